"""The rules of NCCL's one-sided calls on streams, in one thread: what a stream keeps in order, and what a group does not.

- The operations of a rank's stream run one after the other, in the sequence in which they were queued.
- A put writes the peer's inbox and then signals. It waits for nothing of the peer.
- A wait takes one signal of its peer, of whichever put. The stream stands still until there is one.
- The puts of a group run in any sequence.
- Ranks run in any interleaving.
"""

from collections import defaultdict, deque
from contextlib import contextmanager
from functools import partial

import torch


class PutEmulator:
    """Outboxes, inboxes and streams of all ranks.

    Attributes:
        puts: (source, destination, bytes) of those that have run, in sequence.
    """

    def __init__(self, ranks, size, rng):
        self.ranks, self._rng, self.puts = ranks, rng, []
        self.outbox_R, self.inbox_R = (torch.full((ranks, 2, ranks, size), 255, dtype=torch.uint8) for _ in range(2))
        self.stream_R = [deque() for _ in range(ranks)]
        self._signals = defaultdict(int)

    def put(self, rank, peer, half, size):
        self.inbox_R[peer, half, rank, :size] = self.outbox_R[rank, half, peer, :size]
        self._signals[rank, peer] += 1
        self.puts.append((rank, peer, size))
        return True

    def take_signal(self, rank, peer):
        if not self._signals[peer, rank]:
            return False
        self._signals[peer, rank] -= 1
        return True

    def run(self, steps=None):
        """Runs as long as anything can, one operation of a drawn rank after the other; or so many steps."""
        able = list(range(self.ranks))
        while able and steps != 0:
            rank = able[self._rng.integers(len(able))]
            if self.stream_R[rank] and self.stream_R[rank][0]():
                self.stream_R[rank].popleft()
                able, steps = list(range(self.ranks)), steps and steps - 1
            else:
                able.remove(rank)


class EmulatedPutCalls:
    """PutCalls and timer of one rank on a PutEmulator."""

    def __init__(self, emulator, rank):
        self.rank, self.ranks, self.timer, self._emulator, self._group = rank, emulator.ranks, self, emulator, None
        self.outbox, self.inbox = emulator.outbox_R[rank], emulator.inbox_R[rank]

    def _queue(self, operation, put=False):
        if self._group is None:
            self._emulator.stream_R[self.rank].append(operation)
        else:
            self._group.append((operation, put))

    def copy(self, into, source):
        def run():
            into.copy_(source)
            return True

        self._queue(run)

    def put(self, peer, half, size):
        self._queue(partial(self._emulator.put, self.rank, peer, half, size), put=True)

    @contextmanager
    def group(self):
        """The puts inside change places."""
        self._group = grouped = []
        yield
        self._group, puts = None, [operation for operation, put in grouped if put]
        drawn = iter(self._emulator._rng.permutation(len(puts)))
        for operation, put in grouped:
            self._queue(puts[next(drawn)] if put else operation)

    def wait_signal(self, peer, half):
        self._queue(partial(self._emulator.take_signal, self.rank, peer))

    def mark(self):
        mark = []

        def run():
            mark.append(len(self._emulator.puts))
            return True

        self._queue(run)
        return mark

    def reached(self, mark):
        self._emulator.run()
        return bool(mark)

    def seconds(self, mark):
        return float(mark[0])
