"""Placement: which GPU holds which experts of a model in each layer, replicas included."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.value import Value


@dataclass(frozen=True, eq=False, repr=False)
class Placement(Value):
    """Which GPU holds which experts in each layer, and how replicas share their expert's load.

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
        if any(not isinstance(expert, int) for layer in self.slots_LG for held in layer for expert in held):
            raise BadInput("placement: expected experts as whole numbers")
        if not self.slots_LG or len({len(layer) for layer in self.slots_LG}) != 1:
            raise BadInput("placement: expected one list of GPUs for every layer, all of one length")
        if self.split_LG is None:
            object.__setattr__(self, "slots_LG", tuple(tuple(tuple(sorted(held)) for held in layer) for layer in self.slots_LG))
        else:
            self._sort_with_split(self.split_LG)
        experts = self.experts
        if not experts:
            raise BadInput("placement: expected at least one expert, found none")
        for number, layer in enumerate(self.slots_LG):
            found = sorted(expert for held in layer for expert in held)
            whole = len(set(found)) == experts and found[0] >= 0 and found[-1] < experts
            if not whole or (self.split_LG is None and len(found) > experts):
                raise BadInput(f"placement, layer {number}: expected experts 0..{experts - 1} once, found {found}")
            if self.split_LG is not None:
                self._check_split(number)

    def _sort_with_split(self, split_LG: tuple[tuple[tuple[float, ...], ...], ...]) -> None:
        """Sorts each GPU's experts, and the split with them."""
        shapes = [[tuple(map(len, layer)) for layer in table] for table in (self.slots_LG, split_LG)]
        if shapes[0] != shapes[1]:
            raise BadInput("placement: expected a share for each slot")
        pairs = [
            [sorted(zip(held, share, strict=True)) for held, share in zip(*layer, strict=True)]
            for layer in zip(self.slots_LG, split_LG, strict=True)
        ]
        for index, name in enumerate(("slots_LG", "split_LG")):
            column = tuple(tuple(tuple(pair[index] for pair in held) for held in layer) for layer in pairs)
            object.__setattr__(self, name, column)

    def _check_split(self, layer: int) -> None:
        """Raises BadInput unless the layer's parts sum to 1 for every expert and no GPU holds an expert twice."""
        if any(len(set(held)) != len(held) for held in self.slots_LG[layer]):
            raise BadInput(f"placement, layer {layer}: expected no expert twice on a GPU")
        split_EG = self.split_EG(layer)
        total_E = split_EG.sum(axis=1)
        if not (split_EG >= 0).all() or not (abs(total_E - 1) < 1e-9).all():
            raise BadInput(f"placement, layer {layer}: expected shares of zero or more that sum to 1 for every expert")

    @property
    def experts(self) -> int:
        """How many experts a layer has, E."""
        return 1 + max((expert for held in self.slots_LG[0] for expert in held), default=-1)

    @property
    def gpus(self) -> int:
        """How many GPUs there are, G."""
        return len(self.slots_LG[0])

    def layer(self, number: int) -> "Placement":
        """Returns the placement of one layer alone."""
        return Placement(
            self.slots_LG[number : number + 1], None if self.split_LG is None else self.split_LG[number : number + 1]
        )

    @classmethod
    def stack(cls, parts: "Sequence[Placement]") -> "Placement":
        """Returns the placement whose layers are those of `parts`, one after the other."""
        slots = tuple(layer for part in parts for layer in part.slots_LG)
        if all(part.split_LG is None for part in parts):
            return cls(slots)
        whole = [tuple(tuple(tuple(1.0 for _ in held) for held in layer) for layer in part.slots_LG) for part in parts]
        return cls(slots, tuple(layer for part, ones in zip(parts, whole, strict=True) for layer in part.split_LG or ones))

    def relabelled(self, from_G: IntArray) -> "Placement":
        """Returns the placement in which GPU g holds what GPU from_G[g] holds here; from_G is (G,) int64."""
        slots, split = (
            None if table is None else tuple(tuple(layer[gpu] for gpu in from_G.tolist()) for layer in table)
            for table in (self.slots_LG, self.split_LG)
        )
        assert slots is not None
        return Placement(slots, split)

    def gpu_E(self, layer: int) -> IntArray:
        """Returns (E,) int64, the GPU that holds each expert of `layer`, for a placement that holds each expert once."""
        assert self.split_LG is None, "a replicated expert has no one GPU"
        gpu_E = np.empty(self.experts, dtype=np.int64)
        for gpu, held in enumerate(self.slots_LG[layer]):
            gpu_E[list(held)] = gpu
        return gpu_E

    def holds_EG(self, layer: int) -> NDArray[np.bool_]:
        """Returns (E, G) bool, which GPUs hold each expert of `layer`."""
        holds_EG = np.zeros((self.experts, self.gpus), dtype=bool)
        for gpu, held in enumerate(self.slots_LG[layer]):
            holds_EG[list(held), gpu] = True
        return holds_EG

    def split_EG(self, layer: int) -> FloatArray:
        """Returns (E, G) float64, the part of each expert's load that each GPU takes in `layer`."""
        split_EG = np.zeros((self.experts, self.gpus))
        for gpu, held in enumerate(self.slots_LG[layer]):
            split_EG[list(held), gpu] = 1.0 if self.split_LG is None else self.split_LG[layer][gpu]
        return split_EG
