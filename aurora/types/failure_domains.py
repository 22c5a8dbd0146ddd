"""Nodes that may fail, and which of them fail together; placements on them, and how likely every expert survives."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, numbers
from aurora.types.replica_placement import MOST_EQUAL
from aurora.types.value import Value

MAX_ODDS_RATIO = 1e12  # of the most to the least likely to fail; beyond it products of odds are lost in rounding


@dataclass(frozen=True, eq=False, repr=False)
class FailureDomains(Value):
    """The nodes that hold experts, and the failure domains (racks, say) whose nodes fail together.

    Attributes:
        slots_N: (N,) int64, experts that fit on each node, replicas included; one or more.
        domain_N: (N,) int64, the failure domain of each node, 0..D-1, every domain with at least one node.
        odds_D: (D,) float64 above zero, how likely each domain fails, relative to the others. Failure rates serve while
            failures are rare.

    Raises:
        BadInput: if lengths differ, domains are not numbered from 0, or odds differ by more than a factor of MAX_ODDS_RATIO.

    Example:
        >>> from aurora.types import FailureDomains
        >>> four_nodes_in_two_racks = FailureDomains([3, 3, 3, 3], [0, 0, 1, 1], [1.0, 2.0])
        >>> four_nodes_in_two_racks.slots_D.tolist()
        [6, 6]
    """

    slots_N: IntArray
    domain_N: IntArray
    odds_D: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots_N", counts("slots", self.slots_N, 1))
        object.__setattr__(self, "domain_N", counts("failure domains", self.domain_N, 1))
        object.__setattr__(self, "odds_D", numbers("failure rates", self.odds_D))
        if not len(self.slots_N) or (self.slots_N < 1).any():
            raise BadInput(f"slots: expected at least one node and one slot on each, found {self.slots_N.tolist()}")
        if self.domain_N.shape != self.slots_N.shape:
            raise BadInput(f"failure domains: expected one for each of {self.nodes} nodes, found {len(self.domain_N)}")
        if (found := np.unique(self.domain_N)).tolist() != list(range(len(found))):
            raise BadInput(f"failure domains: expected numbers from 0 on without a gap, found {found.tolist()}")
        if self.odds_D.shape != found.shape or (self.odds_D <= 0).any():
            raise BadInput(
                f"failure rates: expected a number above zero for each of {len(found)} failure domains, found "
                f"{self.odds_D.tolist()}"
            )
        if self.odds_D.max() / MAX_ODDS_RATIO > self.odds_D.min():
            raise BadInput(
                f"failure rates: expected them within {MAX_ODDS_RATIO:g} of each other, found {self.odds_D.tolist()}"
            )

    @classmethod
    def equal(cls, nodes: int, slots: int) -> Self:
        """Returns nodes with equal slots; each is a failure domain of its own, and all are equally likely to fail."""
        for name, value in (("nodes", nodes), ("slots", slots)):
            if not 1 <= value <= MOST_EQUAL:
                raise BadInput(f"`{name}`: expected from one to {MOST_EQUAL}, found {value}")
        return cls(np.full(nodes, slots, dtype=np.int64), np.arange(nodes), np.ones(nodes))

    @property
    def nodes(self) -> int:
        """How many nodes there are, N."""
        return len(self.slots_N)

    @property
    def domains(self) -> int:
        """How many failure domains there are, D."""
        return len(self.odds_D)

    @property
    def slots_D(self) -> IntArray:
        """(D,) int64: the slots of each domain."""
        return np.bincount(self.domain_N, weights=self.slots_N).astype(np.int64)

    @property
    def nodes_D(self) -> IntArray:
        """(D,) int64: the nodes of each domain."""
        return np.bincount(self.domain_N).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class SurvivalProbability(Value):
    """How likely every expert is still held after k of D failure domains failed; entry k - 1 of each array, k = 1..D-1.

    Attributes:
        p_K: (D - 1,) float64, the probability.
        half_width_K: (D - 1,) float64, half the width of its 95 % interval; zero where p_K is exact.
        bound_K: (D - 1,) float64, an upper bound on the probability for any placement with the same replica counts.
    """

    p_K: FloatArray
    half_width_K: FloatArray
    bound_K: FloatArray

    def __post_init__(self) -> None:
        for name in ("p_K", "half_width_K", "bound_K"):
            object.__setattr__(self, name, numbers(f"survival, {name}", getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class ResilientPlacement(Value):
    """Experts and their replicas on nodes that may fail, layer by layer.

    Attributes:
        method: the placement's name in SURVIVE.
        min_replicas: replicas of each expert at least; on min(min_replicas, N) distinct nodes, if the method guarantees that.
        slots_LN: slots_LN[l][n] are the experts in the slots of node n in layer l, ascending; an expert may be there twice.
        survival_L: how likely every expert of each layer survives.
        seconds: what finding the placement took.
    """

    method: str
    min_replicas: int
    slots_LN: tuple[tuple[tuple[int, ...], ...], ...]
    survival_L: tuple[SurvivalProbability, ...]
    seconds: float
