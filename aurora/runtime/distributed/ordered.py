"""An order held by point-to-point messages: what gloo, shaped and memory transports share."""

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
from aurora.runtime.distributed.transport import Observe, lost, parts
from aurora.types import Cluster, Order

PIECE_BYTES = 96 * 1024  # of a row; a message costs some 50 us
PIECE_S = 0.001  # or what a slow port takes in this time: until a piece has left, nothing else does, no question either
LEAST_BYTES = 12 * 1024  # of a piece: less costs more messages than it saves waiting
PIECES = 256  # of a row at most
STEADY_BYTES = 8 * PIECE_BYTES  # of a row that tells the rate
AHEAD_S = 0.001  # worth of bytes that a receiver asks for at once, at the rate that it has seen: more than a question takes
AHEAD_BYTES = 8 * PIECE_BYTES  # at most
SMALL_BYTES = 2 * PIECE_BYTES  # that arrive in one exchange: a thread for them would cost more than it gains
SETTLE_S = 0.1  # between the failures of the two directions


class Work(Protocol):
    """A posted message. wait() returns when it has left or arrived."""

    def wait(self) -> object: ...


class Message(NamedTuple):
    """A row of an order, or a piece of one; row and offset: which, and where in it. tensor is contiguous."""

    peer: int
    tensor: torch.Tensor
    row: int
    offset: int
    row_bytes: int

    @property
    def size(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def flat(self) -> torch.Tensor:
        """(size,) uint8."""
        return self.tensor.view(-1).view(torch.uint8)

    @property
    def last(self) -> bool:
        return self.offset + self.size == self.row_bytes


Posted = tuple[Message, Work, float]  # and since when, by time.perf_counter


@dataclass(frozen=True)
class _Window:
    """How much may be under way at a time: so many messages, and of more than one so many bytes."""

    messages: int
    most_bytes: float = inf

    def holds(self, messages: int, size: int) -> bool:
        return messages <= 1 or (messages <= self.messages and size <= self.most_bytes)


class OrderedTransport(ABC):
    """Both ends post a transfer only when it is among their first open ones, and data moves once both have.

    With one partner at a time rows go in pieces. A receiver asks for a piece's worth, or for what arrives while a question
    travels, in planned order and across rows: so a sender is held to a few pieces under way, because what it hands to the
    network early delays its next transfer. A sender posts one piece at a time. What is first in the order and not done is
    always posted at both ends, so there is no deadlock. A rank that may ask for all that it gets, and gets little, does so
    first and then sends, in one thread: nobody ever waits for its questions.

    Rates are held by the senders' clocks, which start together when all have told each other their sizes: pieces leave when
    the row's rate lets them, and receivers ask for everything at once. cluster: whose rates; None holds none, and takes no
    port for slow.
    """

    cuts_rows = True  # whether rows go in pieces where one partner at a time is served

    def __init__(self, rank: int, ranks: int, cluster: Cluster | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self._cluster = cluster
        self._in_Bps = 0.0  # the best lately
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="aurora-port")

    @abstractmethod
    def _send(self, message: Message) -> Work: ...

    @abstractmethod
    def _receive(self, message: Message) -> Work: ...

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        # Every pair directly: a third of all_gather's time at 4 ranks, whose ring takes a wake-up a step.
        row = row.contiguous()
        rows = torch.stack([row] * self.ranks)
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        posted = [self._post(Message(peer, rows[peer], 0, 0, row.nbytes), False) for peer in peers]
        posted += [self._post(Message(peer, row, 0, 0, row.nbytes), True) for peer in peers]
        self._finish(posted, False, False, lambda *_: None)
        return rows

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        if order.paced or order.sub_channels is not None:
            self._by_clock(order, sends, recvs, observe)
            return
        cut, one = order.one_to_one and self.cuts_rows, order.one_to_one
        incoming = self._messages(order, recvs, False, cut)
        outgoing = self._messages(order, sends, True, cut)
        asked, told = _Window(order.recvs_open), _Window(order.sends_open)
        if cut:
            asked = _Window(len(incoming), min(self._in_Bps * AHEAD_S, AHEAD_BYTES))
        if order.sends_open >= len(outgoing) > 1:
            outgoing.sort(key=self._steps_ahead)
        if asked.holds(len(incoming), size := sum(message.size for message in incoming)) and size <= SMALL_BYTES:
            awaited = [self._post(message, False) for message in incoming]
            if told.holds(len(outgoing), 0):  # receives first: by then these have left too, and one wait is saved
                leaving = [self._post(message, True) for message in outgoing]
                self._finish(awaited, False, one, observe)
                self._finish(leaving, True, one, observe)
            else:
                self._drain(outgoing, True, told, one, observe)
                self._finish(awaited, False, one, observe)
            return
        receiving = self._pool.submit(self._drain, incoming, False, asked, one, observe)
        try:
            self._drain(outgoing, True, told, one, observe)
        except RankFailed:
            if wait([receiving], SETTLE_S).done:  # it failed first, and says why
                receiving.result()
            raise
        receiving.result()

    def _messages(self, order: Order, tensors: Sequence[torch.Tensor], sending: bool, cut: bool) -> list[Message]:
        """One message a row, or several, cut the same way at both ends."""
        made = []
        for row, peer, tensor in parts(order, self.rank, tensors, sending):
            row_bytes = _bytes(tensor)
            whole = Message(peer, tensor, row, 0, row_bytes)
            least = self._piece_bytes(*((self.rank, peer) if sending else (peer, self.rank))) if cut else row_bytes
            if row_bytes > least:
                size = max(least, -(-row_bytes // PIECES))
                pieces = enumerate(torch.split(whole.flat, size))
                made += [Message(peer, piece, row, index * size, row_bytes) for index, piece in pieces]
            else:
                made.append(whole)
        return made

    def _piece_bytes(self, sender: int, receiver: int) -> int:
        if self._cluster is None:
            return PIECE_BYTES
        rate_Bps = min(self._cluster.gpus[sender].out_Bps, self._cluster.gpus[receiver].in_Bps)
        return int(min(max(rate_Bps * PIECE_S, LEAST_BYTES), PIECE_BYTES))

    def _drain(self, messages: list[Message], sending: bool, window: "_Window", one: bool, observe: Observe) -> None:
        """Post messages in sequence, as many as the window holds, and wait for them."""
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

        self._finish(oldest(), sending, one, observe)

    def _finish(self, posted: Iterable[Posted], sending: bool, one: bool, observe: Observe) -> None:
        """Wait in sequence. one: with one partner at a time a transfer starts when the last is over."""
        free_s = row_s = 0.0
        for message, work, posted_s in posted:
            if message.offset == 0:
                row_s = max(posted_s, free_s) if one else posted_s
            try:
                work.wait()
            except RuntimeError as error:
                raise lost(self.rank, message.peer, error) from None
            if message.last:
                free_s = time.perf_counter()
                observe(message.peer, sending, message.row_bytes, row_s, free_s)
                if not sending and message.row_bytes >= STEADY_BYTES:
                    self._in_Bps = max(0.9 * self._in_Bps, message.row_bytes / max(free_s - row_s, 1e-6))

    def _by_clock(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        if self._cluster is None or len(self._cluster) != self.ranks:
            raise BadInput(f"order {order.method}: expected a transport that knows the rates of {self.ranks} ports")
        bytes_GG = self.gather(torch.tensor([_bytes(tensor) for tensor in sends], dtype=torch.long)).numpy()
        began_s = time.perf_counter()
        for peer, tensor in enumerate(recvs):
            if peer != self.rank and bytes_GG[peer, self.rank] != _bytes(tensor):
                sent = bytes_GG[peer, self.rank]
                raise BadInput(f"rank {peer} sends {sent} bytes where rank {self.rank} expects {_bytes(tensor)}")
        np.fill_diagonal(bytes_GG, 0)
        start_s_X, rate_Bps_X = row_pacing(order, bytes_GG, self._cluster.network)

        def leaves_s(message: Message) -> float:
            return float(start_s_X[message.row] + message.offset / rate_Bps_X[message.row])

        incoming = sorted(
            self._messages(order, recvs, False, True),
            key=lambda message: (leaves_s(message), -self._steps_ahead(message) % self.ranks),
        )
        outgoing = sorted(
            self._messages(order, sends, True, True),
            key=lambda message: (leaves_s(message), self._steps_ahead(message)),
        )
        left: SimpleQueue[Posted | None] = SimpleQueue()
        arriving = self._pool.submit(self._drain, incoming, False, _Window(len(incoming)), False, observe)
        leaving = self._pool.submit(self._finish, iter(left.get, None), True, False, observe)
        try:
            for message in outgoing:
                time.sleep(max(0.0, began_s + leaves_s(message) - time.perf_counter()))
                left.put(self._post(message, True))
        finally:
            left.put(None)
        leaving.result()
        arriving.result()

    def _steps_ahead(self, message: Message) -> int:
        """What sorts messages of one time so that no peer is everybody's first."""
        return (message.peer - self.rank) % self.ranks

    def _post(self, message: Message, sending: bool) -> Posted:
        try:
            return message, (self._send if sending else self._receive)(message), time.perf_counter()
        except RuntimeError as error:
            raise lost(self.rank, message.peer, error) from None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
