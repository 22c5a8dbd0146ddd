"""Simulated annealing for two colocated models: swaps the groups of model a, of model b, or of both between two GPUs."""

import numpy as np
from numba import njit

from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.types.arrays import IntArray

SEND, RECV, CSEND, CRECV, EXPERT = range(5)  # the rows of GroupCosts.seconds_XGJ
D_A, D_B, D_AB, F_A, F_B, C_A, C_B, C_AB = range(8)  # the rows of MOVED
STEPS = 80  # for every pair of GPUs, 0.15 us each
HOT, COLD = 0.03, 0.0003  # first and last temperature, as shares of the start's time


def anneal(problem: ColocationProblem, a_G: IntArray, b_G: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Returns the best pair of assignments that simulated annealing visits from (a_G, b_G); never worse than the start.

    A step swaps the groups of a, of b or of both between two GPUs. It takes time independent of the number of GPUs, unless it
    lowers a maximum, which is then searched for again. If `problem.movable` is false, only b's groups move.

    Args:
        problem: both models' costs and the objective.
        a_G: (G,) int64, the group of model a on each GPU at the start.
        b_G: (G,) int64, the same for model b.
        rng: for the random swaps.

    Returns:
        (a_G, b_G), (G,) int64 each; the arguments are not changed.
    """
    a_G, b_G = a_G.copy(), b_G.copy()
    value_s = problem.value_s(a_G, b_G)
    if len(a_G) > 1 and value_s > 0:
        arrays = problem.seconds_MXGJ, problem.count_PX, problem.base_P
        steps = STEPS * len(a_G) ** 2
        _anneal(*arrays, a_G, b_G, problem.movable, steps, HOT * value_s, COLD * value_s, rng)
    return a_G, b_G


@njit(cache=True)
def gpu_terms(cost, g, a, b, out):
    """Writes (8,) the seconds of each of MOVED on GPU g with groups a and b to `out`; cost: ColocationProblem.seconds_MXGJ."""
    sa, ra = cost[0, SEND, g, a], cost[0, RECV, g, a]
    sb, rb = cost[1, SEND, g, b], cost[1, RECV, g, b]
    out[D_A] = max(sa, ra)
    out[D_B] = max(sb, rb)
    out[D_AB] = max(sa + sb, ra + rb)
    out[F_A] = cost[0, EXPERT, g, a]
    out[F_B] = cost[1, EXPERT, g, b]
    sa, ra = cost[0, CSEND, g, a], cost[0, CRECV, g, a]
    sb, rb = cost[1, CSEND, g, b], cost[1, CRECV, g, b]
    out[C_A] = max(sa, ra)
    out[C_B] = max(sb, rb)
    out[C_AB] = max(sa + sb, ra + rb)


@njit(cache=True)
def longest_path(count_PX, base_P, most):
    """Returns the seconds of the longest path, from (8,) seconds of each of MOVED."""
    value = 0.0
    for p in range(len(base_P)):
        total = base_P[p]
        for x in range(8):
            total += count_PX[p, x] * most[x]
        value = max(value, total)
    return value


@njit(cache=True)
def _anneal(cost, count_PX, base_P, a_G, b_G, movable, steps, hot, cold, rng):
    """Runs simulated annealing from (a_G, b_G) and writes the best pair seen into both.

    movable: whether a's groups move too. hot, cold: first and last temperature in seconds; it falls geometrically.
    """
    held_GX, most_X = _terms(cost, a_G, b_G)
    value = best = longest_path(count_PX, base_P, most_X)
    best_a, best_b = a_G.copy(), b_G.copy()
    at_g, at_h, after_X = np.empty(8), np.empty(8), np.empty(8)
    heat, cooling = hot, (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= cooling
        g = rng.integers(0, len(a_G))
        h = rng.integers(0, len(a_G) - 1)
        h += h >= g
        ag, ah, bg, bh = _swapped(a_G, b_G, g, h, rng.integers(0, 3) if movable else 1)
        gpu_terms(cost, g, ag, bg, at_g)
        gpu_terms(cost, h, ah, bh, at_h)
        _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X)
        after = longest_path(count_PX, base_P, after_X)
        if after > value and rng.random() >= np.exp((value - after) / heat):
            continue
        value = after
        a_G[g], a_G[h], b_G[g], b_G[h] = ag, ah, bg, bh
        held_GX[g], held_GX[h], most_X[:] = at_g, at_h, after_X
        if value < best:
            best, best_a[:], best_b[:] = value, a_G, b_G
    a_G[:], b_G[:] = best_a, best_b


@njit(cache=True)
def _terms(cost, a_G, b_G):
    """(G, 8) seconds of each of MOVED on each GPU, and (8,) their maxima."""
    held_GX, most_X = np.empty((len(a_G), 8)), np.zeros(8)
    for g in range(len(a_G)):
        gpu_terms(cost, g, a_G[g], b_G[g], held_GX[g])
        most_X = np.maximum(most_X, held_GX[g])
    return held_GX, most_X


@njit(cache=True)
def _swapped(a_G, b_G, g, h, kind):
    """The groups of a on GPUs g and h, and those of b, after a swap of a's (kind 0), of b's (1) or of both (2)."""
    ag, ah = (a_G[g], a_G[h]) if kind == 1 else (a_G[h], a_G[g])
    bg, bh = (b_G[g], b_G[h]) if kind == 0 else (b_G[h], b_G[g])
    return ag, ah, bg, bh


@njit(cache=True)
def _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X):
    """Writes the maxima after GPUs g and h change to at_g and at_h; looks at other GPUs only where g or h had the maximum."""
    for x in range(8):
        top = max(at_g[x], at_h[x])
        if top < most_X[x] and held_GX[g, x] < most_X[x] and held_GX[h, x] < most_X[x]:
            top = most_X[x]
        elif top < most_X[x]:
            for i in range(len(held_GX)):
                if i != g and i != h:
                    top = max(top, held_GX[i, x])
        after_X[x] = top
