"""Branch and bound for colocated models: the optimum, or the best assignment found and a lower bound."""

from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.planner.placement.annealing import gpu_terms, longest_path
from aurora.planner.placement.colocation_problem import Arrays, ColocationProblem
from aurora.planner.placement.lp_relaxation import SLACK, OptimalityProof, prove_bound
from aurora.types.arrays import BoolArray, FloatArray, IntArray

NODES = 1_000_000  # between two looks at the clock: about a quarter of a second
BISECTIONS = 6
MOST_CHOICES = 1 << 24  # of groups that GPUs may hold: with more, the search is left out


def branch_and_bound(problem: ColocationProblem, group_MG: IntArray) -> tuple[IntArray, float]:
    """Finds the best assignment of the models' groups to GPUs, with a lower bound.

    Linear programmes rule out most edges (a group on a GPU) or prove the start optimal. A depth-first search covers the rest,
    starting at the GPU with the fewest choices, a group of each model. A branch ends when the programme's bound plus the spare
    seconds of the branch's edges reaches the best value, or when its longest path does. If `problem.until_s` ends the search
    first, or there are more than MOST_CHOICES, bisection raises the bound: a smaller target value rules out more edges.

    Args:
        problem: the models' costs, the objective and the time limit.
        group_MG: (M, G) int64, the group of each model on each GPU at the start; not changed.

    Returns:
        (group_MG, bound): an assignment, never worse than the start; and the lower bound in seconds. The assignment is optimal
        unless the search ended early.
    """
    value_s = problem.value_s(group_MG)
    proof = prove_bound(problem, value_s)
    if proof.closed:
        return group_MG, proof.bound_s
    group_MG = group_MG.copy()
    best_s, whole = _searched(problem, proof, value_s * (1 - SLACK), group_MG)
    return group_MG, best_s if whole else _raised(problem, proof.bound_s, best_s)


class Choices(NamedTuple):
    """The choices of groups, one of each model, that each GPU may hold.

    Attributes:
        group_CM: (C, M) int64, the group of each model.
        spare_s_C: (C,) seconds that the choice adds to the bound.
        start_G: (G + 1,) int64, where the choices of each GPU begin; least spare first.
        gpu_G: (G,) int64, the GPU that is decided at each depth of the search, fewest choices first.
    """

    group_CM: IntArray
    spare_s_C: FloatArray
    start_G: IntArray
    gpu_G: IntArray


class Branch(NamedTuple):
    """Where the search stands. It goes on from there when it is called again.

    Attributes:
        depth: (1,) int64, how many GPUs are decided; -1 at the end of the search.
        next_G: (G,) int64, what to try next at each depth.
        most_s_GX: (G + 1, X) seconds of each moved term that follow from the choices above each depth.
        bound_s_G: (G + 1,) the bound that follows from these choices.
        used_MJ: (M, J) bool, whether a group of a model is placed.
    """

    depth: IntArray
    next_G: IntArray
    most_s_GX: FloatArray
    bound_s_G: FloatArray
    used_MJ: BoolArray


def _searched(problem: ColocationProblem, proof: OptimalityProof, best_s: float, group_MG: IntArray) -> tuple[float, bool]:
    """Returns (seconds of the best assignment below best_s, else best_s; whether none is better); writes it into group_MG."""
    models, n = group_MG.shape
    if proof.open_MGJ.sum(axis=2, dtype=np.float64).prod(axis=0).sum() > MOST_CHOICES:
        return best_s, False
    arrays = problem.arrays
    choices_G = [_choices(arrays, proof, gpu, best_s) for gpu in range(n)]
    size_G = np.array([len(spare_C) for _, spare_C in choices_G])
    start_G, gpu_G = np.append(0, np.cumsum(size_G)), np.argsort(size_G, kind="stable")
    group_CM, spare_s_C = (np.concatenate(column) for column in zip(*choices_G, strict=True))
    choices = Choices(group_CM, spare_s_C, start_G, gpu_G)
    branch = Branch(
        np.zeros(1, dtype=np.int64),
        start_G[gpu_G],
        np.zeros((n + 1, problem.count_PX.shape[1])),
        np.zeros(n + 1),
        np.zeros((models, n), dtype=np.bool_),
    )
    branch.most_s_GX[0], branch.bound_s_G[0] = proof.lp.least_X, proof.lp.seconds
    while branch.depth[0] >= 0:
        best_s = _dive(arrays, choices, branch, best_s, group_MG, NODES)
        if branch.depth[0] >= 0 and problem.clock() >= problem.until_s:
            return best_s, False
    return best_s, True


def _choices(arrays: Arrays, proof: OptimalityProof, gpu: int, best_s: float) -> tuple[IntArray, FloatArray]:
    """Returns (groups (C, M), spare seconds (C,)) of the choices that GPU gpu may hold below best_s, least spare first."""
    open_M = [np.flatnonzero(open_J) for open_J in proof.open_MGJ[:, gpu]]
    group_CM = np.stack([np.ravel(each) for each in np.meshgrid(*open_M, indexing="ij")], axis=1)
    spare_C = sum(spare_J[group_C] for spare_J, group_C in zip(proof.lp.spare_MGJ[:, gpu], group_CM.T, strict=True))
    seconds_C = _longest_paths(arrays, proof.lp.least_X, gpu, group_CM)
    kept = np.flatnonzero((proof.lp.seconds + spare_C < best_s) & (seconds_C < best_s))
    kept = kept[np.argsort(spare_C[kept], kind="stable")]
    return group_CM[kept], spare_C[kept]


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
def _longest_paths(arrays, least_X, g, group_CM):
    """(C,) lower bounds in seconds of the longest path when GPU g holds each choice of groups (C, M)."""
    term_X, seconds_C = np.empty(len(least_X)), np.empty(len(group_CM))
    for c in range(len(group_CM)):
        gpu_terms(arrays, g, group_CM[c], term_X)
        seconds_C[c] = longest_path(arrays, np.maximum(term_X, least_X))
    return seconds_C


@njit(cache=True)
def _dive(arrays, choices, branch, best_s, group_MG, nodes):
    """Tries up to `nodes` choices and returns the best seconds below best_s, else best_s; writes the best into group_MG."""
    gpus = group_MG.shape[1]
    while branch.depth[0] >= 0 and nodes > 0:
        _take_back(choices, branch)
        found, tried = _next_choice(arrays, choices, branch, best_s)
        nodes -= tried
        if not found:
            branch.depth[0] -= 1
            continue
        depth = branch.depth[0]
        _choose(choices, branch)
        if depth + 1 < gpus:
            branch.depth[0] += 1
            branch.next_G[depth + 1] = choices.start_G[choices.gpu_G[depth + 1]]
            continue
        best_s = longest_path(arrays, branch.most_s_GX[depth + 1])
        for d in range(gpus):
            group_MG[:, choices.gpu_G[d]] = choices.group_CM[branch.next_G[d] - 1]
    return best_s


@njit(cache=True)
def _take_back(choices, branch):
    """Frees the groups of the last choice at this depth, if there was one."""
    at = branch.next_G[branch.depth[0]]
    if at > choices.start_G[choices.gpu_G[branch.depth[0]]]:
        _mark(choices, branch, at - 1, False)


@njit(cache=True)
def _mark(choices, branch, at, used):
    """Marks the groups of a choice as used or free."""
    for m in range(len(branch.used_MJ)):
        branch.used_MJ[m, choices.group_CM[at, m]] = used


@njit(cache=True)
def _any_used(choices, branch, at):
    """Whether a group of a choice is placed already."""
    found = False
    for m in range(len(branch.used_MJ)):
        found |= branch.used_MJ[m, choices.group_CM[at, m]]
    return found


@njit(cache=True)
def _next_choice(arrays, choices, branch, best_s):
    """Moves next_G at this depth to a choice of unplaced groups that may lead below best_s.

    Returns whether there is one, and how many were priced. Its terms are in most_s_GX.
    """
    depth, tried = branch.depth[0], 0
    most_s_X, above_s_X = branch.most_s_GX[depth + 1], branch.most_s_GX[depth]
    g = choices.gpu_G[depth]
    for at in range(branch.next_G[depth], choices.start_G[g + 1]):
        if branch.bound_s_G[depth] + choices.spare_s_C[at] >= best_s:
            break
        if _any_used(choices, branch, at):
            continue
        tried += 1
        gpu_terms(arrays, g, choices.group_CM[at], most_s_X)
        for x in range(len(most_s_X)):
            most_s_X[x] = max(most_s_X[x], above_s_X[x])
        if longest_path(arrays, most_s_X) < best_s:
            branch.next_G[depth] = at
            return True, tried
    return False, tried


@njit(cache=True)
def _choose(choices, branch):
    """Puts the next choice at this depth on its GPU."""
    depth = branch.depth[0]
    at = branch.next_G[depth]
    _mark(choices, branch, at, True)
    branch.bound_s_G[depth + 1] = branch.bound_s_G[depth] + choices.spare_s_C[at]
    branch.next_G[depth] = at + 1
