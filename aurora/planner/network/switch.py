"""The switch: ports and links with their own rates, flows that share them max-min fairly, orders that gate who may start."""

from dataclasses import dataclass

import numpy as np

from aurora.planner.network.max_min_fair import (
    DONE,
    HEAP,
    LOGGED,
    RECVS,
    SENDS,
    FlowRows,
    Log,
    Queues,
    SharedResources,
    join,
    run,
)
from aurora.planner.network.routes import Routes, route
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

FIRST_LOG = 4096  # rows that a log has room for before it grows


@dataclass(frozen=True)
class Transfers:
    """What an all-to-all carried, (X,) each; start_s_X is before a transfer's start-up."""

    src_X: IntArray
    dst_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray


@dataclass(frozen=True)
class Pieces:
    """The parts of transfers that flowed at one rate, (X,) each, as they ended."""

    src_X: IntArray
    dst_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray
    rate_Bps_X: FloatArray


def gated(order: Order, bytes_GG: IntArray, routes: Routes) -> tuple[IntArray, IntArray, FloatArray]:
    """The rows of `order` that carry something: (X,) which, how many bytes, and the rate that each is held to.

    Held to its lanes' share of the slower port, to its bytes over the fluid optimum where the order is paced (coflow MADD), or
    to nothing (infinity).
    """
    n = len(bytes_GG)
    src_X, dst_X = order.pairs_X2.T
    cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
    size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
    most_Bps_X = np.full(len(size_X), np.inf)
    if order.sub_channels is not None:
        out_Bps, in_Bps = routes.room_R[:n], routes.room_R[n : 2 * n]
        lane_Bps_X = np.minimum((out_Bps / order.sub_channels.out_G)[src_X], (in_Bps / order.sub_channels.in_G)[dst_X])
        most_Bps_X = order.sub_channels.row_X * lane_Bps_X
    elif order.paced and (optimum_s := routes.seconds(bytes_GG)) > 0:
        most_Bps_X = size_X / optimum_s
    row_X = np.flatnonzero(size_X)
    return row_X, size_X[row_X], most_Bps_X[row_X]


class Switch:
    """All-to-alls under way. A transfer starts when both ends have joined and it is among the first open ones of each; it pays
    the start-up of its slower end, during which it holds no bandwidth, then flows.

    logging: keep what flowed at which rate, for `pieces`. An event costs what is connected to the ports that it touches, so
    with one partner at a time O(log X).
    """

    def __init__(self, network: Network, logging: bool = False) -> None:
        routes = route(network)
        n, resources = network.gpus, len(routes.room_R)
        self._network, self._routes, self._ranks = network, routes, n
        self._logging = logging
        self._spans: list[tuple[int, int] | None] = []  # of each slot: the rows of its all-to-all
        self._rows = _rows(0, routes.use_GGK.shape[2])
        at, stop, room, undone = _whole(4, 0, 2, n)
        self._queues = Queues(_whole(2, 0), at, stop, room, undone, _whole(0, n))
        self._net = SharedResources(
            room=routes.room_R,
            use=routes.use_GGK,
            share=routes.share_GGK,
            head=np.full(resources, -1, dtype=np.int64),
            flows=_whole(resources),
            free=np.zeros(resources),
            load=np.zeros(resources),
            open=_whole(resources),
            stamp=_whole(resources),
            found=_whole(resources),
            dirty=_whole(resources),
            heap=_whole(0),
            rows=_whole(0),
            done=_whole(0, 2),
            counter=_whole(5),
            now_s=np.zeros(1),
            incast=np.array([float(network.incast)]),
        )
        self._log = _log(FIRST_LOG if logging else 0)

    @property
    def now_s(self) -> float:
        return float(self._net.now_s[0])

    @property
    def busy(self) -> bool:
        """Whether a transfer has started and not ended."""
        return bool(self._net.counter[HEAP])

    def open(self, order: Order, bytes_GG: IntArray) -> int:
        """A new all-to-all of bytes_GG (G, G) int64, in which no rank takes part yet; gives its number."""
        row_X, size_X, most_Bps_X = gated(order, bytes_GG, self._routes)
        slot, first = self._room_for(len(row_X))
        own = slice(first, first + len(row_X))
        src_X, dst_X = order.pairs_X2[row_X].T
        rows, queues, sub_channels = self._rows, self._queues, order.sub_channels
        rows.src[own], rows.dst[own], rows.size[own], rows.left[own], rows.slot[own] = src_X, dst_X, size_X, size_X, slot
        rows.most_Bps[own], rows.startup_s[own] = most_Bps_X, self._network.pair_startup_s_GG[src_X, dst_X]
        rows.sub_channels[own] = 1 if sub_channels is None else sub_channels.row_X[row_X]
        rows.admitted[own] = rows.stamp[own] = 0
        queues.room[slot, SENDS] = order.sends_open if sub_channels is None else sub_channels.out_G
        queues.room[slot, RECVS] = order.recvs_open if sub_channels is None else sub_channels.in_G
        queues.joined[slot] = 0
        for side, rank_X in ((SENDS, src_X), (RECVS, dst_X)):
            queues.row[side, own] = first + np.argsort(rank_X, kind="stable")
            queues.undone[slot, side] = np.bincount(rank_X, minlength=self._ranks)
            queues.stop[slot, side] = first + queues.undone[slot, side].cumsum()
            queues.at[slot, side] = queues.stop[slot, side] - queues.undone[slot, side]
        return slot

    def join(self, number: int, rank: int) -> bool:
        """`rank` takes part from now on; whether it is done already, with nothing to send or receive."""
        join(self._rows, self._queues, self._net, number, rank)
        return not self._queues.undone[number, :, rank].any()

    def run(self, until_s: float = float("inf")) -> list[tuple[int, int]]:
        """On to until_s, or to where a rank has just sent and received all of its own: which, (number, rank) each."""
        while not run(self._rows, self._queues, self._net, self._log, self._logging, until_s):
            self._log = Log(*(np.concatenate([column, np.zeros_like(column)]) for column in self._log))
        count = self._net.counter
        done = [(int(number), int(rank)) for number, rank in self._net.done[: count[DONE]]]
        count[DONE] = 0
        return done

    def close(self, number: int) -> Transfers:
        """What the all-to-all carried, in its order, once all ranks are done with it; its number may be given again."""
        assert not self._queues.undone[number].any(), "an all-to-all is closed before its end"
        span = self._spans[number]
        assert span is not None
        self._spans[number] = None
        own, rows = slice(*span), self._rows
        src_X, dst_X, bytes_X = (column[own].copy() for column in (rows.src, rows.dst, rows.size))
        return Transfers(src_X, dst_X, bytes_X, rows.start_s[own].copy(), rows.end_s[own].copy())

    def pieces(self) -> Pieces:
        """What has flowed since the beginning, where `logging` and before anything is closed. Bytes are whole and sum to each
        transfer's."""
        count, log = int(self._net.counter[LOGGED]), self._log
        row_X = log.row[:count]
        by_row = np.argsort(row_X, kind="stable")
        upto_X = np.rint(log.carried[:count]).astype(np.int64)[by_row]
        again_X = np.diff(row_X[by_row], prepend=-1) == 0
        bytes_X = np.empty_like(upto_X)
        bytes_X[by_row] = upto_X - np.where(again_X, np.roll(upto_X, 1), 0)
        rows = self._rows
        return Pieces(rows.src[row_X], rows.dst[row_X], bytes_X, log.start_s[:count], log.end_s[:count], log.rate_Bps[:count])

    def rates(self) -> dict[tuple[int, int], float]:
        """Bytes per second of each pair's transfer under way, as of the last `run`."""
        rows = self._rows
        flowing = self._net.heap[: self._net.counter[HEAP]]
        pairs = zip(rows.src[flowing].tolist(), rows.dst[flowing].tolist(), strict=True)
        return dict(zip(pairs, rows.rate_Bps[flowing].tolist(), strict=True))

    def _room_for(self, length: int) -> tuple[int, int]:
        """A slot, and the first of `length` rows that no all-to-all uses."""
        first = 0
        for start, stop in sorted(span for span in self._spans if span is not None):
            if start - first >= length:
                break
            first = max(first, stop)
        if (more := first + length - len(self._rows.src)) > 0:
            self._grow(max(more, len(self._rows.src)))
        if None in self._spans:
            slot = self._spans.index(None)
        else:
            slot = len(self._spans)
            self._spans.append(None)
            own = (np.concatenate([column, np.zeros_like(column, shape=(1, *column.shape[1:]))]) for column in self._queues[1:])
            self._queues = Queues(self._queues.row, *own)
            self._net = self._net._replace(done=_whole(len(self._spans) * self._ranks, 2))
        self._spans[slot] = (first, first + length)
        return slot, first

    def _grow(self, more: int) -> None:
        fresh = _rows(more, self._routes.use_GGK.shape[2])
        self._rows = FlowRows(*(np.concatenate(columns) for columns in zip(self._rows, fresh, strict=True)))
        self._queues = self._queues._replace(row=np.concatenate([self._queues.row, _whole(2, more)], axis=1))
        heap, rows = (np.concatenate([column, _whole(more)]) for column in (self._net.heap, self._net.rows))
        self._net = self._net._replace(heap=heap, rows=rows)


def _whole(*shape: int) -> IntArray:
    return np.zeros(shape, dtype=np.int64)


def _rows(length: int, width: int) -> FlowRows:
    whole, number = iter(_whole(8, length)), iter(np.zeros((8, length)))
    return FlowRows(
        src=next(whole),
        dst=next(whole),
        slot=next(whole),
        size=next(whole),
        sub_channels=next(whole),
        most_Bps=next(number),
        startup_s=next(number),
        admitted=next(whole),
        left=next(number),
        since_s=next(number),
        rate_Bps=next(number),
        event_s=next(number),
        start_s=next(number),
        end_s=next(number),
        place=next(whole),
        stamp=next(whole),
        next=_whole(length, width),
        prev=_whole(length, width),
    )


def _log(length: int) -> Log:
    return Log(_whole(length), *(np.zeros(length) for _ in range(4)))
