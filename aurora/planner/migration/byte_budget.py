"""Byte budget: which layers move when a migration may send only so many bytes. A knapsack problem, solved exactly."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from aurora.types.arrays import FloatArray, IntArray


def worth_moving(saved_s_L: FloatArray, bytes_L: IntArray, most_bytes: int) -> IntArray:
    """Returns (L,) int64: 1 for the layers that save the most seconds while moving at most `most_bytes`.

    Args:
        saved_s_L: (L,) float64, seconds that a layer's new placement saves; layers that save none stay.
        bytes_L: (L,) int64, bytes of expert weights that the layer moves.
        most_bytes: the budget in bytes.
    """
    gains = (saved_s_L > 0) & (bytes_L <= most_bytes)
    if bytes_L[gains].sum() <= most_bytes:
        return gains.astype(np.int64)
    rows = np.flatnonzero(gains)
    scale = float(saved_s_L[rows].max())
    found = milp(
        -saved_s_L[rows] / scale,
        constraints=LinearConstraint((bytes_L[rows] / most_bytes)[None, :], -np.inf, 1.0),
        integrality=np.ones(len(rows), dtype=np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, "moving nothing is always possible"
    chosen = np.zeros(len(bytes_L), dtype=np.int64)
    chosen[rows] = np.rint(found.x).astype(np.int64)
    return chosen
