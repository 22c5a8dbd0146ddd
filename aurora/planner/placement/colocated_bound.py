"""Lower bound on a layer of colocated models over all of their placements: a linear program over shares of experts."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, block_diag, coo_array, csr_array, eye_array, hstack, kron

from aurora.planner.network.lower_bounds import spread_beside
from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.objective import Formula, Part
from aurora.planner.placement.phase_program import SMALL, blocks
from aurora.types.arrays import FloatArray, IntArray


def colocated_bound_s(formula: Formula, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """Returns seconds that no placement of all models' experts beats, on ports and on the NICs of servers.

    What crosses between servers is bounded as what crosses between GPUs, with one GPU for each server.

    Args:
        formula: the objective on ports; NICs only take longer.
        costs_M: the layer of each model, in a single scenario.
        replicas: whether the bound covers placements with replicas.
    """
    of_servers_M = [servers for costs in costs_M if (servers := costs.of_servers) is not None]
    return max(_bound_s(formula, each_M, replicas) for each_M in (costs_M, of_servers_M) if each_M)


def least_compute_s(parts: Sequence[Part], costs_M: Sequence[LayerCosts], replicas: bool) -> float | None:
    """Returns a lower bound on the seconds of a term in which GPUs compute; None for other terms.

    Args:
        parts: the parts of the term.
        costs_M: the layer of each model, in a single scenario.
        replicas: whether the bound covers placements with replicas.
    """
    if any(phase not in ("gate", "expert", "aggregate") for part in parts for _, phase in part):
        return None
    return max(_least_s(part, costs_M, replicas) for part in parts)


def _bound_s(formula: Formula, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """The bound on ports alone.

    The program chooses the share of each expert's tokens that each GPU takes. Each part on each GPU is at most its term, and
    each path is at most the result. As in `layer_bound_s`, the bound is the dual solution's, and in large layers GPUs of a kind
    count as one.
    """
    numbers = {term: number for number, term in enumerate(formula.parts)}
    parts = [(numbers[term], part) for term in formula.moved for part in formula.parts[term]]
    summed = [_summed(part, costs_M) for _, part in parts]
    least_X = np.array([max(_least_s(part, costs_M, replicas) for part in each) for each in formula.parts.values()])
    term_K, fixed_KG = np.array([number for number, _ in parts]), np.stack([fixed_G for fixed_G, _ in summed])
    cost_KGE = np.stack([cost_GE for _, cost_GE in summed])
    _, gpus, experts = cost_KGE.shape
    if gpus * experts > SMALL:
        fixed_KG, cost_KGE = _merged(fixed_KG, cost_KGE, blocks(costs_M[0], max(1, SMALL // experts)))
    return max(formula.longest(least_X), _relaxed(formula, least_X, term_K, fixed_KG, cost_KGE))


def _relaxed(formula: Formula, least_X: FloatArray, term_K: IntArray, fixed_KG: FloatArray, cost_KGE: FloatArray) -> float:
    """The program's bound. Part k takes fixed_KG and the costs of its experts on a GPU, and belongs to the term term_K[k]."""
    parts, gpus, experts = cost_KGE.shape
    paths, terms = formula.count_PX.shape
    unit_s = float(np.abs(fixed_KG).max() + np.abs(cost_KGE).max()) or 1.0
    per_gpu = block_diag([cost_KE / unit_s for cost_KE in np.moveaxis(cost_KGE, 1, 0)])  # rows (G, K), shares GPU by GPU
    of_term = np.tile(term_K[:, None] == np.arange(terms), (gpus, 1)).astype(np.float64)
    once = hstack([kron(np.ones((1, gpus)), eye_array(experts)), coo_array((experts, terms + 1))])
    found = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
        np.eye(1, gpus * experts + terms + 1, gpus * experts + terms)[0],
        csr_array(
            block_array(
                [[per_gpu, coo_array(-of_term), None], [None, coo_array(formula.count_PX), coo_array(-np.ones((paths, 1)))]]
            )
        ),
        np.concatenate([-fixed_KG.T.ravel() / unit_s, np.zeros(paths)]),
        csr_array(once),
        np.ones(experts),
        [*[(0, None)] * (gpus * experts), *[(least / unit_s, None) for least in least_X], (0, None)],
        method="highs-ds",
    )
    if found.status != 0:
        return 0.0
    price_X = np.maximum(0.0, -found.ineqlin.marginals)
    price_GK, price_P = price_X[: gpus * parts].reshape(gpus, parts), price_X[gpus * parts :]
    # Any prices give a bound if those of paths sum to one and those of a term's parts to the paths' price of it at most.
    weight_X = price_P @ formula.count_PX / max(float(price_P.sum()), 1.0)
    used_X = np.bincount(term_K, weights=price_GK.sum(axis=0), minlength=terms)
    price_GK = price_GK * np.minimum(1.0, weight_X / np.maximum(used_X, 1e-300))[term_K]
    left_X = np.maximum(0.0, weight_X - np.bincount(term_K, weights=price_GK.sum(axis=0), minlength=terms))
    share_s_GE = np.einsum("gk,kge->ge", price_GK, cost_KGE)
    return float((price_GK.T * fixed_KG).sum() + left_X @ least_X + share_s_GE.min(axis=0).sum())


def _merged(fixed_KG: FloatArray, cost_KGE: FloatArray, block_G: IntArray) -> tuple[FloatArray, FloatArray]:
    """The parts with one GPU for each block of GPUs: the mean of what is fixed, and an expert costs what it costs at best."""
    members = [block_G == block for block in range(int(block_G.max()) + 1)]
    fixed_KB = np.stack([fixed_KG[:, own].mean(axis=1) for own in members], axis=1)
    return fixed_KB, np.stack([cost_KGE[:, own].min(axis=1) / own.sum() for own in members], axis=1)


def _summed(part: Part, costs_M: Sequence[LayerCosts]) -> tuple[FloatArray, FloatArray]:
    """(G,) what a part takes without experts, and (G, E) what each expert of any model adds, model by model."""
    found = [(model, *costs_M[model].phase_s(phase)) for model, phase in part]
    fixed_G = np.sum([fixed_G for _, fixed_G, _ in found], axis=0)
    cost_M = [np.zeros(costs.own_WGE.shape[1:]) for costs in costs_M]
    for model, _, cost_GE in found:
        cost_M[model] = cost_M[model] + cost_GE
    return fixed_G, np.concatenate(cost_M, axis=1)


def _least_s(part: Part, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """A lower bound on the seconds of a part on the GPU where it takes longest."""
    return spread_beside(*_summed(part, costs_M), replicas)
