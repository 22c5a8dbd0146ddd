"""A link's start-up and rate from how long messages of known sizes took."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, counts, numbers


@dataclass(frozen=True)
class LinkFit:
    """A message of b bytes takes startup_s + b / rate_Bps.

    median_error: median |predicted / measured - 1| of the messages that it was fitted to.
    Source: the alpha-beta model of Hockney (Parallel Computing 20, 1994).
    """

    startup_s: float
    rate_Bps: float
    median_error: float

    def seconds(self, bytes_X: ArrayLike) -> FloatArray:
        """(X,) seconds that messages of these bytes take."""
        return np.asarray(self.startup_s + np.asarray(bytes_X) / self.rate_Bps)


def fit_link(bytes_X: ArrayLike, seconds_X: ArrayLike) -> LinkFit:
    """Fit a link to messages by size.

    The rate is the slope between the two largest: whatever every message pays, or a shaper lets pass at once, cancels out. The
    start-up is what the smallest took beyond that, zero at least. Of one size, or where the largest took no longer than the one
    before it, the rate is the largest's bytes over its seconds. For sizes well apart, such as powers of two: between
    nearly equal ones the slope is noise.

    Args:
        bytes_X: (X,) int64, rising, above zero.
        seconds_X: (X,) float64, above zero.

    Raises:
        BadInput: for other arrays.
    """
    sent_X, took_X = counts("fit_link: bytes_X", bytes_X, 1), numbers("fit_link: seconds_X", seconds_X)
    if sent_X.shape != took_X.shape or not len(sent_X):
        raise BadInput(f"fit_link: expected as many seconds as messages, one at least, found {len(took_X)} and {len(sent_X)}")
    if (np.diff(sent_X, prepend=0) <= 0).any():
        raise BadInput("fit_link: bytes_X: expected sizes above zero that rise")
    if took_X.min() <= 0:
        raise BadInput(f"fit_link: seconds_X: expected times above zero, found {took_X.min()}")
    rate_Bps = float(sent_X[-1] / took_X[-1])
    if len(sent_X) > 1 and took_X[-1] > took_X[-2]:
        rate_Bps = float((sent_X[-1] - sent_X[-2]) / (took_X[-1] - took_X[-2]))
    startup_s = max(0.0, float(took_X[0] - sent_X[0] / rate_Bps))
    return LinkFit(startup_s, rate_Bps, float(np.median(np.abs((startup_s + sent_X / rate_Bps) / took_X - 1))))
