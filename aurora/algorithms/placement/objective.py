"""Formulas for the time of one MoE layer of several models: Aurora's Table 2 for two models, the busiest resource for more.

A part is a sum of phases on one GPU, such as dispatch_a + dispatch_b. A term is the longest of its parts on any GPU. A path is
a sum of terms. The time of a layer is its longest path. Plans are made by these formulas; the simulator does not use them.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce

import numpy as np

from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s, longest_of
from aurora.types.arrays import FloatArray, IntArray

Part = tuple[tuple[int, str], ...]  # (model, phase) pairs; a phase is named as in `PhaseTimes.of`
Path = tuple[str, ...]

FIXED = ("gate", "aggregate")  # phases that the placement of experts does not change
_STARTS: tuple[Path, ...] = (
    ("dispatch_ab",),
    ("gate_b", "dispatch_b"),
    ("gate_b", "expert_a"),
    ("dispatch_a", "expert_a"),
)
_ENDS: tuple[Path, ...] = (
    ("expert_b", "aggregate_a"),
    ("combine_a", "aggregate_a"),
    ("combine_ab",),
    ("expert_b", "combine_b"),
)
ALWAYS = ("gate_a", "aggregate_b")  # of each path of two models


@dataclass(frozen=True)
class Formula:
    """A formula for the seconds of a layer of several models: the longest of its paths.

    A part is a sum of phases on one GPU, a term the longest of its parts on any GPU, a path a sum of terms.

    Attributes:
        parts: dict from each term's name to its parts.
        paths: for each path the names of its terms.
    """

    parts: dict[str, tuple[Part, ...]]
    paths: tuple[Path, ...]

    @cached_property
    def moved(self) -> tuple[str, ...]:
        """Names of the terms that the placement of experts changes; they come after all others."""
        return tuple(term for term, parts in self.parts.items() if any(phase not in FIXED for _, phase in parts[0]))

    @cached_property
    def count_ZX(self) -> IntArray:
        """(Z, X) int64, how often each term occurs in each path."""
        return np.array([[path.count(term) for term in self.parts] for path in self.paths], dtype=np.int64)

    def term_XG(self, times_M: Sequence[PhaseTimes]) -> FloatArray:
        """Returns (X, G) seconds of each term on each GPU; times_M are the phase times of each model."""

        def summed(part: Part) -> FloatArray:
            """(G,) seconds of a part on each GPU."""
            return reduce(np.add, (times_M[model].of(phase) for model, phase in part))

        return np.stack([longest_of(map(summed, parts)) for parts in self.parts.values()])

    def longest(self, term_X: FloatArray) -> float:
        """Returns the seconds of the longest path; term_X (X,) are the seconds of each term."""
        return float((self.count_ZX @ term_X).max())

    def seconds(self, times_M: Sequence[PhaseTimes]) -> float:
        """Returns the seconds of the layer; times_M are the phase times of each model."""
        return self.longest(self.term_XG(times_M).max(axis=1, initial=0.0))


@cache
def formula(models: int, nics: bool = False) -> Formula:
    """Returns the Formula of several models: Table 2, in which transfers wait, for two; the busiest resource for more.

    Letters: G gate, N dispatch, F experts, C combine; a and b are the models; |x| is the duration of x. Table 2 as printed is a
    lower bound rather than a timeline: C_a may end before F_a, and N_b ignores G_b. Here every transfer waits for the phases
    that it depends on: N_b ends at max(|N_a + N_b|, G_b + |N_b|). With s = max(end of N_b, end of F_a), C_a ends at s + |C_a|,
    and C_b at max(s + |C_a + C_b|, end of F_b + |C_b|). The rest is as in Table 2.

    Args:
        models: number of models that share the GPUs, two or more.
        nics: whether the GPUs are in servers with NICs between them. Joint all-to-alls of several models then take as long as
            the busiest port or NIC, which carries the rows of all models, and at least as long as each model's alone.

    Source:
        Aurora (arXiv:2410.17043) Table 2.
    """
    if models > 2:
        return _busiest_resource(models, nics)
    return Formula(table_2(nics), tuple((*start, *end, *ALWAYS) for start in _STARTS for end in _ENDS))


def seconds(times_M: Sequence[PhaseTimes], nics: bool) -> float:
    """Returns the predicted seconds of a layer.

    Of one model: max(gate + dispatch) + max(experts + combine) + max(aggregation), each over GPUs (Aurora's Eq. 1). Of several:
    the longest path of their `formula`.

    Args:
        times_M: the phase times of each model.
        nics: as in `formula`; not used for one model.
    """
    return exclusive_s(times_M[0]) if len(times_M) == 1 else formula(len(times_M), nics).seconds(times_M)


def letters(models: int) -> list[str]:
    """Returns the letters of models in the names of terms: "a", "b", ..., "z", then numbers."""
    return [string.ascii_lowercase[m] if m < len(string.ascii_lowercase) else str(m) for m in range(models)]


def _sides(way: str, nics: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The phases of a dispatch or combine that models add up, as they share ports and NICs, and those that they do not."""
    mark = "c" if way == "combine" else ""
    ports = f"{mark}send", f"{mark}recv"
    return ((*ports, *(f"nic_{port}" for port in ports)), (f"{mark}steps",)) if nics else (ports, ())


def table_2(nics: bool) -> dict[str, tuple[Part, ...]]:
    """The parts of Table 2's terms; "ab" is an all-to-all of both models, which counts its busiest port or NIC."""
    a, b = 0, 1

    def single(phase: str) -> dict[str, tuple[Part, ...]]:
        return {f"{phase}_{name}": (((model, phase),),) for name, model in (("a", a), ("b", b))}

    def exchange(way: str) -> dict[str, tuple[Part, ...]]:
        sides, alone = _sides(way, nics)
        separate = {f"{way}_{name}": tuple(((m, side),) for side in (*sides, *alone)) for name, m in (("a", a), ("b", b))}
        of_each = (((model, side),) for model in (a, b) for side in alone)
        return {**separate, f"{way}_ab": (*(((a, side), (b, side)) for side in sides), *of_each)}

    moved = {**exchange("dispatch"), **single("expert"), **exchange("combine")}
    return {**single("gate"), **single("aggregate"), **moved}


def _busiest_resource(models: int, nics: bool) -> Formula:
    """The formula of models that interleave perfectly: the longest of four times.

    They are a model's own Eq. 1; what a port or NIC sends, and what it receives, in all models' dispatches and combines; and
    what a GPU computes for all models. With more models the sums decide, as there is always another model to fill a gap. What
    it leaves out only takes more time: that a model waits for its turn at the port or the GPU, that the first and last models
    of a layer find nobody to overlap with, start-ups, and the links of other fabrics.
    """
    every, named = range(models), letters(models)
    aggregate = {f"aggregate {named[m]}": (((m, "aggregate"),),) for m in every}
    (there, whole), (back, cwhole) = (_sides(way, nics) for way in ("dispatch", "combine"))
    first = {f"gate + dispatch {named[m]}": tuple(((m, "gate"), (m, side)) for side in there + whole) for m in every}
    second = {f"expert + combine {named[m]}": tuple(((m, "expert"), (m, side)) for side in back + cwhole) for m in every}
    both = tuple(zip(there, back, strict=True))  # what ports send, what they receive, and the same of NICs
    shared = {
        f"all {resource}": tuple(tuple((m, phase) for m in every for phase in phases) for phases in of_each)
        for resource, of_each in (
            ("sends", both[::2]),
            ("receives", both[1::2]),
            ("compute", (("gate", "expert", "aggregate"),)),
        )
    }
    model_paths = tuple(zip(first, second, aggregate, strict=True))
    return Formula({**aggregate, **first, **second, **shared}, (*model_paths, *((term,) for term in shared)))
