"""An order held by point-to-point messages: what gloo, shaped and memory transports share."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import ceil
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from aurora.errors import BadInput, RankFailed
from aurora.plan.clock import clock
from aurora.ranks.transport import Observe, Rows, lost_peer, parts
from aurora.types import Cluster, Order

PIECE_BYTES = 96 * 1024  # at least; a message costs some 50 us
PIECES = 256  # of a row at most
STEADY = 8  # pieces of a row that tells the rate
MOST_AHEAD = 8  # pieces that a receiver asks for at once
AHEAD_S = 0.001  # worth of bytes, at the rate that it has seen: more than a question takes
SETTLE_S = 0.1  # between the failures of the two directions


class Work(Protocol):
    """A posted message. wait() returns when it has left or arrived."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Message:
    """A row of an order, or a piece of one; row and offset: which, and where in it."""

    peer: int
    tensor: torch.Tensor
    row: int
    offset: int
    row_bytes: int

    @property
    def last(self) -> bool:
        return self.offset + self.tensor.numel() == self.row_bytes


Posted = tuple[Message, Work, float]  # and since when, by time.perf_counter


class OrderedTransport(ABC):
    """Both ends post a transfer only when it is among their first open ones, and data moves once both have.

    With one partner at a time rows go in pieces. A receiver asks for the next piece, or for what arrives while a question
    travels, in planned order and across rows: so a sender is held to a few pieces under way, because what it hands to the
    network early delays its next transfer. A sender posts one piece at a time. What is first in the order and not done is
    always posted at both ends, so there is no deadlock.

    Rates are held by the senders' clocks, which start together when all have told each other their sizes: pieces leave when
    the row's rate lets them, and receivers ask for everything at once. cluster: whose rates; None holds none.
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
        rows = row.new_empty((self.ranks, *row.shape))
        rows[self.rank] = row
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        asked = _messages([(0, peer, rows[peer]) for peer in peers], cut=False)
        told = _messages([(0, peer, rows[self.rank]) for peer in peers], cut=False)
        posted = [self._post(message, False) for message in asked] + [self._post(message, True) for message in told]
        for message, work, _ in posted:
            with lost_peer(self.rank, message.peer):
                work.wait()
        return rows

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        if order.paced or order.lanes is not None:
            self._by_clock(order, sends, recvs, observe)
            return
        cut, one = order.one_to_one and self.cuts_rows, order.one_to_one
        incoming = _messages(parts(order, self.rank, recvs, sending=False), cut)
        outgoing = _messages(parts(order, self.rank, sends, sending=True), cut)
        ahead = min(MOST_AHEAD, max(1, ceil(self._in_Bps * AHEAD_S / PIECE_BYTES))) if cut else order.recvs_open
        receiving = self._pool.submit(self._drain, incoming, False, ahead, one, observe)
        try:
            self._drain(outgoing, True, order.sends_open, one, observe)
        except RankFailed:
            if wait([receiving], SETTLE_S).done:  # it failed first, and says why
                receiving.result()
            raise
        receiving.result()

    def _drain(self, messages: list[Message], sending: bool, most: int, one: bool, observe: Observe) -> None:
        """Post messages in sequence, `most` at a time, and wait for them."""
        posted: deque[Posted] = deque()

        def oldest() -> Iterator[Posted]:
            for message in messages:
                posted.append(self._post(message, sending))
                if len(posted) == most:
                    yield posted.popleft()
            yield from posted

        self._finish(oldest(), sending, one, observe)

    def _finish(self, posted: Iterable[Posted], sending: bool, one: bool, observe: Observe) -> None:
        """Wait in sequence. one: with one partner at a time a transfer starts when the last is over."""
        free_s = row_s = 0.0
        for message, work, posted_s in posted:
            if message.offset == 0:
                row_s = max(posted_s, free_s) if one else posted_s
            with lost_peer(self.rank, message.peer):
                work.wait()
            if message.last:
                free_s = time.perf_counter()
                observe(message.peer, sending, message.row_bytes, row_s, free_s)
                if not sending and message.row_bytes >= STEADY * PIECE_BYTES:
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
        start_s_X, rate_Bps_X = clock(order, bytes_GG, self._cluster.out_Bps_G, self._cluster.in_Bps_G)

        def leaves_s(message: Message) -> float:
            return float(start_s_X[message.row] + message.offset / rate_Bps_X[message.row])

        incoming, outgoing = (
            sorted(_messages(parts(order, self.rank, tensors, sending), cut=True), key=leaves_s)
            for tensors, sending in ((recvs, False), (sends, True))
        )
        left: SimpleQueue[Posted | None] = SimpleQueue()
        arriving = self._pool.submit(self._drain, incoming, False, max(1, len(incoming)), False, observe)
        leaving = self._pool.submit(self._finish, iter(left.get, None), True, False, observe)
        try:
            for message in outgoing:
                time.sleep(max(0.0, began_s + leaves_s(message) - time.perf_counter()))
                left.put(self._post(message, True))
        finally:
            left.put(None)
        leaving.result()
        arriving.result()

    def _post(self, message: Message, sending: bool) -> Posted:
        with lost_peer(self.rank, message.peer):
            return message, (self._send if sending else self._receive)(message), time.perf_counter()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _messages(rows: Rows, cut: bool) -> list[Message]:
    """One message a row, or several, cut the same way at both ends."""
    made = []
    for row, peer, tensor in rows:
        flat = tensor.view(-1).view(torch.uint8)
        size = max(PIECE_BYTES, -(-len(flat) // PIECES)) if cut else len(flat)
        made += [
            Message(peer, piece, row, index * size, len(flat)) for index, piece in enumerate(torch.split(flat, max(1, size)))
        ]
    return made
