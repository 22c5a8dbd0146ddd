"""Linear program of one layer: the shares of experts' tokens that GPUs take, so that the phases' slowest GPUs take least."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, block_diag, coo_array, csr_array, eye_array, hstack, kron

from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.phase_sums import PhaseSums
from aurora.types.arrays import FloatArray, IntArray

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
