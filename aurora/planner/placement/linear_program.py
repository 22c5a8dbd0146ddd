"""Linear programs of one layer: variables are the shares of experts or groups on GPUs. Bounds, and a placement by rounding.

`PhaseProgram` is for one model: it minimises the seconds of the phases' slowest GPUs in several cases. `path_prices` is for
several models: it minimises the longest path of their objective. Bounds are computed from the dual solutions apart from the
solver, so that its tolerance never enters.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, block_diag, coo_array, csr_array, eye_array, hstack, kron

from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.slot_state import PhaseSums
from aurora.types.arrays import FloatArray, IntArray

SMALL = 4096  # experts times GPUs times cases of a program at most; one of that size takes about 50 ms


class _Solution(NamedTuple):
    """The optimum of a linear program: its variables, and the prices of its rows (zero or more) and of its sums."""

    value_V: FloatArray
    price_X: FloatArray
    price_E: FloatArray


def _solved(
    cost_V: FloatArray, at_most_XV: csr_array, limit_X: FloatArray, sum_EV: csr_array, lower_V: FloatArray, method: str
) -> _Solution | None:
    """Minimises the cost of variables, lower_V or more, with rows of at most limit_X and sums of one; None if that fails."""
    bounds_V2 = np.column_stack([lower_V, np.full(len(lower_V), np.inf)])
    found = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
        cost_V, at_most_XV, limit_X, sum_EV, np.ones(sum_EV.shape[0]), bounds_V2, method=method
    )
    if found.status != 0:
        return None
    return _Solution(found.x, np.maximum(0.0, -found.ineqlin.marginals), found.eqlin.marginals)


class PathPrices(NamedTuple):
    """A dual solution found by `path_prices`, corrected so that it gives a lower bound whatever the solver's tolerance.

    Parts, terms and paths are defined in the module `objective`. With s(k, g) the seconds of part k on GPU g,
    weight_P @ base_P + rest_X @ least_X + sum of weight_KG * s is a lower bound on the longest path, for any shares.

    Attributes:
        term_X: (X,) seconds of each term in the program's optimum.
        weight_P: (P,) weights of the paths, which sum to one. A term's weight is the sum of those of its paths.
        weight_KG: (K, G) weights of each part on each GPU; over a term's parts and GPUs they sum to the term's weight at most.
        rest_X: (X,) each term's weight minus that sum.
        price_E: (E,) dual prices of the rows of sum_EV.
    """

    term_X: FloatArray
    weight_P: FloatArray
    weight_KG: FloatArray
    rest_X: FloatArray
    price_E: FloatArray


def path_prices(
    cost_KV: FloatArray,
    gpu_V: IntArray,
    fixed_KG: FloatArray,
    term_K: IntArray,
    count_PX: IntArray,
    base_P: FloatArray,
    least_X: FloatArray,
    sum_EV: csr_array,
    method: str,
) -> PathPrices | None:
    """Minimises the longest path over shares of edges by a linear program; returns None if the solver gives up.

    An edge puts an expert, or a group, on a GPU; its share is from 0 to 1. A term is at least each of its parts on each GPU,
    and the objective is at least each path.

    Args:
        cost_KV: (K, V) seconds that each edge adds to each part on the edge's GPU.
        gpu_V: (V,) int64, the GPU of each edge.
        fixed_KG: (K, G) seconds that each part takes on each GPU besides its edges.
        term_K: (K,) int64, the term of each part.
        count_PX: (P, X) int64, how often each term occurs in each path.
        base_P: (P,) seconds of each path that no share changes.
        least_X: (X,) lower bounds on the seconds of each term.
        sum_EV: (E, V), one row for each expert or group: 1 for its edges, whose shares sum to one, 0 for others.
        method: method of scipy's `linprog`.
    """
    (edges, (paths, terms)), gpus = (len(gpu_V), count_PX.shape), fixed_KG.shape[1]
    part, edge = np.nonzero(cost_KV)
    held = coo_array((cost_KV[part, edge], (part * gpus + gpu_V[edge], edge)), shape=(fixed_KG.size, edges))
    of_term = np.repeat(term_K[:, None] == np.arange(terms), gpus, axis=0).astype(np.float64)
    rows = [[held, coo_array(-of_term), None], [None, coo_array(count_PX), coo_array(-np.ones((paths, 1)))]]
    solution = _solved(
        np.eye(1, edges + terms + 1, edges + terms)[0],
        csr_array(block_array(rows)),
        np.concatenate([-fixed_KG.ravel(), -base_P]),
        csr_array(hstack([sum_EV, coo_array((sum_EV.shape[0], terms + 1))])),
        np.concatenate([np.zeros(edges), least_X, [-np.inf]]),
        method,
    )
    if solution is None:
        return None
    dual_KG, dual_P = solution.price_X[: fixed_KG.size].reshape(fixed_KG.shape), solution.price_X[fixed_KG.size :]
    # Any weights give a bound if those of paths sum to one and those of parts to at most their term's. Take the solver's.
    weight_P = dual_P / dual_P.sum()
    weight_X = weight_P @ count_PX
    used_X = np.bincount(term_K, dual_KG.sum(axis=1), minlength=terms)
    shrink_X = np.divide(weight_X, used_X, out=np.ones(terms), where=used_X > weight_X)
    rest_X = np.maximum(weight_X - used_X * shrink_X, 0.0)
    term_X = solution.value_V[edges : edges + terms]
    return PathPrices(term_X, weight_P, dual_KG * shrink_X[term_K][:, None], rest_X, solution.price_E)


class PhaseProgram(NamedTuple):
    """Linear program of one layer: minimise cost_V @ v subject to at_most_XV @ v <= limit_X, once_EV @ v = 1, v >= lower_V.

    The variables are the shares of experts on GPUs, GPU by GPU; then the time of the two phases (gate with dispatch, experts
    with combine) in each traffic case. If not all cases count, a threshold and each case's excess over it follow
    (conditional value at risk).

    Attributes:
        layer: the layer's costs.
        least_YW: (2, W) lower bounds on the seconds of the two phases.
        unit_s: seconds of one unit of time in the program.
        cost_V: (V,) weights of the objective. If all cases count, it leaves out the aggregation, which is constant.
        at_most_XV: (X, V) rows: sums of GPUs in the order (G, 4, W), slots (G,), and excesses of cases (W,), if any.
        limit_X: (X,) upper limit of each row.
        once_EV: (E, V) rows that sum each expert's shares.
        lower_V: (V,) lower bounds of the variables.

    Source:
        The objective: Aurora (arXiv:2410.17043) Eq. 1. The conditional value at risk as a linear program: Rockafellar & Uryasev
        2000.
    """

    layer: PhaseSums
    least_YW: FloatArray
    unit_s: float
    cost_V: FloatArray
    at_most_XV: csr_array
    limit_X: FloatArray
    once_EV: csr_array
    lower_V: FloatArray

    def solved(self) -> tuple[FloatArray, FloatArray]:
        """Solves the program. Returns (share_GE, price_X): each GPU's share of each expert, and the dual price of each row.

        All are zero if the solver gives up.
        """
        gpus, experts, _, _ = self.layer.part_s_GEXW.shape
        solution = _solved(self.cost_V, self.at_most_XV, self.limit_X, self.once_EV, self.lower_V, "highs-ds")
        if solution is None:
            return np.zeros((gpus, experts)), np.zeros(len(self.limit_X))
        return solution.value_V[: gpus * experts].reshape(gpus, experts), solution.price_X

    def dual_s(self, price_X: FloatArray) -> float:
        """Returns the Lagrangian of the rows in seconds, which is a lower bound on the objective for any prices.

        Args:
            price_X: (X,) float64, zero or more, the price of each row of at_most_XV; the dual solution gives the best bound.
        """
        layer = self.layer
        gpus, _, sums, scenarios = layer.part_s_GEXW.shape
        rows, slots_G, excess_W = np.split(np.maximum(0.0, price_X), [gpus * sums * scenarios, gpus * (sums * scenarios + 1)])
        weight_W = np.full(scenarios, 1 / scenarios)
        if layer.worst < scenarios:
            weight_W = np.minimum(excess_W, 1 / layer.worst)
            weight_W /= max(1.0, float(weight_W.sum()))
        row_GYXW = rows.reshape(gpus, 2, sums // 2, scenarios)
        total_YW = row_GYXW.sum(axis=(0, 2))
        row_GYXW = row_GYXW * np.minimum(1.0, weight_W / np.maximum(total_YW, 1e-300))[:, None]
        left_YW = np.maximum(0.0, weight_W - row_GYXW.sum(axis=(0, 2)))
        row_GXW, slots_G = row_GYXW.reshape(gpus, sums, scenarios), slots_G * self.unit_s
        share_s_GE = np.einsum("gexw,gxw->ge", layer.part_s_GEXW, row_GXW) + slots_G[:, None]
        fixed_s = (row_GXW * layer.base_s_GXW).sum() + (left_YW * self.least_YW).sum() + weight_W @ layer.aggregate_s_W
        return float(fixed_s + share_s_GE.min(axis=0).sum() - slots_G @ layer.slots_G)


def phase_program(layer: PhaseSums, least_YW: FloatArray) -> PhaseProgram:
    """Builds the linear program whose optimum is a lower bound on a layer's seconds over all placements.

    Args:
        layer: one layer in W traffic cases.
        least_YW: (2, W) lower bounds in seconds on the two phases: gate with dispatch, and experts with combine.
    """
    gpus, experts, sums, scenarios = layer.part_s_GEXW.shape
    unit_s = float(layer.base_s_GXW.max() + layer.part_s_GEXW.max()) or 1.0
    tail = layer.worst < scenarios
    per_gpu = [np.moveaxis(part_s_EXW, 0, 2).reshape(sums * scenarios, experts) / unit_s for part_s_EXW in layer.part_s_GEXW]
    each = eye_array(scenarios)
    of_phase = kron(kron(eye_array(2), np.ones((sums // 2, 1))), each)
    rows = [
        [block_diag(per_gpu), -kron(np.ones((gpus, 1)), of_phase), None, None],
        [kron(eye_array(gpus), np.ones((1, experts))), None, None, None],
        [None, kron(np.ones((1, 2)), each), coo_array(-np.ones((scenarios, 1))), -each],
    ]
    limits = [-layer.base_s_GXW.ravel() / unit_s, layer.slots_G, -layer.aggregate_s_W / unit_s]
    shares, phases, excesses = gpus * experts, 2 * scenarios, scenarios + 1
    if tail:
        cost = [np.zeros(shares + phases), np.ones(1), np.full(scenarios, 1 / layer.worst)]
    else:
        cost, rows, limits = [np.zeros(shares), np.full(phases, 1 / scenarios)], [row[:2] for row in rows[:2]], limits[:2]
    least = [np.zeros(shares), least_YW.ravel() / unit_s, np.zeros(excesses if tail else 0)]
    once = [kron(np.ones((1, gpus)), eye_array(experts)), coo_array((experts, len(np.concatenate(least)) - shares))]
    return PhaseProgram(
        layer,
        least_YW,
        unit_s,
        np.concatenate(cost),
        csr_array(block_array(rows)),
        np.concatenate(limits),
        csr_array(hstack(once)),
        np.concatenate(least),
    )


def relaxed_s(layer: PhaseSums, least_YW: FloatArray) -> float:
    """Returns a lower bound on a layer's seconds: the dual value of `phase_program`, which has the same arguments."""
    program = phase_program(layer, least_YW)
    return program.dual_s(program.solved()[1])


def blocks(costs: LayerCosts, most: int) -> IntArray:
    """Returns (G,) int64, the block of each GPU: GPUs with equal ports and expert times share one; there are at most `most`."""
    kind_GX = np.column_stack([costs.expert_s_WGE.sum(axis=(0, 2)), *costs.port_s_XG])
    kinds_KX, kind_G = np.unique(kind_GX, axis=0, return_inverse=True)
    return np.asarray(kind_G.reshape(-1) * min(most, len(kinds_KX)) // len(kinds_KX), dtype=np.int64)


def merged(layer: PhaseSums, block_G: IntArray) -> PhaseSums:
    """Returns the layer with each block of GPUs taken as one GPU, so that its bounds hold for the layer itself.

    The base of a block's sum is the mean of its GPUs'. An expert adds to it as much as on the block's best GPU, divided by the
    number of GPUs. So no placement takes longer on its slowest block than on its slowest GPU.

    Args:
        layer: the layer.
        block_G: (G,) int64, the block of each GPU, numbered from 0 without a gap.
    """
    members = [block_G == block for block in range(int(block_G.max()) + 1)]
    return layer._replace(
        part_s_GEXW=np.stack([layer.part_s_GEXW[own].min(axis=0) / own.sum() for own in members]),
        base_s_GXW=np.stack([layer.base_s_GXW[own].mean(axis=0) for own in members]),
        slots_G=np.array([layer.slots_G[own].sum() for own in members]),
    )


def lp_rounding(costs: LayerCosts, slots_G: IntArray) -> IntArray:
    """Places each expert on the GPU that takes its largest share in the linear program, as far as slots last.

    If ports and speeds differ, the program gives how many experts each GPU should hold, which a search by swaps rarely reaches.
    For large layers it is solved for the sum of all cases, or for blocks of equal GPUs; an expert then goes to the GPU of
    its block that would compute least.

    Args:
        costs: one layer in W cases.
        slots_G: (G,) int64, how many experts each GPU can hold; at least E in all.

    Returns:
        (E,) int64, the GPU of each expert.
    """
    gpus, experts = costs.expert_s_WGE.shape[1:]
    if gpus * experts * len(costs.own_WGE) > SMALL:
        costs = costs.summed
    layer = PhaseSums.of(costs, slots_G)
    block_G = np.arange(gpus) if gpus * experts <= SMALL else blocks(costs, max(1, SMALL // experts))
    program = phase_program(merged(layer, block_G), np.zeros((2, len(costs.own_WGE))))
    share_GE = program.solved()[0][block_G]
    work_s_GE = costs.expert_s_WGE.sum(axis=0)
    busy_s_G, free_G, gpu_E = np.zeros(gpus), layer.slots_G.copy(), np.empty(experts, dtype=np.int64)
    for expert in np.lexsort((-costs.load_WE.sum(axis=0), -share_GE.max(axis=0))).tolist():
        after_s_G = busy_s_G + work_s_GE[:, expert]
        gpu = int(np.lexsort((after_s_G, -share_GE[:, expert], free_G == 0))[0])
        gpu_E[expert] = gpu
        busy_s_G[gpu], free_G[gpu] = after_s_G[gpu], free_G[gpu] - 1
    return gpu_E
