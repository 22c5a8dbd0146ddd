"""Ordered transport: holds a planned order by point-to-point messages. The gloo, shaped and memory transports extend it.

An exchange has these steps: cut the order's rows into messages, post sends and receives within windows, wait for them in
sequence. Paced orders send each message at its planned time instead.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch

from aurora.errors import BadInput, RankFailed
from aurora.planner.network.pacing import row_pacing
from aurora.runtime.distributed.transport import Observe, peer_lost, row_slices
from aurora.types import Cluster, Order
from aurora.types.arrays import IntArray

PIECE_BYTES = 96 * 1024  # of a row that is cut; a message costs some 50 us
PIECE_S = 0.001  # of a slow port's time, where that is less: until a piece has left, nothing else does, no request either
LEAST_BYTES = 12 * 1024  # of a piece: less costs more messages than it saves waiting
PIECES = 256  # of a row at most
STEADY_BYTES = 8 * PIECE_BYTES  # of a row whose time gives a rate
AHEAD_S = 0.001  # of bytes that a receiver requests at once, at the rate that it has seen: more than a request takes
AHEAD_BYTES = 8 * PIECE_BYTES  # at most
SMALL_BYTES = 2 * PIECE_BYTES  # arriving in one exchange: a thread for them would cost more than it gains
SETTLE_S = 0.1  # to wait for the other direction's failure, which may explain this one's


class Work(Protocol):
    """A message that has been posted and may still be under way."""

    def wait(self) -> object:
        """Waits until the message has left or arrived. Raises RuntimeError if it cannot."""


class Message(NamedTuple):
    """A row of an order, or a piece of one."""

    peer: int  # the rank at the other end
    tensor: torch.Tensor  # the contiguous tensor to send or to fill
    row: int  # index of the row in the order
    offset: int  # byte of the row at which the message begins
    row_bytes: int  # size of the whole row

    @property
    def size(self) -> int:
        """Size of the message in bytes."""
        return int(self.tensor.nbytes)

    @property
    def flat(self) -> torch.Tensor:
        """The tensor as (size,) uint8."""
        return self.tensor.view(-1).view(torch.uint8)

    @property
    def last(self) -> bool:
        """Whether the message ends its row."""
        return self.offset + self.size == self.row_bytes


Posted = tuple[Message, Work, float]  # and when it was posted, by time.perf_counter


@dataclass(frozen=True)
class _Window:
    """How much may be under way in one direction: this many messages, and of more than one this many bytes."""

    messages: int
    max_bytes: float = inf

    def holds(self, messages: int, size: int) -> bool:
        return messages <= 1 or (messages <= self.messages and size <= self.max_bytes)


class OrderedTransport(ABC):
    """A Transport over `_send` and `_receive` of single messages.

    Both ends post a transfer only when it is among their first open ones, and data move once both have. The first transfer of
    the order that is not done is always posted at both ends, so there is no deadlock.

    With one partner at a time, rows go in pieces. A receiver requests pieces in planned order, across rows: one piece, or as
    many as arrive while a request travels. So a sender has only a few pieces under way, because what it gives the network early
    delays its next transfer. A rank that receives little, and may request all of it, first requests and then sends, in one
    thread.

    Paced orders are held by the senders' clocks, which start when all ranks know each other's sizes: messages leave at their
    planned times, and receivers request everything at once. They need `cluster`, the ports' rates; without it no port counts as
    slow.
    """

    cuts_rows = True  # whether rows are cut where one partner at a time is served
    has_collective = False
    in_stages = False

    def __init__(self, rank: int, ranks: int, cluster: Cluster | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self._cluster = cluster
        self._in_Bps = 0.0  # the best rate seen lately
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="aurora-port")

    @abstractmethod
    def _send(self, message: Message) -> Work:
        """Posts a message to its peer. Raises RuntimeError if the peer is lost."""

    @abstractmethod
    def _receive(self, message: Message) -> Work:
        """Posts the receipt of a message from its peer into its tensor. Raises RuntimeError if the peer is lost."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor; see `Transport.gather`."""
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
        if order.paced or order.sub_channels is not None:
            self._exchange_paced(order, sends, recvs, observe)
            return
        one_partner, cut = order.one_to_one, order.one_to_one and self.cuts_rows
        incoming = self._cut(order, recvs, False, cut)
        outgoing = self._cut(order, sends, True, cut)
        receive_window, send_window = _Window(order.recvs_open), _Window(order.sends_open)
        if cut:
            receive_window = _Window(len(incoming), min(self._in_Bps * AHEAD_S, AHEAD_BYTES))
        if order.sends_open >= len(outgoing) > 1:
            outgoing.sort(key=self._steps_ahead)
        arriving_bytes = sum(message.size for message in incoming)
        if arriving_bytes <= SMALL_BYTES and receive_window.holds(len(incoming), arriving_bytes):
            self._exchange_small(incoming, outgoing, send_window, one_partner, observe)
        else:
            self._exchange_large(incoming, outgoing, receive_window, send_window, one_partner, observe)

    def wait(self) -> None:  # noqa: B027
        """Returns at once: an exchange is done when it returns."""

    # Steps of an exchange.

    def _cut(self, order: Order, tensors: Sequence[torch.Tensor], sending: bool, cut: bool) -> list[Message]:
        """This rank's rows in order as messages: one a row, or several pieces, cut the same way at both ends."""
        messages = []
        for row, peer, tensor in row_slices(order, self.rank, tensors, sending):
            row_bytes = tensor.nbytes
            whole = Message(peer, tensor, row, 0, row_bytes)
            if cut and row_bytes > (least := self._piece_bytes(*((self.rank, peer) if sending else (peer, self.rank)))):
                size = max(least, -(-row_bytes // PIECES))
                pieces = enumerate(torch.split(whole.flat, size))
                messages += [Message(peer, piece, row, index * size, row_bytes) for index, piece in pieces]
            else:
                messages.append(whole)
        return messages

    def _piece_bytes(self, sender: int, receiver: int) -> int:
        if self._cluster is None:
            return PIECE_BYTES
        rate_Bps = min(self._cluster.gpus[sender].out_Bps, self._cluster.gpus[receiver].in_Bps)
        return int(min(max(rate_Bps * PIECE_S, LEAST_BYTES), PIECE_BYTES))

    def _exchange_small(
        self, incoming: list[Message], outgoing: list[Message], send_window: _Window, one_partner: bool, observe: Observe
    ) -> None:
        """In this thread: request everything, then send."""
        arriving = [self._post(message, False) for message in incoming]
        if send_window.holds(len(outgoing), 0):  # receives first: by then these have left too, and one wait is saved
            leaving = [self._post(message, True) for message in outgoing]
            self._wait_for(arriving, False, one_partner, observe)
            self._wait_for(leaving, True, one_partner, observe)
        else:
            self._post_within(send_window, outgoing, True, one_partner, observe)
            self._wait_for(arriving, False, one_partner, observe)

    def _exchange_large(
        self,
        incoming: list[Message],
        outgoing: list[Message],
        receive_window: _Window,
        send_window: _Window,
        one_partner: bool,
        observe: Observe,
    ) -> None:
        """Receive in another thread while this one sends, each within its window."""
        receiving = self._pool.submit(self._post_within, receive_window, incoming, False, one_partner, observe)
        try:
            self._post_within(send_window, outgoing, True, one_partner, observe)
        except RankFailed:
            if wait([receiving], SETTLE_S).done:  # it failed first, and its error says why
                receiving.result()
            raise
        receiving.result()

    def _post_within(
        self, window: _Window, messages: list[Message], sending: bool, one_partner: bool, observe: Observe
    ) -> None:
        """Posts messages in sequence, as many at a time as the window holds, and waits for all."""
        posted: deque[Posted] = deque()

        def oldest() -> Iterator[Posted]:
            size = 0
            for message in messages:
                size += message.size
                while not window.holds(len(posted) + 1, size):
                    size -= posted[0][0].size
                    yield posted.popleft()
                posted.append(self._post(message, sending))
            yield from posted

        self._wait_for(oldest(), sending, one_partner, observe)

    def _post(self, message: Message, sending: bool) -> Posted:
        try:
            return message, (self._send if sending else self._receive)(message), time.perf_counter()
        except RuntimeError as error:
            raise peer_lost(self.rank, message.peer, error) from None

    def _wait_for(self, posted: Iterable[Posted], sending: bool, one_partner: bool, observe: Observe) -> None:
        """Waits in sequence and reports each row. With one partner at a time a row starts when the one before has ended."""
        free_s = row_s = 0.0
        for message, work, posted_s in posted:
            if message.offset == 0:
                row_s = max(posted_s, free_s) if one_partner else posted_s
            try:
                work.wait()
            except RuntimeError as error:
                raise peer_lost(self.rank, message.peer, error) from None
            if message.last:
                free_s = time.perf_counter()
                observe(message.peer, sending, message.row_bytes, row_s, free_s)
                if not sending and message.row_bytes >= STEADY_BYTES:
                    self._in_Bps = max(0.9 * self._in_Bps, message.row_bytes / max(free_s - row_s, 1e-6))

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
        began_s = time.perf_counter()
        start_s_X, rate_Bps_X = row_pacing(order, bytes_GG, self._cluster.network)

        def leaves_s(message: Message) -> float:
            return float(start_s_X[message.row] + message.offset / rate_Bps_X[message.row])

        incoming = sorted(
            self._cut(order, recvs, False, True),
            key=lambda message: (leaves_s(message), -self._steps_ahead(message) % self.ranks),
        )
        outgoing = sorted(
            self._cut(order, sends, True, True),
            key=lambda message: (leaves_s(message), self._steps_ahead(message)),
        )
        receiving = self._pool.submit(self._post_within, _Window(len(incoming)), incoming, False, False, observe)
        self._send_at([(began_s + leaves_s(message), message) for message in outgoing], observe)
        receiving.result()

    def _gather_sizes(self, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> IntArray:
        """(G, G) bytes of all ranks, zero to themselves. Raises BadInput if a peer sends other than is expected here."""
        bytes_GG = self.gather(torch.tensor([_bytes(tensor) for tensor in sends], dtype=torch.long)).numpy()
        for peer, tensor in enumerate(recvs):
            if peer != self.rank and bytes_GG[peer, self.rank] != _bytes(tensor):
                sent = bytes_GG[peer, self.rank]
                raise BadInput(f"rank {peer} sends {sent} bytes where rank {self.rank} expects {_bytes(tensor)}")
        np.fill_diagonal(bytes_GG, 0)
        return np.asarray(bytes_GG)

    def _send_at(self, timed: Iterable[tuple[float, Message]], observe: Observe) -> None:
        """Posts each message at its time, by time.perf_counter; another thread waits for them meanwhile."""
        left: SimpleQueue[Posted | None] = SimpleQueue()
        leaving = self._pool.submit(self._wait_for, iter(left.get, None), True, False, observe)
        try:
            for at_s, message in timed:
                time.sleep(max(0.0, at_s - time.perf_counter()))
                left.put(self._post(message, True))
        finally:
            left.put(None)
        leaving.result()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
