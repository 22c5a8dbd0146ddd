"""Fits a link's start-up and rate to measured message times, and tells by links' rates whether hosts are servers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class LinkFit:
    """Start-up and rate of a link: a message of b bytes takes startup_s + b / rate_Bps seconds.

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

    The rate is the slope of a least-squares line: costs that every message pays, and a burst that a traffic shaper lets pass at
    once, cancel out. The start-up is what the smallest message took beyond its bytes at that rate, at least zero. With one size
    only, or if larger messages took no longer, the rate is the largest message's bytes over its seconds. Sizes should be well
    apart, such as powers of two: between nearly equal sizes the slope is noise.

    Args:
        bytes_X: (X,) int64, message sizes, rising, above zero.
        seconds_X: (X,) float64, the time of each message, above zero.
    """
    sent_X, took_X = np.asarray(bytes_X, dtype=np.float64), np.asarray(seconds_X, dtype=np.float64)
    assert (np.diff(sent_X, prepend=0) > 0).all(), "sizes rise from above zero"
    slope = np.polyfit(sent_X, took_X, 1)[0] if len(sent_X) > 1 else 0.0
    rate_Bps = float(1 / slope if slope > 0 else sent_X[-1] / took_X[-1])
    startup_s = max(0.0, float(took_X[0] - sent_X[0] / rate_Bps))
    return LinkFit(startup_s, rate_Bps, float(np.median(np.abs((startup_s + sent_X / rate_Bps) / took_X - 1))))


TIERS = 1.25  # how many times as fast links inside hosts must be as those between them, for hosts to be servers


def find_servers(rate_Bps_GG: ArrayLike, host_G: ArrayLike) -> IntArray:
    """Returns each rank's server, (G,) int64: its host, if links inside hosts are clearly faster than those between them.

    They are if, in the median, they are more than TIERS times as fast, and each host has several ranks: a single slow rank may
    as well have a slow port. Otherwise all ranks are on one server. NVLink pairs on a host are no servers: no NIC lies between
    them.

    Args:
        rate_Bps_GG: (G, G) float64, bytes per second from rank to rank, measured one pair at a time; above zero except on the
            diagonal.
        host_G: (G,) int64, the host of each rank, numbered from zero.
    """
    rates_GG, hosts_G = np.asarray(rate_Bps_GG), np.asarray(host_G, dtype=np.int64)
    between_GG = ~np.eye(len(rates_GG), dtype=np.bool_)
    ranks_N, inside_GG = np.bincount(hosts_G), np.equal.outer(hosts_G, hosts_G)
    if len(ranks_N) == 1 or (ranks_N == 1).any():
        return np.zeros_like(hosts_G)
    clear = np.median(rates_GG[inside_GG & between_GG]) > TIERS * np.median(rates_GG[~inside_GG])
    return hosts_G if clear else np.zeros_like(hosts_G)
