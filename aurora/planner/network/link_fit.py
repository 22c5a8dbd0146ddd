"""Fits a link's start-up and rate to measured message times."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, counts, numbers


@dataclass(frozen=True)
class LinkFit:
    """A link on which a message of b bytes takes startup_s + b / rate_Bps seconds.

    Source: the alpha-beta model of Hockney (Parallel Computing 20, 1994).
    """

    startup_s: float
    rate_Bps: float
    median_error: float  # median |predicted / measured - 1| over the messages that the link was fitted to

    def seconds(self, bytes_X: ArrayLike) -> FloatArray:
        """Returns (X,) float64, the seconds that messages of bytes_X (X,) bytes take."""
        return np.asarray(self.startup_s + np.asarray(bytes_X) / self.rate_Bps)


def fit_link(bytes_X: ArrayLike, seconds_X: ArrayLike) -> LinkFit:
    """Fits a link's start-up and rate to the times of messages of several sizes.

    The rate is the slope between the two largest messages: costs that every message pays, and a burst that a traffic shaper
    lets pass at once, cancel out. The start-up is what the smallest message took beyond its bytes at that rate, at least zero.
    With one size only, or if the largest message took no longer than the one before it, the rate is the largest message's bytes
    over its seconds. Sizes should be well apart, such as powers of two: between nearly equal sizes the slope is noise.

    Args:
        bytes_X: (X,) int64, message sizes, rising, above zero.
        seconds_X: (X,) float64, the time of each message, above zero.

    Raises:
        BadInput: if lengths differ or are zero, sizes do not rise from above zero, or a time is not above zero.
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
