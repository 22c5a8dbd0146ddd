"""Nodes that may fail, what fits on them, and which of them fail together; and what is left of experts on them."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, numbers
from aurora.types.value import Value

SPREAD = 1e12  # from the least to the most likely to fail: beyond, products of odds are lost in rounding


@dataclass(frozen=True, eq=False, repr=False)
class FailureDomains(Value):
    """slots_N (N,) int64: experts that fit on each node, replicas included, one or more.

    domain_N (N,) int64: the failure domain of each node, 0..D-1, all of them used: a domain's nodes fail together. Where each
    node is its own, domains are nodes. odds_D (D,) float64: how likely each domain fails, against the others: rates, as long as
    failures are rare.
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

        if self.odds_D.max() / SPREAD > self.odds_D.min():
            raise BadInput(f"failure rates: expected them within {SPREAD:g} of each other, found {self.odds_D.tolist()}")

    @classmethod
    def equal(cls, nodes: int, slots: int) -> Self:
        """`nodes` nodes of `slots` slots each that fail one by one, all as likely."""
        if nodes < 1:
            raise BadInput(f"`nodes`: expected one or more, found {nodes}")
        if slots > np.iinfo(np.int64).max:
            raise BadInput(f"`slots`: expected fewer, found {slots}")
        return cls(np.full(nodes, slots, dtype=np.int64), np.arange(nodes), np.ones(nodes))

    @property
    def nodes(self) -> int:
        return len(self.slots_N)

    @property
    def domains(self) -> int:
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
    """The probability that every expert is still held after k failure domains of D failed: p_K[k - 1], k = 1..D-1.

    half_K: half the width of its confidence interval, zero where p_K is exact. best_K: above what no placement of as many
    replicas gets.
    """

    p_K: FloatArray
    half_K: FloatArray
    best_K: FloatArray

    def __post_init__(self) -> None:
        for name in ("p_K", "half_K", "best_K"):
            object.__setattr__(self, name, numbers(f"survival, {name}", getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class ResilientPlacement(Value):
    """Experts on nodes, layer by layer, and what they survive. slots_LN[l][n]: the experts in the slots of node n, ascending;
    an expert may be there twice. floor: the replicas that every expert has at least, on min(floor, N) distinct nodes if the
    method sees to it. seconds: what finding them took."""

    method: str
    min_replicas: int
    slots_LN: tuple[tuple[tuple[int, ...], ...], ...]
    survival_L: tuple[SurvivalProbability, ...]
    seconds: float
