"""Oracle: branch and bound for colocated models, over linear programs; the optimum, and a lower bound on all assignments.

An edge (m, g, j) puts group j of model m on GPU g. The linear program lets a GPU hold fractions of groups. An edge is open
while an assignment with it may still beat a given value in seconds; otherwise it is closed.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from aurora.algorithms.placement.assignment import bottleneck_value
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.linear_program import PathProgram
from aurora.types.arrays import BoolArray, FloatArray, IntArray

SLACK = 1e-9  # relative: a proof shows that no assignment is better by more than this
ROUNDED = 1e-6  # relative: what the solver's own tolerances may add to the bound of whole shares
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
    open_MGJ = every_edge(problem)
    first = lp = lp_bound(problem, open_MGJ)
    while lp.seconds < aim_s:
        kept_MGJ = open_MGJ & (lp.seconds + lp.spare_MGJ < aim_s)
        for model in range(len(kept_MGJ)):
            term_XGJ = np.maximum(lp.least_X[:, None, None], _least_XGJ(problem, kept_MGJ, model))
            term_XGJ = np.minimum(term_XGJ, HUGE)  # infinite without a partner, but a path may hold it zero times
            path_ZGJ = np.tensordot(problem.count_ZX, term_XGJ, axes=1) + problem.base_Z[:, None, None]
            kept_MGJ[model] &= path_ZGJ.max(axis=0) < aim_s
        if kept_MGJ.sum() > WORTHWHILE * open_MGJ.sum():
            return OptimalityProof(lp.seconds, False, kept_MGJ, lp)
        open_MGJ = kept_MGJ
        lp = lp_bound(problem, open_MGJ)
    return OptimalityProof(max(aim_s, first.seconds), True, np.zeros_like(open_MGJ), first)


def every_edge(problem: ColocationProblem) -> BoolArray:
    """Returns (M, G, J) bool, whether model m's group j may sit on GPU g."""
    open_MGJ = np.ones((len(problem.costs_M), problem.gpus, problem.gpus), dtype=np.bool_)
    if not problem.movable:
        for model, held_G in problem.held.items():
            open_MGJ[model] = np.arange(problem.gpus)[None, :] == held_G[:, None]
    return open_MGJ


def lp_bound(problem: ColocationProblem, open_MGJ: BoolArray) -> LpBound:
    """Returns the bound of the linear program over open edges, computed from its dual solution without solver tolerances."""
    arrays, least_X = problem.arrays, _least_X(problem, open_MGJ)
    nothing_MGJ = np.zeros(open_MGJ.shape)
    if not np.isfinite(least_X).all():
        return LpBound(np.inf, nothing_MGJ, least_X, least_X)
    (models, n, _), program = open_MGJ.shape, _program(problem, open_MGJ, least_X)
    if (solution := program.solved("highs")) is None:
        return LpBound(float((problem.count_ZX @ least_X + problem.base_Z).max()), nothing_MGJ, least_X, least_X)
    weights, price_s_MJ = program.weights(solution.price_R), solution.price_s_E[models * n :].reshape(models, n)
    cost_MGJ = nothing_MGJ.copy()
    for row, (model, part) in enumerate(zip(arrays.model_N, arrays.part_N, strict=True)):
        cost_MGJ[model] += arrays.seconds_GNJ[:, row] * weights.weight_KG[part][:, None]
    spare_MGJ = np.where(open_MGJ, cost_MGJ - price_s_MJ[:, None, :], np.inf)
    price_MG = spare_MGJ.min(axis=2)
    bound_s = float(weights.weight_Z @ problem.base_Z + weights.rest_X @ least_X + price_MG.sum() + price_s_MJ.sum())
    return LpBound(bound_s, spare_MGJ - price_MG[:, :, None], solution.term_X, least_X)


def _program(problem: ColocationProblem, open_MGJ: BoolArray, least_X: FloatArray) -> PathProgram:
    """The program of the open edges, sorted by model, GPU and group; least_X as in `LpBound`."""
    arrays, (models, n, _), (model_V, gpu_V, group_V) = problem.arrays, open_MGJ.shape, np.nonzero(open_MGJ)
    cost_KV = np.zeros((len(arrays.term_K), len(model_V)))
    for row, (model, part) in enumerate(zip(arrays.model_N, arrays.part_N, strict=True)):
        own_V = model_V == model
        cost_KV[part, own_V] = arrays.seconds_GNJ[gpu_V[own_V], row, group_V[own_V]]
    sums = np.concatenate([model_V * n + gpu_V, (models + model_V) * n + group_V]), np.tile(np.arange(len(model_V)), 2)
    sum_EV = csr_array((np.ones(2 * len(model_V)), sums), shape=(2 * models * n, len(model_V)))
    nothing_KG = np.zeros((len(arrays.term_K), n))
    return PathProgram(cost_KV, gpu_V, nothing_KG, arrays.term_K, problem.count_ZX, problem.base_Z, least_X, sum_EV)


def _least_X(problem: ColocationProblem, open_MGJ: BoolArray) -> FloatArray:
    """(X,) a lower bound in seconds on each moved term alone, by bottleneck matchings; infinite without an assignment."""
    least_X = np.zeros(problem.count_ZX.shape[1])
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
    least_XGJ = np.zeros((problem.count_ZX.shape[1], *open_MGJ.shape[1:]))
    for term in np.unique(term_N[arrays.model_N == model]).tolist():
        rows = {m: (term_N == term) & (arrays.model_N == m) for m in range(len(open_MGJ))}
        others = [m for m in rows if m != model and rows[m].any()]
        for g, seconds_NJ in enumerate(arrays.seconds_GNJ):
            own_KJ = seconds_NJ[rows[model]]
            beside = [seconds_NJ[rows[other]][:, open_MGJ[other, g]] for other in others]  # (K, open groups) of each
            if len(beside) != 1:
                least = [np.zeros(len(own_KJ)), *(other_KJ.min(axis=1, initial=np.inf) for other_KJ in beside)]
                beside = [np.sum(least, axis=0)[:, None]]
            least_XGJ[term, g] = (own_KJ[:, :, None] + beside[0][:, None, :]).max(axis=0).min(axis=1, initial=np.inf)
    return least_XGJ


def _whole(program: PathProgram, limit_s: float) -> tuple[FloatArray | None, float]:
    """Solves the program for shares of zero or one, for up to limit_s seconds.

    Returns:
        (share_V, bound_s): the best shares (V,) found, None if there are none; and a lower bound in seconds on all such shares,
        infinite if there are none.
    """
    cost_V, at_most_RV, limit_R, sum_EV, lower_V = program._matrices()
    edges = len(program.gpu_V)
    solution = milp(
        cost_V,
        integrality=(np.arange(len(cost_V)) < edges).astype(np.int64),
        bounds=Bounds(lower_V, np.inf),
        constraints=[LinearConstraint(at_most_RV, -np.inf, limit_R), LinearConstraint(sum_EV, 1.0, 1.0)],
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    bound = np.inf if solution.status == 2 else solution.mip_dual_bound or 0.0
    base_s = float(program.base_Z.mean()) if program.worst == len(program.base_Z) else 0.0  # no row has it
    return None if solution.x is None else solution.x[:edges], base_s + bound * program.unit_s * (1 - ROUNDED)


def branch_and_bound(problem: ColocationProblem, group_MG: IntArray, limit_s: float = 60.0) -> tuple[IntArray, float]:
    """Finds the best assignment of the models' groups to GPUs, with a lower bound.

    Linear programs close most edges or prove the start optimal. The solver's branch and bound covers the rest, for limit_s.

    Args:
        problem: the models' costs and the objective.
        group_MG: (M, G) int64, the group of each model on each GPU at the start; not changed.
        limit_s: seconds for the solver's branch and bound; zero: none.

    Returns:
        (group_MG, bound): an assignment, never worse than the start; and the lower bound in seconds. The assignment is optimal,
        to within the solver's tolerance, unless the search ended early.
    """
    value_s = problem.value_s(group_MG)
    proof = prove_bound(problem, value_s)
    if proof.closed or limit_s <= 0:
        return group_MG, proof.bound_s
    share_V, bound_s = _whole(_program(problem, proof.open_MGJ, proof.lp.least_X), limit_s)
    if share_V is not None:
        best_MGJ = np.zeros(proof.open_MGJ.shape)
        best_MGJ[proof.open_MGJ] = share_V
        best_MG = best_MGJ.argmax(axis=2)
        if (best_s := problem.value_s(best_MG)) < value_s:
            group_MG, value_s = best_MG, best_s
    return group_MG, max(proof.bound_s, min(bound_s, value_s * (1 - SLACK)))
