"""Branch and bound for two colocated models: the optimum, or the best assignment found and a lower bound."""

from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.planner.placement.annealing import gpu_terms, longest_path
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.planner.placement.lp_relaxation import SLACK, OptimalityProof, prove_bound
from aurora.types.arrays import BoolArray, FloatArray, IntArray

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


class Pairs(NamedTuple):
    """The pairs of groups that each GPU may hold.

    Attributes:
        a_P: (P,) int64, the group of model a.
        b_P: (P,) int64, the group of model b.
        spare_s_P: (P,) seconds that the pair adds to the bound.
        start_G: (G + 1,) int64, where the pairs of each GPU begin; least spare first.
        gpu_G: (G,) int64, the GPU that is decided at each depth of the search, fewest pairs first.
    """

    a_P: IntArray
    b_P: IntArray
    spare_s_P: FloatArray
    start_G: IntArray
    gpu_G: IntArray


class Branch(NamedTuple):
    """Where the search stands. It goes on from there when it is called again.

    Attributes:
        depth: (1,) int64, how many GPUs are decided; -1 at the end of the search.
        next_G: (G,) int64, the pair to try next at each depth.
        most_s_GX: (G + 1, 8) seconds of each of MOVED that follow from the choices above each depth.
        bound_s_G: (G + 1,) the bound that follows from these choices.
        used_MJ: (2, J) bool, whether a group of a model is placed.
    """

    depth: IntArray
    next_G: IntArray
    most_s_GX: FloatArray
    bound_s_G: FloatArray
    used_MJ: BoolArray


def _searched(
    problem: ColocationProblem, proof: OptimalityProof, best_s: float, a_G: IntArray, b_G: IntArray
) -> tuple[float, bool]:
    """Returns (seconds of the best assignment below best_s, else best_s; whether none is better); writes it into a_G, b_G."""
    n = len(a_G)
    arrays = problem.seconds_MXGJ, problem.count_PX, problem.base_P
    pairs_G = [_pairs(arrays, proof, gpu, best_s) for gpu in range(n)]
    size_G = np.array([len(a_P) for a_P, _, _ in pairs_G])
    start_G, gpu_G = np.append(0, np.cumsum(size_G)), np.argsort(size_G, kind="stable")
    a_P, b_P, spare_s_P = (np.concatenate(column) for column in zip(*pairs_G, strict=True))
    pairs = Pairs(a_P, b_P, spare_s_P, start_G, gpu_G)
    branch = Branch(
        np.zeros(1, dtype=np.int64), start_G[gpu_G], np.zeros((n + 1, 8)), np.zeros(n + 1), np.zeros((2, n), dtype=np.bool_)
    )
    branch.most_s_GX[0], branch.bound_s_G[0] = proof.lp.least_X, proof.lp.seconds
    while branch.depth[0] >= 0:
        best_s = _dive(*arrays, pairs, branch, best_s, a_G, b_G, NODES)
        if branch.depth[0] >= 0 and problem.clock() >= problem.until_s:
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
    values = np.empty(8)
    seconds_P = np.empty(len(a_P))
    for p in range(len(a_P)):
        gpu_terms(cost, g, a_P[p], b_P[p], values)
        seconds_P[p] = longest_path(count_PX, base_P, np.maximum(values, least_X))
    return seconds_P


@njit(cache=True)
def _dive(cost, count_PX, base_P, pairs, branch, best_s, a_G, b_G, nodes):
    """Searches up to `nodes` pairs and returns the best seconds below best_s, else best_s; writes the best into a_G, b_G."""
    while branch.depth[0] >= 0 and nodes > 0:
        _take_back(pairs, branch)
        found, tried = _next_pair(cost, count_PX, base_P, pairs, branch, best_s)
        nodes -= tried
        if not found:
            branch.depth[0] -= 1
            continue
        depth = branch.depth[0]
        _choose(pairs, branch)
        if depth + 1 < len(a_G):
            branch.depth[0] += 1
            branch.next_G[depth + 1] = pairs.start_G[pairs.gpu_G[depth + 1]]
            continue
        best_s = longest_path(count_PX, base_P, branch.most_s_GX[depth + 1])
        for d in range(len(a_G)):
            a_G[pairs.gpu_G[d]] = pairs.a_P[branch.next_G[d] - 1]
            b_G[pairs.gpu_G[d]] = pairs.b_P[branch.next_G[d] - 1]
    return best_s


@njit(cache=True)
def _take_back(pairs, branch):
    """Frees the groups of the last choice at this depth, if there was one."""
    at = branch.next_G[branch.depth[0]]
    if at > pairs.start_G[pairs.gpu_G[branch.depth[0]]]:
        branch.used_MJ[0, pairs.a_P[at - 1]] = False
        branch.used_MJ[1, pairs.b_P[at - 1]] = False


@njit(cache=True)
def _next_pair(cost, count_PX, base_P, pairs, branch, best_s):
    """Moves next_G at this depth to a pair of unplaced groups that may lead below best_s.

    Returns whether there is one, and how many pairs were priced. Its terms are in most_s_GX.
    """
    depth, tried = branch.depth[0], 0
    most_s_X, above_s_X = branch.most_s_GX[depth + 1], branch.most_s_GX[depth]
    g = pairs.gpu_G[depth]
    for at in range(branch.next_G[depth], pairs.start_G[g + 1]):
        if branch.bound_s_G[depth] + pairs.spare_s_P[at] >= best_s:
            break
        if branch.used_MJ[0, pairs.a_P[at]] or branch.used_MJ[1, pairs.b_P[at]]:
            continue
        tried += 1
        gpu_terms(cost, g, pairs.a_P[at], pairs.b_P[at], most_s_X)
        for x in range(8):
            most_s_X[x] = max(most_s_X[x], above_s_X[x])
        if longest_path(count_PX, base_P, most_s_X) < best_s:
            branch.next_G[depth] = at
            return True, tried
    return False, tried


@njit(cache=True)
def _choose(pairs, branch):
    """Puts the next pair at this depth on its GPU."""
    depth = branch.depth[0]
    at = branch.next_G[depth]
    branch.used_MJ[0, pairs.a_P[at]] = True
    branch.used_MJ[1, pairs.b_P[at]] = True
    branch.bound_s_G[depth + 1] = branch.bound_s_G[depth] + pairs.spare_s_P[at]
    branch.next_G[depth] = at + 1
