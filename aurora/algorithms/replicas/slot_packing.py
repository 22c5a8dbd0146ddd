"""Swaps of replicas between GPUs that lower the largest time of a GPU, compiled; `server_search` levels servers by them."""

import numpy as np

from aurora.types.compiled import njit
from aurora.types.placement import EMPTY

CLOSE = 1e-12  # relative: values that differ by less are equal


@njit(cache=True)
def _holds(held_P, expert):
    """Returns whether the slots held_P, (P,) int64, of a GPU hold the expert."""
    for other in held_P:  # noqa: SIM110 (numba compiles no generators)
        if other == expert:
            return True
    return False


@njit(cache=True, nogil=True)
def swap_descent(part_GX, slots_G, held_GP, time_G, enough):
    """Swaps replicas of the slowest GPU for smaller ones, or for empty slots, of other GPUs while that lowers its time.

    Each step takes the swap after which the slower of the two GPUs is fastest. It stops once the largest time is `enough` or
    less. Changes held_GP and time_G in place.

    Args:
        part_GX: (G, E + 1) the time of a replica of each expert on each GPU; the last column, of an empty slot, is zero.
        slots_G, held_GP, time_G: as in the module.
        enough: a largest time at which to stop.
    """
    while time_G.max() > enough:
        worst = np.argmax(time_G)
        slot, gpu, place = _best_swap(part_GX, slots_G, held_GP, time_G, worst)
        if slot < 0:
            return
        mine, theirs = held_GP[worst, slot], held_GP[gpu, place]
        held_GP[worst, slot], held_GP[gpu, place] = theirs, mine
        time_G[worst] += part_GX[worst, theirs] - part_GX[worst, mine]
        time_G[gpu] += part_GX[gpu, mine] - part_GX[gpu, theirs]


@njit(cache=True, nogil=True)
def _best_swap(part_GX, slots_G, held_GP, time_G, worst):
    """The swap (slot of GPU `worst`, other GPU, slot there) after which the slower of both is fastest; slot -1: none helps."""
    best = time_G[worst] * (1.0 - CLOSE)
    at_slot = at_gpu = at_place = -1
    for slot in range(slots_G[worst]):
        mine = held_GP[worst, slot]
        for gpu in range(slots_G.shape[0]):
            if gpu == worst or time_G[gpu] >= best:
                continue
            for place in range(slots_G[gpu]):
                theirs = held_GP[gpu, place]
                ours = time_G[worst] + part_GX[worst, theirs] - part_GX[worst, mine]
                after = max(ours, time_G[gpu] + part_GX[gpu, mine] - part_GX[gpu, theirs])
                if after < best and not _holds(held_GP[gpu], mine) and (theirs == EMPTY or not _holds(held_GP[worst], theirs)):
                    best = after
                    at_slot, at_gpu, at_place = slot, gpu, place
    return at_slot, at_gpu, at_place
