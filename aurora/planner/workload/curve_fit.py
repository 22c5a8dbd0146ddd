"""Fits compute-time curves: monotone, piecewise linear, with few pieces, through measured seconds by number of tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from aurora.errors import BadInput
from aurora.types import Curve
from aurora.types.arrays import FloatArray, IntArray, numbers

TOLERANCE = 0.01  # largest relative distance of the curve from the monotone fit


@dataclass(frozen=True)
class CurveFit:
    """A fitted curve, and the median and maximum of |curve / measured - 1| over the points that it was fitted to."""

    curve: Curve
    median_error: float
    worst_error: float


def fit_curve(tokens_X: ArrayLike, seconds_X: ArrayLike, tolerance: float = TOLERANCE) -> CurveFit:
    """Fits a curve that never falls, with the fewest knots among the measured token counts.

    For each token count the median of its seconds is used. Isotonic regression makes the logarithms of these monotone, so that
    residuals are relative. Then knots are dropped while every point of the monotone fit stays within `tolerance` of the curve.

    Args:
        tokens_X: (X,) token counts above zero, in any sequence.
        seconds_X: (X,) measured seconds above zero.
        tolerance: largest relative distance of the curve from the monotone fit.

    Raises:
        BadInput: if the arrays are not numbers above zero, empty, or of different lengths.

    Source:
        Pool adjacent violators (Ayer et al., Ann. Math. Stat. 26, 1955); fewest pieces as a shortest path (Imai and Iri,
        Computational Morphology, 1988).
    """
    at_X, took_X = numbers("fit_curve: tokens", tokens_X), numbers("fit_curve: seconds", seconds_X)
    if at_X.shape != took_X.shape or not len(at_X):
        raise BadInput(f"fit_curve: expected as many seconds as token counts, found {len(took_X)} and {len(at_X)}")
    for what, least in (("tokens", at_X.min()), ("seconds", took_X.min())):
        if least <= 0:
            raise BadInput(f"fit_curve: {what} must be above zero, found {least}")
    points_X, of_X = np.unique(at_X, return_inverse=True)
    median_X = np.array([np.median(took_X[of_X == point]) for point in range(len(points_X))])
    rising_X = np.maximum.accumulate(np.exp(isotonic_regression(np.log(median_X)).x))  # exp may round a tie apart
    knots_X = fewest_knots(points_X, rising_X, tolerance)
    curve = Curve(points_X[knots_X], rising_X[knots_X])
    error_X = np.abs(curve(at_X) / took_X - 1)
    return CurveFit(curve, float(np.median(error_X)), float(error_X.max()))


def fewest_knots(at_X: FloatArray, height_X: FloatArray, tolerance: float) -> IntArray:
    """Returns indices of the fewest points whose straight connection passes within `tolerance` times each point's height.

    It is a shortest path over all straight pieces that keep the tolerance; at_X rises.
    """
    last = len(at_X) - 1
    pieces_X, before_X = np.full(last + 1, last + 1), np.zeros(last + 1, dtype=np.int64)
    pieces_X[0] = 0
    for begin in range(last):
        apart_X = at_X[begin + 1 :] - at_X[begin]
        low_X = np.maximum.accumulate((height_X[begin + 1 :] * (1 - tolerance) - height_X[begin]) / apart_X)
        high_X = np.minimum.accumulate((height_X[begin + 1 :] * (1 + tolerance) - height_X[begin]) / apart_X)
        slope_X = (height_X[begin + 1 :] - height_X[begin]) / apart_X
        for end in begin + 1 + np.flatnonzero((low_X <= slope_X) & (slope_X <= high_X)):
            if pieces_X[begin] + 1 < pieces_X[end]:
                pieces_X[end], before_X[end] = pieces_X[begin] + 1, begin
    knots = [last]
    while knots[-1]:
        knots.append(int(before_X[knots[-1]]))
    return np.array(knots[::-1], dtype=np.int64)
