"""Event-driven model of the network: an order decides when transfers start; running ones share ports and NICs max-min fairly.

`timed` computes the schedule of an order for given bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from aurora.algorithms.network.max_min_fair import (
    DONE,
    LOGGED,
    RECVS,
    SENDS,
    UNDER_WAY,
    FlowRows,
    PortQueues,
    RateLog,
    SharedResources,
    join,
    perform,
    run,
    set_event,
)
from aurora.algorithms.network.port_bounds import fluid_bound, one_to_one_bound, pair_rates
from aurora.algorithms.network.routes import cut_bound, route, rows_to_send
from aurora.types import Network, Order, Schedule
from aurora.types.arrays import FloatArray, IntArray, locked, read_only
from aurora.types.compiled import njit

FIRST_LOG = 4096  # rows that a log holds before it grows


@dataclass(frozen=True)
class Transfers:
    """Timed transfers of an all-to-all, in its order, as columns (X,). start_s_X is when a transfer's start-up begins."""

    src_X: IntArray
    dst_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray


@dataclass(frozen=True)
class Pieces(Transfers):
    """The parts of transfers that flowed at one rate, in the order in which they ended; start-ups are left out.

    number_X is the number of each part's all-to-all, as `Switch.open` returned it.
    """

    rate_Bps_X: FloatArray
    number_X: IntArray


class Switch:
    """Simulation of all-to-alls on one network.

    A transfer starts when both of its ranks have joined the all-to-all and the order lets both of them have it under way. It
    first takes its start-up, without bandwidth, then flows at its max-min fair rate. The cost of an event
    grows with the number of flows that share ports with it, directly or through other flows; it is O(log X) if every rank has
    one partner at a time.

    Args:
        network: ports, start-ups, servers and incast.
        logging: whether to record the parts of transfers that flowed at one rate, for `pieces`.
        rows: initial capacity, in transfers; it grows as needed.
    """

    def __init__(self, network: Network, logging: bool = False, rows: int = 0) -> None:
        routes = route(network)
        n, resources = network.gpus, len(routes.capacity_Bps_R)
        self._network, self._routes, self._ranks, self._logging = network, routes, n, logging
        self._spans: list[tuple[int, int] | None] = []  # of each slot: the rows of its all-to-all
        self._rows = _rows(0, routes.use_GGK.shape[2])
        self._queues = PortQueues(_whole(2, 0), *_whole(3, 0, 2, n, 1), *_whole(1, 0, 2, n), *_whole(2, 0, n))
        resource_columns = [np.full(resources, -1), *_whole(5, resources), np.zeros(resources)]
        scratch = [np.full(2, np.inf), _whole(0), _whole(0, 2), _whole(5), np.zeros(1), np.array([float(network.incast)])]
        self._net = SharedResources(routes.capacity_Bps_R, routes.use_GGK, *resource_columns, *scratch)
        self._log = _log(FIRST_LOG if logging else 0)
        if rows:
            self._grow(rows)

    @property
    def now_s(self) -> float:
        """The present simulated time in seconds."""
        return float(self._net.now_s[0])

    @property
    def busy(self) -> bool:
        """True while a transfer has started and not ended."""
        return bool(self._net.counter[UNDER_WAY])

    def open(self, order: Order, bytes_GG: IntArray, staged: bool = False) -> int:
        """Adds an all-to-all, which ranks can `join`; returns its number.

        Args:
            order: the order of its transfers.
            bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
            staged: whether transfers run in stages (`Order.stage_X`): a rank's next transfers start when all that it has under
                way have ended, as NCCL's grouped calls do.

        Returns:
            The all-to-all's number.
        """
        row_X, size_X, limit_Bps_X = rows_to_send(order, bytes_GG, self._routes)
        slot, first = self._allocate(len(row_X), order.tiers)
        block = slice(first, first + len(row_X))
        src_X, dst_X = order.pairs_X2[row_X].T
        rows, queues = self._rows, self._queues
        rows.src[block], rows.dst[block], rows.bytes[block], rows.slot[block] = src_X, dst_X, size_X, slot
        rows.left_bytes[block], rows.limit_Bps[block] = size_X, limit_Bps_X
        rows.startup_s[block] = self._network.pair_startup_s_GG[src_X, dst_X]
        rows.stage[block] = order.stage_X[row_X] if staged else 0
        rows.tier[block] = 0 if order.tier_X is None else order.tier_X[row_X]
        rows.admitted[block] = rows.stamp[block] = 0
        queues.free[slot, SENDS], queues.free[slot, RECVS] = order.sends_open, order.recvs_open
        for side, rank_X in ((SENDS, src_X), (RECVS, dst_X)):
            port_X = rank_X * queues.at.shape[3] + rows.tier[block]
            queues.row[side, block] = first + np.lexsort((rows.stage[block], port_X))
            queues.unfinished[slot, side] = np.bincount(rank_X, minlength=self._ranks)
            count_GT = np.bincount(port_X, minlength=queues.at[slot, side].size).reshape(self._ranks, -1)
            queues.stop[slot, side] = first + count_GT.cumsum().reshape(count_GT.shape)
            queues.at[slot, side] = queues.stop[slot, side] - count_GT
        queues.stage[slot] = queues.under_way[slot] = 0
        return slot

    def join(self, number: int, rank: int) -> bool:
        """Adds a rank to an all-to-all, from the present time on. Returns True if it has nothing to send or receive."""
        join(self._rows, self._queues, self._net, number, rank)
        return not self._queues.unfinished[number, :, rank].any()

    def run(self, until_s: float = float("inf")) -> list[tuple[int, int]]:
        """Advances the simulated time until an all-to-all ends on some rank, or to until_s if that is earlier.

        An all-to-all ends on a rank when the rank has sent and received everything. Returns (number of the all-to-all, rank)
        for every end at that time; empty if until_s came first.
        """
        while not run(self._rows, self._queues, self._net, self._log, self._logging, until_s):
            self._grow_log()
        count = self._net.counter
        ends = [(int(number), int(rank)) for number, rank in self._net.done[: count[DONE]]]
        count[DONE] = 0
        return ends

    def perform(self, numbers: Sequence[int]) -> None:
        """Simulates all-to-alls in sequence until all have ended; a rank joins the next when the previous ends on it."""
        step_G = np.full(self._ranks, -1)
        while not perform(self._rows, self._queues, self._net, self._log, self._logging, np.array(numbers), step_G):
            self._grow_log()

    def close(self, number: int) -> Transfers:
        """Removes an all-to-all that all ranks have finished, and returns its transfers; its number may be used again."""
        assert not self._queues.unfinished[number].any(), "an all-to-all is closed before its end"
        span = self._spans[number]
        assert span is not None
        self._spans[number] = None
        block, rows = slice(*span), self._rows
        src_X, dst_X, bytes_X = (column[block].copy() for column in (rows.src, rows.dst, rows.bytes))
        return Transfers(src_X, dst_X, bytes_X, rows.start_s[block].copy(), rows.end_s[block].copy())

    def pieces(self) -> Pieces:
        """Returns all parts of transfers so far, each of constant rate, with whole bytes that sum to each transfer's bytes.

        Needs `logging`, and that no all-to-all has been closed.
        """
        count, log = int(self._net.counter[LOGGED]), self._log
        row_X = log.row[:count]
        by_row = np.argsort(row_X, kind="stable")
        upto_X = np.rint(log.carried_bytes[:count]).astype(np.int64)[by_row]
        again_X = np.diff(row_X[by_row], prepend=-1) == 0
        bytes_X = np.empty_like(upto_X)
        bytes_X[by_row] = upto_X - np.where(again_X, np.roll(upto_X, 1), 0)
        rows = self._rows
        start_s_X, end_s_X, rate_Bps_X = log.start_s[:count], log.end_s[:count], log.rate_Bps[:count]
        return Pieces(rows.src[row_X], rows.dst[row_X], bytes_X, start_s_X, end_s_X, rate_Bps_X, rows.slot[row_X])

    def _allocate(self, length: int, tiers: int) -> tuple[int, int]:
        """Allocates a slot of so many tiers, and `length` rows that no all-to-all uses; returns the slot and the first row."""
        first = 0
        for start, stop in sorted(span for span in self._spans if span is not None):
            if start - first >= length:
                break
            first = max(first, stop)
        if (more := first + length - len(self._rows.src)) > 0:
            self._grow(max(more, len(self._rows.src)))
        if (more := tiers - self._queues.at.shape[3]) > 0:
            queues = self._queues
            firsts, stops, free = (
                np.pad(column, [(0, 0)] * 3 + [(0, more)]) for column in (queues.at, queues.stop, queues.free)
            )
            self._queues = queues._replace(at=firsts, stop=stops, free=free)
        if None in self._spans:
            slot = self._spans.index(None)
        else:
            slot = len(self._spans)
            self._spans.append(None)
            arrays = (np.concatenate([array, np.zeros_like(array, shape=(1, *array.shape[1:]))]) for array in self._queues[1:])
            self._queues = PortQueues(self._queues.row, *arrays)
            self._net = self._net._replace(done=_whole(len(self._spans) * self._ranks, 2))
        self._spans[slot] = (first, first + length)
        return slot, first

    def _grow_log(self) -> None:
        """Doubles the log."""
        self._log = RateLog(*(np.concatenate([column, np.zeros_like(column)]) for column in self._log))

    def _grow(self, more: int) -> None:
        """Adds `more` rows."""
        fresh = _rows(more, self._routes.use_GGK.shape[2])
        self._rows = FlowRows(*(np.concatenate(columns) for columns in zip(self._rows, fresh, strict=True)))
        self._queues = self._queues._replace(row=np.concatenate([self._queues.row, _whole(2, more)], axis=1))
        before_s, places = self._net.event_s, 1 << (len(self._rows.src) - 1).bit_length()
        if len(before_s) < 2 * places:
            event_s = np.full(2 * places, np.inf)
            for row in np.flatnonzero(before_s[len(before_s) // 2 :] < np.inf):
                set_event(event_s, row, before_s[len(before_s) // 2 + row])
            self._net = self._net._replace(event_s=event_s)
        self._net = self._net._replace(rows=np.concatenate([self._net.rows, _whole(more)]))


def _whole(*shape: int) -> IntArray:
    """Zeros, int64."""
    return np.zeros(shape, dtype=np.int64)


def _rows(length: int, width: int) -> FlowRows:
    """`length` empty rows that use up to `width` resources each."""
    return FlowRows(*_whole(8, length), *np.zeros((7, length)), *_whole(2, length, width))


def _log(length: int) -> RateLog:
    """An empty log of `length` rows."""
    return RateLog(_whole(length), *(np.zeros(length) for _ in range(4)))


def timed(order: Order, bytes_GG: IntArray, network: Network, staged: bool = False) -> Schedule:
    """Computes the schedule of an order when all ranks begin at once; bytes_GG (G, G) int64 has a zero diagonal."""
    return timed_steps(order, bytes_GG[None], network, staged)


def timed_steps(order: Order, bytes_SGG: IntArray, network: Network, staged: bool = False, bounded: bool = True) -> Schedule:
    """Computes the schedule of a flat (one step) or hierarchical (several steps) all-to-all when all ranks begin at once.

    A rank begins the next step as soon as its transfers of the current step have ended, as in the runtime. Between
    servers, transfers share NICs as well as ports, and the schedule names the port or NIC that limits it.

    Args:
        order: the order of every step.
        bytes_SGG: (S, G, G) int64 with zero diagonals, bytes from each rank to each other in each step.
        network: ports, start-ups, servers and incast.
        staged: whether transfers run in stages, as on NCCL; see `Switch.open`.
        bounded: whether to compute bounds, which takes half of the time; if not, they are zero, and `cut` is None.

    Returns:
        A Schedule, with `step_X` if there are several steps. Its bounds are for the summed bytes of all steps.
    """
    steps, bytes_GG = len(bytes_SGG), bytes_SGG.sum(axis=0) if len(bytes_SGG) > 1 else bytes_SGG[0]
    apart = network.servers is None or not network.servers.shared
    plain = steps == 1 and not order.paced and order.tier_X is None and apart
    if plain and order.one_to_one and not staged:
        pieces = one_to_one_pieces(order, bytes_GG, network)
    else:
        pieces = by_start(fluid_pieces(order, bytes_SGG, network, staged))
    tier_X = None
    if order.tier_X is not None:
        tier_GG = np.zeros(bytes_GG.shape, dtype=np.int64)
        tier_GG[*order.pairs_X2.T] = order.tier_X
        tier_X = tier_GG[pieces.src_X, pieces.dst_X]
    return Schedule(
        order.method,
        order.one_to_one,
        pieces.src_X,
        pieces.dst_X,
        pieces.bytes_X,
        pieces.start_s_X,
        pieces.end_s_X,
        pieces.rate_Bps_X,
        fluid_bound(bytes_GG, network) if bounded else 0.0,
        one_to_one_bound(bytes_GG, network.without_startup) if bounded else 0.0,
        cut_bound(bytes_GG, network) if bounded and network.servers is not None else None,
        tier_X,
        pieces.number_X if steps > 1 else None,
    )


def steps_seconds(order: Order, bytes_SGG: IntArray, network: Network) -> float:
    """Returns the predicted seconds of a flat or hierarchical all-to-all; arguments as in `timed_steps`."""
    switch = Switch(network, rows=int(np.count_nonzero(bytes_SGG)))
    switch.perform([switch.open(order, bytes_GG) for bytes_GG in bytes_SGG])
    return switch.now_s


def counts_seconds(network: Network) -> float:
    """Returns the seconds of the exchange of token counts before an all-to-all: an allgather by recursive doubling."""
    return (network.gpus - 1).bit_length() * float(network.startup_s_G.max())


def by_start(made: Pieces) -> Pieces:
    """Returns pieces sorted by start; ties by source, destination and further columns."""
    row_X = np.argsort(made.start_s_X, kind="stable")
    equal_X = np.diff(made.start_s_X[row_X], prepend=np.nan, append=np.nan) == 0
    at_once = np.flatnonzero(equal_X[:-1] | equal_X[1:])  # few, of millions
    keys = (made.rate_Bps_X, made.end_s_X, made.bytes_X, made.dst_X, made.src_X, made.start_s_X)
    row_X[at_once] = row_X[at_once][np.lexsort([key_X[row_X[at_once]] for key_X in keys])]
    return Pieces(*(getattr(made, column.name)[row_X] for column in fields(made)))


def one_to_one_pieces(order: Order, bytes_GG: IntArray, network: Network) -> Pieces:
    """Returns the timed pieces of an order with `one_to_one`, sorted by start and source.

    The order must have one tier and not be paced; no GPUs may share a NIC. A transfer starts when both of its ports have ended
    their previous transfer; its rate is constant, as it shares neither port.
    """
    src_X, dst_X = (rank_X.copy() for rank_X in order.pairs_X2.T)
    size_X = np.empty(len(src_X), np.int64)
    _sizes(src_X, dst_X, read_only(bytes_GG), size_X)
    if order.share_X2 is not None:
        first_X, end_X = order.cuts(size_X).T
        size_X = end_X - first_X
    if np.count_nonzero(size_X) < len(size_X):
        src_X, dst_X, size_X = (column_X[size_X > 0] for column_X in (src_X, dst_X, size_X))
    columns = (src_X, dst_X, size_X, *(np.empty(len(size_X)) for _ in range(3)))
    if not _one_after_the_other(*columns, pair_rates(network), network.pair_startup_s_GG):
        row_X = np.lexsort((src_X, columns[3]))
        columns = tuple(column_X[row_X] for column_X in columns)
    return Pieces(*map(locked, (*columns, np.zeros(len(size_X), np.int64))))


@njit(cache=True)
def _sizes(src_X, dst_X, bytes_GG, size_X):
    """Writes the bytes of each row's pair."""
    for row in range(len(src_X)):
        size_X[row] = bytes_GG[np.uint64(src_X[row]), np.uint64(dst_X[row])]  # unsigned indexes are quicker


@njit(cache=True, error_model="numpy")
def _one_after_the_other(src_X, dst_X, size_X, start_s_X, end_s_X, rate_Bps_X, Bps_GG, startup_s_GG):
    """Writes the seconds and rates of rows of some bytes each, and puts rows that start together in the sequence of sources.

    Returns whether the rows are by start; if not, those that start together are left as they are.
    """
    free_out_s, free_in_s = np.zeros((2, len(Bps_GG)))
    by_start, last_s = True, 0.0
    for row in range(len(size_X)):
        src, dst = np.uint64(src_X[row]), np.uint64(dst_X[row])
        start_s = max(free_out_s[src], free_in_s[dst]) + startup_s_GG[src, dst]
        rate_Bps_X[row] = Bps_GG[src, dst]
        free_out_s[src] = free_in_s[dst] = end_s_X[row] = start_s + size_X[row] / Bps_GG[src, dst]
        by_start &= start_s >= last_s
        last_s = start_s_X[row] = start_s
    for row in range(1, len(size_X) if by_start else 0):
        at = row
        while at > 0 and start_s_X[at] == start_s_X[at - 1] and src_X[at] < src_X[at - 1]:
            for whole_X in (src_X, dst_X, size_X):
                whole_X[at], whole_X[at - 1] = whole_X[at - 1], whole_X[at]
            for real_X in (end_s_X, rate_Bps_X):
                real_X[at], real_X[at - 1] = real_X[at - 1], real_X[at]
            at -= 1
    return by_start


def fluid_pieces(order: Order, bytes_SGG: IntArray, network: Network, staged: bool = False) -> Pieces:
    """Returns the timed pieces of any order, simulated on a Switch: concurrent transfers share ports and NICs.

    Args:
        order: the order of every step.
        bytes_SGG: (S, G, G) int64, bytes from each rank to each other in each step.
        network, staged: as in `timed_steps`.

    Returns:
        The pieces; `number_X` is the step of each.
    """
    switch = Switch(network, logging=True, rows=int(np.count_nonzero(bytes_SGG)))
    switch.perform([switch.open(order, bytes_GG, staged) for bytes_GG in bytes_SGG])
    return switch.pieces()
