"""Loads of GPUs by the loads of experts, for a table of slots."""

import numpy as np
from numpy.typing import ArrayLike

from aurora.planner.workload.serving_gpus import served_split
from aurora.types import Placement
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.placement import EMPTY

MOST_SERVED = 1024  # layers whose parts are kept


class ReplicaParts:
    """The part of its expert's load that each slot takes.

    In layers whose slots have not changed since, it is the part of the first placement; else replicas take even parts.

    In all-to-alls over servers one server serves all of a server's tokens of an expert. There a slot takes the part that this
    makes of it, if as many tokens start on each GPU.

    Args:
        first: the first placement; or a table of its slots, which take even parts.
        server_G: (G,) int64, the server of each GPU, if all-to-alls go over servers; None: they are flat.
    """

    def __init__(self, first: Placement | ArrayLike, server_G: IntArray | None = None) -> None:
        self._server_G = server_G
        self._served: dict[bytes, FloatArray] = {}  # parts of a layer by its slots and their parts if all-to-alls were flat
        self._first_LGP: IntArray | None = None
        if isinstance(first, Placement) and first.split_LG is not None:
            self._first_LGP, self._part_LGP = first.held_LGP(), np.zeros(first.held_LGP().shape)
            for layer, split_G in enumerate(first.split_LG):
                for gpu, split_P in enumerate(split_G):
                    self._part_LGP[layer, gpu, : len(split_P)] = split_P
            self._unchanged_L: BoolArray = np.ones(len(self._first_LGP), dtype=np.bool_)

    def parts(self, held_LGP: IntArray) -> FloatArray:
        """Returns (L, G, P), the parts of slots (L, G, P) of which layers may have changed, with -1 for no expert."""
        part_LGP = _even_parts(held_LGP)
        if self._first_LGP is not None:
            first_L = self._unchanged_L & (held_LGP == self._first_LGP).all(axis=(1, 2))
            part_LGP[first_L] = self._part_LGP[first_L]
        if self._server_G is not None:
            for layer in np.flatnonzero(((part_LGP > 0) & (part_LGP < 1)).any(axis=(1, 2))).tolist():
                part_LGP[layer] = self._served_parts(held_LGP[layer], part_LGP[layer], self._server_G)
        return part_LGP

    def change(self, held_LGP: IntArray) -> None:
        """Says that slots (L, G, P) are in force."""
        if self._first_LGP is not None:
            self._unchanged_L &= (held_LGP == self._first_LGP).all(axis=(1, 2))

    def _served_parts(self, held_GP: IntArray, part_GP: FloatArray, server_G: IntArray) -> FloatArray:
        """(G, P) the parts of a layer's slots in all-to-alls over servers, by those in flat ones."""
        key = held_GP.tobytes() + part_GP.tobytes()
        if key not in self._served:
            if len(self._served) >= MOST_SERVED:
                self._served.clear()
            gpu_X, slot_X = np.nonzero(held_GP != EMPTY)
            expert_X = held_GP[gpu_X, slot_X]
            split_EG = np.zeros((expert_X.max() + 1, len(held_GP)))
            split_EG[expert_X, gpu_X] = part_GP[gpu_X, slot_X]
            served_EG = served_split(np.ones(split_EG.shape[::-1]), split_EG, server_G)
            self._served[key] = np.zeros_like(part_GP)
            self._served[key][gpu_X, slot_X] = served_EG[expert_X, gpu_X]
        return self._served[key]


def gpu_loads(load_DLE: FloatArray, held_LGP: IntArray, cost_G: FloatArray, part_LGP: FloatArray | None = None) -> FloatArray:
    """Returns (D, L, G) float64, the load of each GPU times its cost.

    Args:
        load_DLE: (D, L, E) loads of experts, for each of D draws or windows.
        held_LGP: (L, G, P) int64, the expert in each slot, -1 for none.
        cost_G: (G,) cost of a unit of load on each GPU.
        part_LGP: (L, G, P) the part of its expert's load that each slot takes; None: replicas take even parts.
    """
    layers, experts = load_DLE.shape[1:]
    at_LGP = np.where(held_LGP != EMPTY, held_LGP, 0) + np.arange(layers)[:, None, None] * experts
    flat_DX = load_DLE.reshape(len(load_DLE), layers * experts)
    parts_LGP = _even_parts(held_LGP) if part_LGP is None else part_LGP
    return np.asarray((flat_DX[:, at_LGP] * parts_LGP).sum(axis=3) * cost_G)


def _even_parts(held_LGP: IntArray) -> FloatArray:
    """(L, G, P) float64, the parts of slots if replicas take even ones."""
    experts, used_LGP = int(held_LGP.max()) + 1, held_LGP != EMPTY
    at_LGP = np.where(used_LGP, held_LGP, 0) + np.arange(len(held_LGP))[:, None, None] * experts
    count_X = np.bincount(at_LGP[used_LGP], minlength=len(held_LGP) * experts)
    return np.asarray(np.where(used_LGP, 1 / np.maximum(count_X, 1)[at_LGP], 0.0))
