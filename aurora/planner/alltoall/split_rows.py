"""Rows of orders that split transfers, collected slot by slot."""

from dataclasses import replace

import numpy as np

from aurora.planner.alltoall.open_shop import DenseShop
from aurora.planner.alltoall.pairs import all_pairs, order_of
from aurora.types import Order, SubChannels
from aurora.types.arrays import FloatArray, IntArray

SLOTS = 8  # slots per rank at most; Birkhoff's largest-first matchings need fewer on most traffic


class SplitRows:
    """Collects the rows of an order, each a part of its pair's work.

    Args:
        work_GG: (n, n) int64, units of work from each sender to each receiver.
    """

    def __init__(self, work_GG: IntArray) -> None:
        self._work_GG, self._done_GG = work_GG, np.zeros_like(work_GG)
        self._rows: list[tuple[int, int]] = []
        self._shares: list[tuple[float, float]] = []
        self._sub_channels: list[int] = []

    def serve(self, src: int, dst: int, units: int, sub_channels: int = 1) -> None:
        """Appends a row that carries the next `units` of the pair's work.

        Args:
            src: the sender.
            dst: the receiver.
            units: units of work.
            sub_channels: sub-channels that the row takes of both ports.
        """
        before, whole = int(self._done_GG[src, dst]), int(self._work_GG[src, dst])
        self._done_GG[src, dst] += units
        self._rows.append((src, dst))
        self._shares.append((before / whole, (before + units) / whole))
        self._sub_channels.append(sub_channels)

    def order(self, method: str, out_G: IntArray | None = None, in_G: IntArray | None = None) -> Order:
        """Returns an order of the rows served so far, then of the work that is left, in dense open-shop order.

        Args:
            method: the order's name.
            out_G: (n,) int64, sub-channels of each sending port; None: one partner at a time. What is left takes all
                sub-channels that both of its ports have.
            in_G: (n,) int64, sub-channels of each receiving port; None as out_G.
        """
        n = len(self._work_GG)
        width_GG = np.ones((n, n)) if out_G is None or in_G is None else np.minimum(out_G[:, None], in_G[None, :])
        left_GG = self._work_GG - self._done_GG
        if left_GG.any():
            shop = DenseShop(n)
            shop.run(left_GG / width_GG)
            for src, dst in zip(shop.src_X[: shop.count].tolist(), shop.dst_X[: shop.count].tolist(), strict=True):
                self.serve(src, dst, int(left_GG[src, dst]), int(width_GG[src, dst]))
        silent = [pair for pair in all_pairs(n) if self._work_GG[pair] == 0]
        share_X2 = np.array([*self._shares, *([(0.0, 1.0)] * len(silent))]).reshape(-1, 2)
        made = replace(order_of(method, self._rows + silent), share_X2=share_X2)
        if out_G is None or in_G is None:
            return made
        row_X = np.array([*self._sub_channels, *([1] * len(silent))], dtype=np.int64)
        return replace(made, sub_channels=SubChannels(row_X, out_G, in_G))


def ticks(work_GG: IntArray | FloatArray, whole: float) -> IntArray:
    """Returns work as integers, in units of a 2^40th of a whole, rounded up.

    Args:
        work_GG: (n, n), work in any unit.
        whole: an amount of work in that unit, which becomes 2^40.

    Returns:
        (n, n) int64.
    """
    return np.ceil(work_GG / max(whole, 1e-300) * 2**40).astype(np.int64)
