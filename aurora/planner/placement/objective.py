"""The time of one MoE layer from its phases' times: Aurora's Eq. 1 and Table 2, and the causal reading of the latter.

Every term is a maximum over GPUs of per-port or per-GPU seconds, and a time is the longest of a few sums of terms, its paths.
The simulator, not these formulas, prices a Program.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aurora.types.arrays import FloatArray, IntArray

FIXED = ("gate_a", "gate_b", "aggregate_a", "aggregate_b")  # of the requests' ranks: no placement of experts moves them
MOVED = (
    "dispatch_a", "dispatch_b", "dispatch_ab", "expert_a", "expert_b", "combine_a", "combine_b", "combine_ab",
)  # fmt: skip
TERMS = (*FIXED, *MOVED)
OTHER = {term: term[:-1] + {"a": "b", "b": "a"}[term[-1]] for term in TERMS if not term.endswith("_ab")}

Path = tuple[str, ...]
_PAPER: tuple[Path, ...] = (
    ("gate_b", "expert_a", "expert_b", "aggregate_a"),
    ("dispatch_a", "expert_a", "expert_b", "aggregate_a"),
    ("dispatch_ab", "expert_b", "aggregate_a"),
    ("dispatch_ab", "combine_a", "aggregate_a"),
    ("dispatch_ab", "dispatch_ab"),
)
_CAUSAL_STARTS: tuple[Path, ...] = (
    ("dispatch_ab",),
    ("gate_b", "dispatch_b"),
    ("gate_b", "expert_a"),
    ("dispatch_a", "expert_a"),
)
_CAUSAL_ENDS: tuple[Path, ...] = (
    ("expert_b", "aggregate_a"),
    ("combine_a", "aggregate_a"),
    ("combine_ab",),
    ("expert_b", "combine_b"),
)
_ALWAYS = ("gate_a", "aggregate_b")
PATHS: dict[str, tuple[Path, ...]] = {
    "paper": tuple((*path, *_ALWAYS) for path in _PAPER),
    "causal": tuple((*start, *end, *_ALWAYS) for start in _CAUSAL_STARTS for end in _CAUSAL_ENDS),
}


@dataclass(frozen=True)
class PhaseTimes:
    """One model's phases on each GPU, (G,) seconds each. send/recv: the dispatch's port times; csend/crecv: the combine's."""

    gate_G: FloatArray
    send_G: FloatArray
    recv_G: FloatArray
    csend_G: FloatArray
    crecv_G: FloatArray
    expert_G: FloatArray
    aggregate_G: FloatArray

    @property
    def dispatch_G(self) -> FloatArray:
        return np.maximum(self.send_G, self.recv_G)

    @property
    def combine_G(self) -> FloatArray:
        return np.maximum(self.csend_G, self.crecv_G)


def exclusive(a: PhaseTimes) -> float:
    """max(G + N) + max(F + C) + max(A). Source: Aurora Eq. 1."""
    return float(exclusive_G(a).max(axis=1, initial=0.0).sum())


def exclusive_G(a: PhaseTimes) -> FloatArray:
    """(3, G) seconds of Eq. 1's parts on each GPU: gate and dispatch, experts and combine, aggregation."""
    return np.stack([a.gate_G + a.dispatch_G, a.expert_G + a.combine_G, a.aggregate_G])


def paper(a: PhaseTimes, b: PhaseTimes) -> float:
    """Two colocated models, Aurora's Table 2 as printed: a lower bound, not a timeline."""
    return longest("paper", shared_XG(a, b).max(axis=1, initial=0.0))


def causal(a: PhaseTimes, b: PhaseTimes) -> float:
    """Two colocated models; no transfer ends before what it waits for. `paper` <= `causal` where combines mirror dispatches.

    As printed, Table 2 lets C_a end before F_a and N_b ignore G_b. Here N_b ends max(|N_a + N_b|, G_b + |N_b|); with
    s = max(end N_b, end F_a), C_a ends s + |C_a| and C_b ends max(s + |C_a + C_b|, end F_b + |C_b|); the rest is Table 2.
    """
    return longest("causal", shared_XG(a, b).max(axis=1, initial=0.0))


OBJECTIVE: dict[str, Callable[[PhaseTimes, PhaseTimes], float]] = {"causal": causal, "paper": paper}


def shared_XG(a: PhaseTimes, b: PhaseTimes) -> FloatArray:
    """(X, G) seconds of each of TERMS on each GPU; of an all-to-all of both models those of the port that takes longer."""
    dispatch_ab = np.maximum(a.send_G + b.send_G, a.recv_G + b.recv_G)
    combine_ab = np.maximum(a.csend_G + b.csend_G, a.crecv_G + b.crecv_G)
    return np.stack(
        [
            *(a.gate_G, b.gate_G, a.aggregate_G, b.aggregate_G, a.dispatch_G, b.dispatch_G, dispatch_ab),
            *(a.expert_G, b.expert_G, a.combine_G, b.combine_G, combine_ab),
        ]
    )


def path_counts(objective: str, leads: bool = True) -> IntArray:
    """(P, X) int64: how often each path of `objective` holds each of TERMS; unless a leads, a's terms are Table 2's b."""
    terms = TERMS if leads else [OTHER.get(term, term) for term in TERMS]
    return np.array([[path.count(term) for term in terms] for path in PATHS[objective]], dtype=np.int64)


def longest(objective: str, term_X: FloatArray) -> float:
    """Seconds of the longest path when TERMS take term_X (X,) seconds; it never falls when one of them rises."""
    return float((path_counts(objective) @ term_X).max())
