"""Predicts seconds of exchanges from measured curves, by interpolation in bytes and number of partners."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from aurora.types import Network, Order, TransferCurve
from aurora.types.arrays import FloatArray, IntArray, above_zero

COUNT_BYTES = 8  # that a rank tells every other of each


def fit_transfer_curve(partners: int, bytes_X: ArrayLike, seconds_X: ArrayLike) -> TransferCurve:
    """Makes a TransferCurve (seconds by bytes) from measured exchanges.

    Each size gets the geometric mean of its measured seconds. If a larger exchange was faster than a smaller one, the smaller
    one gets the larger one's seconds, because measurements are too long more often than too short.

    Args:
        partners: number of GPUs that each GPU sends to, and receives from.
        bytes_X: (X,) bytes that one port sends to all partners together, above zero, in any sequence; sizes may repeat.
        seconds_X: (X,) measured seconds, above zero.

    Raises:
        BadInput: if the arrays are not numbers above zero, empty, or of different lengths.
    """
    sent_X, took_X = above_zero("link curve", ("bytes", "seconds"), bytes_X, seconds_X)
    size_X, of_X = np.unique(sent_X, return_inverse=True)
    mean_X = np.exp(np.bincount(of_X, np.log(took_X)) / np.bincount(of_X))
    return TransferCurve(partners, size_X, np.minimum.accumulate(mean_X[::-1])[::-1])


def exchange_seconds(curves: Sequence[TransferCurve], bytes_X: ArrayLike, partners_X: ArrayLike) -> FloatArray:
    """Returns (X,) float64, the seconds of exchanges, predicted from measured curves.

    In bytes: logarithms are interpolated by monotone cubics. Below the smallest measured size, an exchange takes that size's
    seconds; above the largest, it runs at that size's bytes per second.

    In the number of partners, n - 1 on n GPUs, exchanges are compared at equal bytes per buffer, of which the part (n - 1) / n
    leaves the GPU. Between two measured numbers, seconds are interpolated linearly in that part. Below the fewest measured
    partners, the curve of the fewest is used. Above the most, the growth between the two largest numbers shows the limit: a
    port, with seconds in proportion to (n - 1) / n; or a path that all GPUs share, with seconds as a power of n - 1.

    Args:
        curves: one curve or more, by rising partners.
        bytes_X: (X,) bytes that one port sends to all partners together, above zero.
        partners_X: (X,) number of partners of that port, one or more.

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
    """Returns the predicted seconds of the exchange of token counts before an all-to-all.

    With measured link curves: an exchange of that size. Without: the start-ups of an allgather by recursive doubling.
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

    Without curves: the larger start-up of the row's two ends. With curves: at each end, the measured seconds of an exchange of
    all messages that the port has open at the same time, minus their bytes / port rate; the larger of both ends counts. So a
    predicted exchange takes its measured seconds, but never less than the ports need for its bytes. If ports differ, the
    slowest port's rate is used, because a measured exchange waits for it; but at least the rate of the curves' largest
    exchanges.

    Args:
        order: the order.
        row_X: (X,) indices of its rows.
        size_X: (X,) int64, bytes of each of these rows, above zero.
        network: only its ports and curves are used.
        flowing_X: (X,) the part of each row's bytes that takes time at its ports; the rest passes in their burst, see
            `port_bursts`.
    """
    src_X, dst_X = order.pairs_X2[row_X].T
    if not network.curves:
        return np.asarray(network.pair_startup_s_GG[src_X, dst_X])
    slowest_Bps = _slowest_Bps(network)
    tier_X = np.zeros(len(row_X), dtype=np.int64) if order.tier_X is None else order.tier_X[row_X]
    longest_X = np.zeros(len(row_X))
    for rank_X, most_open in ((src_X, order.sends_open), (dst_X, order.recvs_open)):
        port_X = tier_X * network.gpus + rank_X
        rows_X = np.bincount(port_X)[port_X]
        rest_X = np.bincount(port_X, size_X)[port_X] - size_X
        together_X = np.minimum(rows_X, most_open)
        posted_X = size_X + (together_X - 1) * rest_X / np.maximum(rows_X - 1, 1)
        seconds_X = exchange_seconds(network.curves, posted_X, together_X)
        longest_X = np.maximum(longest_X, seconds_X - flowing_X * posted_X / slowest_Bps)
    return longest_X


def port_bursts(src_X: IntArray, dst_X: IntArray, size_X: IntArray, network: Network) -> FloatArray:
    """Returns (2, G) float64, the burst of each port in an exchange: bytes that it sends (row 0), and receives (1), in no time.

    Clouds limit ports by token buckets, which let some bytes pass at once after a rest. Measured curves show this as seconds
    below bytes / port rate. Without curves, bursts are zero.

    Args:
        src_X: (X,) the sending rank of each message.
        dst_X: (X,) the receiving rank of each message.
        size_X: (X,) int64, bytes of each message, above zero.
        network: only its ports and curves are used.
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
