"""Simulated annealing for colocated models: swaps the groups of one model, or of all that may move, between two GPUs."""

import numpy as np
from numba import njit

from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.types.arrays import IntArray

STEPS_PER_PAIR = 80  # for every pair of GPUs, 0.2 us each
HOT, COLD = 0.03, 0.0003  # first and last temperature, as shares of the start's time


def anneal(problem: ColocationProblem, group_MG: IntArray, rng: np.random.Generator) -> IntArray:
    """Returns the best assignment that simulated annealing visits; never worse than the start.

    A step swaps the groups of one model, or of all models that may move, between two GPUs. It takes time independent of the
    number of GPUs, unless it lowers a maximum, which is then searched for again.

    Args:
        problem: the models' costs and the objective.
        group_MG: (M, G) int64, the group of each model on each GPU at the start; not changed.
        rng: for the random swaps.

    Returns:
        (M, G) int64, as `group_MG`.
    """
    group_GM = group_MG.T.copy()
    value_s = problem.value_s(group_MG)
    if problem.gpus > 1 and value_s > 0:
        steps = STEPS_PER_PAIR * problem.gpus**2
        _anneal(problem.arrays, group_GM, problem.movers_M, steps, HOT * value_s, COLD * value_s, rng)
    return group_GM.T.copy()


@njit(cache=True)
def gpu_terms(arrays, g, group_M, out_X):
    """Writes (X,) the seconds of each moved term on GPU g with the groups (M,) to out_X."""
    out_X[:] = 0.0
    for k in range(len(arrays.term_K)):
        seconds = 0.0
        for n in range(arrays.start_K[k], arrays.start_K[k + 1]):
            seconds += arrays.seconds_GNJ[g, n, group_M[arrays.model_N[n]]]
        out_X[arrays.term_K[k]] = max(out_X[arrays.term_K[k]], seconds)


@njit(cache=True)
def longest_path(arrays, most_X):
    """Returns the seconds of the longest path, from (X,) seconds of each moved term."""
    value = 0.0
    for p in range(len(arrays.base_P)):
        total = arrays.base_P[p]
        for q in range(arrays.first_P[p], arrays.first_P[p + 1]):
            total += most_X[arrays.term_Q[q]]
        value = max(value, total)
    return value


@njit(cache=True)
def _anneal(arrays, group_GM, movers_M, steps, hot, cold, rng):
    """Runs simulated annealing from group_GM and writes the best assignment seen into it.

    movers_M: the models whose groups move. hot, cold: first and last temperature in seconds; it falls geometrically.
    """
    gpus, terms = len(group_GM), arrays.term_K.max() + 1
    held_GX, most_X = np.empty((gpus, terms)), np.zeros(terms)
    for g in range(gpus):
        gpu_terms(arrays, g, group_GM[g], held_GX[g])
        most_X = np.maximum(most_X, held_GX[g])
    value = best = longest_path(arrays, most_X)
    best_GM = group_GM.copy()
    at_g, at_h, after_X = np.empty(terms), np.empty(terms), np.empty(terms)
    heat, cooling = hot, (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= cooling
        g = rng.integers(0, gpus)
        h = rng.integers(0, gpus - 1)
        h += h >= g
        mover = rng.integers(0, len(movers_M) + 1) if len(movers_M) > 1 else 0  # the last number: all of them
        _swap(group_GM, movers_M, mover, g, h)
        gpu_terms(arrays, g, group_GM[g], at_g)
        gpu_terms(arrays, h, group_GM[h], at_h)
        _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X)
        after = longest_path(arrays, after_X)
        if after > value and rng.random() >= np.exp((value - after) / heat):
            _swap(group_GM, movers_M, mover, g, h)
            continue
        value = after
        held_GX[g], held_GX[h], most_X[:] = at_g, at_h, after_X
        if value < best:
            best, best_GM[:] = value, group_GM
    group_GM[:] = best_GM


@njit(cache=True)
def _swap(group_GM, movers_M, mover, g, h):
    """Swaps the groups of movers_M[mover] between GPUs g and h; those of all movers_M if there is no such mover."""
    for i in range(len(movers_M)):
        if mover in (i, len(movers_M)):
            m = movers_M[i]
            group_GM[g, m], group_GM[h, m] = group_GM[h, m], group_GM[g, m]


@njit(cache=True)
def _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X):
    """Writes the maxima after GPUs g and h change to at_g and at_h; looks at other GPUs only where g or h had the maximum."""
    for x in range(len(most_X)):
        top = max(at_g[x], at_h[x])
        if top < most_X[x] and held_GX[g, x] < most_X[x] and held_GX[h, x] < most_X[x]:
            top = most_X[x]
        elif top < most_X[x]:
            for i in range(len(held_GX)):
                if i != g and i != h:
                    top = max(top, held_GX[i, x])
        after_X[x] = top
