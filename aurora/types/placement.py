"""Placement: which GPU holds which experts of a model in each layer, replicas included."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.value import Value

EMPTY = -1  # in place of an expert, a GPU or a slot: none
EMPTY_INT64: Any = np.int64(EMPTY)  # for compiled code: numba compiles a function anew for each constant that it is given


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
        if any(not isinstance(each, int) or abs(each) >> 62 for layer in self.slots_LG for held in layer for each in held):
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
        for layer in range(len(self.slots_LG)):
            self._check_layer(layer, experts)

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
        return expert_P, np.repeat(np.arange(len(held_G)), [len(held) for held in held_G])

    @property
    def experts(self) -> int:
        """How many experts a layer has, E."""
        return 1 + max(chain.from_iterable(self.slots_LG[0]), default=-1)

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
    def of_slots(cls, held_LGP: IntArray, share_LGP: FloatArray | None = None) -> "Placement":
        """Returns the placement that tables of slots hold.

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
    def evenly(cls, slots_LG: tuple[tuple[tuple[int, ...], ...], ...]) -> "Placement":
        """Returns the placement whose slots take even parts of an expert's load; it has no split if no expert has replicas.

        Args:
            slots_LG: by layer and GPU, the experts in its slots; an expert twice on a GPU becomes one replica with two parts.
        """
        counts_L = [Counter(chain.from_iterable(layer)) for layer in slots_LG]
        if all(number == 1 for counts in counts_L for number in counts.values()):
            return cls(slots_LG)
        held_LG = [[Counter(held) for held in layer] for layer in slots_LG]  # in the slots' sequence
        split = tuple(
            tuple(tuple(times / counts[expert] for expert, times in held.items()) for held in layer)
            for layer, counts in zip(held_LG, counts_L, strict=True)
        )
        return cls(tuple(tuple(tuple(held) for held in layer) for layer in held_LG), split)

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

    def held_LGP(self, slots: int = 1) -> IntArray:
        """Returns (L, G, P) int64, the expert in each slot, EMPTY for none; P is `slots`, or more if a GPU holds more."""
        width = max(slots, *(len(held) for layer in self.slots_LG for held in layer))
        none = (EMPTY,) * width
        return np.array([[(*held, *none[len(held) :]) for held in layer] for layer in self.slots_LG], dtype=np.int64)

    def gpu_E(self, layer: int) -> IntArray:
        """Returns (E,) int64, the GPU that holds each expert of `layer`, for a placement that holds each expert once."""
        assert self.split_LG is None, "a replicated expert has no one GPU"
        expert_P, gpu_P = self._replicas(layer)
        return gpu_P[np.argsort(expert_P)]

    def holds_EG(self, layer: int) -> NDArray[np.bool_]:
        """Returns (E, G) bool, which GPUs hold each expert of `layer`."""
        holds_EG = np.zeros((self.experts, self.gpus), dtype=bool)
        holds_EG[self._replicas(layer)] = True
        return holds_EG

    def split_EG(self, layer: int) -> FloatArray:
        """Returns (E, G) float64, the part of each expert's load that each GPU takes in `layer`."""
        split_EG = np.zeros((self.experts, self.gpus))
        parts = 1.0 if self.split_LG is None else np.fromiter(chain.from_iterable(self.split_LG[layer]), np.float64)
        split_EG[self._replicas(layer)] = parts
        return split_EG
