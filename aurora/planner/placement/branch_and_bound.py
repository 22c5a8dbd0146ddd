"""Branch and bound for colocated models, over linear programs: the optimum, or the best assignment found and a lower bound.

An edge (m, g, j) puts group j of model m on GPU g. The linear program lets a GPU hold fractions of groups. An edge is open
while an assignment with it may still beat a given value in seconds; otherwise it is closed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from aurora.planner.placement.assignment import bottleneck_value
from aurora.planner.placement.colocation_problem import Arrays, ColocationProblem, gpu_terms, longest_path
from aurora.planner.placement.linear_program import path_prices
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.compiled import njit

SLACK = 1e-9  # relative: a proof shows that no assignment is better by more than this
WORTHWHILE = 0.97  # another linear program is solved if the last round left at most this part of the edges open
HUGE = 1e300


@dataclass(frozen=True)
class LpBound:
    """A lower bound on every assignment that uses open edges only.

    Terms are defined in `objective.Formula`; a moved term is one that depends on the assignment.

    Attributes:
        seconds: the bound; infinite if there is no such assignment.
        spare_MGJ: (M, G, J) seconds; an assignment takes at least `seconds` plus the sum of spare_MGJ over its edges.
        term_X: (X,) seconds of each moved term in the optimum of the linear program.
        least_X: (X,) seconds, a lower bound on each moved term by itself.
    """

    seconds: float
    spare_MGJ: FloatArray
    term_X: FloatArray
    least_X: FloatArray


@dataclass(frozen=True)
class OptimalityProof:
    """Result of `prove_bound`: a lower bound, and the edges that an assignment better than a given value can use.

    Attributes:
        bound_s: lower bound in seconds on all assignments.
        closed: True if no assignment beats the value by more than SLACK.
        open_MGJ: (M, G, J) bool, the edges that a better assignment can use; all false if `closed`.
        lp: the bound of the last linear program, or of the first if `closed`.
    """

    bound_s: float
    closed: bool
    open_MGJ: BoolArray
    lp: LpBound


def prove_bound(problem: ColocationProblem, value_s: float) -> OptimalityProof:
    """Proves a lower bound on a colocation problem by a few linear programs.

    Each round closes the edges that no assignment below value_s can use, and relaxes the rest again. The rounds end when no
    edge is open (no assignment is then below value_s) or when a round closes few edges.

    Args:
        problem: the models' costs and the objective.
        value_s: seconds of the assignment to beat.
    """
    aim_s = value_s * (1 - SLACK)
    open_MGJ = problem.open_MGJ
    first = found = lp_bound(problem, open_MGJ)
    while found.seconds < aim_s:
        kept_MGJ = open_MGJ & (found.seconds + found.spare_MGJ < aim_s)
        for model in range(len(kept_MGJ)):
            term_XGJ = np.maximum(found.least_X[:, None, None], _least_XGJ(problem, kept_MGJ, model))
            term_XGJ = np.minimum(term_XGJ, HUGE)  # infinite without a partner, but a path may hold it zero times
            path_PGJ = np.tensordot(problem.count_PX, term_XGJ, axes=1) + problem.base_P[:, None, None]
            kept_MGJ[model] &= path_PGJ.max(axis=0) < aim_s
        if kept_MGJ.sum() > WORTHWHILE * open_MGJ.sum():
            return OptimalityProof(found.seconds, False, kept_MGJ, found)
        open_MGJ = kept_MGJ
        found = lp_bound(problem, open_MGJ)
    return OptimalityProof(max(aim_s, first.seconds), True, np.zeros_like(open_MGJ), first)


def lp_bound(problem: ColocationProblem, open_MGJ: BoolArray) -> LpBound:
    """Returns the bound of the linear program over open edges, computed from its dual solution without solver tolerances."""
    arrays, least_X = problem.arrays, _least_X(problem, open_MGJ)
    nothing_MGJ = np.zeros(open_MGJ.shape)
    if not np.isfinite(least_X).all():
        return LpBound(np.inf, nothing_MGJ, least_X, least_X)
    scale = float(max(arrays.seconds_GNJ.max(), problem.base_P.max())) or 1.0
    seconds_GNJ, base_P, (models, n, _) = arrays.seconds_GNJ / scale, problem.base_P / scale, open_MGJ.shape
    model_V, gpu_V, group_V = np.nonzero(open_MGJ)
    rows = list(enumerate(zip(arrays.model_N, arrays.part_N, strict=True)))
    cost_KV = np.zeros((len(arrays.term_K), len(model_V)))
    for row, (model, part) in rows:
        own_V = model_V == model
        cost_KV[part, own_V] = seconds_GNJ[gpu_V[own_V], row, group_V[own_V]]
    sums = np.concatenate([model_V * n + gpu_V, (models + model_V) * n + group_V]), np.tile(np.arange(len(model_V)), 2)
    sum_EV = csr_array((np.ones(2 * len(model_V)), sums), shape=(2 * models * n, len(model_V)))
    nothing_KG = np.zeros((len(arrays.term_K), n))
    prices = path_prices(cost_KV, gpu_V, nothing_KG, arrays.term_K, problem.count_PX, base_P, least_X / scale, sum_EV, "highs")
    if prices is None:
        return LpBound(float((problem.count_PX @ least_X + problem.base_P).max()), nothing_MGJ, least_X, least_X)
    cost_MGJ, price_MJ = nothing_MGJ.copy(), prices.price_E[models * n :].reshape(models, n)
    for row, (model, part) in rows:
        cost_MGJ[model] += seconds_GNJ[:, row] * prices.weight_KG[part][:, None]
    spare_MGJ = np.where(open_MGJ, cost_MGJ - price_MJ[:, None, :], np.inf)
    price_MG = spare_MGJ.min(axis=2)
    bound = float(prices.weight_P @ base_P + prices.rest_X @ (least_X / scale) + price_MG.sum() + price_MJ.sum())
    return LpBound(bound * scale, (spare_MGJ - price_MG[:, :, None]) * scale, prices.term_X * scale, least_X)


def _least_X(problem: ColocationProblem, open_MGJ: BoolArray) -> FloatArray:
    """(X,) a lower bound in seconds on each moved term alone, by bottleneck matchings; infinite without an assignment."""
    least_X = np.zeros(problem.count_PX.shape[1])
    for model, open_GJ in enumerate(open_MGJ):
        for term, least_GJ in enumerate(_least_XGJ(problem, open_MGJ, model)):
            least_X[term] = max(least_X[term], bottleneck_value(np.where(open_GJ, least_GJ, np.inf)))
    return least_X


def _least_XGJ(problem: ColocationProblem, open_MGJ: BoolArray, model: int) -> FloatArray:
    """(X, G, J) seconds that each moved term takes at least when the model's group j sits on GPU g.

    Beside one other model the least is taken over its groups; beside several, over the groups of each and for each part apart.
    """
    arrays = problem.arrays
    term_N = arrays.term_K[arrays.part_N]
    least_XGJ = np.zeros((problem.count_PX.shape[1], *open_MGJ.shape[1:]))
    for term in np.unique(term_N[arrays.model_N == model]).tolist():
        rows = {each: (term_N == term) & (arrays.model_N == each) for each in range(len(open_MGJ))}
        others = [each for each in rows if each != model and rows[each].any()]
        for g, seconds_NJ in enumerate(arrays.seconds_GNJ):
            own_KJ = seconds_NJ[rows[model]]
            beside = [seconds_NJ[rows[other]][:, open_MGJ[other, g]] for other in others]  # (K, open groups) of each
            if len(beside) != 1:
                least = [np.zeros(len(own_KJ)), *(other_KJ.min(axis=1, initial=np.inf) for other_KJ in beside)]
                beside = [np.sum(least, axis=0)[:, None]]
            least_XGJ[term, g] = (own_KJ[:, :, None] + beside[0][:, None, :]).max(axis=0).min(axis=1, initial=np.inf)
    return least_XGJ


NODES = 1_000_000  # between two looks at the clock: about a quarter of a second
BISECTIONS = 6
MOST_CHOICES = 1 << 24  # of groups that GPUs may hold: with more, the search is left out


def branch_and_bound(problem: ColocationProblem, group_MG: IntArray) -> tuple[IntArray, float]:
    """Finds the best assignment of the models' groups to GPUs, with a lower bound.

    Linear programs close most edges or prove the start optimal. A depth-first search covers the rest, GPU by GPU, fewest
    choices first; a choice is one group of each model. A branch ends when a lower bound on it reaches the best value: the
    program's bound plus the spare seconds of the branch's edges, or the branch's longest path. If `problem.until_s` ends the
    search first, or there are more than MOST_CHOICES, bisection raises the bound: a smaller target value closes more edges.

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
    """The choices of each GPU. A choice is one group of each model for the GPU to hold.

    Attributes:
        group_CM: (C, M) int64, the group of each model in each choice.
        spare_s_C: (C,) seconds that the choice adds to the bound.
        start_G: (G + 1,) int64; GPU g has the choices start_G[g] to start_G[g + 1] - 1, sorted by rising spare seconds.
        gpu_G: (G,) int64, the GPU that is decided at each depth of the search, fewest choices first.
    """

    group_CM: IntArray
    spare_s_C: FloatArray
    start_G: IntArray
    gpu_G: IntArray


class Branch(NamedTuple):
    """State of a depth-first search, so that it can be interrupted and continued.

    Attributes:
        depth: (1,) int64, number of decided GPUs; -1 at the end of the search.
        next_G: (G,) int64, the choice to try next at each depth.
        most_s_GX: (G + 1, X) seconds of each moved term on the GPUs decided before each depth, at most.
        bound_s_G: (G + 1,) the bound in seconds with these GPUs decided.
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
        depth = branch.depth[0]
        if branch.next_G[depth] > choices.start_G[choices.gpu_G[depth]]:
            _mark(choices, branch, branch.next_G[depth] - 1, False)  # the groups of the last choice at this depth
        found, tried = _next_choice(arrays, choices, branch, best_s)
        nodes -= tried
        if not found:
            branch.depth[0] -= 1
            continue
        at = branch.next_G[depth]
        _mark(choices, branch, at, True)
        branch.bound_s_G[depth + 1] = branch.bound_s_G[depth] + choices.spare_s_C[at]
        branch.next_G[depth] = at + 1
        if depth + 1 < gpus:
            branch.depth[0] += 1
            branch.next_G[depth + 1] = choices.start_G[choices.gpu_G[depth + 1]]
            continue
        best_s = longest_path(arrays, branch.most_s_GX[depth + 1])
        for d in range(gpus):
            group_MG[:, choices.gpu_G[d]] = choices.group_CM[branch.next_G[d] - 1]
    return best_s


@njit(cache=True)
def _mark(choices, branch, at, used):
    """Marks the groups of a choice as used or free."""
    for m in range(len(branch.used_MJ)):
        branch.used_MJ[m, choices.group_CM[at, m]] = used


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
        used = False
        for m in range(len(branch.used_MJ)):
            used |= branch.used_MJ[m, choices.group_CM[at, m]]
        if used:
            continue
        tried += 1
        gpu_terms(arrays, g, choices.group_CM[at], most_s_X)
        for x in range(len(most_s_X)):
            most_s_X[x] = max(most_s_X[x], above_s_X[x])
        if longest_path(arrays, most_s_X) < best_s:
            branch.next_G[depth] = at
            return True, tried
    return False, tried
