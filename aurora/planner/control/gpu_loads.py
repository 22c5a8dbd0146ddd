"""Loads of GPUs by the loads of experts, for a table of slots."""

import numpy as np

from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY


def gpu_loads(load_DLE: FloatArray, held_LGP: IntArray, cost_G: FloatArray) -> FloatArray:
    """Returns (D, L, G) float64, the load of each GPU times its cost, if replicas share their expert's load evenly.

    Args:
        load_DLE: (D, L, E) loads of experts, for each of D draws or windows.
        held_LGP: (L, G, P) int64, the expert in each slot, -1 for none.
        cost_G: (G,) cost of a unit of load on each GPU.
    """
    layers, experts = load_DLE.shape[1:]
    used_LGP = held_LGP != EMPTY
    at_LGP = np.where(used_LGP, held_LGP, 0) + np.arange(layers)[:, None, None] * experts
    count_X = np.bincount(at_LGP[used_LGP], minlength=layers * experts)
    part_LGP = np.where(used_LGP, 1 / np.maximum(count_X, 1)[at_LGP], 0.0)
    flat_DX = load_DLE.reshape(len(load_DLE), layers * experts)
    return np.asarray((flat_DX[:, at_LGP] * part_LGP).sum(axis=3) * cost_G)
