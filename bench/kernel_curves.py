"""Curves of grouped kernels that were measured on several numbers of expert-parallel ranks."""

import numpy as np
from scipy.optimize import isotonic_regression

from aurora.algorithms.workload.curve_fit import BalancedPoints, grouped_curves
from aurora.types import Curve


def curves_on_ranks(points: BalancedPoints, fewer_ranks: BalancedPoints | None = None) -> tuple[Curve, Curve]:
    """Returns two curves: the seconds of one expert by its rows, and the overhead by all rows of the layer.

    With several expert-parallel ranks, a kernel also spends time on rows of other ranks. If rows are balanced, these grow with
    an expert's own rows, so that the expert's seconds come out too long; on fewer ranks, less so. The expert's curve is
    therefore the shorter of both measurements. The rest of the kernel's seconds is the overhead, fitted by a curve that never
    falls (least squares of relative errors).

    Args:
        points: the measurements; points with less than one row per expert count only for the overhead, if there are others.
        fewer_ranks: measurements of the same kernel on fewer ranks; None: there are none.
    """
    expert, launch = grouped_curves(points)
    if fewer_ranks is None:
        return expert, launch
    other, _ = grouped_curves(fewer_ranks)
    both_X = np.union1d(expert.tokens_X, other.tokens_X)
    expert = Curve(both_X, np.minimum(expert(both_X), other(both_X)))
    beyond_s_X = points.seconds_X - points.busy_X * expert(np.maximum(points.rows_X / points.experts, 1.0))
    overhead_s_X = np.maximum(beyond_s_X, launch.seconds_X[0])
    rows_X, of_X = np.unique(points.rows_X, return_inverse=True)
    weight_X = np.bincount(of_X, points.seconds_X**-2.0)  # so that errors count relative to the kernel
    mean_X = np.bincount(of_X, overhead_s_X * points.seconds_X**-2.0) / weight_X
    return expert, Curve(rows_X, np.maximum.accumulate(isotonic_regression(mean_X, weights=weight_X).x))
