"""Costs of one layer that a slot search sees: the seconds of Aurora's Eq. 1 (arXiv:2410.17043) as sums over a GPU's experts.

There are four sums: (0) gate and sending in the dispatch, (1) gate and receiving in the dispatch, (2) experts and sending in
the combine, (3) experts and receiving in the combine. The first phase (gate + dispatch) is the larger of sums 0 and 1, the
second phase (experts + combine) that of 2 and 3. A case takes the largest first phase of a GPU, the largest second phase, and
the aggregation.
"""

from typing import NamedTuple

import numpy as np

from aurora.types.arrays import FloatArray, IntArray

SUMS = (("gate", "send"), ("gate", "recv"), ("expert", "csend"), ("expert", "crecv"))  # phases of each sum of a GPU
PARTS = len(SUMS)


class PhaseSums(NamedTuple):
    """Seconds of the four sums of each GPU (see this module) in W traffic cases: without experts, and added by each expert.

    Attributes:
        part_s_GEXW: (G, E, 4, W) seconds that each expert adds to each sum of each GPU.
        base_s_GXW: (G, 4, W) seconds of each sum of each GPU without experts.
        aggregate_s_W: (W,) seconds of the aggregation on the slowest GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        worst: number of cases that count, longest first.
    """

    part_s_GEXW: FloatArray
    base_s_GXW: FloatArray
    aggregate_s_W: FloatArray
    slots_G: IntArray
    worst: int

    @staticmethod
    def of_times(time_s_GE: FloatArray, slots_G: IntArray, beside_s_G: FloatArray) -> "PhaseSums":
        """Returns the sums of one case in which a GPU takes a time for each of its experts, and `beside_s_G` (G,) without any.

        time_s_GE (G, E) is the time of each expert on each GPU. The first sum is that time; the others are zero.
        """
        part_s_GEXW, base_s_GXW = np.zeros((*time_s_GE.shape, PARTS, 1)), np.zeros((len(time_s_GE), PARTS, 1))
        part_s_GEXW[:, :, 0, 0], base_s_GXW[:, 0, 0] = time_s_GE, beside_s_G
        return PhaseSums(part_s_GEXW, base_s_GXW, np.zeros(1), slots_G, 1)
