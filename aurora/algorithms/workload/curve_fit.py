"""Fits compute-time curves, monotone and piecewise linear, to measured seconds by number of tokens.

A grouped kernel computes all experts of a rank. Its time is modelled as an overhead plus the sum of its experts' times. An
expert without tokens takes no time; one with few tokens takes the time to read its weights.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from aurora.errors import BadInput
from aurora.types import Curve
from aurora.types.arrays import FloatArray, numbers


def fit_curve(tokens_X: ArrayLike, seconds_X: ArrayLike) -> Curve:
    """Fits a curve that never falls, with the measured token counts as its knots.

    For each token count the median of its seconds is used. Isotonic regression makes the logarithms of these monotone, so that
    residuals are relative.

    Args:
        tokens_X: (X,) token counts above zero, in any sequence.
        seconds_X: (X,) measured seconds above zero.

    Raises:
        BadInput: if the arrays are not numbers above zero, empty, or of different lengths.

    Source:
        Pool adjacent violators (Ayer et al., Ann. Math. Stat. 26, 1955).
    """
    at_X, took_X = numbers("fit_curve: tokens", tokens_X), numbers("fit_curve: seconds", seconds_X)
    if at_X.shape != took_X.shape or not len(at_X):
        raise BadInput(f"fit_curve: expected as many seconds as tokens, one at least, found {len(took_X)} and {len(at_X)}")
    for name, column_X in (("tokens", at_X), ("seconds", took_X)):
        if column_X.min() <= 0:
            raise BadInput(f"fit_curve: {name} must be above zero, found {column_X.min()}")
    points_X, of_X = np.unique(at_X, return_inverse=True)
    median_X = np.array([np.median(took_X[of_X == point]) for point in range(len(points_X))])
    rising_X = np.maximum.accumulate(np.exp(isotonic_regression(np.log(median_X)).x))  # exp may round a tie apart
    return Curve(points_X, rising_X)


LEAST_POINTS = 3  # with at most one row an expert, to tell overhead from experts


@dataclass(frozen=True)
class BalancedPoints:
    """Measured seconds of one rank's grouped kernel, if all experts of the layer have equally many rows.

    Attributes:
        rows_X: (X,) float64, rows of the layer on all ranks, that is (token, expert) pairs, above zero.
        seconds_X: (X,) float64, measured seconds, above zero.
        experts: number of experts of the layer.
        held: number of experts that the rank holds.
    """

    rows_X: FloatArray
    seconds_X: FloatArray
    experts: int
    held: int

    @property
    def busy_X(self) -> FloatArray:
        """(X,) float64, number of the rank's experts that have rows; at least one, because only busy ranks are measured."""
        return np.clip(self.rows_X * (self.held / self.experts), 1.0, self.held)

    @property
    def launch_s(self) -> float:
        """Estimated seconds of the kernel if no expert has rows; zero if there are too few points for an estimate.

        A straight line of seconds over busy experts is fitted to the points with at most one row per expert, by least squares
        of relative errors; the result is its value at zero, limited to the range from zero to the shortest point.
        """
        few_X = self.rows_X <= self.experts
        if few_X.sum() < LEAST_POINTS:
            return 0.0
        busy_X, took_X = self.busy_X[few_X], self.seconds_X[few_X]
        design_X2 = np.stack([1 / took_X, busy_X / took_X], axis=1)
        line_2 = np.linalg.lstsq(design_X2, np.ones(len(took_X)), rcond=None)[0]
        return float(np.clip(line_2[0], 0.0, self.seconds_X.min()))


def grouped_curves(points: BalancedPoints) -> tuple[Curve, Curve]:
    """Returns two curves: seconds of one expert by its number of rows, and the (constant) overhead by the layer's rows.

    Args:
        points: the measurements; points with less than one row per expert count only for the overhead, if there are others.
    """
    many_X = points.rows_X >= points.experts
    launch_s = points.launch_s if many_X.any() else 0.0
    many_X |= not many_X.any()
    least_s = 1e-9 * points.seconds_X.min()  # an expert that takes no time cannot be fitted
    expert_s_X = np.maximum(points.seconds_X[many_X] - launch_s, least_s) / points.held
    expert = fit_curve(points.rows_X[many_X] / points.experts, expert_s_X)
    return expert, Curve(np.ones(1), np.full(1, launch_s))
