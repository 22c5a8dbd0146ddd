"""Fits a link's start-up and rate to measured message times, and finds a cluster's servers by the rates of its links."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, above_zero, counts, locked, numbers


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
    sent_X, took_X = above_zero("fit_link", ("bytes", "seconds"), counts("fit_link: bytes", bytes_X, 1), seconds_X)
    if (np.diff(sent_X) <= 0).any():
        raise BadInput("fit_link: expected bytes that rise")
    rate_Bps = float(sent_X[-1] / took_X[-1])
    if len(sent_X) > 1 and took_X[-1] > took_X[-2]:
        rate_Bps = float((sent_X[-1] - sent_X[-2]) / (took_X[-1] - took_X[-2]))
    startup_s = max(0.0, float(took_X[0] - sent_X[0] / rate_Bps))
    return LinkFit(startup_s, rate_Bps, float(np.median(np.abs((startup_s + sent_X / rate_Bps) / took_X - 1))))


TIERS = 1.25  # how many times as fast links inside a server must be as those to other servers
Parts = list[IntArray]  # the ranks of each server


def find_servers(rate_Bps_GG: ArrayLike, host_G: ArrayLike | None = None) -> IntArray:
    """Finds which ranks share a server: links inside a server are clearly faster than those between servers.

    Ranks are clustered by the logarithms of the rates (average linkage), and the coarsest clear partition is taken. A partition
    is clear if at least two of its servers have several ranks and, in each of these servers, the slowest internal link is

    - more than TIERS times as fast as the fastest link to other servers, and
    - faster by more than the spread of internal links that the ranks' ports do not explain.

    If no partition is clear, hosts are the servers if the median rate of links inside hosts is more than TIERS times the median
    rate of all others.

    A server consists of whole hosts: ranks of one host reach each other without a NIC, and faster links among them are NVLink
    pairs or rings. Ranks with slow ports do not form a server: a slow port is slow to all ranks.

    Args:
        rate_Bps_GG: (G, G) float64, bytes per second from rank to rank, measured one pair at a time; above zero except on the
            diagonal.
        host_G: (G,) int64, the host of each rank; None: unknown, so that servers follow from the rates alone.

    Returns:
        (G,) int64, each rank's server, numbered from zero in the order of their first ranks; all zero if none are clear.

    Raises:
        BadInput: if the rates are not a square, or one is not above zero.
    """
    rates_GG = numbers("find_servers: rate_Bps_GG", rate_Bps_GG, 2)
    ranks = len(rates_GG)
    between = ~np.eye(ranks, dtype=bool)
    if rates_GG.shape != (ranks, ranks) or (rates_GG[between] <= 0).any():
        raise BadInput("find_servers: rate_Bps_GG: expected a square of rates above zero")
    hosts_G = np.arange(ranks) if host_G is None else np.asarray(host_G)
    if ranks > 2:
        log_GG = np.log(np.where(between, rates_GG, 1.0))
        symmetric_GG = (log_GG + log_GG.T) / 2
        distance_GG = np.where(between, symmetric_GG[between].max() - symmetric_GG, 0.0)
        tree = linkage(squareform(distance_GG, checks=False), "average")
        for label_G in cut_tree(tree, n_clusters=np.arange(2, ranks)).T:
            if _of_whole_hosts(label_G, hosts_G) and _clear(rates_GG, _parts(label_G)):
                return _numbered(label_G)
    parts = _parts(hosts_G)
    if len(parts) > 1 and all(len(part) > 1 for part in parts):
        inside_GG = np.equal.outer(hosts_G, hosts_G)
        if np.median(rates_GG[inside_GG & between]) > TIERS * np.median(rates_GG[~inside_GG]):
            return _numbered(hosts_G)
    return locked(np.zeros(ranks, dtype=np.int64))


def _parts(label_G: IntArray) -> Parts:
    """The ranks of each label."""
    return [np.flatnonzero(label_G == label) for label in np.unique(label_G)]


def _numbered(label_G: IntArray) -> IntArray:
    """The labels as numbers from zero, in the order of their first ranks."""
    _, first_N, which_G = np.unique(label_G, return_index=True, return_inverse=True)
    return locked(np.argsort(np.argsort(first_N))[which_G].astype(np.int64))


def _of_whole_hosts(label_G: IntArray, host_G: IntArray) -> bool:
    """Returns whether no host has ranks of two labels."""
    return all(len(np.unique(label_G[part])) == 1 for part in _parts(host_G))


def _clear(rates_GG: FloatArray, parts: Parts) -> bool:
    """Returns whether links inside are clearly faster than those between the parts; a slow port is no reason."""
    several = [part for part in parts if len(part) > 1]
    for part in several:
        others = np.setdiff1d(np.arange(len(rates_GG)), part)
        outside_Bps = max(rates_GG[np.ix_(part, others)].max(), rates_GG[np.ix_(others, part)].max())
        inside_GG, pairs = rates_GG[np.ix_(part, part)].copy(), ~np.eye(len(part), dtype=bool)
        np.fill_diagonal(inside_GG, 0.0)
        explained_GG = np.minimum.outer(inside_GG.max(axis=1), inside_GG.max(axis=0))
        gap = inside_GG[pairs].min() / outside_Bps
        if gap <= max(TIERS, (explained_GG[pairs] / inside_GG[pairs]).max()):
            return False
    return len(several) > 1
