"""Splits of batches over replicas, compiled by Cython; `per_batch` says what they are for."""

import cython
import numpy as np
from cython import cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

CLOSE = declare(Float, 1e-12)  # relative: loads that differ by less count as equal
UNREACHED = declare(Index, -1)


@final
@cclass
class Replicas:
    """The slots by expert, and what the search for a chain from GPU to GPU has reached."""

    held_GP: ConstInts2  # the expert in each slot, negative for none
    first_E: ConstInts1  # (E + 1,) where each expert's slots begin in owner_X
    owner_X: ConstInts1  # the slots, as gpu * P + slot, sorted by expert
    load_G: Floats1
    seen_E: Flags1
    queue_G: Ints1  # the GPUs that are reached, `reached` of them
    from_G: Ints1  # the slot of the GPU before it that load leaves
    into_G: Ints1  # its own slot that the load comes to
    reached: Index

    def __init__(self, held_GP: ConstInts2, first_E: ConstInts1, owner_X: ConstInts1):
        self.held_GP, self.first_E, self.owner_X, self.reached = held_GP, first_E, owner_X, 0
        self.load_G, self.seen_E = np.zeros(0), np.zeros(len(first_E) - 1, np.uint8)
        self.queue_G, self.from_G, self.into_G = np.zeros((3, len(held_GP)), np.int64)


@cython.locals(start=Index, end=Index, g=Index, moved=Float, reached=Float)
def split(replicas: Replicas, part_GP: Floats2, load_G: Floats1, target: Float, most: Float):
    """Splits experts' loads over their replicas so that the largest load of a GPU is the least possible.

    part_GP and load_G, the loads of slots and GPUs, are changed. At the start the target is the mean, and `most` the largest.
    """
    from_G, into_G = replicas.from_G, replicas.into_G
    width: Index = part_GP.shape[1]
    replicas.load_G = load_G
    with nogil:
        while True:
            start = 0
            for g in range(load_G.shape[0]):
                if load_G[g] > load_G[start]:
                    start = g
            moved = load_G[start] - target
            if moved <= CLOSE * most:
                break
            end = _find_chain(replicas, part_GP, start, target, CLOSE * most)
            if end < 0:  # what the reached GPUs have cannot go elsewhere
                reached = 0.0
                for at in range(replicas.reached):
                    reached += load_G[replicas.queue_G[at]]
                target = max(target * (1.0 + CLOSE), reached / replicas.reached)
                continue
            moved, g = min(moved, target - load_G[end]), end
            while g != start:
                moved = min(moved, part_GP[from_G[g] // width, from_G[g] % width])
                g = from_G[g] // width
            load_G[start] -= moved
            load_G[end] += moved
            g = end
            while g != start:
                part_GP[from_G[g] // width, from_G[g] % width] -= moved
                part_GP[g, into_G[g] % width] += moved
                g = from_G[g] // width


@cfunc
@nogil
@exceptval(check=False)
def _find_chain(replicas: Replicas, part_GP: Floats2, start: Index, target: Float, tiny: Float) -> Index:
    """Searches GPUs that share experts, breadth first, for one below the target, and returns it; -1: there is none."""
    width: Index = part_GP.shape[1]
    head: Index = 0
    replicas.seen_E[:] = 0
    replicas.from_G[:] = UNREACHED
    replicas.from_G[start], replicas.queue_G[0], replicas.reached = start, start, 1
    while head < replicas.reached:
        g = replicas.queue_G[head]
        head += 1
        for p in range(width):
            expert = replicas.held_GP[g, p]
            if expert < 0 or replicas.seen_E[expert] or part_GP[g, p] <= tiny:
                continue
            replicas.seen_E[expert] = 1
            for at in range(replicas.first_E[expert], replicas.first_E[expert + 1]):
                other = replicas.owner_X[at] // width
                if replicas.from_G[other] == UNREACHED:
                    replicas.from_G[other], replicas.into_G[other] = g * width + p, replicas.owner_X[at]
                    replicas.queue_G[replicas.reached] = other
                    replicas.reached += 1
                    if replicas.load_G[other] < target - tiny:
                        return other
    return -1
