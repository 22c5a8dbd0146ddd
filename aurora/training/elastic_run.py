"""Elastic training runs, on one host or several: ranks that may be lost and come back, and the lighthouse of the run.

The `Launcher` starts ranks, receives their messages, keeps the log of steps, and admits hosts that join.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import randbelow, token_hex
from typing import Any

from aurora.elastic.epoch_nccl import gpu_of_rank, transport_of_host
from aurora.elastic.host_connection import HOST_MESSAGES, MOST_RANKS, JoinRun, WireFormat, certificate_of_hosts, difference
from aurora.elastic.hosts import JoiningHost, Lead, LedRanks, lighthouse_of, ranks_at_lighthouse
from aurora.elastic.lighthouse import check_torchft
from aurora.elastic.member import HANG_S, Member, OtherRun, keep_collections_short, own_address
from aurora.elastic.processes import RankLoss, RankProcess, RankProcesses, StartedRank, silence_native_code
from aurora.elastic.steps import Pause, Version, run_elastic
from aurora.errors import AuroraError, BadInput, RankFailed, plural
from aurora.models.hub import model_digest
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.training.data import read_samples, samples_digest
from aurora.training.member_training import MemberTraining
from aurora.training.trainer import Trainer, load_trainer
from aurora.training.training_run import (
    LOG,
    CommittedStep,
    FinalStep,
    KeptSteps,
    TrainResult,
    has_mark,
    leaders_options,
    log_step,
    logged_steps,
    shared_by_hosts,
    sole_run,
)
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray
from aurora.types.run_options import address_text, parse_address

LOOK_S = 0.1  # at most, between two looks at processes
Watch = Callable[[int, dict[int, int]], None]


@dataclass(frozen=True)
class MemberFinished:
    """Message from member to launcher: all steps are done."""

    remarks: tuple[str, ...]


class Launcher:
    """Starts the ranks of an elastic training, receives their messages, and keeps the log of steps.

    Args:
        options, output: as in `aurora.train`.
        watch: called after each new step with (step number, {rank of this host: process id}).
    """

    def __init__(self, options: TrainOptions, output: Path, watch: Watch) -> None:
        self._options, self._output, self._watch = options, output, watch
        self._names = {rank: f"rank {rank}" for rank in range(options.ranks)}
        self._respawns_left = dict.fromkeys(range(options.ranks), options.respawn)
        self._steps = KeptSteps()
        self._most = options.ranks  # ranks at one time
        self._ended_s: float | None = None  # when the first member had finished

    def run(self, processes: RankProcesses) -> TrainResult:
        """Runs until all members have finished or are lost, ends this host's processes, and returns the result."""
        self._processes = processes
        try:
            for rank in range(self._options.ranks):
                processes.start(rank)
            while (processes.running or processes.starting) and not self._late():
                for rank, event in processes.events(LOOK_S):
                    self._handle(rank, event)
        finally:
            processes.close(self._ended_s is not None)
        return self._steps.result(self._output, self._options, self._most)

    def refusal(self, shared: Mapping[str, str], host: JoinRun) -> str | None:
        """Returns a sentence on why a host cannot join, or None if it can.

        Args:
            shared: values of this host that must be the same on all hosts; see `shared_by_hosts`.
            host: the host's request.
        """
        assert isinstance(self._processes, LedRanks)
        if self._ended_s is not None:
            return "expected a run that goes on, found that all steps are done"
        if (sentence := difference(shared, host.about)) is not None:
            return sentence
        ranks = self._options.ranks + sum(len(peer.ranks) for peer in (*self._processes.joined, host) if peer.name != host.name)
        if (ranks := ranks + len(host.ranks)) > self._options.batch:
            return f"`batch`: expected a sample for each of {ranks} ranks or more, found {self._options.batch}"
        return None

    def _late(self) -> bool:
        """Returns whether a member has finished and the others have had HANG_S seconds to do the same."""
        return self._ended_s is not None and time.monotonic() - self._ended_s > HANG_S

    def _handle(self, rank: int, event: Any) -> None:
        """Handles one event of a rank. Raises the error that ends the run."""
        match event:
            case StartedRank() | RankLoss():
                if isinstance(self._processes, LedRanks) and (host := self._processes.host_of(rank)) is not None:
                    self._names[rank] = f"{host.name}: rank {host.ranks.index(rank)}"
                    self._respawns_left.setdefault(rank, host.respawn)
                if isinstance(event, RankLoss):
                    self._lose(rank, event.reason)
                self._most = max(self._most, len(self._processes.running))
            case RankFailed():
                self._lose(rank, str(event))
            case OtherRun():
                self._lose(rank, str(event), event)
            case AuroraError():
                raise event
            case MemberFinished(remarks):
                self._steps.remarks += remarks
                self._processes.kill(rank)
                self._ended_s = self._ended_s or time.monotonic()
            case FinalStep():
                new, first = self._steps.take(event)
                if new:
                    self._steps.remarks += log_step(self._output / LOG, event.step)
                if first:
                    running = self._processes.running.items()
                    pids = {number: process.pid for number, process in running if isinstance(process, RankProcess)}
                    self._watch(event.step.step, pids)

    def _lose(self, rank: int, reason: str, refused: OtherRun | None = None) -> None:
        """Takes note of a lost rank, and restarts it if that is left, unless the others have refused it."""
        self._processes.kill(rank)
        self._steps.lost.append(
            f"{self._names.get(rank, f'rank {rank}')} was lost after {plural(len(self._steps), 'step')}: {reason}"
        )
        if self._ended_s is not None:
            return
        if self._respawns_left.get(rank) and refused is None:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)
        # Others may come from other hosts; members wait for them until their time-out.
        least = 1 if isinstance(self._processes, LedRanks) else self._options.min_ranks
        if (ranks := len(self._processes.running) + len(self._processes.starting)) < least:
            raise refused or RankFailed(f"{ranks} ranks are left, at least {least} have to be; {self._steps.lost[-1]}")


LEADER = "rank"  # names of the leader's ranks begin so; those of other hosts' come after them in sequence
WIRE = WireFormat(*HOST_MESSAGES, CommittedStep, FinalStep, MemberFinished, Pause, Version)


def train_elastic(
    path: str, samples_NT: IntArray, options: TrainOptions, output: Path, watch: Watch = lambda step, pids: None
) -> TrainResult:
    """Trains on local processes, with `options.lead` also on other hosts, and continues when ranks are lost.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`, without `join`.
        watch: called after each new step with its number and the process id of every rank of this host.

    Raises:
        BadInput: if a rank raises it.
        MissingDependency: if torchft is not installed.
        RankFailed: if fewer than `min_ranks` ranks remain.
    """
    check_torchft()
    options = replace(options, transport=transport_of_host(options.transport, options.ranks))
    certificate = certificate_of_hosts("lead") if options.lead else None
    args = LEADER, path, samples_NT, options, output
    launcher = Launcher(options, output, watch)
    with ExitStack() as stack:
        mark = stack.enter_context(sole_run(output))
        lead = None
        if certificate is not None and options.lead is not None:
            address, job = parse_address("lead", options.lead), (mark, leaders_options(options), samples_digest(samples_NT))
            refusal = partial(launcher.refusal, shared_by_hosts(path))
            lead = Lead(address, certificate, tuple(range(options.ranks)), WIRE, refusal, lambda: job)
        return launcher.run(
            ranks_at_lighthouse(stack, train_member, args, options.ranks, options.timeout_s, lead, options.port)
        )


def join_training(
    path: str, files: Sequence[str | Path], options: TrainOptions, output: Path, watch: Watch = lambda step, pids: None
) -> TrainResult:
    """Joins the training run whose leader listens at `options.join`, and trains there with local processes.

    Args:
        path: the model's folder.
        files, output: `text` and `output` of `aurora.train`; the same as the leader's.
        options: only per-host options are used; the others are taken from the leader.
        watch: as in `train_elastic`.

    Raises:
        BadInput: if a rank raises it, or if this host's model, files or version differ from the leader's.
        MissingDependency: if torchft is not installed.
        RankFailed: if the leader is lost, or ends the run.
    """
    check_torchft()
    joined = JoinedTraining(path, files, options, output, watch)
    joined.run()
    return joined.result()


class JoinedTraining(JoiningHost):
    """JoiningHost of a training run that another host leads; arguments as in `join_training`."""

    def __init__(self, path: str, files: Sequence[str | Path], options: TrainOptions, output: Path, watch: Watch) -> None:
        assert options.join is not None
        self._path, self._files, self._options, self._output, self._watch = path, files, options, output, watch
        self._address = parse_address("join", options.join)
        try:
            address = own_address(self._address)
        except OSError as error:
            raise BadInput(f"`join`: {address_text(self._address)} cannot be reached: {error.strerror}") from None
        self._label = f"{address}-{token_hex(3)}"
        first = randbelow(2**32) * MOST_RANKS  # tells this host's ranks from those of others
        self._job: tuple[str, Mapping[str, Any], str] | None = None  # the first one
        self._samples_NT: IntArray | None = None
        self._steps = KeptSteps()
        self._finished: set[int] = set()  # ranks that have taken all steps
        ranks, certificate = tuple(range(first, first + options.ranks)), certificate_of_hosts("join")
        request = JoinRun(f"host {self._label}", ranks, shared_by_hosts(path), options.respawn)
        super().__init__(
            self._address, certificate, request, WIRE, self._make_processes, timeout_s=options.timeout_s, keeps_ranks=True
        )

    def result(self) -> TrainResult:
        """Returns the result of this host's ranks."""
        return self._steps.result(self._output, self._options, self._options.ranks)

    def heard(self, rank: int, message: Any) -> None:
        """Records the steps and remarks that a rank of this host reports."""
        match message:
            case FinalStep():
                _, first = self._steps.take(message)
                if first:
                    self._watch(message.step.step, {number % MOST_RANKS: pid for number, pid in self.pids.items()})
            case MemberFinished(remarks):
                self._steps.remarks += remarks
                self._finished.add(rank)

    def ended(self, rank: int, reason: str) -> None:
        """Records that a rank was lost."""
        if rank not in self._finished:
            self._steps.lost.append(f"rank {rank % MOST_RANKS} was lost after {plural(len(self._steps), 'step')}: {reason}")

    def unheard(self) -> Iterable[tuple[int, Any]]:
        """Returns (rank, message) pairs with the final steps that are missing in the present leader's log."""
        if self.admitted > 1 and self.pids:
            rank, logged = min(self.pids), logged_steps(self._output / LOG)
            yield from ((rank, self._steps.finals[number]) for number in sorted(self._steps.finals.keys() - logged))

    def _make_processes(self, job: tuple[str, Mapping[str, Any], str]) -> RankProcesses:
        """Returns this host's processes for the leader's job. Raises BadInput if this host cannot take part in it."""
        self._check(job)
        _, leaders, text = job
        options = self._options = _with_leaders(self._options, leaders)
        transport_of_host(options.transport, options.ranks)  # refuses nccl without enough GPUs
        if self._samples_NT is None:
            self._samples_NT = read_samples(self._path, self._files, options.length)
        if (digest := samples_digest(self._samples_NT)) != text:
            raise BadInput(f"host {self._label}: expected `text` {text} as the leader has, found {digest}")
        args = f"{LEADER}-at-{self._label}", self._path, self._samples_NT, options, self._output
        return RankProcesses(
            train_member, args, options.ranks, lighthouse_of(self._address), options.timeout_s, self._request.ranks
        )  # fmt: skip

    def _check(self, job: tuple[str, Mapping[str, Any], str]) -> None:
        """Raises BadInput if the run is another one than this host can take part in, or has taken part in before."""
        leader = address_text(self._address)
        if not has_mark(self._output, job[0]):
            expected = f"expected the folder of the run at {leader}, shared by all hosts"
            raise BadInput(f"{self._output}: {expected}; found another one or none")
        self._job = self._job or job
        before, now = ({f"`{name}`": value for name, value in options.items()} | {"`text`": text}
                       for _, options, text in (self._job, job))  # fmt: skip
        if (sentence := difference(now, before)) is not None:
            raise BadInput(f"the leader was started again with other options: host {self._label}: {sentence}")


def _with_leaders(options: TrainOptions, leaders: Mapping[str, Any]) -> TrainOptions:
    """Returns a host's options with those of the leader. Raises BadInput if they are no such options."""
    try:
        if leaders.keys() == leaders_options(options).keys():
            return replace(options, **leaders)
    except (TypeError, BadInput):
        pass
    raise BadInput(f"{options.join} sent options of another version")


def train_member(
    connection: Connection,
    rank_info: RankInfo,
    host: str,
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
) -> None:
    """Trains as a member of an elastic run; reports each step, and at the end success or an error, to the launcher.

    Args:
        connection: pipe to the launcher.
        rank_info: this rank, and the address of the lighthouse.
        host: the host's name, with which the names of its members begin.
        path, samples_NT, options, output: as in `train_elastic`.
    """
    silence_native_code()
    try:
        gpu = gpu_of_rank(options.transport, rank_info.local_rank, options.over_hosts)
        expected = options.min_ranks if options.join else max(options.ranks, options.min_ranks)

        def load() -> tuple[Trainer, dict[str, Any]]:
            trainer, about = load_trainer(path, "cpu" if gpu is None else gpu.device, samples_NT, options)
            trainer.warm_up(options.ranks)
            return trainer, about

        digest = model_digest(path)
        work = MemberTraining(load, path, options, output, lambda *_: member.transport(), connection.send, digest=digest)
        member = Member(
            (rank_info.host, rank_info.port), f"{host}-{rank_info.local_rank:04d}", timeout_s=rank_info.timeout_s,
            expected=expected, least=options.min_ranks, gpu=gpu, about={"`model`": digest[:16]},
        )  # fmt: skip
        keep_collections_short()
        run_elastic(member, work, work.paused)
        work.close()
        member.close()
        answer: Any = MemberFinished(tuple(work.remarks))
    except AuroraError as error:
        answer = error
    except BaseException as error:
        answer = RankFailed(describe_error(error))
    connection.send(answer)
