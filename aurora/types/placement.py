"""Placement: the experts that each GPU holds in each layer, replicas included; slots of GPUs; failure domains of nodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import BoolArray, FloatArray, IntArray, Value, as_array, check_arrays, counts, gap, locked, numbers

EMPTY = -1  # in place of an expert, a GPU or a slot: none


@dataclass(frozen=True, eq=False, repr=False)
class Placement(Value):
    """Placement of experts on GPUs in each layer, replicas included, and the division of each expert's load over its replicas.

    Args:
        slots_LG: slots_LG[l][g] are the experts that GPU g holds in layer l, ascending; each layer holds every expert at least
            once.
        split_LG: in the shape of slots_LG, the part of its expert's load that each replica takes; the parts of an expert sum to
            1. None if every expert is held once.

    Raises:
        BadInput: if layers differ in their number of GPUs, an expert is missing, or a split does not fit.
    """

    slots_LG: tuple[tuple[tuple[int, ...], ...], ...]
    split_LG: tuple[tuple[tuple[float, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        if any(type(expert) is not int or abs(expert) >> 62 for layer in self.slots_LG for row in layer for expert in row):
            raise BadInput("placement: expected experts as whole numbers")
        if not self.slots_LG or len({len(layer) for layer in self.slots_LG}) != 1:
            raise BadInput("placement: expected one list of GPUs for every layer, all of one length")
        if self.split_LG is None:
            object.__setattr__(self, "slots_LG", tuple(tuple(tuple(sorted(row)) for row in layer) for layer in self.slots_LG))
        else:
            self._sort_with_split(self.split_LG)
        experts = self.experts
        if not experts:
            raise BadInput("placement: expected at least one expert, found none")
        for layer in range(len(self.slots_LG)):
            self._check_layer(layer, experts)

    def _sort_with_split(self, split_LG: tuple[tuple[tuple[float, ...], ...], ...]) -> None:
        """Sorts each GPU's experts, and the split with them."""
        shapes = [[tuple(map(len, layer)) for layer in table] for table in (self.slots_LG, split_LG)]
        if shapes[0] != shapes[1]:
            raise BadInput("placement: expected a share for each slot")
        pairs = [
            [sorted(zip(slots, share, strict=True)) for slots, share in zip(*layer, strict=True)]
            for layer in zip(self.slots_LG, split_LG, strict=True)
        ]
        for index, name in enumerate(("slots_LG", "split_LG")):
            column = tuple(tuple(tuple(pair[index] for pair in row) for row in layer) for layer in pairs)
            object.__setattr__(self, name, column)

    def _check_layer(self, layer: int, experts: int) -> None:
        """Raises BadInput unless every expert is held, no GPU holds one twice, and the parts of each sum to 1."""
        expert_P, gpu_P = self._replicas(layer)
        inside = len(expert_P) >= experts and int(expert_P.min()) >= 0 and int(expert_P.max()) < experts
        whole = inside and bool(np.bincount(expert_P, minlength=experts).all())
        if not whole or (self.split_LG is None and len(expert_P) > experts):
            raise BadInput(
                f"placement, layer {layer}: expected experts 0..{experts - 1} once, found {sorted(expert_P.tolist())}"
            )
        if self.split_LG is None:
            return
        if len(np.unique(expert_P * self.gpus + gpu_P)) != len(expert_P):
            raise BadInput(f"placement, layer {layer}: expected no expert twice on a GPU")
        share_P = np.fromiter(chain.from_iterable(self.split_LG[layer]), np.float64)
        total_E = np.bincount(expert_P, share_P, experts)
        if not (share_P >= 0).all() or not (abs(total_E - 1) < 1e-9).all():
            raise BadInput(f"placement, layer {layer}: expected shares of zero or more that sum to 1 for every expert")

    def _replicas(self, layer: int) -> tuple[IntArray, IntArray]:
        """(P,) expert and (P,) GPU of each replica of a layer, GPU by GPU."""
        held_G = self.slots_LG[layer]
        expert_P = np.fromiter(chain.from_iterable(held_G), np.int64)
        return expert_P, np.repeat(np.arange(len(held_G)), [len(slots) for slots in held_G])

    @cached_property
    def experts(self) -> int:
        """Number of experts of a layer, E."""
        return 1 + max(chain.from_iterable(self.slots_LG[0]), default=-1)

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs, G."""
        return len(self.slots_LG[0])

    def layer(self, number: int) -> "Placement":
        """Returns the placement of one layer, `number` counted from 0, as a Placement with one layer."""
        return Placement(
            self.slots_LG[number : number + 1], None if self.split_LG is None else self.split_LG[number : number + 1]
        )

    @classmethod
    def of_slots(cls, held_LGP: IntArray, share_LGP: FloatArray | None = None) -> "Placement":
        """Returns the Placement made from the expert in each slot.

        Args:
            held_LGP: (L, G, P) int64, the expert in each slot, EMPTY for none.
            share_LGP: (L, G, P) float64, the part of its expert's load that each slot takes; None: even parts, see `evenly`.
        """
        used_LGP = held_LGP != EMPTY

        def in_use(table_LGP: IntArray | FloatArray) -> tuple[tuple[tuple[Any, ...], ...], ...]:
            return tuple(
                tuple(tuple(row[used].tolist()) for row, used in zip(*layer, strict=True))
                for layer in zip(table_LGP, used_LGP, strict=True)
            )

        return cls.evenly(in_use(held_LGP)) if share_LGP is None else cls(in_use(held_LGP), in_use(share_LGP))

    @classmethod
    def unreplicated(cls, gpu_E: IntArray, gpus: int) -> "Placement":
        """Returns the placement of one layer without replicas; expert e is on GPU gpu_E[e]."""
        return cls((tuple(tuple(np.flatnonzero(gpu_E == gpu).tolist()) for gpu in range(gpus)),))

    @classmethod
    def divided(cls, slots_G: tuple[tuple[int, ...], ...], split_EG: FloatArray) -> "Placement":
        """Returns the placement of one layer with a given load split; its split_LG is None if no expert has replicas.

        Args:
            slots_G: the experts on each GPU.
            split_EG: (E, G), the part of each expert's load that each GPU takes.
        """
        if sum(map(len, slots_G)) == len(split_EG):
            return cls((slots_G,))
        return cls((slots_G,), (tuple(tuple(split_EG[list(slots), gpu].tolist()) for gpu, slots in enumerate(slots_G)),))

    @classmethod
    def held(cls, held_EG: IntArray | BoolArray) -> "Placement":
        """Returns the placement of one layer in which every replica of an expert takes the same part of its load.

        Args:
            held_EG: (E, G), above zero where a GPU holds an expert.
        """
        return cls.evenly((tuple(tuple(np.flatnonzero(held_E).tolist()) for held_E in held_EG.T),))

    @classmethod
    def evenly(cls, slots_LG: tuple[tuple[tuple[int, ...], ...], ...]) -> "Placement":
        """Returns the placement in which every slot of an expert takes the same part of its load.

        Its split_LG is None if no expert has replicas.

        Args:
            slots_LG: slots_LG[l][g] are the experts in the slots of GPU g. An expert in two slots of one GPU becomes one
                replica that takes the parts of both.
        """
        counts_L = [Counter(chain.from_iterable(layer)) for layer in slots_LG]
        if all(number == 1 for counts in counts_L for number in counts.values()):
            return cls(slots_LG)
        held_LG = [[Counter(slots) for slots in layer] for layer in slots_LG]  # in the slots' sequence
        split = tuple(
            tuple(tuple(times / counts[expert] for expert, times in repeats.items()) for repeats in layer)
            for layer, counts in zip(held_LG, counts_L, strict=True)
        )
        return cls(tuple(tuple(tuple(repeats) for repeats in layer) for layer in held_LG), split)

    @classmethod
    def stack(cls, parts: "Sequence[Placement]") -> "Placement":
        """Returns the placement with the layers of all `parts`, in sequence."""
        slots = tuple(layer for part in parts for layer in part.slots_LG)
        if all(part.split_LG is None for part in parts):
            return cls(slots)
        whole = [tuple(tuple(tuple(1.0 for _ in experts) for experts in layer) for layer in part.slots_LG) for part in parts]
        return cls(slots, tuple(layer for part, ones in zip(parts, whole, strict=True) for layer in part.split_LG or ones))

    def fewest_replicas(self, layer: int, node_G: ArrayLike) -> tuple[int, int]:
        """Returns (GPUs, nodes): the minimum over a layer's experts of the number of GPUs, and of nodes, that hold the expert.

        (2, 1): every expert is on two GPUs or more, and some expert is on one node only.

        Args:
            layer: index of the layer.
            node_G: (G,) the node of each GPU.
        """
        held_EG, nodes_G = self.holds_EG(layer), np.asarray(node_G)
        held_EN = np.stack([held_EG[:, nodes_G == node].any(axis=1) for node in np.unique(nodes_G)], axis=1)
        return int(held_EG.sum(axis=1).min()), int(held_EN.sum(axis=1).min())

    def held_LGP(self, slots: int = 1) -> IntArray:
        """Returns (L, G, P) int64, the expert in each slot, EMPTY for none; P is `slots`, or more if a GPU holds more."""
        width = max(slots, *(len(experts) for layer in self.slots_LG for experts in layer))
        none = (EMPTY,) * width
        return np.array([[(*experts, *none[len(experts) :]) for experts in layer] for layer in self.slots_LG], dtype=np.int64)

    def gpu_E(self, layer: int) -> IntArray:
        """Returns (E,) int64, the GPU that holds each expert of `layer`, for a placement without replicas."""
        assert self.split_LG is None, "a replicated expert has no one GPU"
        expert_P, gpu_P = self._replicas(layer)
        return gpu_P[np.argsort(expert_P)]

    def holds_EG(self, layer: int) -> BoolArray:
        """Returns (E, G) bool, True where a GPU holds an expert of `layer`."""
        holds_EG = np.zeros((self.experts, self.gpus), dtype=bool)
        holds_EG[self._replicas(layer)] = True
        return holds_EG

    def split_EG(self, layer: int) -> FloatArray:
        """Returns (E, G) float64, the part of each expert's load that each GPU takes in `layer`."""
        split_EG = np.zeros((self.experts, self.gpus))
        parts = 1.0 if self.split_LG is None else np.fromiter(chain.from_iterable(self.split_LG[layer]), np.float64)
        split_EG[self._replicas(layer)] = parts
        return split_EG


MOST_EQUAL = 1 << 16  # GPUs or nodes that are made alike, and slots of each
TINY = 1e-200  # smaller loads count as zero


@dataclass(frozen=True, eq=False, repr=False)
class GpuSlots(Value):
    """Number of experts that fit on each GPU, and the cost of a unit of load there.

    Attributes:
        slots_G: (G,) int64, experts that fit on each GPU, replicas included; one or more.
        cost_G: (G,) float64 above zero, the cost of a unit of load on each GPU: 1 where all are equal, else 1 / speed, or the
            seconds that a token takes to compute and to move.
        nodes: number of nodes; each has equally many consecutive GPUs. Only EPLB's hierarchical placement uses it.
        groups: number of expert groups of group-limited routing; each has equally many consecutive experts. Only EPLB's
            hierarchical placement uses it.

    Raises:
        BadInput: if lengths differ, or values are out of range.

    Example:
        >>> from aurora.types import GpuSlots
        >>> GpuSlots.equal(gpus=4, slots=2) == GpuSlots([2, 2, 2, 2], [1.0, 1.0, 1.0, 1.0])
        True
    """

    slots_G: IntArray
    cost_G: FloatArray
    nodes: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots_G", counts("slots", self.slots_G, 1))
        object.__setattr__(self, "cost_G", numbers("cost of load", self.cost_G))
        if not len(self.slots_G) or (self.slots_G < 1).any():
            raise BadInput(f"slots: expected at least one GPU and one slot on each, found {self.slots_G.tolist()}")
        if self.cost_G.shape != self.slots_G.shape or (self.cost_G <= 0).any():
            raise BadInput(
                f"cost of load: expected a number above zero for each of {self.gpus} GPUs, found {self.cost_G.tolist()}"
            )
        if self.nodes < 1 or self.gpus % self.nodes:
            raise BadInput(f"`nodes`: expected a divisor of the {self.gpus} GPUs, found {self.nodes}")
        if self.groups < 1:
            raise BadInput(f"`groups`: expected one or more, found {self.groups}")

    @classmethod
    def equal(cls, gpus: int, slots: int, nodes: int = 1, groups: int = 1) -> Self:
        """Returns GpuSlots of equal GPUs with cost 1."""
        for name, value in (("gpus", gpus), ("slots", slots)):
            if not 1 <= value <= MOST_EQUAL:
                raise BadInput(f"`{name}`: expected from one to {MOST_EQUAL}, found {value}")
        return cls(np.full(gpus, slots, dtype=np.int64), np.ones(gpus), nodes, groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs, G."""
        return len(self.slots_G)

    @property
    def alike(self) -> bool:
        """True if all GPUs have the same slots and cost."""
        return bool((self.slots_G == self.slots_G[0]).all() and (self.cost_G == self.cost_G[0]).all())

    def useful_G(self, experts: int) -> IntArray:
        """Returns (G,) int64, the slots of each GPU, at most `experts`, because a GPU holds an expert in one slot only."""
        return np.minimum(self.slots_G, experts)


@dataclass(frozen=True, eq=False, repr=False)
class ReplicaPlacement(Value):
    """Experts and their replicas on GPUs, layer by layer, for the loads that they were placed for.

    Attributes:
        method: the method's name in REPLICAS.
        placement: the experts on each GPU, and how each expert's load splits over its replicas.
        max_load_L: (L,) float64, the largest load x cost of a GPU.
        mean_load_L: (L,) float64, max_load_L under perfect balance, if any GPU could take any part of the load.
        bound_L: (L,) float64, a lower bound on max_load_L for all placements that the slots and the method's rules allow.
        seconds: seconds that it took to find the placement.
    """

    method: str
    placement: Placement
    max_load_L: FloatArray
    mean_load_L: FloatArray
    bound_L: FloatArray
    seconds: float

    def __post_init__(self) -> None:
        check_arrays(self, "replica placement, ")
        if len(self.max_load_L) != len(self.placement.slots_LG):
            raise BadInput(f"replica placement: expected max_load_L for each of {len(self.placement.slots_LG)} layers")

    @property
    def gap_L(self) -> FloatArray:
        """(L,) float64: the gap of the largest load to its bound, max_load_L / bound_L - 1."""
        return np.array([gap(top, bound) for top, bound in zip(self.max_load_L.tolist(), self.bound_L.tolist(), strict=True)])


@dataclass(frozen=True, eq=False, repr=False)
class Rebalanced(Value):
    """Result of `aurora.rebalance`: the next placement. Replicas share their expert's load evenly.

    Attributes:
        held_LGP: (L, G, P) int64, the expert in each slot, -1 for none; an expert that stays on a GPU keeps its slot.
        moves_L: (L,) int64, number of experts that GPUs fetch because they did not hold them before.
        before_L: (L,) float64, the largest load x cost of a GPU under the previous placement, with the new loads.
        max_load_L: (L,) float64, the same under this placement; never more than before_L.
        mean_load_L: (L,) float64, max_load_L under perfect balance, if any GPU could take any part of the load.
        seconds: seconds that it took to find the placement.
    """

    held_LGP: IntArray
    moves_L: IntArray
    before_L: FloatArray
    max_load_L: FloatArray
    mean_load_L: FloatArray
    seconds: float

    def __post_init__(self) -> None:
        for name in ("held_LGP", "moves_L", "before_L", "max_load_L", "mean_load_L"):
            locked(getattr(self, name))

    @property
    def placement(self) -> Placement:
        """The slots held_LGP as a Placement with an even load split."""
        return Placement.of_slots(self.held_LGP)


def expert_loads(what: str, value: ArrayLike) -> FloatArray:
    """Returns loads of experts, (L, E) or (E,) for one layer, as a locked (L, E) float64 array.

    Loads below TINY become zero, so that quotients by GPUs and slots stay normal floats.

    Raises:
        BadInput: if they are not numbers of zero or more; the message calls them `what`.
    """
    array = as_array(what, value)
    table = numbers(what, array[None, :] if array.ndim == 1 else array, 2)
    if not table.size:
        raise BadInput(f"{what}: expected a load for at least one layer and one expert, found shape {array.shape}")
    if (table < 0).any():
        raise BadInput(f"{what}: expected loads of zero or more, found {table.min():g}")
    with np.errstate(over="ignore"):
        total_L = table.sum(axis=1)
    if not np.isfinite(total_L).all():
        raise BadInput(f"{what}: a layer's loads sum to more than a float holds")
    return locked(np.where(table < TINY, 0.0, table))


MAX_ODDS_RATIO = 1e12  # of the most to the least likely to fail; beyond it products of odds are lost in rounding


@dataclass(frozen=True, eq=False, repr=False)
class FailureDomains(Value):
    """The nodes that hold experts, and the failure domains (racks, say) whose nodes fail together.

    Attributes:
        slots_N: (N,) int64, experts that fit on each node, replicas included; one or more.
        domain_N: (N,) int64, the failure domain of each node, 0..D-1, every domain with at least one node.
        odds_D: (D,) float64 above zero, odds that each domain fails, relative to the other domains. If failures are rare,
            failure rates can be given.

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
        if (domains := np.unique(self.domain_N)).tolist() != list(range(len(domains))):
            raise BadInput(f"failure domains: expected numbers from 0 on without a gap, found {domains.tolist()}")
        if self.odds_D.shape != domains.shape or (self.odds_D <= 0).any():
            raise BadInput(
                f"failure rates: expected a number above zero for each of {len(domains)} failure domains, found "
                f"{self.odds_D.tolist()}"
            )
        if self.odds_D.max() / MAX_ODDS_RATIO > self.odds_D.min():
            raise BadInput(
                f"failure rates: expected them within {MAX_ODDS_RATIO:g} of each other, found {self.odds_D.tolist()}"
            )

    @classmethod
    def equal(cls, nodes: int, slots: int, domains: Sequence[int] | None = None, odds: Sequence[float] | None = None) -> Self:
        """Returns FailureDomains of nodes with equal slots.

        Args:
            nodes: number of nodes.
            slots: experts that fit on each node.
            domains: the failure domain of each node; None: each node is a failure domain.
            odds: odds that each domain fails, relative to the other domains; None: equal odds.
        """
        for name, value in (("nodes", nodes), ("slots", slots)):
            if not 1 <= value <= MOST_EQUAL:
                raise BadInput(f"`{name}`: expected from one to {MOST_EQUAL}, found {value}")
        domain_N = np.arange(nodes) if domains is None else np.array(domains)
        odds_D = np.ones(len(set(domain_N.tolist()))) if odds is None else np.array(odds)
        return cls(np.full(nodes, slots, dtype=np.int64), domain_N, odds_D)

    @property
    def nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.slots_N)

    @property
    def domains(self) -> int:
        """Number of failure domains, D."""
        return len(self.odds_D)

    @property
    def slots_D(self) -> IntArray:
        """(D,) int64: number of slots of each failure domain, over its nodes."""
        return np.bincount(self.domain_N, weights=self.slots_N).astype(np.int64)

    @property
    def nodes_D(self) -> IntArray:
        """(D,) int64: number of nodes of each failure domain."""
        return np.bincount(self.domain_N).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class SurvivalProbability(Value):
    """Probability that every expert is still held after k of D failure domains failed.

    Entry k - 1 of each array is for k failures, k = 1..D-1.

    Attributes:
        p_K: (D - 1,) float64, the probability.
        half_width_K: (D - 1,) float64, half the width of its 95 % interval; zero where p_K is exact.
        bound_K: (D - 1,) float64, an upper bound on the probability for any placement with the same replica counts.
    """

    p_K: FloatArray
    half_width_K: FloatArray
    bound_K: FloatArray

    def __post_init__(self) -> None:
        check_arrays(self, "survival, ")


@dataclass(frozen=True, eq=False, repr=False)
class ResilientPlacement(Value):
    """Experts and their replicas on nodes that may fail, layer by layer.

    Attributes:
        method: the method's name in SURVIVE.
        min_replicas: minimum replicas of each expert; on min(min_replicas, N) distinct nodes, if the method guarantees that.
        slots_LN: slots_LN[l][n] are the experts in the slots of node n in layer l, ascending; an expert may be there twice.
        survival_L: by layer, the probability that all of its experts survive 1, 2, ... failures.
        seconds: seconds that it took to find the placement.
    """

    method: str
    min_replicas: int
    slots_LN: tuple[tuple[tuple[int, ...], ...], ...]
    survival_L: tuple[SurvivalProbability, ...]
    seconds: float
