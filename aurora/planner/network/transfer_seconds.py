"""Seconds of exchanges by measured curves: interpolated between bytes and partners, extrapolated by bounds."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from aurora.types import Network, Order, TransferCurve
from aurora.types.arrays import FloatArray, IntArray, above_zero

COUNT_BYTES = 8  # that a rank tells every other of each


def fit_transfer_curve(partners: int, bytes_X: ArrayLike, seconds_X: ArrayLike) -> TransferCurve:
    """Makes a curve of measured exchanges.

    The geometric mean of each size's seconds counts. Where a larger exchange was faster, smaller ones get its seconds: what is
    measured too long is the more likely error.

    Args:
        partners: how many GPUs each GPU sends to, and receives from.
        bytes_X: (X,) bytes that a port sends in all, above zero, in any sequence; sizes may repeat.
        seconds_X: (X,) measured seconds, above zero.

    Raises:
        BadInput: if the arrays are not numbers above zero, empty, or of different lengths.
    """
    sent_X, took_X = above_zero("link curve", ("bytes", "seconds"), bytes_X, seconds_X)
    size_X, of_X = np.unique(sent_X, return_inverse=True)
    mean_X = np.exp(np.bincount(of_X, np.log(took_X)) / np.bincount(of_X))
    return TransferCurve(partners, size_X, np.minimum.accumulate(mean_X[::-1])[::-1])


def exchange_seconds(curves: Sequence[TransferCurve], bytes_X: ArrayLike, partners_X: ArrayLike) -> FloatArray:
    """Returns (X,) float64, the seconds of exchanges by measured curves.

    Between sizes, logarithms are interpolated by cubics that keep the curve monotone. Below the smallest size an exchange takes
    the smallest's seconds, above the largest it has the largest's bytes per second. Between two numbers of partners, seconds
    of one buffer (a port's bytes and the part that stays) are interpolated in the part of it that leaves, (n - 1) / n on n
    GPUs. Fewer partners than measured take the seconds of the fewest for their bytes. For more partners than measured, the
    two largest numbers say what limits: each port, whose seconds grow with (n - 1) / n, or a path that all share, with n - 1
    or, if they grew faster than that, with the power of it by which they grew.

    Args:
        curves: by rising partners, one at least.
        bytes_X: (X,) bytes that a port sends in all, above zero.
        partners_X: (X,) its partners, one or more.

    Source (interpolation): Fritsch and Carlson, SIAM J. Numer. Anal. 17, 1980.
    """
    sent_X, many_X = np.broadcast_arrays(np.asarray(bytes_X, dtype=np.float64), np.asarray(partners_X, dtype=np.float64))
    measured_C = np.array([curve.partners for curve in curves])
    after_X = np.searchsorted(measured_C, many_X)
    seconds_X = np.empty(sent_X.shape)
    for after in np.unique(after_X):
        own_X = after_X == after
        sent, many = sent_X[own_X], many_X[own_X]
        if after == 0 or len(curves) == 1:
            seconds_X[own_X] = _seconds(curves[0], sent)
        else:
            larger = min(after, len(curves) - 1)
            seconds_X[own_X] = _by_partners(curves[larger - 1], curves[larger], sent, many)
    return seconds_X


def counts_seconds(network: Network) -> float:
    """Returns the seconds in which ranks tell each other their token counts: an exchange by the link curves.

    Without measured curves, the start-ups of an allgather by recursive doubling.
    """
    partners = network.gpus - 1
    if not partners:
        return 0.0
    if not network.curves:
        return partners.bit_length() * float(network.startup_s_G.max())
    return float(exchange_seconds(network.curves, [COUNT_BYTES * network.gpus * partners], [partners])[0])


def _seconds(curve: TransferCurve, bytes_X: FloatArray) -> FloatArray:
    """The seconds of exchanges with as many partners as the curve has."""
    largest = curve.bytes_X[-1]
    within_X = np.clip(bytes_X, curve.bytes_X[0], largest)
    seconds_X = np.full(bytes_X.shape, curve.seconds_X[0])
    if (spline := _spline(curve)) is not None:
        seconds_X = np.exp(spline(np.log(within_X)))
    return np.asarray(seconds_X * np.maximum(bytes_X / largest, 1.0))


@lru_cache(maxsize=64)
def _spline(curve: TransferCurve) -> Callable[[FloatArray], FloatArray] | None:
    """Logarithm of seconds by logarithm of bytes; None for a single point."""
    from scipy.interpolate import PchipInterpolator  # a third of a second, which only measured curves are worth

    if len(curve.bytes_X) == 1:
        return None
    spline: Callable[[FloatArray], FloatArray] = PchipInterpolator(np.log(curve.bytes_X), np.log(curve.seconds_X))
    return spline


def _leaving(partners: ArrayLike) -> FloatArray:
    """The part of a buffer that leaves its GPU."""
    many = np.asarray(partners, dtype=np.float64)
    return np.asarray(many / (many + 1))


def _by_partners(few: TransferCurve, many: TransferCurve, bytes_X: FloatArray, partners_X: FloatArray) -> FloatArray:
    """Seconds with more partners than `few` has, in between or, where `many` has fewer as well, beyond."""
    part_X, low, high = _leaving(partners_X), _leaving(few.partners), _leaving(many.partners)
    buffer_X = bytes_X / part_X
    few_X, many_X = (_seconds(curve, buffer_X * part) for curve, part in ((few, low), (many, high)))
    if partners_X.max() <= many.partners:
        weight_X = (part_X - low) / (high - low)
        return np.asarray((1 - weight_X) * few_X + weight_X * many_X)
    own_X = many_X + np.maximum(many_X - few_X, 0.0) * (part_X - high) / (high - low)
    by_own, by_shared, grew_X = np.log(high / low), np.log(many.partners / few.partners), np.log(many_X / few_X)
    shared_X = many_X * (partners_X / many.partners) ** np.maximum(grew_X / by_shared, 1.0)
    weight_X = np.clip((grew_X - by_own) / (by_shared - by_own), 0.0, 1.0)
    return np.asarray(own_X ** (1 - weight_X) * shared_X**weight_X)


def row_startups(
    order: Order, row_X: IntArray, size_X: IntArray, network: Network, flowing_X: FloatArray | float = 1.0
) -> FloatArray:
    """Returns (X,) float64, the start-up seconds of rows of an order.

    Without curves that is the start-up of the row's slower end. With curves, at each end it is what the measured exchange of
    all messages that the port has open with this one takes beyond their bytes at a port's rate, and the longer of both counts.
    An exchange that was measured then takes the measured seconds, and never less than the ports need for what flows. Of unequal
    ports the slowest counts, whose bytes a measured exchange waits for; but no slower than the curves' largest exchanges were.

    Args:
        order: the order.
        row_X: (X,) indices of its rows.
        size_X: (X,) int64 the bytes that they carry, above zero.
        network: its ports and curves.
        flowing_X: (X,) the part of each row's bytes that takes time of its ports, see `port_bursts`.
    """
    src_X, dst_X = order.pairs_X2[row_X].T
    if not network.curves:
        return np.asarray(network.pair_startup_s_GG[src_X, dst_X])
    sub = order.sub_channels
    sides = (
        (src_X, order.sends_open if sub is None else sub.out_G[src_X]),
        (dst_X, order.recvs_open if sub is None else sub.in_G[dst_X]),
    )
    slowest_Bps = _slowest_Bps(network)
    tier_X = np.zeros(len(row_X), dtype=np.int64) if order.tier_X is None else order.tier_X[row_X]
    longest_X = np.zeros(len(row_X))
    for rank_X, open_X in sides:
        port_X = tier_X * network.gpus + rank_X
        rows_X = np.bincount(port_X)[port_X]
        rest_X = np.bincount(port_X, size_X)[port_X] - size_X
        together_X = np.minimum(rows_X, open_X)
        posted_X = size_X + (together_X - 1) * rest_X / np.maximum(rows_X - 1, 1)
        seconds_X = exchange_seconds(network.curves, posted_X, together_X)
        longest_X = np.maximum(longest_X, seconds_X - flowing_X * posted_X / slowest_Bps)
    return longest_X


def port_bursts(src_X: IntArray, dst_X: IntArray, size_X: IntArray, network: Network) -> FloatArray:
    """Returns (2, G) float64, bytes of an exchange that ports were measured to send and to receive in no time.

    Token buckets, as clouds hold ports to their rates with, let some bytes pass at once after a rest: then curves are below a
    port's bytes at its rate. Without curves there are none.

    Args:
        src_X: (X,) the sending rank of each message.
        dst_X: (X,) the receiving one.
        size_X: (X,) int64 its bytes, above zero.
        network: its ports and curves.
    """
    burst_2G = np.zeros((2, network.gpus))
    if not network.curves or not len(size_X):
        return burst_2G
    for burst_G, rank_X in zip(burst_2G, (src_X, dst_X), strict=True):
        partners_G, bytes_G = np.bincount(rank_X, minlength=network.gpus), np.bincount(rank_X, size_X, network.gpus)
        used_G = partners_G > 0
        seconds_G = exchange_seconds(network.curves, bytes_G[used_G], partners_G[used_G])
        burst_G[used_G] = np.maximum(bytes_G[used_G] - seconds_G * _slowest_Bps(network), 0.0)
    return burst_2G


def _slowest_Bps(network: Network) -> float:
    """Bytes per second of the port for which measured exchanges wait."""
    largest_Bps = max(curve.bytes_X[-1] / curve.seconds_X[-1] for curve in network.curves)
    return float(max(min(network.out_Bps_G.min(), network.in_Bps_G.min()), largest_Bps))
