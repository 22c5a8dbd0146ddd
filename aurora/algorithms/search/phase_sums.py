"""Costs of one layer that a slot search sees: sums of the seconds that a GPU's experts add, terms, and paths of terms.

A GPU has four sums in each of W columns: sums 0 and 1 make a term, the larger of them on the GPU where it is largest, and so do
sums 2 and 3. A path is a sum of terms, and the objective is the mean of the longest paths.

Aurora's Eq. 1 (arXiv:2410.17043) has a column and a path for each traffic case. Its sums are (0) gate and sending in the
dispatch, (1) gate and receiving in the dispatch, (2) experts and sending in the combine, (3) experts and receiving in the
combine; its path is the first phase (gate + dispatch), the second phase (experts + combine), and the aggregation. The terms and
paths of models that share the GPUs are those of `placement.objective`.
"""

from typing import NamedTuple

import numpy as np

from aurora.types.arrays import FloatArray, IntArray

SUMS = (("gate", "send"), ("gate", "recv"), ("expert", "csend"), ("expert", "crecv"))  # phases of each sum of a GPU
PARTS = len(SUMS)


class PhaseSums(NamedTuple):
    """Seconds of the four sums of each GPU (see this module) in W columns: without experts, and added by each expert.

    Attributes:
        part_s_GEXW: (G, E, 4, W) seconds that each expert adds to each sum of each GPU.
        base_s_GXW: (G, 4, W) seconds of each sum of each GPU without experts.
        fixed_s_Z: (Z,) seconds of each path besides its terms: for Eq. 1 of the aggregation on the slowest GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        worst: number of paths that count, longest first.
        count_ZYW: (Z, 2, W) float64, how often each term is in each path; None for Eq. 1: both terms of case z in path z.
        alike: experts 0 to alike - 1 are of one model, the next of another; a slot then keeps its model. 0: all are alike.
    """

    part_s_GEXW: FloatArray
    base_s_GXW: FloatArray
    fixed_s_Z: FloatArray
    slots_G: IntArray
    worst: int
    count_ZYW: FloatArray | None = None
    alike: int = 0

    @property
    def paths_ZYW(self) -> FloatArray:
        """(Z, 2, W) how often each term is in each path."""
        return np.eye(len(self.fixed_s_Z))[:, None].repeat(2, axis=1) if self.count_ZYW is None else self.count_ZYW

    @staticmethod
    def of_times(time_s_GE: FloatArray, slots_G: IntArray, beside_s_G: FloatArray) -> "PhaseSums":
        """Returns the sums of one case in which a GPU takes a time for each of its experts, and `beside_s_G` (G,) without any.

        time_s_GE (G, E) is the time of each expert on each GPU. The first sum is that time; the others are zero.
        """
        part_s_GEXW, base_s_GXW = np.zeros((*time_s_GE.shape, PARTS, 1)), np.zeros((len(time_s_GE), PARTS, 1))
        part_s_GEXW[:, :, 0, 0], base_s_GXW[:, 0, 0] = time_s_GE, beside_s_G
        return PhaseSums(part_s_GEXW, base_s_GXW, np.zeros(1), slots_G, 1)
