"""What survives every rank: prompts and what was produced for them, and who is to do what next."""

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.compile import compile_plan
from aurora.planner.migration.survivors import moved_bytes, moves, program_among, restored
from aurora.planner.network.schedule_time import timed
from aurora.runtime.elastic_rank import EpochWork, FetchedWeights, HeldExperts, NewTokens
from aurora.runtime.result import Answers, MembershipChange
from aurora.types import Cluster, Order, Plan, Program
from aurora.types.arrays import FloatArray, IntArray


class RequestJournal:
    """The coordinator of a run: keeps every token that ranks tell of, and gives what lost ranks have not finished to others.

    load_MLE: (L, E) of each model, the tokens of each expert: where experts go that nobody holds any more.
    """

    def __init__(self, plan: Plan, prompts_M: Sequence[Sequence[list[int]]], load_MLE: Sequence[FloatArray]) -> None:
        self.answers_M = [Answers() for _ in prompts_M]
        self.changes: list[MembershipChange] = []
        self._plan, self._program, self._prompts_M, self._load_MLE = plan, compile_plan(plan), prompts_M, load_MLE
        self._open_M = [set(range(len(prompts))) for prompts in prompts_M]
        self._began_s = time.perf_counter()
        self._told_s: float | None = None  # when the last token came, since then
        self._lost: dict[int, str] = {}
        self._members: tuple[int, ...] = ()
        self._restored: tuple[tuple[int, ...], Program] | None = None
        self._order(1 - np.eye(len(plan.cluster), dtype=np.int64), plan.cluster)  # compiled before it is urgent

    @property
    def finished(self) -> bool:
        return not any(self._open_M)

    @property
    def wants_new_epoch(self) -> bool:
        ready = self._restored
        return ready is not None and ready[0] == self._members

    def on_progress(self, rank: int, fresh: NewTokens | FetchedWeights) -> bool:
        if isinstance(fresh, FetchedWeights):
            self.changes[-1].took_s = max(self.changes[-1].took_s, fresh.seconds)
            return False
        now_s = time.perf_counter() - self._began_s
        answers, still_open = self.answers_M[fresh.model], self._open_M[fresh.model]
        answers.add(fresh.tokens)
        answers.seconds = now_s
        still_open -= {token.request for token in fresh.tokens if token.last}
        if self.changes and self.changes[-1].resumed_s is None:
            self.changes[-1].resumed_s = now_s
        self._told_s = now_s
        return True

    def on_lost(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason

    def assign(self, epoch: int, states: Mapping[int, HeldExperts]) -> dict[int, EpochWork]:
        seats = tuple(states)
        holdings = list(states.values())
        held_R = [holding.held_ML for holding in holdings]
        before, self._members = self._members, seats
        ready, self._restored = self._restored, None
        if ready is not None and ready[0] == before == seats:
            program = ready[1]
        else:
            program = program_among(self._program, seats, self._load_MLE, held_R)
            self._restore(program, seats)
        found = moves(program, held_R, holdings[0].expert_bytes_M)
        cluster = Cluster(self._plan.cluster.name, tuple(self._plan.cluster.gpus[seat] for seat in seats))
        bytes_RR = moved_bytes(found, holdings[0].expert_bytes_M, len(seats))
        order, predicted_s = self._order(bytes_RR, cluster)
        if epoch > 1:
            joined = tuple(sorted(set(seats) - set(before)))
            from_checkpoint = sum(move.source is None for move in found)
            moved = len(found) - from_checkpoint
            self.changes.append(
                MembershipChange(
                    epoch, self._lost, joined, moved, from_checkpoint, int(bytes_RR.sum()), predicted_s, self._told_s
                )
            )
        self._lost = {}
        requests_MR = [self._dealt(model, holdings) for model in range(len(self._prompts_M))]
        return {
            seat: EpochWork(program, cluster, tuple(found), order, tuple(requests_R[rank] for requests_R in requests_MR))
            for rank, seat in enumerate(seats)
        }

    def _restore(self, program: Program, seats: tuple[int, ...]) -> None:
        """Find, beside the serving, where replicas go so that as many failures as planned are survived again."""
        min_replicas, placement = self._plan.options.min_replicas, program.placements_M[0]
        if min_replicas is None or len(seats) in (1, len(self._plan.cluster)):
            return

        def find() -> None:
            better = restored(self._program, self._plan.cluster, seats, self._load_MLE[0], placement.slots_LG, min_replicas)
            if better.placements_M[0].slots_LG != placement.slots_LG and self._members == seats:
                self._restored = (seats, better)

        threading.Thread(target=find, daemon=True, name="aurora-restore").start()

    def _dealt(self, model: int, holdings: Sequence[HeldExperts]) -> list[dict[int, tuple[int, ...]]]:
        """What is in nobody's hands, one after the other to whoever has fewest to do; with what was produced for it."""
        taken = {index for holding in holdings for index in holding.serving_M[model]}
        busy_R = np.array([len(set(holding.serving_M[model]) & self._open_M[model]) for holding in holdings])
        waiting, tokens = sorted(self._open_M[model] - taken), self.answers_M[model].tokens
        requests_R: list[dict[int, tuple[int, ...]]] = [{} for _ in holdings]
        for index, rank in zip(waiting, fewest_first(busy_R, len(waiting)).tolist(), strict=True):
            requests_R[rank][index] = tuple(tokens.get(index, ()))
        return requests_R

    @staticmethod
    def _order(bytes_RR: IntArray, cluster: Cluster) -> tuple[Order, float]:
        """In which weights travel, and in how many seconds."""
        order = ORDER["openshop"](bytes_RR, cluster.network, rng=np.random.default_rng(0))
        return order, timed(order, bytes_RR, cluster.network).makespan_s


def fewest_first(busy_R: IntArray, count: int) -> IntArray:
    """(count,) whose turn it is when each turn is of whoever has had fewest, busy_R (R,) before; of equals the first."""
    levels = np.arange(busy_R.min(), busy_R.max() + -(-count // len(busy_R)) + 1)
    found: IntArray = (levels[:, None] >= busy_R).nonzero()[1][:count]
    return found
