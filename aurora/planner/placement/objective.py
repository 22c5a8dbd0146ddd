"""The time of one MoE layer from the times of its phases: Aurora's Eq. 1 and Table 2, and a causal variant of Table 2.

A term is a maximum over GPUs of per-port or per-GPU seconds. A path is a sum of terms. The time of a layer is its longest path.
Model a is the one that Table 2 starts with, b the other; "ab" is an all-to-all of both. These formulas serve planning; the
simulator prices a Program.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aurora.types.arrays import FloatArray, IntArray

FIXED = ("gate_a", "gate_b", "aggregate_a", "aggregate_b")  # the placement of experts does not change these
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
    """Seconds of one model's phases on each GPU; `send` and `recv` are of the dispatch, `csend` and `crecv` of the combine."""

    gate_G: FloatArray
    send_G: FloatArray
    recv_G: FloatArray
    csend_G: FloatArray
    crecv_G: FloatArray
    expert_G: FloatArray
    aggregate_G: FloatArray

    @property
    def dispatch_G(self) -> FloatArray:
        """(G,) seconds of each GPU's busier port in the dispatch."""
        return np.maximum(self.send_G, self.recv_G)

    @property
    def combine_G(self) -> FloatArray:
        """(G,) seconds of each GPU's busier port in the combine."""
        return np.maximum(self.csend_G, self.crecv_G)


def exclusive(a: PhaseTimes) -> float:
    """Returns the seconds of a layer of one model, max(gate + dispatch) + max(experts + combine) + max(aggregate).

    Source:
        Aurora (arXiv:2410.17043) Eq. 1.
    """
    return float(exclusive_XG(a).max(axis=1, initial=0.0).sum())


def exclusive_XG(a: PhaseTimes) -> FloatArray:
    """Returns (3, G) seconds of the parts of Eq. 1 on each GPU: gate + dispatch, experts + combine, aggregation."""
    return np.stack([a.gate_G + a.dispatch_G, a.expert_G + a.combine_G, a.aggregate_G])


def paper(a: PhaseTimes, b: PhaseTimes) -> float:
    """Returns the seconds of a layer of two colocated models by Table 2 as printed: a lower bound, not a timeline.

    Args:
        a: phases of the model that Table 2 starts with.
        b: phases of the other model.

    Source:
        Aurora (arXiv:2410.17043) Table 2.
    """
    return longest("paper", shared_XG(a, b).max(axis=1, initial=0.0))


def causal(a: PhaseTimes, b: PhaseTimes) -> float:
    """Returns the seconds of a layer of two colocated models, if every transfer waits for the phases that it depends on.

    As printed, Table 2 lets C_a end before F_a, and N_b ignore G_b (G gate, N dispatch, F experts, C combine). Here N_b ends at
    max(|N_a + N_b|, G_b + |N_b|). With s = max(end of N_b, end of F_a), C_a ends at s + |C_a|, and C_b ends at
    max(s + |C_a + C_b|, end of F_b + |C_b|). The rest is Table 2. `paper` <= `causal` where combines mirror dispatches.
    """
    return longest("causal", shared_XG(a, b).max(axis=1, initial=0.0))


OBJECTIVE: dict[str, Callable[[PhaseTimes, PhaseTimes], float]] = {"causal": causal, "paper": paper}


def shared_XG(a: PhaseTimes, b: PhaseTimes) -> FloatArray:
    """Returns (X, G) seconds of each of TERMS on each GPU; an all-to-all of both models counts its busier port."""
    dispatch_ab = np.maximum(a.send_G + b.send_G, a.recv_G + b.recv_G)
    combine_ab = np.maximum(a.csend_G + b.csend_G, a.crecv_G + b.crecv_G)
    fixed = a.gate_G, b.gate_G, a.aggregate_G, b.aggregate_G
    there = a.dispatch_G, b.dispatch_G, dispatch_ab
    back = a.combine_G, b.combine_G, combine_ab
    return np.stack([*fixed, *there, a.expert_G, b.expert_G, *back])


def path_counts(objective: str, leads: bool = True) -> IntArray:
    """Returns (P, X) int64, how often each path of an objective holds each of TERMS.

    `leads` is whether model a is the one that Table 2 starts with; otherwise the terms of a and b change places.
    """
    terms = TERMS if leads else [OTHER.get(term, term) for term in TERMS]
    return np.array([[path.count(term) for term in terms] for path in PATHS[objective]], dtype=np.int64)


def longest(objective: str, term_X: FloatArray) -> float:
    """Returns the seconds of an objective's longest path, from (X,) seconds of TERMS; it never falls when a term rises."""
    return float((path_counts(objective) @ term_X).max())
