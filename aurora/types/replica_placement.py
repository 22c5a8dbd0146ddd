"""The expert slots of GPUs, and a placement of experts and their replicas in them."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, as_array, counts, gap, locked, numbers
from aurora.types.placement import Placement
from aurora.types.value import Value

MOST_EQUAL = 1 << 16  # GPUs or nodes that are made alike, and slots of each
TINY = 1e-200  # smaller loads count as zero


@dataclass(frozen=True, eq=False, repr=False)
class GpuSlots(Value):
    """How many experts fit on each GPU, and what load costs there.

    Attributes:
        slots_G: (G,) int64, experts that fit on each GPU, replicas included; one or more.
        cost_G: (G,) float64 above zero, what a unit of load costs on each GPU: 1 where all are equal, else 1 / speed, or the
            seconds that a token takes to compute and to move.
        nodes: number of nodes; each has equally many consecutive GPUs. Only EPLB's hierarchical placement uses it.
        groups: number of expert groups (of group-limited routing), equally many consecutive experts each. Only for EPLB too.

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
        """Returns equal GPUs with cost 1."""
        for name, value in (("gpus", gpus), ("slots", slots)):
            if not 1 <= value <= MOST_EQUAL:
                raise BadInput(f"`{name}`: expected from one to {MOST_EQUAL}, found {value}")
        return cls(np.full(gpus, slots, dtype=np.int64), np.ones(gpus), nodes, groups)

    @property
    def gpus(self) -> int:
        """How many GPUs there are, G."""
        return len(self.slots_G)

    @property
    def alike(self) -> bool:
        """Whether all GPUs have the same slots and cost."""
        return bool((self.slots_G == self.slots_G[0]).all() and (self.cost_G == self.cost_G[0]).all())

    def useful_G(self, experts: int) -> IntArray:
        """Returns (G,) int64, the slots of each GPU, at most `experts`: more slots cannot all hold different experts."""
        return np.minimum(self.slots_G, experts)


@dataclass(frozen=True, eq=False, repr=False)
class ReplicaPlacement(Value):
    """Experts and their replicas on GPUs, layer by layer, for the loads that they were placed for.

    Attributes:
        method: the placement's name in REPLICAS.
        placement: the experts on each GPU, and how each expert's load splits over its replicas.
        max_load_L: (L,) float64, the largest product of a GPU's load and its cost.
        mean_load_L: (L,) float64, what max_load_L would be if load could be split at will.
        bound_L: (L,) float64, a lower bound on max_load_L for all placements that these slots and the method's rules allow.
        seconds: what finding the placement took.
    """

    method: str
    placement: Placement
    max_load_L: FloatArray
    mean_load_L: FloatArray
    bound_L: FloatArray
    seconds: float

    def __post_init__(self) -> None:
        for name in ("max_load_L", "mean_load_L", "bound_L"):
            object.__setattr__(self, name, numbers(f"replica placement, {name}", getattr(self, name)))
            if len(getattr(self, name)) != len(self.placement.slots_LG):
                raise BadInput(f"replica placement: expected {name} for each of {len(self.placement.slots_LG)} layers")

    @property
    def gap_L(self) -> FloatArray:
        """(L,) float64: how far the largest load is above its bound, max_load_L / bound_L - 1."""
        return np.array([gap(top, bound) for top, bound in zip(self.max_load_L.tolist(), self.bound_L.tolist(), strict=True)])


@dataclass(frozen=True, eq=False, repr=False)
class Rebalanced(Value):
    """The placement that follows on one in force, for new loads. Replicas share their expert's load evenly.

    Attributes:
        held_LGP: (L, G, P) int64, the expert in each slot, -1 for none; an expert that stays on a GPU keeps its slot.
        moves_L: (L,) int64, how many experts the GPUs fetch: those that they did not hold before.
        before_L: (L,) float64, the largest product of a GPU's load and its cost with the placement in force.
        max_load_L: (L,) float64, the same with this one; never more.
        mean_load_L: (L,) float64, what it would be if load could be split at will.
        seconds: what finding the placement took.
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
        """The placement with its even load split."""
        return Placement.of_slots(self.held_LGP)


def expert_loads(what: str, value: ArrayLike) -> FloatArray:
    """Returns loads of experts, (L, E) or (E,) for one layer, as a locked (L, E) float64 array; a BadInput names them `what`.

    Loads below TINY become zero, so that what is divided by GPUs and slots stays a normal float.
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
