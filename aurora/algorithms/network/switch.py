"""Event-driven model of the network: an order decides when transfers start; running ones share ports and NICs max-min fairly.

`timed` computes the schedule of an order for given bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.algorithms.network import max_min_fair_core as core
from aurora.algorithms.network.one_to_one_core import one_after_the_other
from aurora.algorithms.network.port_bounds import pair_rates, schedule_bounds
from aurora.algorithms.network.routes import cut_bound, route, rows_to_send
from aurora.types import Network, Order, Schedule
from aurora.types.arrays import FloatArray, IntArray, locked

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
        routes, n = route(network), network.gpus
        kinds = routes.use_GGK.shape[2]
        nics = (len(routes.capacity_Bps_R) - 2 * n) // 2
        resources = np.zeros(len(routes.capacity_Bps_R), core.RESOURCE)
        resources["capacity_Bps"], resources["head"] = routes.capacity_Bps_R, -1
        resources["kind"] = np.repeat(np.arange(kinds), [n, n, nics, nics][:kinds])
        self._network, self._routes = network, routes
        self._spans: list[tuple[int, int] | None] = []  # of each slot: the rows of its all-to-all
        self._rows = np.zeros(0, core.ROW)
        self._turns = np.zeros((3, 0), np.int64)
        self._queues = np.zeros((0, 2, n, 1), core.QUEUE)
        self._members = np.zeros((0, n), core.MEMBER)
        self._done, self._event_s = np.zeros((0, 2), np.int64), np.full(2, np.inf)
        self._log = np.zeros(FIRST_LOG if logging else 0, core.PART)
        self._state = core.SwitchState(resources, kinds, network.incast, logging)
        self._grow(rows, 1, 1)

    @property
    def now_s(self) -> float:
        """The present simulated time in seconds."""
        return float(self._state.now_s)

    @property
    def busy(self) -> bool:
        """True while a transfer has started and not ended."""
        return bool(self._state.under_way)

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
        block, pairs_X2 = slice(first, first + len(row_X)), order.pairs_X2[row_X]
        ends, rows, queues, members = (*pairs_X2.T,), self._rows[block], self._queues[slot], self._members[slot]
        rows["rank"], rows["use"][:, : self._routes.use_GGK.shape[2]] = pairs_X2, self._routes.use_GGK[ends]
        rows["slot"], rows["bytes"], rows["left_bytes"], rows["limit_Bps"] = slot, size_X, size_X, limit_Bps_X
        rows["startup_s"] = self._network.pair_startup_s_GG[ends]
        rows["stage"] = order.stage_X[row_X] if staged else 0
        rows["tier"] = 0 if order.tier_X is None else order.tier_X[row_X]
        rows["admitted"] = rows["stamp"] = 0
        members["stage"] = members["under_way"] = 0
        for side, rank_X in enumerate(ends):
            port_X = rank_X * queues.shape[2] + rows["tier"]
            self._turns[side, block] = first + np.lexsort((rows["stage"], port_X))
            members["unfinished"][:, side] = np.bincount(rank_X, minlength=len(members))
            count_GT = np.bincount(port_X, minlength=queues[side].size).reshape(len(members), -1)
            queues["stop"][side] = first + count_GT.cumsum().reshape(count_GT.shape)
            queues["at"][side] = queues["stop"][side] - count_GT
            queues["free"][side] = (order.sends_open, order.recvs_open)[side]
        return slot

    def join(self, number: int, rank: int) -> bool:
        """Adds a rank to an all-to-all, from the present time on. Returns True if it has nothing to send or receive."""
        return not core.join(self._state, number, rank)

    def run(self, until_s: float = float("inf")) -> list[tuple[int, int]]:
        """Advances the simulated time until an all-to-all ends on some rank, or to until_s if that is earlier.

        An all-to-all ends on a rank when the rank has sent and received everything. Returns (number of the all-to-all, rank)
        for every end at that time; empty if until_s came first.
        """
        ends: list[tuple[int, int]] | None = core.run(self._state, until_s)
        while ends is None:
            self._grow_log()
            ends = core.run(self._state, until_s)
        return ends

    def perform(self, numbers: Sequence[int]) -> None:
        """Simulates all-to-alls in sequence until all have ended; a rank joins the next when the previous ends on it."""
        left_G = [iter(numbers) for _ in range(self._network.gpus)]

        def join_next(rank: int) -> None:
            """Has a rank join the next all-to-all in which it has anything to send or receive."""
            for number in left_G[rank]:
                if not self.join(number, rank):
                    return

        for rank in range(self._network.gpus):
            join_next(rank)
        while self.busy:
            for _, rank in self.run():
                join_next(rank)

    def close(self, number: int) -> Transfers:
        """Removes an all-to-all that all ranks have finished, and returns its transfers; its number may be used again."""
        assert not self._members[number]["unfinished"].any(), "an all-to-all is closed before its end"
        span = self._spans[number]
        assert span is not None
        self._spans[number] = None
        rows = self._rows[slice(*span)]
        src_X, dst_X = rows["rank"].T.copy()
        return Transfers(src_X, dst_X, *(rows[column].copy() for column in ("bytes", "start_s", "end_s")))

    def pieces(self) -> Pieces:
        """Returns all parts of transfers so far, each of constant rate, with whole bytes that sum to each transfer's bytes.

        Needs `logging`, and that no all-to-all has been closed.
        """
        log = self._log[: self._state.logged]
        row_X = log["row"]
        by_row = np.argsort(row_X, kind="stable")
        upto_X = np.rint(log["carried_bytes"]).astype(np.int64)[by_row]
        again_X = np.diff(row_X[by_row], prepend=-1) == 0
        bytes_X = np.empty_like(upto_X)
        bytes_X[by_row] = upto_X - np.where(again_X, np.roll(upto_X, 1), 0)
        src_X, dst_X = self._rows["rank"][row_X].T
        return Pieces(src_X, dst_X, bytes_X, log["start_s"], log["end_s"], log["rate_Bps"], self._rows["slot"][row_X])

    def _allocate(self, length: int, tiers: int) -> tuple[int, int]:
        """Allocates a slot of so many tiers, and `length` rows that no all-to-all uses; returns the slot and the first row."""
        first = 0
        for start, stop in sorted(span for span in self._spans if span is not None):
            if start - first >= length:
                break
            first = max(first, stop)
        if None not in self._spans:
            self._spans.append(None)
        slot = self._spans.index(None)
        self._spans[slot] = (first, first + length)
        self._grow(first + length, len(self._spans), tiers)
        return slot, first

    def _grow_log(self) -> None:
        """Doubles the log."""
        self._log = _enlarged(self._log, 2 * len(self._log))
        self._hold()

    def _grow(self, *sizes: int) -> None:
        """Makes room for so many rows, all-to-alls and tiers: twice as many of each as there are, if there are too few."""
        n, now = self._network.gpus, (len(self._rows), len(self._members), self._queues.shape[3])
        rows, slots, tiers = (have if size <= have else max(size, 2 * have) for size, have in zip(sizes, now, strict=True))
        if rows > now[0]:
            before_s, places = self._event_s, 1 << (rows - 1).bit_length()
            self._rows, self._turns = _enlarged(self._rows, rows), _enlarged(self._turns, 3, rows)
            self._event_s = np.full(2 * places, np.inf)
            self._event_s[places : places + now[0]] = before_s[len(before_s) // 2 :][: now[0]]
        if (slots, tiers) != now[1:]:
            self._queues, self._members = _enlarged(self._queues, slots, 2, n, tiers), _enlarged(self._members, slots, n)
            self._done = _enlarged(self._done, slots * n, 2)
        if (rows, slots, tiers) != now:
            self._hold()

    def _hold(self) -> None:
        """Has the simulation use the present arrays."""
        self._state.hold(self._rows, self._turns, self._queues, self._members, self._done, self._event_s, self._log)


def _enlarged(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """A larger array with another in its first corner and zeros elsewhere."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


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
    tier_X = step_X = None
    if steps == 1 and apart and order.one_to_one and order.tier_X is None and not order.paced and not staged:
        columns = one_to_one_columns(order, bytes_GG, network)
    else:
        made = by_start(fluid_pieces(order, bytes_SGG, network, staged))
        columns = [made.src_X, made.dst_X, made.bytes_X, made.start_s_X, made.end_s_X, made.rate_Bps_X]
        step_X = made.number_X if steps > 1 else None
        if order.tier_X is not None:
            tier_GG = np.zeros(bytes_GG.shape, dtype=np.int64)
            tier_GG[*order.pairs_X2.T] = order.tier_X
            tier_X = locked(tier_GG[made.src_X, made.dst_X])
    cut = cut_bound(bytes_GG, network) if bounded and network.servers is not None else None
    bounds_s = schedule_bounds(bytes_GG, network) if bounded else (0.0, 0.0)
    return Schedule.made(order.method, order.one_to_one, *columns, *bounds_s, cut, tier_X, step_X)


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
    return Pieces(*(locked(getattr(made, column.name)[row_X]) for column in fields(made)))


def one_to_one_columns(order: Order, bytes_GG: IntArray, network: Network) -> list[NDArray[Any]]:
    """Returns the columns of a Schedule, from src_X to rate_Bps_X, of an order with `one_to_one`: rows by start and source.

    The order must have one tier and not be paced; no GPUs may share a NIC. A transfer starts when both of its ports have ended
    their previous transfer; its rate is constant, as it shares neither port.
    """
    size_X, bytes_GG = None, np.ascontiguousarray(bytes_GG, np.int64)
    if order.share_X2 is not None:
        first_X, end_X = order.cuts(bytes_GG[*order.pairs_X2.T]).T
        size_X = end_X - first_X
    pairs_X2, Bps_GG = np.ascontiguousarray(order.pairs_X2), pair_rates(network)
    columns: list[NDArray[Any]]
    columns, by_start = one_after_the_other(pairs_X2, bytes_GG, Bps_GG, network.pair_startup_s_GG, size_X)
    if not by_start:
        row_X = np.lexsort((columns[0], columns[3]))
        columns = [locked(column_X[row_X]) for column_X in columns]
    return columns


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
