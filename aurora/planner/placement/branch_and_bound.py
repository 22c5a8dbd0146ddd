"""Branch and bound for two colocated models: the optimum, or the best assignment found and a lower bound."""

import numpy as np
from numba import njit

from aurora.planner.placement.annealing import gpu_terms, longest_path
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.planner.placement.lp_relaxation import SLACK, OptimalityProof, prove_bound
from aurora.types.arrays import IntArray

NODES = 1_000_000  # between two looks at the clock: about a quarter of a second
BISECTIONS = 6


def branch_and_bound(problem: ColocationProblem, a_G: IntArray, b_G: IntArray) -> tuple[IntArray, IntArray, float]:
    """Finds the best assignment of two models' groups to GPUs, with a lower bound.

    Linear programmes rule out most edges (a group on a GPU) or prove the start optimal. A depth-first search covers the rest,
    starting at the GPU with the fewest pairs of groups. A branch ends when the programme's bound plus the spare seconds of the
    branch's edges reaches the best value, or when its longest path does. If `problem.until_s` ends the search first, bisection
    raises the bound: a smaller target value rules out more edges.

    Args:
        problem: both models' costs, the objective and the time limit.
        a_G: (G,) int64, the group of model a on each GPU at the start.
        b_G: (G,) int64, the same for model b.

    Returns:
        (a_G, b_G, bound): (G,) int64 each, never worse than the start; and the lower bound in seconds. The assignment is
        optimal unless the time limit ended the search.
    """
    value_s = problem.value_s(a_G, b_G)
    proof = prove_bound(problem, value_s)
    if proof.closed:
        return a_G, b_G, proof.bound_s
    a_G, b_G = a_G.copy(), b_G.copy()
    best_s, whole = _searched(problem, proof, value_s * (1 - SLACK), a_G, b_G)
    return a_G, b_G, best_s if whole else _raised(problem, proof.bound_s, best_s)


def _searched(
    problem: ColocationProblem, proof: OptimalityProof, best_s: float, a_G: IntArray, b_G: IntArray
) -> tuple[float, bool]:
    """Returns (seconds of the best assignment below best_s, else best_s; whether none is better); writes it into a_G, b_G."""
    n = len(a_G)
    arrays = problem.seconds_MXGJ, problem.count_PX, problem.base_P
    pairs = [_pairs(arrays, proof, gpu, best_s) for gpu in range(n)]
    size_G = np.array([len(a_P) for a_P, _, _ in pairs])
    start_G = np.concatenate([[0], np.cumsum(size_G)])
    where_G = np.argsort(size_G, kind="stable")
    choices = *(np.concatenate(column) for column in zip(*pairs, strict=True)), start_G, where_G
    cursor, depth = np.full(n, start_G[where_G[0]]), np.zeros(1, dtype=np.int64)
    most, spent_s = np.zeros((n + 1, 8)), np.zeros(n + 1)
    most[0], spent_s[0] = proof.lp.least_X, proof.lp.seconds
    used = np.zeros((2, n), dtype=np.bool_)
    while depth[0] >= 0:
        best_s = _dive(*arrays, *choices, cursor, most, spent_s, used, depth, best_s, a_G, b_G, NODES)
        if depth[0] >= 0 and problem.clock() >= problem.until_s:
            return best_s, False
    return best_s, True


def _pairs(arrays, proof: OptimalityProof, gpu: int, best_s: float):
    """Returns (a's groups, b's groups, spare seconds) of the pairs that GPU gpu may hold below best_s, least spare first."""
    a_P, b_P = (np.ravel(x) for x in np.meshgrid(*(np.flatnonzero(x) for x in proof.open_MGJ[:, gpu]), indexing="ij"))
    spare_P = proof.lp.spare_MGJ[0, gpu, a_P] + proof.lp.spare_MGJ[1, gpu, b_P]
    seconds_P = _longest_paths(*arrays, proof.lp.least_X, gpu, a_P, b_P)
    kept = np.flatnonzero((proof.lp.seconds + spare_P < best_s) & (seconds_P < best_s))
    kept = kept[np.argsort(spare_P[kept], kind="stable")]
    return a_P[kept], b_P[kept], spare_P[kept]


def _raised(problem: ColocationProblem, low_s: float, high_s: float) -> float:
    """Raises the lower bound low_s towards high_s by bisection."""
    for _ in range(BISECTIONS):
        aim_s = (low_s + high_s) / 2
        if (proof := prove_bound(problem, aim_s)).closed:
            low_s = max(low_s, proof.bound_s)
        else:
            high_s = aim_s
    return low_s


@njit(cache=True)
def _longest_paths(cost, count_PX, base_P, least_X, g, a_P, b_P):
    """(P,) lower bounds in seconds of the longest path when GPU g holds each pair of groups (a_P, b_P)."""
    """(P,) lower bounds in seconds of the longest path when GPU g holds each pair of groups (a_P, b_P)."""
    values = np.empty(8)
    seconds_P = np.empty(len(a_P))
    for p in range(len(a_P)):
        gpu_terms(cost, g, a_P[p], b_P[p], values)
        seconds_P[p] = longest_path(count_PX, base_P, np.maximum(values, least_X))
    return seconds_P


@njit(cache=True)
def _dive(
    cost, count_PX, base_P, a_P, b_P, spare_P, start_G, where_G, cursor, most, spent, used, state, best, a_G, b_G, nodes
):  # fmt: skip
    """Searches up to `nodes` pairs and returns the best value below `best`, else `best`. Another call continues the search.

    The arrays hold its whole state. state[0]: the depth, -1 at the end. cursor (G,): the next pair at each depth. most
    (G + 1, 8), spent (G + 1,): seconds of MOVED, and the bound, that follow from the choices above each depth.
    """
    n = len(where_G)
    depth = state[0]
    values = np.empty(8)
    while depth >= 0 and nodes > 0:
        g = where_G[depth]
        at = cursor[depth]
        if at > start_G[g]:  # take back the last choice at this depth
            used[0, a_P[at - 1]] = False
            used[1, b_P[at - 1]] = False
        moved = False
        while at < start_G[g + 1]:
            if spent[depth] + spare_P[at] >= best:
                break
            if used[0, a_P[at]] or used[1, b_P[at]]:
                at += 1
                continue
            nodes -= 1
            gpu_terms(cost, g, a_P[at], b_P[at], values)
            for x in range(8):
                most[depth + 1, x] = max(most[depth, x], values[x])
            if longest_path(count_PX, base_P, most[depth + 1]) >= best:
                at += 1
                continue
            moved = True
            break
        if not moved:
            depth -= 1
            continue
        used[0, a_P[at]] = True
        used[1, b_P[at]] = True
        spent[depth + 1] = spent[depth] + spare_P[at]
        cursor[depth] = at + 1
        if depth + 1 == n:
            best = longest_path(count_PX, base_P, most[n])
            for d in range(n):
                a_G[where_G[d]] = a_P[cursor[d] - 1]
                b_G[where_G[d]] = b_P[cursor[d] - 1]
            continue
        depth += 1
        cursor[depth] = start_G[where_G[depth]]
    state[0] = depth
    return best
