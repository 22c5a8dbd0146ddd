"""Identifies the rank for which the others wait, by a pure function of the ranks' last observed states."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

RUNS, STOPPED, GONE = "runs", "stopped", "gone"  # of a process
PHASES = IDLE, COMPUTE, STEP, DISPATCH, COMBINE = "idle", "compute", "step", "dispatch", "combine"
EXCHANGES = (STEP, DISPATCH, COMBINE)  # phases in which a rank waits for all others
BALANCERS = NO_BALANCER, RESTS, PLANS, WAITS, MOVES, READY, ENDED = "none", "rests", "plans", "waits", "moves", "ready", "ended"
_DOES = {
    NO_BALANCER: "is not there", RESTS: "rests", PLANS: "plans", WAITS: "waits for the others' plans", MOVES: "moves a layer",
    READY: "has a layer ready that no pass takes",
}  # fmt: skip
WAIT_S = 2.5  # an exchange that lasts as long is stuck
UNEXPLAINED_S = 10.0  # or as long, where all ranks are in it and nothing shows that bytes are lost: it may be a long first one
BALANCER_S = 10.0  # background threads that have come equally far stand still after as long
SILENT_S = 3.0  # a rank whose thread gives no sign of life for as long is stopped
SLOW = 2.0  # times the others' median compute of the same passes: clearly below the three times that are to be seen
LEAST_PASSES = 5  # that are compared
LEAST_SHARE = 0.2  # of the passes' time that a slow rank takes longer than the others


class Pass(NamedTuple):
    """Size and times of a forward pass that has ended."""

    size: int  # binary digits of the number of own tokens
    compute_s: float  # outside of exchanges
    seconds: float


@dataclass(frozen=True)
class RankState:
    """Last observed state of one rank.

    Args:
        process: state of its worker and engine processes: RUNS, or STOPPED or GONE if one of them is.
        silent_s: seconds since its watchdog's last heartbeat.
        phase: the present phase, one of PHASES.
        since_s: seconds since the phase began.
        exchanges: number of exchanges at which it has arrived; the n-th exchange is the same on all ranks.
        layer: index of the MoE layer that it computes; None: outside MoE layers.
        passes: its recent forward passes; the key is the number of exchanges before the end of the pass, so the same pass has
            the same key on all ranks.
        unacknowledged: ranks that do not acknowledge bytes although they were retransmitted (TCP).
        balancer: state of EPLB's background thread, one of BALANCERS: "rests" (nothing to move), "plans", "waits" (for the
            plans of other ranks), "moves" (sends a layer's experts), "ready" (the experts have arrived, and the next forward
            pass has to put them in place).
        balancer_s: seconds since that state began.
        balancer_passes: forward passes since that state began.
        balancer_layers: number of layers whose moves the thread has begun.
    """

    process: str = RUNS
    silent_s: float = 0.0
    phase: str = IDLE
    since_s: float = 0.0
    exchanges: int = 0
    layer: int | None = None
    passes: Mapping[int, Pass] = field(default_factory=dict)
    unacknowledged: frozenset[int] = frozenset()
    balancer: str = NO_BALANCER
    balancer_s: float = 0.0
    balancer_passes: int = 0
    balancer_layers: int = 0

    @property
    def waits(self) -> bool:
        """True if the rank has waited in an exchange for WAIT_S or longer."""
        return self.phase in EXCHANGES and self.since_s >= WAIT_S


class StuckRank(NamedTuple):
    """Rank for which the others wait (None: unknown), with the kind of cause and a reason as text."""

    rank: int | None  # None: a link that is not known
    cause: str  # gone, stopped, slow, late, link or balancer
    reason: str  # a sentence without the rank

    def __str__(self) -> str:
        return f"{'a rank' if self.rank is None else f'rank {self.rank}'} {self.reason}"


def stuck_rank(states: Mapping[int, RankState], complete: bool = True) -> StuckRank | None:
    """Returns the rank for which the others wait; None if no rank is stuck.

    The result is the first that applies of:

    - A rank whose process is gone or stopped.
    - If ranks have waited in an exchange for WAIT_S: a rank that has not arrived there. If all have arrived, the network drops
      bytes: then the rank with the most links that have unacknowledged bytes. Without such links, a rank that is one exchange
      behind or, after UNEXPLAINED_S, an unknown rank.
    - A rank that takes SLOW times as long as the others to compute the same passes with as many tokens.
    - A rank whose EPLB thread has ended, or is behind the others' while forward passes go on.

    Args:
        states: the state of each observed rank.
        complete: True: these are all ranks. False: the rank that has not arrived may be an unobserved one.
    """
    return _ended(states) or _late(states, complete) or _slow(states) or _balancer(states)


def _ended(states: Mapping[int, RankState]) -> StuckRank | None:
    """A rank whose process is gone, or does not run."""
    waiting = _where({rank: state for rank, state in states.items() if state.process == RUNS})
    for rank, state in states.items():
        if state.process == GONE:
            return StuckRank(rank, "gone", f"is gone: its process has ended{waiting}")
    for rank, state in states.items():
        if state.process == STOPPED or state.silent_s >= SILENT_S:
            evidence = "its process is stopped" if state.process == STOPPED else "its process gives no sign of life"
            return StuckRank(rank, "stopped", f"is stopped: {evidence}{waiting}")
    return None


def _late(states: Mapping[int, RankState], complete: bool) -> StuckRank | None:
    """A rank that has not arrived at the exchange in which others wait, or a rank whose link carries no bytes."""
    waiting = {rank: state for rank, state in states.items() if state.waits}
    if not waiting:
        return None
    arrived, where = max(state.exchanges for state in waiting.values()), _where(waiting)
    late = [rank for rank, state in states.items() if state.exchanges < arrived and state.phase not in EXCHANGES]
    if late:
        rank = min(late, key=lambda late_rank: (states[late_rank].exchanges, -states[late_rank].since_s))
        if states[rank].phase == IDLE:
            return StuckRank(rank, "late", f"is late: its engine has begun no forward pass{where}")
        return StuckRank(rank, "slow", f"is slow: it still computes{where}")
    if len(waiting) < len(states):
        return None
    pairs = {frozenset((rank, peer)) for rank, state in states.items() for peer in state.unacknowledged - {rank}}
    if not pairs and not complete:
        return StuckRank(None, "late", f"of another host has not arrived{where}")
    ends = Counter(rank for pair in pairs for rank in sorted(pair))
    first = min(state.exchanges for state in waiting.values())
    behind = [rank for rank, state in waiting.items() if state.exchanges == first < arrived]
    at_most = [rank for rank, count in ends.items() if count == max(ends.values())] or behind
    if not at_most and min(state.since_s for state in waiting.values()) < UNEXPLAINED_S:
        return None
    if len(at_most) == 1:
        return StuckRank(at_most[0], "link", f"does not exchange bytes with the others: look at its link{where}")
    peers = f" between ranks {' and '.join(map(str, sorted(at_most)))}" if len(at_most) == 2 else ""
    return StuckRank(min(at_most, default=None), "link", f"waits for bytes that do not come: look at the link{peers}{where}")


def _slow(states: Mapping[int, RankState]) -> StuckRank | None:
    """The rank that computes the same passes longest, if that is SLOW times as long as the others, in the median of passes."""
    ratios: dict[int, float] = {}
    mean_s = {rank: fmean(p.compute_s for p in s.passes.values()) for rank, s in states.items() if s.passes}
    for rank, state in states.items():
        if mean_s.get(rank, 0.0) < SLOW * min(mean_s.values(), default=0.0):
            continue  # as it is with most, without a comparison pass by pass
        others = [other.passes for peer, other in states.items() if peer != rank]
        pairs: list[tuple[float, float]] = []
        for number, mine in state.passes.items():
            alike = [theirs.compute_s for passes in others if (theirs := passes.get(number)) and theirs.size == mine.size]
            if alike:
                usual_s = median(alike)
                pairs.append((mine.compute_s / max(usual_s, 1e-9), (mine.compute_s - usual_s) / max(mine.seconds, 1e-9)))
        if len(pairs) >= LEAST_PASSES and median(share for _, share in pairs) >= LEAST_SHARE:
            ratios[rank] = median(ratio for ratio, _ in pairs)
    slowest = max(ratios, key=ratios.__getitem__, default=None)
    if slowest is None or ratios[slowest] < SLOW:
        return None
    return StuckRank(slowest, "slow", f"is slow: it computes {ratios[slowest]:.1f} times as long as ranks with as many tokens")


def _balancer(states: Mapping[int, RankState]) -> StuckRank | None:
    """A rank whose balancer has ended; or the one furthest behind, if balancers stand still while forward passes go on."""
    for rank, state in states.items():
        if state.balancer == ENDED:
            return StuckRank(rank, "balancer", "has no balancer: EPLB's background thread has ended, and no expert moves")
    still = [s for s in states.values() if s.balancer_s >= WAIT_S and s.balancer_passes >= LEAST_PASSES]
    if len(still) < len(states) or not any(state.balancer in (WAITS, MOVES, READY) for state in still):
        return None
    progress = {rank: (state.balancer_layers, BALANCERS.index(state.balancer)) for rank, state in states.items()}
    rank = min(progress, key=progress.__getitem__)
    reason = f"stands still: EPLB's background thread {_DOES[states[rank].balancer]}"
    if len(set(progress.values())) > 1:
        return StuckRank(rank, "balancer", f"{reason}, and the others' are further")
    if any(state.balancer_s < BALANCER_S for state in still):  # moves of a large layer take long
        return None
    return StuckRank(rank, "balancer", f"{reason}, as on all ranks")


def _where(states: Mapping[int, RankState]) -> str:
    """A clause that says which of the ranks wait, and in which exchange; empty if none do."""
    waiting = {rank: state for rank, state in states.items() if state.waits}
    if not waiting:
        return ""
    last = max(waiting.values(), key=lambda state: state.exchanges)
    layer = "" if last.layer is None else f" of MoE layer {last.layer}"
    exchange = "beginning of a forward pass" if last.phase == STEP else f"{last.phase}{layer}"
    ranks = ", ".join(map(str, sorted(waiting)))
    return f"; rank {ranks} waits in the {exchange}" if len(waiting) == 1 else f"; ranks {ranks} wait in the {exchange}"
