"""Phase sums: the seconds of Aurora's Eq. 1 (arXiv:2410.17043) as four sums over the experts that a GPU holds.

They are what the GPU sends and receives in the dispatch, and its experts' work with what it sends and with what it receives in
the combine. The first phase (gate + dispatch) is the larger of the first two, the second phase (experts + combine) that of
the others. A scenario takes the largest first phase of a GPU, the largest second phase and the aggregation.
"""

from typing import NamedTuple, Self

import numpy as np
from numba import njit

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
