"""Serving that survives lost ranks, on one host or several.

`run_elastic` serves, and leads hosts that join; a joining host calls `join_run`. The run's coordinator is a `RequestJournal` in
the parent process, which outlives every rank.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.network.switch import timed
from aurora.algorithms.recovery import program_among, restored
from aurora.elastic.control_channel import CONTROL_MESSAGES, run_member
from aurora.elastic.coordinated_ranks import CoordinatedRanks
from aurora.elastic.elastic_rank import (
    BeganServing,
    Decided,
    EpochWork,
    FetchedWeights,
    HeldExperts,
    NewTokens,
    serve_elastic_rank,
)
from aurora.elastic.epoch_nccl import transport_of_host
from aurora.elastic.host_connection import HOST_MESSAGES, JoinRun, WireFormat, certificate_of_hosts, difference, this_version
from aurora.elastic.hosts import JoiningHost, Lead, lighthouse_of
from aurora.elastic.lighthouse import check_torchft
from aurora.elastic.processes import RankProcesses
from aurora.errors import AuroraError, BadInput
from aurora.io.journals import JournalFile
from aurora.io.plans import plan_digest
from aurora.models.hub import model_digest
from aurora.models.loading import load_config, load_tokenizer
from aurora.runtime.result import (
    Answers,
    MembershipChange,
    RankResult,
    RunResult,
    Token,
    TokenTimes,
    journalled_answers,
    measured_trace,
)
from aurora.runtime.run import check_arrivals, check_run, compile_what_ranks_call
from aurora.runtime.transports.process_groups import rank_info_from_environment
from aurora.runtime.weight_messages import ExpertTransfer, expert_transfers, transfer_bytes
from aurora.types import (
    Cluster,
    ControlOptions,
    ControlReport,
    Gpu,
    Hierarchy,
    Order,
    Placement,
    Plan,
    Program,
    RunOptions,
    SlicePolicy,
)
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.program import Barrier, Compute, Exchange
from aurora.types.run_options import parse_address
from aurora.types.trace import ControlWindow, PlacementChange


class RequestJournal:
    """Records all produced tokens, and assigns experts and unfinished requests to the members of each epoch.

    Implements `aurora.elastic.coordinated_ranks.Coordinator`. Experts that no rank holds any more are placed by their loads
    `load_MLE`: for each model, (L, E) tokens of each expert. If the run `adapts`, ranks keep the experts that they hold until a
    rank joins, and GPUs differ by `cost_MG`, see `controlled`. Tokens are also written to `file`; answers that it contains from
    an earlier run are not produced again. `arrivals_M`: arrival times of the requests, as in `serve_rank`.

    Attributes:
        answers_M: the answers so far, by model; their seconds count from the start of serving.
        start_s: seconds from the start of the run to the start of serving; None: serving has not begun.
        changes: the membership changes so far.
    """

    def __init__(
        self,
        plan: Plan,
        prompts_M: Sequence[Sequence[list[int]]],
        load_MLE: Sequence[FloatArray],
        adapts: bool = False,
        file: JournalFile | None = None,
        cost_MG: FloatArray | None = None,
        arrivals_M: Sequence[Sequence[float]] = (),
    ) -> None:
        self.answers_M = journalled_answers({} if file is None else file.resumed, len(prompts_M))
        self.start_s: float | None = None
        self.changes: list[MembershipChange] = []
        self._file, self._arrivals_M = file, arrivals_M
        self._arrived_s_M: list[dict[int, float]] = []  # from when ranks begin to serve
        self._adapts, self._cost_MG = adapts, cost_MG
        self._decided: dict[tuple[int, int], ControlReport] = {}  # by epoch and model
        self._plan, self._program, self._prompts_M, self._load_MLE = plan, compile_plan(plan), prompts_M, load_MLE
        pairs = zip(prompts_M, self.answers_M, strict=True)
        self._open_M = [set(range(len(prompts))) - answers.finished for prompts, answers in pairs]
        self._began_s = time.perf_counter()
        self._last_token_s: float | None = None  # when the last token arrived, since then
        self._lost: dict[int, str] = {}
        self._members: tuple[int, ...] = ()
        self._restored: tuple[tuple[int, ...], Program] | None = None
        self._order(1 - np.eye(len(plan.cluster), dtype=np.int64), plan.cluster)  # compiles it before it is urgent

    @property
    def finished(self) -> bool:
        """True if every request is answered."""
        return not any(self._open_M)

    @property
    def wants_new_epoch(self) -> bool:
        """True if the background search has found a better placement of replicas for the current members."""
        return self._restored is not None and self._restored[0] == self._members

    @property
    def control_M(self) -> tuple[ControlReport, ...]:
        """Reports of the placement controllers, by epoch and model, including those of lost ranks."""
        return tuple(report for _, report in sorted(self._decided.items(), key=itemgetter(0)))

    def on_progress(self, rank: int, progress: NewTokens | FetchedWeights | BeganServing | Decided) -> bool:
        """Records a rank's progress: new tokens, seconds of the weight transfer, the start of serving, or decisions.

        Returns True if there are new tokens.
        """
        now_s = time.perf_counter() - self._began_s
        if isinstance(progress, Decided):
            self._decided[progress.epoch, progress.model] = progress.report
            return False
        if isinstance(progress, FetchedWeights):
            self.changes[-1].took_s = max(self.changes[-1].took_s, progress.seconds)
            return False
        if self.start_s is None:
            self.start_s = now_s
            arrivals_M = self._arrivals_M or [[0.0] * len(prompts) for prompts in self._prompts_M]
            self._arrived_s_M = [{at: now_s + arrives_s for at, arrives_s in enumerate(arrivals)} for arrivals in arrivals_M]
        if isinstance(progress, BeganServing):
            return False
        answers = self.answers_M[progress.model]
        if self._file is not None:
            for token in progress.tokens:
                at = len(answers.tokens.get(token.request, ()))
                self._file.add(progress.model, token.request, at, [token.token], token.last)
        answers.add(progress.tokens, rank, now_s, self._arrived_s_M[progress.model])
        answers.seconds = now_s - self.start_s
        self._open_M[progress.model] -= answers.finished
        if self.changes and self.changes[-1].resumed_s is None:
            self.changes[-1].resumed_s = now_s
        self._last_token_s = now_s
        return True

    def on_lost(self, rank: int, reason: str) -> None:
        """Records why a rank was lost, for the next MembershipChange."""
        self._lost[rank] = reason

    def assign(self, epoch: int, states: Mapping[int, HeldExperts]) -> dict[int, EpochWork]:
        """Returns the work of each member of an epoch, by rank: its program, expert transfers and unfinished requests."""
        members = tuple(states)
        states_R = list(states.values())
        held_R = [state.held_ML for state in states_R]
        before, self._members = self._members, members
        stayed = set(before) - self._lost.keys()  # a lost rank may be back already
        restored_program, self._restored = self._restored, None
        if restored_program is not None and restored_program[0] == before == members:
            program = restored_program[1]
        else:
            stays = self._adapts and bool(before) and set(members) <= stayed
            program = program_among(self._program, members, self._load_MLE, held_R, moved=stays)
            self._restore_replicas(program, members)
        transfers = expert_transfers(program.placements_M, held_R, states_R[0].expert_bytes_M)
        cluster = Cluster(self._plan.cluster.name, tuple(self._plan.cluster.gpus[rank] for rank in members))
        bytes_RR = transfer_bytes(transfers, states_R[0].expert_bytes_M, len(members))
        order, predicted_s = self._order(bytes_RR, cluster)
        if epoch > 1:
            joined = tuple(sorted(set(members) - stayed))
            from_checkpoint = sum(move.source is None for move in transfers)
            moved = len(transfers) - from_checkpoint
            self.changes.append(
                MembershipChange(
                    epoch, self._lost, joined, moved, from_checkpoint, int(bytes_RR.sum()), predicted_s, self._last_token_s
                )
            )
        self._lost = {}
        cost_MG = None if self._cost_MG is None else self._cost_MG[:, list(members)]
        requests_MR = [self._deal_requests(model, states_R) for model in range(len(self._prompts_M))]
        served_s = None if self.start_s is None else time.perf_counter() - self._began_s - self.start_s
        return {
            rank: EpochWork(
                program,
                cluster,
                tuple(transfers),
                order,
                tuple(requests_R[at] for requests_R in requests_MR),
                cost_MG,
                tuple(
                    {index: arrivals[index] for index in requests_R[at]}
                    for arrivals, requests_R in zip(self._arrivals_M, requests_MR, strict=False)
                ),
                served_s,
            )
            for at, rank in enumerate(members)
        }

    def _restore_replicas(self, program: Program, members: tuple[int, ...]) -> None:
        """Finds, in the background, where replicas go so that as many failures as planned are survived again."""
        min_replicas, placement = self._plan.options.min_replicas, program.placements_M[0]
        if min_replicas is None or len(members) in (1, len(self._plan.cluster)):
            return

        def find() -> None:
            better = restored(self._program, self._plan.cluster, members, self._load_MLE[0], placement.slots_LG, min_replicas)
            if better.placements_M[0].slots_LG != placement.slots_LG and self._members == members:
                self._restored = (members, better)

        threading.Thread(target=find, daemon=True, name="aurora-restore").start()

    def _deal_requests(self, model: int, states_R: Sequence[HeldExperts]) -> list[dict[int, tuple[int, ...]]]:
        """Deals the open requests that no member is decoding, each to the member with fewest; with their answers so far."""
        decoding = {index for state in states_R for index in state.serving_M[model]}
        busy_R = np.array([len(set(state.serving_M[model]) & self._open_M[model]) for state in states_R])
        waiting, tokens = sorted(self._open_M[model] - decoding), self.answers_M[model].tokens
        requests_R: list[dict[int, tuple[int, ...]]] = [{} for _ in states_R]
        for index, rank in zip(waiting, fewest_first(busy_R, len(waiting)).tolist(), strict=True):
            requests_R[rank][index] = tuple(tokens.get(index, ()))
        return requests_R

    @staticmethod
    def _order(bytes_RR: IntArray, cluster: Cluster) -> tuple[Order, float]:
        """Returns the order in which weights travel, and its predicted seconds."""
        order = ORDER["openshop"](bytes_RR, cluster.network, rng=np.random.default_rng(0))
        return order, timed(order, bytes_RR, cluster.network).makespan_s


def fewest_first(busy_R: IntArray, count: int) -> IntArray:
    """Returns the ranks of `count` requests: each goes to the rank with the fewest so far (the lowest such rank).

    Example:
        >>> fewest_first(np.array([2, 0]), 3).tolist()
        [1, 1, 0]
    """
    levels = np.arange(busy_R.min(), busy_R.max() + -(-count // len(busy_R)) + 1)
    rank_Q: IntArray = (levels[:, None] >= busy_R).nonzero()[1][:count]
    return rank_Q


WIRE = WireFormat(
    *HOST_MESSAGES, *CONTROL_MESSAGES, Answers, Barrier, BeganServing, Cluster, Compute, ControlOptions, ControlReport,
    ControlWindow, Decided, EpochWork, Exchange, ExpertTransfer, FetchedWeights, Gpu, HeldExperts, Hierarchy, NewTokens, Order,
    Placement, PlacementChange, Program, RankResult, RunOptions, SlicePolicy, Token, TokenTimes,
)  # fmt: skip


def run_elastic(
    plan: Plan,
    models: Sequence[str | Path],
    prompts: Sequence[Sequence[list[int]]],
    options: RunOptions,
    load_MLE: Sequence[FloatArray] | None = None,
    watch: Callable[[int, dict[int, int]], None] | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    cost_MG: FloatArray | None = None,
    arrivals: Sequence[Sequence[float]] = (),
) -> RunResult:
    """Serves prompts like `aurora.run`, and continues with the remaining ranks when some are lost.

    Args:
        plan, models, prompts, options: as in `aurora.run`.
        load_MLE: for each model, (L, E) tokens of each expert, from which new places of lost experts are chosen. None: all
            experts have equal load.
        watch: called at the start of each epoch with (epoch number, {rank: process id} of its members).
        journal, resume: as in `aurora.run`.
        cost_MG: as in `controlled`.
        arrivals: as in `aurora.run`.

    Returns:
        The result. If the run cannot continue: the result so far, with `failure` set.
    """
    check_torchft()
    check_run(plan, models, prompts, options)
    check_arrivals(prompts, arrivals)
    if rank_info_from_environment(options.timeout_s) is not None:
        raise BadInput("`survive`: starts its ranks by itself, expected none of torchrun's variables")
    options = _with_transport(plan, options)
    layers_M = [(len(model.dispatch_L), model.placement.experts) for model in plan.models]
    loads_MLE = load_MLE or [np.ones(shape) for shape in layers_M]
    began_s, failure = time.perf_counter(), None
    results: list[RankResult] = []
    lead = lead_of(plan, models, prompts, options, began_s)
    compile_what_ranks_call(plan, options)
    about = {} if journal is None else _told_apart_by(plan, models, prompts, options)
    opened = nullcontext() if journal is None else closing(JournalFile(Path(journal), about, resume))
    with opened as file:
        requests = RequestJournal(plan, prompts, loads_MLE, options.adapt is not None, file, cost_MG, arrivals)
        ranks = CoordinatedRanks(
            serve_elastic_rank, len(plan.cluster), requests, (plan, [str(path) for path in models], prompts, options, began_s),
            timeout_s=options.timeout_s, hang_s=options.hang_s, respawn=options.respawn, watch=watch, lead=lead,
        )  # fmt: skip
        try:
            results = list(ranks.run().values())
        except AuroraError as error:
            if not any(answers.tokens for answers in requests.answers_M):
                raise
            failure = str(error)
    seconds, names_M = max(answers.seconds for answers in requests.answers_M), tuple(model.model for model in plan.models)
    transport = results[0].transport if results else "none"
    trace, from_s = measured_trace(results, names_M, len(plan.cluster))
    trace = replace(trace, control_M=requests.control_M)
    answers_M, changes = tuple(requests.answers_M), tuple(requests.changes)
    start_s = requests.start_s or 0.0
    return RunResult(answers_M, seconds, trace, transport, None, (), None, changes, failure, start_s, from_s)


def _with_transport(plan: Plan, options: RunOptions) -> RunOptions:
    """Returns options that name the transport of a run that survives lost ranks; see `transport_of_host`."""
    gpus, transport = plan.cluster.gpus, options.transport
    if any(model.hierarchy is not None for model in plan.models):  # an aborted step leaves rows that name any experts
        if transport == "nccl":
            raise BadInput("`survive`: on nccl expected a plan with flat all-to-alls, found one over servers")
        transport = "gloo" if transport == "auto" else transport
    local = len(gpus) if options.lead is None else sum(gpu.node == options.node for gpu in gpus)
    return replace(options, transport=transport_of_host(transport, local))


def _told_apart_by(
    plan: Plan, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions
) -> dict[str, Any]:
    """Returns all that answers depend on, by which runs are told apart. All of the models' files are read."""
    return {
        "models": [[model.model, model.identity.fingerprint] for model in plan.models],
        "prompts": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "model files": [model_digest(path) for path in models],
        "answers": [
            [len(requests), load_config(path).vocab_size, load_tokenizer(path).eos_token_id]
            for path, requests in zip(models, prompts, strict=True)
        ],
    }


def lead_of(
    plan: Plan, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions, began_s: float
) -> Lead | None:
    """Returns the leader's settings for a run over several hosts; None if all ranks are on this host.

    Args:
        plan, models, prompts, options: as in `aurora.run`.
        began_s: start of the run, by time.perf_counter.

    Raises:
        BadInput: if the certificate is missing, the address is invalid, or the plan has no GPU on `options.node`.
    """
    if options.lead is None:
        return None
    address, certificate, about = parse_address("lead", options.lead), certificate_of_hosts("lead"), about_run(plan, models)
    ranks_of = ranks_by_node(plan, options.node)
    others = {name_of(node): ranks for node, ranks in ranks_of.items() if node != options.node}

    def refusal(host: JoinRun) -> str | None:
        if (why := difference(about, host.about)) is not None:
            return why
        if others.get(host.name) != host.ranks:
            return f"`node`: expected one of the plan's other nodes, {', '.join(name.split()[1] for name in others)}"
        return None

    def job() -> tuple[Any, ...]:
        return [list(requests) for requests in prompts], options, time.perf_counter() - began_s

    awaited = {rank: name for name, ranks in others.items() for rank in ranks}
    local = () if options.node is None else ranks_of[options.node]
    return Lead(address, certificate, local, WIRE, refusal, job, awaited)


def join_run(plan: Plan, models: Sequence[str | Path], options: RunOptions) -> None:
    """Joins the run whose leader listens at `options.join`: runs the ranks of `options.node` until the run is complete.

    The leader provides prompts and all other options. Clock error of this host's trace: at most the time of one message.

    Args:
        plan, models: as in `aurora.run`; must be the same as the leader's.
        options: only `join`, `node` and `timeout_s` are used; `timeout_s` is the longest time without a leader.

    Raises:
        BadInput: if the leader rejects this host, or this host has no certificate.
        MissingDependency: if torchft is not installed.
        RankFailed: if the leader ends the run before it is complete, or cannot be reached for `timeout_s`.
    """
    assert options.join is not None
    assert options.node is not None
    check_torchft()
    leader, certificate = parse_address("join", options.join), certificate_of_hosts("join")
    local, paths = ranks_by_node(plan, options.node)[options.node], [str(model) for model in models]

    def processes(job: tuple[Any, ...]) -> RankProcesses:
        prompts, leaders, since_s = job
        transport_of_host(leaders.transport, len(local))
        args = plan, paths, prompts, leaders, time.perf_counter() - since_s
        member_args = serve_elastic_rank, args, leaders.hang_s, leaders.timeout_s
        return RankProcesses(run_member, member_args, len(plan.cluster), lighthouse_of(leader), leaders.timeout_s, local)

    request = JoinRun(name_of(options.node), local, about_run(plan, models))
    JoiningHost(leader, certificate, request, WIRE, processes, timeout_s=options.timeout_s).run()


def about_run(plan: Plan, models: Sequence[str | Path]) -> dict[str, str]:
    """Returns {description: value} of versions and digests that must be equal on all hosts. Reads all model files."""
    files = {f"the files of {planned.model}": model_digest(path) for planned, path in zip(plan.models, models, strict=True)}
    return this_version() | {name: digest[:16] for name, digest in {"the plan": plan_digest(plan), **files}.items()}


def ranks_by_node(plan: Plan, chosen: int | None) -> dict[int, tuple[int, ...]]:
    """Returns {node: its ranks} of a plan. Raises BadInput if `chosen`, the `node` of the options, is none of the plan's."""
    node_R = [gpu.node for gpu in plan.cluster.gpus]
    ranks_of = {node: tuple(rank for rank, gpu_node in enumerate(node_R) if gpu_node == node) for node in sorted(set(node_R))}
    if chosen is not None and chosen not in ranks_of:
        raise BadInput(f"`node`: expected one of the plan's, {', '.join(map(str, ranks_of))}, found {chosen}")
    return ranks_of


def name_of(node: int) -> str:
    """Returns the name, used in messages, of the host that runs a node's ranks: "node 0"."""
    return f"node {node}"
