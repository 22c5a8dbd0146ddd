"""Memory transport: ranks are threads of one process, and messages are copies."""

import threading
from collections import defaultdict, deque

import torch

from aurora.runtime.distributed.ordered import Message, OrderedTransport, Work
from aurora.types import Cluster


class Memory:
    """Matches the sends and receives of one group of ranks; each end waits at most timeout_s seconds for the other."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.ranks, self.timeout_s = ranks, timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int, bool], deque[_Half]] = defaultdict(deque)

    def post(self, src: int, dst: int, sent: bool, message: Message) -> "_Half":
        """Posts one end of the next message from src to dst; data move once both ends are posted."""
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
    """One rank's ordered transport over the Memory that all ranks of the group share."""

    def __init__(self, memory: Memory, rank: int, cluster: Cluster | None = None) -> None:
        super().__init__(rank, memory.ranks, cluster)
        self._memory = memory

    def _send(self, message: Message) -> Work:
        return self._memory.post(self.rank, message.peer, True, message)

    def _receive(self, message: Message) -> Work:
        return self._memory.post(message.peer, self.rank, False, message)
