"""Request journal: the coordinator of a run that survives lost ranks. It outlives every rank."""

import threading
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from aurora.elastic.elastic_rank import BeganServing, Decided, EpochWork, FetchedWeights, HeldExperts, NewTokens
from aurora.io.journals import JournalFile
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.compile import compile_plan
from aurora.planner.network.switch import timed
from aurora.planner.recovery import program_among, program_in_force, restored
from aurora.runtime.expert_moves import expert_transfers, transfer_bytes
from aurora.runtime.result import MembershipChange, journalled_answers
from aurora.types import Cluster, ControlReport, Order, Plan, Program
from aurora.types.arrays import FloatArray, IntArray


class RequestJournal:
    """Keeps every token that ranks produce, and assigns experts and unfinished requests to the members of each epoch.

    Implements `aurora.elastic.coordinated_ranks.Coordinator`. Experts that no rank holds any more are placed by
    `load_MLE`: for each model, (L, E) tokens of each expert. If the run `adapts`, ranks keep what they have come to hold until
    one joins, and decide by `cost_MG`, as of `controlled`. Tokens go to `file`, too, whose answers of an earlier run are not
    produced anew. Requests arrive as `arrivals_M` says, as of `serve_rank`.

    Attributes:
        answers_M: the answers so far, by model; their seconds count from when ranks began to serve.
        start_s: seconds until ranks began to serve.
        changes: the changes of membership so far.
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
        """True if every request has its answer."""
        return not any(self._open_M)

    @property
    def wants_new_epoch(self) -> bool:
        """True if the search for lost replicas has found a better placement for the current members."""
        return self._restored is not None and self._restored[0] == self._members

    @property
    def control_M(self) -> tuple[ControlReport, ...]:
        """Reports of each model's control loop by epoch, also of lost ranks."""
        return tuple(report for _, report in sorted(self._decided.items(), key=itemgetter(0)))

    def on_progress(self, rank: int, progress: NewTokens | FetchedWeights | BeganServing | Decided) -> bool:
        """Records new tokens, how long weights travelled, the start, or decisions. Returns whether there were new tokens."""
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
            self._arrived_s_M = [{at: now_s + each for at, each in enumerate(arrivals)} for arrivals in arrivals_M]
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
        """Records why a rank was lost."""
        self._lost[rank] = reason

    def assign(self, epoch: int, states: Mapping[int, HeldExperts]) -> dict[int, EpochWork]:
        """Assigns experts and unfinished requests to the members of an epoch."""
        members = tuple(states)
        held = list(states.values())
        held_R = [state.held_ML for state in held]
        before, self._members = self._members, members
        stayed = set(before) - self._lost.keys()  # a lost rank may be back already
        restored_program, self._restored = self._restored, None
        if restored_program is not None and restored_program[0] == before == members:
            program = restored_program[1]
        else:
            stays = self._adapts and bool(before) and set(members) <= stayed
            program = program_in_force(self._program, members, held_R) if stays else self._program
            program = program_among(program, members, self._load_MLE, held_R)
            self._restore_replicas(program, members)
        transfers = expert_transfers(program.placements_M, held_R, held[0].expert_bytes_M)
        cluster = Cluster(self._plan.cluster.name, tuple(self._plan.cluster.gpus[rank] for rank in members))
        bytes_RR = transfer_bytes(transfers, held[0].expert_bytes_M, len(members))
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
        calibration = next((state.calibration for state in held if state.calibration is not None), None)
        cost_MG = None if self._cost_MG is None else self._cost_MG[:, list(members)]
        requests_MR = [self._deal_requests(model, held) for model in range(len(self._prompts_M))]
        served_s = None if self.start_s is None else time.perf_counter() - self._began_s - self.start_s
        return {
            rank: EpochWork(
                program,
                cluster,
                tuple(transfers),
                order,
                tuple(requests_R[at] for requests_R in requests_MR),
                calibration,
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

    def _deal_requests(self, model: int, held: Sequence[HeldExperts]) -> list[dict[int, tuple[int, ...]]]:
        """Deals the open requests that no member is decoding, each to the member with fewest; with their answers so far."""
        taken = {index for state in held for index in state.serving_M[model]}
        busy_R = np.array([len(set(state.serving_M[model]) & self._open_M[model]) for state in held])
        waiting, tokens = sorted(self._open_M[model] - taken), self.answers_M[model].tokens
        requests_R: list[dict[int, tuple[int, ...]]] = [{} for _ in held]
        for index, rank in zip(waiting, fewest_first(busy_R, len(waiting)).tolist(), strict=True):
            requests_R[rank][index] = tuple(tokens.get(index, ()))
        return requests_R

    @staticmethod
    def _order(bytes_RR: IntArray, cluster: Cluster) -> tuple[Order, float]:
        """Returns the order in which weights travel, and its predicted seconds."""
        order = ORDER["openshop"](bytes_RR, cluster.network, rng=np.random.default_rng(0))
        return order, timed(order, bytes_RR, cluster.network).makespan_s


def fewest_first(busy_R: IntArray, count: int) -> IntArray:
    """Deals `count` requests one by one, each to the rank that has the fewest; ties go to the lowest rank.

    Example:
        >>> fewest_first(np.array([2, 0]), 3).tolist()
        [1, 1, 0]
    """
    levels = np.arange(busy_R.min(), busy_R.max() + -(-count // len(busy_R)) + 1)
    found: IntArray = (levels[:, None] >= busy_R).nonzero()[1][:count]
    return found
