"""Rebalancing inside servers: experts change GPUs, and none changes its server.

In all-to-alls over servers a token goes once to each server that holds experts of it. As long as experts stay on their servers,
the rows between servers stay as planned, and weights travel by the network inside.
"""

import numpy as np

from aurora.planner.replication.rebalance import rebalance
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY


def rebalance_inside(
    load_LE: FloatArray,
    held_LGP: IntArray,
    part_LGP: FloatArray,
    slots: GpuSlots,
    server_G: IntArray,
    enough: float = 0.01,
    min_replicas: int = 1,
    domain_G: IntArray | None = None,
) -> IntArray:
    """Changes few slots of a placement in force, each server by itself, so that its GPUs suit new loads.

    Args:
        load_LE: (L, E) the load of each expert in each layer.
        held_LGP: (L, G, P) int64, the expert in each slot, EMPTY for none.
        part_LGP: (L, G, P) the part of its expert's load that each slot takes; a server keeps its parts.
        slots: how many experts fit on each GPU, and what load costs there.
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        enough, min_replicas, domain_G: as of `aurora.rebalance`; each server keeps `min_replicas`, or what it has.

    Returns:
        (L, G, P) int64, the slots after it.
    """
    next_LGP = held_LGP.copy()
    for server in range(server_G.max() + 1):
        gpus = np.flatnonzero(server_G == server)
        mine = GpuSlots(slots.slots_G[gpus], slots.cost_G[gpus])
        domains = None if domain_G is None else domain_G[gpus]
        expert_LX = [np.unique(held_GP[gpus][held_GP[gpus] != EMPTY]) for held_GP in held_LGP]
        count_L = np.array(list(map(len, expert_LX)))
        for count in sorted(set(count_L.tolist()) - {0}):
            layers = np.flatnonzero(count_L == count)
            numbered = [_numbered(held_LGP[each][gpus], expert_LX[each]) for each in layers]
            loads = [_load_X(load_LE[each], held_LGP[each][gpus], part_LGP[each][gpus], expert_LX[each]) for each in layers]
            found = rebalance(np.array(loads), np.array(numbered), mine, None, 0.0, enough, min_replicas, domains).held_LGP
            for each, after_XP in zip(layers, found, strict=True):
                named_XP = np.where(after_XP == EMPTY, EMPTY, expert_LX[each][after_XP])
                next_LGP[each, gpus, : after_XP.shape[1]] = named_XP
    return next_LGP


def _numbered(held_XP: IntArray, expert_X: IntArray) -> IntArray:
    """The slots of a server with its experts numbered from zero."""
    return np.where(held_XP == EMPTY, EMPTY, np.searchsorted(expert_X, held_XP))


def _load_X(load_E: FloatArray, held_XP: IntArray, part_XP: FloatArray, expert_X: IntArray) -> FloatArray:
    """The load of each of a server's experts there."""
    used_XP = held_XP != EMPTY
    part_E = np.bincount(held_XP[used_XP], part_XP[used_XP], minlength=len(load_E))
    return np.asarray((load_E * part_E)[expert_X])
