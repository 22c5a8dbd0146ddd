"""Many experts a GPU, some of them replicated: the room that GPUs have, and a layout of experts in it."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, gap, locked, numbers
from aurora.types.placement import Placement
from aurora.types.value import Value

TINY = 1e-200


@dataclass(frozen=True, eq=False, repr=False)
class GpuSlots(Value):
    """What GPUs can take. slots_G (G,) int64: experts that fit on each, one or more.

    cost_G (G,) float64: what a unit of load costs on each GPU, 1 where all are equal: seconds a token of computing and of its
    port together, or 1 / speed. nodes: the GPUs are this many equal runs, in order. groups: the experts are this many equal
    runs, in order, that routing treats as one; only EPLB's hierarchical placement asks.
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
        """`gpus` GPUs alike, of `slots` slots each."""
        if gpus < 1:
            raise BadInput(f"`gpus`: expected one or more, found {gpus}")
        if slots > np.iinfo(np.int64).max:
            raise BadInput(f"`slots`: expected fewer, found {slots}")
        return cls(np.full(gpus, slots, dtype=np.int64), np.ones(gpus), nodes, groups)

    @property
    def gpus(self) -> int:
        return len(self.slots_G)

    @property
    def alike(self) -> bool:
        """All GPUs have the same slots and cost."""
        return bool((self.slots_G == self.slots_G[0]).all() and (self.cost_G == self.cost_G[0]).all())

    def useful_G(self, experts: int) -> IntArray:
        """(G,) int64: slots that can hold different experts."""
        return np.minimum(self.slots_G, experts)


@dataclass(frozen=True, eq=False, repr=False)
class ReplicaPlacement(Value):
    """Experts and their replicas on GPUs, layer by layer, for one table of loads.

    max_load_L: the largest load times cost of a GPU. mean_load_L: what it would be if load could be divided at will.
    bound_L: below what no placement in that room gets, by the rules of the method. seconds: what finding it took.
    """

    method: str
    placement: Placement
    max_load_L: FloatArray
    mean_load_L: FloatArray
    bound_L: FloatArray
    seconds: float

    def __post_init__(self) -> None:
        for name in ("max_load_L", "mean_load_L", "bound_L"):
            object.__setattr__(self, name, numbers(f"layout, {name}", getattr(self, name)))
            if len(getattr(self, name)) != len(self.placement.slots_LG):
                raise BadInput(f"layout: expected {name} for each of {len(self.placement.slots_LG)} layers")

    @property
    def gap_L(self) -> FloatArray:
        """(L,) float64: max_load_L / bound_L - 1."""
        return np.array(
            [gap(top, min_replicas) for top, min_replicas in zip(self.max_load_L.tolist(), self.bound_L.tolist(), strict=True)]
        )


def expert_loads(what: str, value: ArrayLike) -> FloatArray:
    """A locked (L, E) float64 table of loads; one axis is one layer. BadInput unless numbers of zero or more, some of each.

    Loads below TINY count as zero, so that what is divided by GPUs and slots stays a normal float.
    """
    array = np.asarray(value)
    table = numbers(what, array[None, :] if array.ndim == 1 else array, 2)
    if not table.size:
        raise BadInput(f"{what}: expected a load for at least one layer and one expert, found shape {array.shape}")
    if (table < 0).any():
        raise BadInput(f"{what}: expected loads of zero or more, found {table.min():g}")
    if not np.isfinite(table.sum(axis=1)).all():
        raise BadInput(f"{what}: a layer's loads sum to more than a float holds")
    return locked(np.where(table < TINY, 0.0, table))
