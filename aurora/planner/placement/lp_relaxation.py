"""LP relaxation of the colocation problem: lower bounds on a layer of two models, and proofs of optimality.

An edge puts a group of one model on a GPU. The linear programme lets a GPU hold fractions of groups. An edge is open while an
assignment that uses it may still beat the value asked about; otherwise it is closed.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from aurora.planner.placement.annealing import C_A, C_AB, C_B, CRECV, CSEND, D_A, D_AB, D_B, EXPERT, F_A, F_B, RECV, SEND
from aurora.planner.placement.bottleneck_matching import bottleneck_value
from aurora.planner.placement.colocation_problem import ColocationProblem
from aurora.types.arrays import BoolArray, FloatArray

SLACK = 1e-9  # relative: a proof shows that no assignment is better by more than this
WORTHWHILE = 0.97  # another linear programme is solved if the last round left at most this part of the edges open
HUGE = 1e300
# For each term of MOVED: the models whose seconds it sums, and the rows of seconds_MXGJ of which it takes the larger.
PARTS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    D_A: ((0,), (SEND, RECV)), D_B: ((1,), (SEND, RECV)), D_AB: ((0, 1), (SEND, RECV)),
    F_A: ((0,), (EXPERT,)), F_B: ((1,), (EXPERT,)),
    C_A: ((0,), (CSEND, CRECV)), C_B: ((1,), (CSEND, CRECV)), C_AB: ((0, 1), (CSEND, CRECV)),
}  # fmt: skip


@dataclass(frozen=True)
class LpBound:
    """A lower bound on every assignment that uses open edges only.

    Attributes:
        seconds: the bound; infinite if there is no such assignment.
        spare_MGJ: (2, G, J) seconds; an assignment takes at least `seconds` plus the sum of spare_MGJ over its edges.
        term_X: (8,) seconds of each of MOVED in the relaxed optimum.
        least_X: (8,) seconds, a lower bound on each of MOVED alone.
    """

    seconds: float
    spare_MGJ: FloatArray
    term_X: FloatArray
    least_X: FloatArray


@dataclass(frozen=True)
class OptimalityProof:
    """What linear programmes prove about assignments that beat a given value.

    Attributes:
        bound_s: lower bound in seconds on all assignments.
        closed: whether no assignment beats the value by more than SLACK.
        open_MGJ: (2, G, J) bool, the only edges that an assignment which beats the value can use; none if `closed`.
        lp: the bound of the last linear programme, or of the first if `closed`.
    """

    bound_s: float
    closed: bool
    open_MGJ: BoolArray
    lp: LpBound


def prove_bound(problem: ColocationProblem, value_s: float) -> OptimalityProof:
    """Proves a lower bound on a colocation problem by a few linear programmes.

    Each round closes the edges that no assignment below value_s can use, and relaxes the rest again. The rounds end when no
    edge is open (no assignment is then below value_s) or when a round closes few edges.

    Args:
        problem: both models' costs and the objective.
        value_s: seconds of the assignment to beat.
    """
    aim_s = value_s * (1 - SLACK)
    open_MGJ = problem.open_MGJ
    first = found = lp_bound(problem, open_MGJ)
    while found.seconds < aim_s:
        kept_MGJ = open_MGJ & (found.seconds + found.spare_MGJ < aim_s)
        for model in (0, 1):
            term_XGJ = np.maximum(found.least_X[:, None, None], _least_XGJ(problem.seconds_MXGJ, kept_MGJ, model))
            term_XGJ = np.minimum(term_XGJ, HUGE)  # infinite without a partner, but a path may hold it zero times
            path_PGJ = np.tensordot(problem.count_PX, term_XGJ, axes=1) + problem.base_P[:, None, None]
            kept_MGJ[model] &= path_PGJ.max(axis=0) < aim_s
        if kept_MGJ.sum() > WORTHWHILE * open_MGJ.sum():
            return OptimalityProof(found.seconds, False, kept_MGJ, found)
        open_MGJ = kept_MGJ
        found = lp_bound(problem, open_MGJ)
    return OptimalityProof(max(aim_s, first.seconds), True, np.zeros_like(open_MGJ), first)


def lp_bound(problem: ColocationProblem, open_MGJ: BoolArray) -> LpBound:
    """Returns the bound of the linear programme over open edges, from its dual solution: no solver tolerance enters it."""
    least_X = _least_X(problem.seconds_MXGJ, open_MGJ)
    nothing_MGJ = np.zeros(open_MGJ.shape)
    if not np.isfinite(least_X).all():
        return LpBound(np.inf, nothing_MGJ, least_X, least_X)
    scale = float(max(problem.seconds_MXGJ.max(), problem.base_P.max())) or 1.0
    base_P, scaled_least_X, parts = problem.base_P / scale, least_X / scale, _parts(problem.seconds_MXGJ / scale)
    solved = _solved(problem.count_PX, base_P, scaled_least_X, parts, open_MGJ)
    if solved is None:
        return LpBound(float((problem.count_PX @ least_X + problem.base_P).max()), nothing_MGJ, least_X, least_X)
    term_X, dual_P, dual_KG, price_MJ = solved
    # Any weights give a bound if those of paths sum to one and those of parts to at most their term's. Take the solver's.
    weight_P = dual_P / dual_P.sum()
    weight_X = weight_P @ problem.count_PX
    used_X, cost_MGJ = np.zeros(8), nothing_MGJ.copy()
    for (term, _), dual_G in zip(parts, dual_KG, strict=True):
        used_X[term] += dual_G.sum()
    shrink_X = np.divide(weight_X, used_X, out=np.ones(8), where=used_X > weight_X)
    for (term, part_MGJ), dual_G in zip(parts, dual_KG, strict=True):
        cost_MGJ += part_MGJ * (dual_G * shrink_X[term])[None, :, None]
    spare_MGJ = np.where(open_MGJ, cost_MGJ - price_MJ[:, None, :], np.inf)
    price_MG = spare_MGJ.min(axis=2)
    rest_X = np.maximum(weight_X - used_X * shrink_X, 0.0)
    bound = float(weight_P @ base_P + rest_X @ scaled_least_X + price_MG.sum() + price_MJ.sum())
    return LpBound(bound * scale, (spare_MGJ - price_MG[:, :, None]) * scale, term_X * scale, least_X)


def _solved(
    count_PX: FloatArray, base_P: FloatArray, least_X: FloatArray, parts: list[tuple[int, FloatArray]], open_MGJ: BoolArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray] | None:
    """(MOVED, dual prices of the paths, of each part on each GPU, of each model's groups) of the relaxed optimum, if solved.

    Columns: a share of each open edge, MOVED, the longest path. Rows: each part on each GPU is at most its term, each path is
    at most the longest, and the shares of every GPU and of every group sum to one.
    """
    edges = model, gpu, group = np.nonzero(open_MGJ)
    n, count, paths, top = open_MGJ.shape[1], len(model), len(base_P), len(parts) * open_MGJ.shape[1]
    gpus = np.arange(n)
    rows, cols, values = [], [], []
    for number, (term, part_MGJ) in enumerate(parts):
        held = part_MGJ[edges]
        some = np.flatnonzero(held)
        rows += [number * n + gpu[some], number * n + gpus]
        cols += [some, np.full(n, count + term)]
        values += [held[some], np.full(n, -1.0)]
    path, term_P = np.nonzero(count_PX)
    rows += [top + path, top + np.arange(paths)]
    cols += [count + term_P, np.full(paths, count + 8)]
    values += [count_PX[path, term_P], np.full(paths, -1.0)]
    cells = np.concatenate(rows), np.concatenate(cols)
    within = coo_array((np.concatenate(values), cells), shape=(top + paths, count + 9)).tocsr()
    sums = np.concatenate([model * n + gpu, 2 * n + model * n + group]), np.tile(np.arange(count), 2)
    whole = coo_array((np.ones(2 * count), sums), shape=(4 * n, count + 9)).tocsr()
    least = np.concatenate([np.zeros(count), least_X, [-np.inf]])
    solved = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
        np.eye(1, count + 9, count + 8)[0],
        within,
        np.concatenate([np.zeros(top), -base_P]),
        whole,
        np.ones(4 * n),
        np.stack([least, np.full(count + 9, np.inf)], axis=1),
        method="highs",
    )
    if solved.status != 0:
        return None
    dual = np.maximum(-solved.ineqlin.marginals, 0.0)
    price_MJ = solved.eqlin.marginals[2 * n :].reshape(2, n)
    return solved.x[count : count + 8], dual[top:], dual[:top].reshape(len(parts), n), price_MJ


def _least_X(seconds_MXGJ: FloatArray, open_MGJ: BoolArray) -> FloatArray:
    """(8,) a lower bound in seconds on each of MOVED alone, by bottleneck matchings; infinite without an assignment."""
    least_X = np.zeros(8)
    for model in (0, 1):
        for term, least_GJ in enumerate(_least_XGJ(seconds_MXGJ, open_MGJ, model)):
            least_X[term] = max(least_X[term], bottleneck_value(np.where(open_MGJ[model], least_GJ, np.inf)))
    return least_X


def _least_XGJ(seconds_MXGJ: FloatArray, open_MGJ: BoolArray, model: int) -> FloatArray:
    """(8, G, J) seconds that each of MOVED takes at least when the model's group j sits on GPU g."""
    least_XGJ = np.zeros((8, *open_MGJ.shape[1:]))
    other = 1 - model
    for term, (models, rows) in PARTS.items():
        if models == (model,):
            least_XGJ[term] = seconds_MXGJ[model, list(rows)].max(axis=0)
        elif len(models) == 2:
            for g, partner_J in enumerate(open_MGJ[other]):
                own_XJ, partner_XJ = seconds_MXGJ[model, list(rows), g], seconds_MXGJ[other, list(rows), g][:, partner_J]
                least_XGJ[term, g] = (own_XJ[:, :, None] + partner_XJ[:, None, :]).max(axis=0).min(axis=1, initial=np.inf)
    return least_XGJ


def _parts(seconds_MXGJ: FloatArray) -> list[tuple[int, FloatArray]]:
    """(term of MOVED, (2, G, J) seconds of each edge) of each part; the sum over the edges of any GPU is at most the term.

    A term of one model has one part, the larger of its rows on each edge. A term of both models has one part for each row.
    """
    made = []
    for term, (models, rows) in PARTS.items():
        if len(models) == 2:
            made += [(term, seconds_MXGJ[:, row]) for row in rows]
        else:
            part_MGJ = np.zeros_like(seconds_MXGJ[:, 0])
            part_MGJ[models[0]] = seconds_MXGJ[models[0], list(rows)].max(axis=0)
            made.append((term, part_MGJ))
    return made
