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
    """Computes the seconds of each of MOVED on one GPU.

    Args:
        cost: (2, 5, G, J) seconds, as ColocationProblem.seconds_MXGJ.
        g: the GPU.
        a, b: the groups of models a and b on this GPU.
        out: (8,) filled with the seconds.
    """
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
    """Returns the seconds of the objective's longest path.

    Args:
        count_PX: (P, 8), how often each path holds each of MOVED.
        base_P: (P,) seconds of each path's FIXED terms.
        most: (8,) seconds of each of MOVED, the largest of a GPU.
    """
    value = 0.0
    for p in range(len(base_P)):
        total = base_P[p]
        for x in range(8):
            total += count_PX[p, x] * most[x]
        value = max(value, total)
    return value


@njit(cache=True)
def _anneal(cost, count_PX, base_P, a_G, b_G, movable, steps, hot, cold, rng):
    """Runs simulated annealing from (a_G, b_G), writes the best pair seen into both and returns that pair's seconds.

    movable: whether a's groups move too. hot, cold: first and last temperature in seconds; it falls geometrically.
    """
    n = len(a_G)
    held = np.empty((n, 8))
    now = np.zeros(8)
    for g in range(n):
        gpu_terms(cost, g, a_G[g], b_G[g], held[g])
        for x in range(8):
            now[x] = max(now[x], held[g, x])
    value = longest_path(count_PX, base_P, now)
    best = value
    best_a = a_G.copy()
    best_b = b_G.copy()
    at_g = np.empty(8)
    at_h = np.empty(8)
    most = np.empty(8)
    heat = hot
    cooling = (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= cooling
        g = rng.integers(0, n)
        h = rng.integers(0, n - 1)
        if h >= g:
            h += 1
        kind = rng.integers(0, 3) if movable else 1
        ag, ah = (a_G[g], a_G[h]) if kind == 1 else (a_G[h], a_G[g])
        bg, bh = (b_G[g], b_G[h]) if kind == 0 else (b_G[h], b_G[g])
        gpu_terms(cost, g, ag, bg, at_g)
        gpu_terms(cost, h, ah, bh, at_h)
        for x in range(8):
            top = max(at_g[x], at_h[x])
            if top < now[x]:
                if held[g, x] < now[x] and held[h, x] < now[x]:
                    top = now[x]
                else:
                    for i in range(n):
                        if i != g and i != h and held[i, x] > top:
                            top = held[i, x]
            most[x] = top
        fresh = longest_path(count_PX, base_P, most)
        if fresh <= value or rng.random() < np.exp((value - fresh) / heat):
            value = fresh
            a_G[g], a_G[h], b_G[g], b_G[h] = ag, ah, bg, bh
            held[g] = at_g
            held[h] = at_h
            now[:] = most
            if value < best:
                best = value
                best_a[:] = a_G
                best_b[:] = b_G
    a_G[:] = best_a
    b_G[:] = best_b
    return best
