"""Phase sums of a layer, and the linear program over them: the seconds of Aurora's Eq. 1 (arXiv:2410.17043) as four sums a GPU.

They are what the GPU sends and receives in the dispatch, and its experts' work with what it sends and with what it receives in
the combine. The first phase (gate + dispatch) is the larger of the first two, the second phase (experts + combine) that of
the others. A scenario takes the largest first phase of a GPU, the largest second phase and the aggregation.
"""

from typing import NamedTuple, Self

import numpy as np
from numba import njit
from scipy.optimize import linprog
from scipy.sparse import block_array, block_diag, coo_array, csr_array, eye_array, hstack, kron

from aurora.planner.placement.cost_model import LayerCosts
from aurora.types.arrays import FloatArray, IntArray

PARTS = 4  # sums of a GPU: sent and received in the dispatch; experts with received and with sent in the combine


class PhaseSums(NamedTuple):
    """Phase sums of one layer in W scenarios: what each expert adds to them, and what they are without experts.

    Attributes:
        part_s_GEXW: (G, E, 4, W) seconds that an expert adds to each sum of a GPU.
        base_s_GXW: (G, 4, W) seconds of each sum of a GPU that holds no expert.
        aggregate_s_W: (W,) seconds of the aggregation on the slowest GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        worst: how many scenarios count, the longest first.
    """

    part_s_GEXW: FloatArray
    base_s_GXW: FloatArray
    aggregate_s_W: FloatArray
    slots_G: IntArray
    worst: int

    @classmethod
    def of(cls, costs: LayerCosts, slots_G: IntArray) -> Self:
        """Returns the sums of a layer.

        Args:
            costs: one layer in W scenarios.
            slots_G: (G,) int64, how many experts each GPU can hold.
        """
        part_s_GEXW, base_s_GXW = _sums(
            np.ascontiguousarray(costs.own_WGE, dtype=np.float64),
            np.ascontiguousarray(costs.expert_s_WGE, dtype=np.float64),
            np.ascontiguousarray(costs.gate_s_WG, dtype=np.float64),
            np.ascontiguousarray(costs.port_s_XG),
        )
        return cls(
            part_s_GEXW,
            base_s_GXW,
            costs.aggregate_s_WG.max(axis=1),
            np.minimum(slots_G, costs.own_WGE.shape[2]).astype(np.int64),
            costs.worst,
        )


@njit(cache=True, nogil=True)
def _sums(own_WGE, expert_s_WGE, gate_s_WG, port_s_XG):
    """part_s_GEXW and base_s_GXW of PhaseSums."""
    scenarios, gpus, experts = own_WGE.shape
    part_s_GEXW, base_s_GXW = np.empty((gpus, experts, PARTS, scenarios)), np.empty((gpus, PARTS, scenarios))
    load_WE = np.zeros((scenarios, experts))
    for w in range(scenarios):
        for g in range(gpus):
            for e in range(experts):
                load_WE[w, e] += own_WGE[w, g, e]
    for g in range(gpus):
        sent_s, received_s, back_s, home_s = port_s_XG[0, g], port_s_XG[1, g], port_s_XG[2, g], port_s_XG[3, g]
        for w in range(scenarios):
            own = 0.0
            for e in range(experts):
                local = own_WGE[w, g, e]
                arriving, work_s = load_WE[w, e] - local, expert_s_WGE[w, g, e]
                own += local
                part_s_GEXW[g, e, 0, w] = -local * sent_s
                part_s_GEXW[g, e, 1, w] = arriving * received_s
                part_s_GEXW[g, e, 2, w] = work_s + arriving * back_s
                part_s_GEXW[g, e, 3, w] = work_s - local * home_s
            base_s_GXW[g, 0, w] = gate_s_WG[w, g] + own * sent_s
            base_s_GXW[g, 1, w] = gate_s_WG[w, g]
            base_s_GXW[g, 2, w] = 0.0
            base_s_GXW[g, 3, w] = own * home_s
    return part_s_GEXW, base_s_GXW


@njit(cache=True, nogil=True)
def add_share(part_s_GEXW, row_GXW, at, g, e, share):
    """Adds a share of expert e on GPU g to row `at`."""
    for x in range(PARTS):
        for w in range(row_GXW.shape[2]):
            row_GXW[at, x, w] += share * part_s_GEXW[g, e, x, w]


@njit(cache=True, nogil=True)
def copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, at, g, e, share):
    """Sets row `at` to the sums of GPU g with a share of expert e more."""
    for x in range(PARTS):
        for w in range(row_GXW.shape[2]):
            row_GXW[at, x, w] = sum_s_GXW[g, x, w] + share * part_s_GEXW[g, e, x, w]


SMALL = 4096  # experts times GPUs times scenarios of a program at most; one of that size takes about 50 ms


class PhaseProgram(NamedTuple):
    """Minimises `cost_V` over variables V: shares of experts on GPUs, GPU by GPU; then the two phases of each scenario.

    Where not all scenarios count, a threshold and each scenario's excess over it follow (conditional value at risk).

    Attributes:
        layer: the layer.
        least_YW: (2, W) seconds that each phase takes at least.
        unit_s: seconds of one unit of time.
        cost_V: (V,) weights of the objective, the aggregation left out where all scenarios count.
        at_most_XV: (X, V) rows: sums of GPUs in the order (G, 4, W), slots (G,), and excesses of scenarios (W,), if any.
        limit_X: (X,) what each row is at most.
        once_EV: (E, V) rows that sum each expert's shares, which are one in all.
        lower_V: (V,) lower bounds.

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
        """Returns ((G, E) each GPU's share of each expert, (X,) price of each row); all zero if the solver gives up."""
        gpus, experts, _, _ = self.layer.part_s_GEXW.shape
        found = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
            self.cost_V,
            self.at_most_XV,
            self.limit_X,
            self.once_EV,
            np.ones(experts),
            np.column_stack([self.lower_V, np.full(len(self.lower_V), np.inf)]),
            method="highs-ds",
        )
        if found.status != 0:
            return np.zeros((gpus, experts)), np.zeros(len(self.limit_X))
        return found.x[: gpus * experts].reshape(gpus, experts), np.maximum(0.0, -found.ineqlin.marginals)

    def dual_s(self, price_X: FloatArray) -> float:
        """Returns a lower bound in seconds on the objective, for any prices: the Lagrangian of the rows.

        Args:
            price_X: (X,) float64, zero or more, the price of each row; the bound is best for the program's dual solution.
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
    """Returns the linear program of a layer.

    Args:
        layer: one layer in W scenarios.
        least_YW: (2, W) seconds that each phase takes at least.
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


def blocks(costs: LayerCosts, most: int) -> IntArray:
    """Returns (G,) int64 block numbers: the same for GPUs with the same ports and expert times, and at most `most` of them."""
    kind_GX = np.column_stack([costs.expert_s_WGE.sum(axis=(0, 2)), *costs.port_s_XG])
    kinds_KX, kind_G = np.unique(kind_GX, axis=0, return_inverse=True)
    return np.asarray(kind_G.reshape(-1) * min(most, len(kinds_KX)) // len(kinds_KX), dtype=np.int64)


def merged(layer: PhaseSums, block_G: IntArray) -> PhaseSums:
    """Returns the layer with one GPU for each block; no placement takes longer on its slowest block than on its slowest GPU.

    A block's sums are the means of its GPUs', and an expert costs there what it costs on the block's best GPU for each sum.

    Args:
        layer: the layer.
        block_G: (G,) int64, the number of each GPU's block, from 0 without a gap.
    """
    members = [block_G == block for block in range(int(block_G.max()) + 1)]
    return layer._replace(
        part_s_GEXW=np.stack([layer.part_s_GEXW[own].min(axis=0) / own.sum() for own in members]),
        base_s_GXW=np.stack([layer.base_s_GXW[own].mean(axis=0) for own in members]),
        slots_G=np.array([layer.slots_G[own].sum() for own in members]),
    )


def lp_rounding(costs: LayerCosts, slots_G: IntArray) -> IntArray:
    """Places each expert on the GPU that takes its largest share in the linear program, as far as slots last.

    The program sees what is hard to reach by swaps: which GPUs hold how many experts where ports and speeds differ. In large
    layers it is solved for the sum of all scenarios, or for blocks of GPUs of a kind; an expert then goes to the GPU of its
    block that would compute least.

    Args:
        costs: one layer in W scenarios.
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
