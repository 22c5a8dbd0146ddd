"""A port's start-up and rate from how long messages of known sizes took."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, counts, numbers


@dataclass(frozen=True)
class Link:
    """A message of b bytes takes startup_s + b / rate_Bps. error: mean |predicted / measured - 1| of what it was fitted to.

    Source: the alpha-beta model of Hockney (Parallel Computing 20, 1994).
    """

    startup_s: float
    rate_Bps: float
    error: float

    def seconds(self, message_bytes_X: ArrayLike) -> FloatArray:
        """(X,) seconds that messages of these bytes take."""
        return np.asarray(self.startup_s + np.asarray(message_bytes_X) / self.rate_Bps)


def fit_link(message_bytes_X: ArrayLike, seconds_X: ArrayLike) -> Link:
    """The start-up (zero or more) and rate of least mean |predicted / measured - 1|: a linear program, so no line has less.

    message_bytes_X (X,) int64, seconds_X (X,) float64, both above zero, with at least two sizes. Relative, because small
    messages tell the start-up and large ones the rate; not squared, because a few slow outliers then move nothing.
    Raises BadInput for other arrays, and where the seconds do not grow with the bytes.
    """
    bytes_X = counts("fit_link: message bytes", message_bytes_X, 1)
    took_X = numbers("fit_link: seconds", seconds_X)
    if bytes_X.shape != took_X.shape:
        raise BadInput(f"fit_link: expected as many seconds as messages, found {len(took_X)} and {len(bytes_X)}")
    if len(np.unique(bytes_X)) < 2:
        raise BadInput(f"fit_link: expected messages of at least two sizes, found {len(np.unique(bytes_X))}")
    for what, least in (("message bytes", bytes_X.min()), ("seconds", took_X.min())):
        if least <= 0:
            raise BadInput(f"fit_link: {what} must be above zero, found {least}")
    per_X2 = np.stack([1 / took_X, bytes_X / took_X], axis=1)
    unit_2 = per_X2.max(axis=0)
    scaled_X2 = per_X2 / unit_2  # so that both unknowns are about one
    count = len(took_X)
    slack_XX = np.eye(count)
    found = linprog(
        np.concatenate([np.zeros(2), np.full(count, 1 / count)]),
        A_ub=np.block([[scaled_X2, -slack_XX], [-scaled_X2, -slack_XX]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count)]),
    )
    assert found.x is not None, found.message
    line_2 = found.x[:2]
    if line_2[1] < 1e-9:
        raise BadInput("fit_link: expected seconds that grow with the message bytes, found none that do: no rate can be told")
    error = float(abs(scaled_X2 @ line_2 - 1).mean())
    return Link(float(line_2[0] / unit_2[0]), float(unit_2[1] / line_2[1]), error)
