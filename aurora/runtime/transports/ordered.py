"""Ordered transport: performs an all-to-all in a planned order by point-to-point messages, over gloo, shaped or memory.

An exchange cuts the transfers of the order (its rows) into messages, posts sends and receives, a few at a time, and waits for
them in sequence. A paced order instead has planned start times, at which its messages are sent.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch

from aurora.algorithms.network.port_bounds import pair_rates
from aurora.errors import BadInput, RankFailed
from aurora.moe.transport import Observe, peer_lost, row_slices
from aurora.types import Cluster, Order
from aurora.types.arrays import FloatArray, IntArray

PIECE_BYTES = 96 * 1024  # of a row that is cut; a message costs some 50 us
PIECE_S = 0.001  # of a slow port's time, where that is less: until a piece has left, nothing else does, no request either
LEAST_BYTES = 12 * 1024  # of a piece: less costs more messages than it saves waiting
PIECES = 256  # of a row at most
STEADY_BYTES = 8 * PIECE_BYTES  # of a row whose time gives a rate
AHEAD_S = 0.001  # of bytes that a receiver requests at once, at the rate seen of such links: more than a request takes
AHEAD_BYTES = 8 * PIECE_BYTES  # at most
SMALL_BYTES = 2 * PIECE_BYTES  # arriving in one exchange: a thread for them would cost more than it gains
SLACK = 1e-9  # of a sum of floats
SETTLE_S = 0.1  # to wait for the other direction's failure, which may explain this one's


class Work(Protocol):
    """Handle of a posted send or receive, which may be unfinished."""

    def wait(self) -> object:
        """Waits until the message is sent or received. Raises RuntimeError on failure."""


class Message(NamedTuple):
    """Message that this rank sends or receives: one transfer of an order (a row of it), or a piece of one."""

    peer: int  # the rank at the other end
    tensor: torch.Tensor  # the contiguous tensor to send or to fill
    row: int  # index of the row in the order
    offset: int  # byte of the row at which the message begins
    row_bytes: int  # size of the whole row
    tier: int = 0  # the row's tier in the order

    @property
    def size(self) -> int:
        """Size of the message in bytes."""
        return int(self.tensor.nbytes)

    @property
    def flat(self) -> torch.Tensor:
        """The tensor's bytes, (size,) uint8."""
        return self.tensor.view(-1).view(torch.uint8)

    @property
    def last(self) -> bool:
        """True if the message is the last piece of its row."""
        return self.offset + self.size == self.row_bytes


Posted = tuple[Message, Work, float]  # and when it was posted, by time.perf_counter


@dataclass(frozen=True)
class _Window:
    """Limits of one direction: this many messages, and of more than one this many bytes of each peer."""

    messages: int
    max_bytes_by_peer: Mapping[int, float] | None = None  # None: any

    def part(self, message: Message) -> float:
        """The part of the window that a message fills."""
        return 0.0 if self.max_bytes_by_peer is None else message.size / max(self.max_bytes_by_peer[message.peer], 1.0)

    def holds(self, messages: int, part: float) -> bool:
        return messages <= 1 or (messages <= self.messages and part <= 1 + SLACK)


class _Lane(NamedTuple):
    """Messages of one direction that have a window of their own."""

    messages: list[Message]
    window: _Window
    one_partner: bool  # whether a row starts when the one before has ended

    @property
    def open(self) -> bool:
        """True if all of its messages may be under way at once."""
        return self.window.holds(len(self.messages), sum(map(self.window.part, self.messages)))


class OrderedTransport(ABC):
    """Base of Transports that enforce an order; subclasses define `_send` and `_receive` for single messages.

    An order allows each rank n transfers at a time. Sender and receiver post a transfer when it is among the rank's first n
    unfinished ones; data move once both have posted it. The order's first unfinished transfer is always posted at both ends,
    so there is no deadlock.

    If the order allows one partner at a time, transfers are cut into pieces. A receiver requests pieces in the planned
    sequence: one piece ahead, or as many as arrive during a round trip. So a sender has only a few pieces in flight; more would
    fill the network and delay its next transfer. A rank that may request all that it receives at once does so first, and then
    sends, in one thread.

    In an order with tiers, each tier in which the rank must keep a sequence has its own threads. The transfers of other tiers
    are all posted at once.

    Paced orders are kept by the senders' clocks, which start when all ranks know each other's sizes: messages leave at their
    planned times, and receivers request everything at once. Paced orders need `cluster` for the port rates; without it, all
    ports count as equally fast.
    """

    cuts_rows = True  # whether rows are cut where one partner at a time is served
    has_collective = False
    in_stages = False

    def __init__(self, rank: int, ranks: int, cluster: Cluster | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self._cluster = cluster
        self._in_Bps_by_link: defaultdict[float, float] = defaultdict(float)  # by planned rate, the best rate seen lately
        # A lane in sequence holds two peers' rows or more, so that all lanes of both directions have a thread at once.
        self._pool = ThreadPoolExecutor(2 * ranks, thread_name_prefix="aurora-port")

    @abstractmethod
    def _send(self, message: Message) -> Work:
        """Posts a message to its peer. Raises RuntimeError if the peer is lost."""

    @abstractmethod
    def _receive(self, message: Message) -> Work:
        """Posts the receipt of a message from its peer into its tensor. Raises RuntimeError if the peer is lost."""

    def _lost(self, peers: Sequence[int], error: RuntimeError) -> RankFailed:
        """The failure of a call that ends by `error`; `peers` are those of which one seems lost (none: unknown which)."""
        return peer_lost(self.rank, peers, error)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers a small tensor; see `Transport.gather`."""
        # Every pair directly: a third of all_gather's time at 4 ranks, whose ring takes a wake-up a step.
        row = row.contiguous()
        rows = torch.stack([row] * self.ranks)
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        posted = [self._post(Message(peer, rows[peer], 0, 0, row.nbytes), False) for peer in peers]
        posted += [self._post(Message(peer, row, 0, 0, row.nbytes), True) for peer in peers]
        self._wait_for(posted, False, False, lambda *_: None)
        return rows

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`."""
        assert order is not None, "it has no all-to-all of its own"
        if order.paced:
            self._exchange_paced(order, sends, recvs, observe)
            return
        cut = order.one_to_one and self.cuts_rows
        incoming = self._lanes(order, self._cut(order, recvs, False, cut), False)
        outgoing = self._lanes(order, self._cut(order, sends, True, cut), True)
        arriving_bytes = sum(message.size for lane in incoming for message in lane.messages)
        if arriving_bytes <= SMALL_BYTES and all(lane.open for lane in incoming):
            self._exchange_small(incoming, outgoing, observe)
        else:
            self._exchange_large(incoming, outgoing, observe)

    def wait(self) -> None:  # noqa: B027
        """Returns immediately, because `exchange` returns only when it is done."""

    # Steps of an exchange.

    def _cut(self, order: Order, tensors: Sequence[torch.Tensor], sending: bool, cut: bool) -> list[Message]:
        """This rank's rows in order as messages: one a row, or several pieces, cut the same way at both ends.

        Rows whose tier has no sequence to keep at either end are not cut, since all messages would be posted at once.
        """
        messages = []
        for row, peer, tensor in row_slices(order, self.rank, tensors, sending):
            row_bytes = tensor.nbytes
            tier = 0 if order.tier_X is None else int(order.tier_X[row])
            whole = Message(peer, tensor, row, 0, row_bytes, tier)
            in_pieces = cut and (order.tier_X is None or order.in_sequence_X[row])
            if in_pieces and row_bytes > (least := self._piece_bytes(*((self.rank, peer) if sending else (peer, self.rank)))):
                size = max(least, -(-row_bytes // PIECES))
                pieces = enumerate(torch.split(whole.flat, size))
                messages += [Message(peer, piece, row, index * size, row_bytes, tier) for index, piece in pieces]
            else:
                messages.append(whole)
        return messages

    def _piece_bytes(self, sender: int, receiver: int) -> int:
        if self._cluster is None:
            return PIECE_BYTES
        return int(min(max(self._pair_Bps_GG[sender, receiver] * PIECE_S, LEAST_BYTES), PIECE_BYTES))

    @cached_property
    def _pair_Bps_GG(self) -> FloatArray:
        """(G, G) float64, the rate of each pair's transfer that has the network to itself."""
        assert self._cluster is not None
        return pair_rates(self._cluster.network)

    def _planned_Bps(self, peer: int) -> float:
        """The planned rate of what arrives from a peer; 0 without a cluster, where all links count as alike."""
        return 0.0 if self._cluster is None else float(self._pair_Bps_GG[peer, self.rank])

    def _lanes(self, order: Order, messages: list[Message], sending: bool) -> list[_Lane]:
        """Messages of one direction by tier; those of tiers without a sequence to keep are one lane, which comes last."""
        opened = order.sends_open if sending else order.recvs_open
        by_tier: defaultdict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_tier[message.tier].append(message)
        lanes, at_once = [], []
        for group in by_tier.values():
            if sum(message.last for message in group) <= opened and max(opened, len(by_tier)) > 1:
                at_once += group
            elif self.cuts_rows and order.one_to_one and not sending:
                seen_Bps = {peer: self._in_Bps_by_link[self._planned_Bps(peer)] for peer in {message.peer for message in group}}
                ahead_bytes = {peer: min(rate_Bps * AHEAD_S, AHEAD_BYTES) for peer, rate_Bps in seen_Bps.items()}
                lanes.append(_Lane(group, _Window(len(group), ahead_bytes), True))
            else:
                lanes.append(_Lane(group, _Window(opened), order.one_to_one))
        if at_once:
            at_once = sorted(at_once, key=self._steps_ahead) if sending else at_once
            lanes.append(_Lane(at_once, _Window(len(at_once)), False))
        return lanes

    def _exchange_small(self, incoming: list[_Lane], outgoing: list[_Lane], observe: Observe) -> None:
        """In this thread: request everything, then send."""
        arriving = [[self._post(message, False) for message in lane.messages] for lane in incoming]
        if all(lane.window.holds(len(lane.messages), 0) for lane in outgoing):
            # Receives first: by then these have left too, and one wait is saved.
            leaving = [[self._post(message, True) for message in lane.messages] for lane in outgoing]
        else:
            self._perform(outgoing, True, observe)
            leaving = []
        for lanes, posted, sending in ((incoming, arriving, False), (outgoing, leaving, True)):
            for lane, posts in zip(lanes, posted, strict=False):
                self._wait_for(posts, sending, lane.one_partner, observe)

    def _exchange_large(self, incoming: list[_Lane], outgoing: list[_Lane], observe: Observe) -> None:
        """Receive in other threads while this one sends, each lane within its window.

        Requests go first: one that is posted after bulk for the same peer waits until this has left.
        """
        receiving = self._started(incoming, False, observe)
        try:
            self._perform(outgoing, True, observe)
        except RankFailed:
            for ended in wait(receiving, SETTLE_S, FIRST_EXCEPTION).done:  # it failed first, and its error says why
                ended.result()
            raise
        for future in receiving:
            future.result()

    def _perform(self, lanes: list[_Lane], sending: bool, observe: Observe) -> None:
        """Performs the first lane in this thread, and the others beside it."""
        beside = self._started(lanes[1:], sending, observe)
        for lane in lanes[:1]:
            self._post_within(lane, self._opened(lane, sending), sending, observe)
        for future in beside:
            future.result()

    def _started(self, lanes: list[_Lane], sending: bool, observe: Observe) -> list[Future[None]]:
        """Posts the first messages of each lane, and performs the rest of each in another thread."""
        posted = [self._opened(lane, sending) for lane in lanes]
        return [
            self._pool.submit(self._post_within, lane, first, sending, observe)
            for lane, first in zip(lanes, posted, strict=True)
        ]

    def _opened(self, lane: _Lane, sending: bool) -> deque[Posted]:
        """Posts as many of a lane's messages as its window holds."""
        posted: deque[Posted] = deque()
        part = 0.0
        for message in lane.messages:
            part += lane.window.part(message)
            if not lane.window.holds(len(posted) + 1, part):
                break
            posted.append(self._post(message, sending))
        return posted

    def _post_within(self, lane: _Lane, posted: deque[Posted], sending: bool, observe: Observe) -> None:
        """Goes on after what is posted of a lane: as many messages at a time as its window holds. Waits for all."""
        rest = lane.messages[len(posted) :]

        def oldest() -> Iterator[Posted]:
            part = sum(lane.window.part(message) for message, *_ in posted)
            for message in rest:
                part += lane.window.part(message)
                while not lane.window.holds(len(posted) + 1, part):
                    part -= lane.window.part(posted[0][0])
                    yield posted.popleft()
                posted.append(self._post(message, sending))
            yield from posted

        self._wait_for(oldest(), sending, lane.one_partner, observe)

    def _post(self, message: Message, sending: bool) -> Posted:
        try:
            return message, (self._send if sending else self._receive)(message), time.perf_counter()
        except RuntimeError as error:
            raise self._lost([message.peer], error) from None

    def _wait_for(self, posted: Iterable[Posted], sending: bool, one_partner: bool, observe: Observe) -> None:
        """Waits in sequence and reports each row. With one partner at a time a row starts when the one before has ended."""
        free_s = row_s = 0.0
        for message, work, posted_s in posted:
            if message.offset == 0:
                row_s = max(posted_s, free_s) if one_partner else posted_s
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost([message.peer], error) from None
            if message.last:
                free_s = time.perf_counter()
                observe(message.peer, sending, message.row_bytes, row_s, free_s)
                if not sending and message.row_bytes >= STEADY_BYTES:
                    seen_Bps = message.row_bytes / max(free_s - row_s, 1e-6)
                    planned_Bps = self._planned_Bps(message.peer)
                    self._in_Bps_by_link[planned_Bps] = max(0.9 * self._in_Bps_by_link[planned_Bps], seen_Bps)

    def _steps_ahead(self, message: Message) -> int:
        """Sorts messages of one time so that no peer comes first on all ranks."""
        return (message.peer - self.rank) % self.ranks

    # Paced orders.

    def _exchange_paced(
        self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Each message leaves at its planned time; everything is requested at once."""
        if self._cluster is None or len(self._cluster) != self.ranks:
            raise BadInput(f"order {order.method}: expected a transport that knows the rates of {self.ranks} ports")
        bytes_GG = self._gather_sizes(sends, recvs)
        from aurora.algorithms.network.routes import route, rows_to_send  # which orders without pace need not

        began_s = time.perf_counter()
        row_X, _, limit_Bps_X = rows_to_send(order, bytes_GG, route(self._cluster.network))
        rate_Bps_X = np.full(len(order.pairs_X2), np.inf)
        rate_Bps_X[row_X] = limit_Bps_X

        def leaves_s(message: Message) -> float:
            return float(message.offset / rate_Bps_X[message.row])

        incoming = sorted(
            self._cut(order, recvs, False, True),
            key=lambda message: (leaves_s(message), -self._steps_ahead(message) % self.ranks),
        )
        outgoing = sorted(
            self._cut(order, sends, True, True),
            key=lambda message: (leaves_s(message), self._steps_ahead(message)),
        )
        (receiving,) = self._started([_Lane(incoming, _Window(len(incoming)), False)], False, observe)
        self._send_at([(began_s + leaves_s(message), message) for message in outgoing], observe)
        receiving.result()

    def _gather_sizes(self, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> IntArray:
        """(G, G) bytes of all ranks, zero to themselves. Raises BadInput if a peer sends other than is expected here."""
        bytes_GG = self.gather(torch.tensor([tensor.nbytes for tensor in sends], dtype=torch.long)).numpy()
        for peer, tensor in enumerate(recvs):
            if peer != self.rank and bytes_GG[peer, self.rank] != tensor.nbytes:
                sent = bytes_GG[peer, self.rank]
                raise BadInput(f"rank {peer} sends {sent} bytes where rank {self.rank} expects {tensor.nbytes}")
        np.fill_diagonal(bytes_GG, 0)
        return np.asarray(bytes_GG)

    def _send_at(self, timed: Iterable[tuple[float, Message]], observe: Observe) -> None:
        """Posts each message at its time, by time.perf_counter; another thread waits for them meanwhile."""
        queue: SimpleQueue[Posted | None] = SimpleQueue()
        leaving = self._pool.submit(self._wait_for, iter(queue.get, None), True, False, observe)
        try:
            for at_s, message in timed:
                time.sleep(max(0.0, at_s - time.perf_counter()))
                queue.put(self._post(message, True))
        finally:
            queue.put(None)
        leaving.result()


class Memory:
    """Matches sends with receives between ranks that are threads; a send or receive waits at most `timeout_s` for the other."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.ranks, self.timeout_s = ranks, timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int, bool], deque[_Half]] = defaultdict(deque)

    def post(self, src: int, dst: int, sent: bool, message: Message) -> "_Half":
        """Posts the send (`sent` True) or the receive of the next message from src to dst; data move once both are posted."""
        half = _Half(message, self.timeout_s)
        with self._lock:
            others = self._waiting[src, dst, not sent]
            if not others:
                self._waiting[src, dst, sent].append(half)
                return half
            other = others.popleft()
        half.match(other, sent)
        return half


class _Half:
    """One end of a message."""

    def __init__(self, message: Message, timeout_s: float) -> None:
        self._message, self._timeout_s = message, timeout_s
        self._moved = threading.Event()
        self._failure: str | None = None

    def match(self, other: "_Half", sent: bool) -> None:
        source, target = (self, other) if sent else (other, self)
        out, into = source._message.flat, target._message.flat
        if len(out) == len(into):
            with torch.inference_mode():  # the tensors may be inference tensors
                into.copy_(out)
        else:
            self._failure = other._failure = f"it sends {len(out)} bytes where {len(into)} are expected"
        self._moved.set()
        other._moved.set()

    def wait(self) -> None:
        if not self._moved.wait(self._timeout_s):
            raise RuntimeError(f"nothing within {self._timeout_s:g} s")
        if self._failure is not None:
            raise RuntimeError(self._failure)


class MemoryTransport(OrderedTransport):
    """OrderedTransport between ranks that are threads of one process, over a Memory that they share."""

    def __init__(self, memory: Memory, rank: int, cluster: Cluster | None = None) -> None:
        super().__init__(rank, memory.ranks, cluster)
        self._memory = memory

    def _send(self, message: Message) -> Work:
        return self._memory.post(self.rank, message.peer, True, message)

    def _receive(self, message: Message) -> Work:
        return self._memory.post(message.peer, self.rank, False, message)
