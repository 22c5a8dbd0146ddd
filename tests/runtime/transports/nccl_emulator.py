"""NCCL's rules for grouped sends and receives, in one thread and with a clock of its own.

- A communicator is made by the first call of all of its ranks.
- The calls of a rank run one after the other, in the sequence in which they were posted.
- The transfers of a call run side by side. One begins when the calls at both of its ends have begun, and the call ends as a whole.
- NCCL sorts the transfers of a call into rounds: in round d a rank sends to rank + d and receives from rank - d. With `rounds_at_once`
  so many rounds are under way.
- The n-th send from one rank to another belongs to the n-th receive there, and both have one size.
- A pair's FIFO holds less than `buffered_bytes` that its receiver has not asked for. A send that fits into what is left of it ends
  without its receiver; the others wait.
- After a CUDA error (`fail`) every call and query of the rank's process fails, for good.
- While a rank captures a graph (`capturing`), it may queue calls of a communicator that has been made, and ask for no event.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from aurora.runtime.transports.nccl import End


class Deadlock(RuntimeError):
    """Ranks wait for each other, or for calls that never come."""


class Mismatch(RuntimeError):
    """A send and its receive differ in size: NCCL would hang, or write where it must not."""


class Transfer(NamedTuple):
    """A transfer that has ended."""

    src: int
    dst: int
    size: int
    start_s: float
    end_s: float


@dataclass
class Half:
    """One end of a transfer: when its call began, and when it ended."""

    pair: tuple[int, int]  # source and destination
    tensor: torch.Tensor
    number: int = 0  # of its round
    start_s: float | None = None
    end_s: float | None = None


@dataclass(eq=False)
class Call:
    """A grouped call or, without ends, a mark."""

    posted_s: float
    halves: list[Half] = field(default_factory=list)
    start_s: float | None = None
    end_s: float | None = None


class NcclEmulator:
    """One communicator and the streams of its ranks.

    Args:
        ranks: number of ranks.
        seconds: how long a transfer of (source, destination, bytes) takes, its start-up included.
        buffered_bytes: size of a pair's FIFO.
        rounds_at_once: rounds of a call that are under way at once; None: all.

    Attributes:
        transfers: those that have ended, in the sequence in which they were found to.
        called: ranks that have made a call.
    """

    def __init__(
        self,
        ranks: int,
        seconds: Callable[[int, int, int], float],
        buffered_bytes: int = 0,
        rounds_at_once: int | None = None,
    ) -> None:
        self.ranks, self.transfers = ranks, list[Transfer]()
        self.seconds, self._buffered_bytes = seconds, buffered_bytes
        self._rounds_at_once = rounds_at_once or ranks
        self._stream_R: list[deque[Call]] = [deque() for _ in range(ranks)]
        self._free_s_R = [0.0] * ranks
        self.called: set[int] = set()
        self._halves: dict[tuple[int, int, bool], deque[Half]] = defaultdict(deque)  # not yet at an end, by pair and side

    def post(self, rank: int, posted_s: float, ends: Sequence[End]) -> None:
        """Queues a grouped call of a rank."""
        call = Call(posted_s)
        for peer, sent, tensor in ends:
            pair = (rank, peer) if sent else (peer, rank)
            call.halves.append(Half(pair, tensor, (pair[1] - pair[0]) % self.ranks))
            self._halves[*pair, sent].append(call.halves[-1])
        self.called.add(rank)
        self._stream_R[rank].append(call)

    def mark(self, rank: int, posted_s: float) -> Call:
        """Queues a mark on a rank's stream."""
        self._stream_R[rank].append(Call(posted_s))
        return self._stream_R[rank][-1]

    def run(self) -> None:
        """Runs as long as anything can. Raises Mismatch if two ends differ in size."""
        todo = list(range(self.ranks))
        while todo:
            rank = todo.pop()
            while (call := self._begun_call(rank)) is not None:
                opened = True
                while opened:
                    opened = self._open_rounds(call)
                    for half in call.halves:
                        todo += self._move(*half.pair)
                if any(half.end_s is None for half in call.halves):
                    break
                call.end_s = self._free_s_R[rank] = max([call.start_s, *(half.end_s for half in call.halves)])
                self._stream_R[rank].popleft()

    def finish(self) -> None:
        """Runs everything. Raises Deadlock if something waits for ever, Mismatch if two ends differ in size."""
        self.run()
        if stuck := [rank for rank, stream in enumerate(self._stream_R) if stream]:
            if len(self.called) < self.ranks:
                raise Deadlock(f"ranks {sorted(self.called)} make a communicator of {self.ranks} ranks")
            raise Deadlock(f"ranks {stuck} wait for ever")

    def _begun_call(self, rank: int) -> Call | None:
        """The call that the rank is in, begun if it was not; None if there is none, or no communicator yet."""
        stream = self._stream_R[rank]
        if not stream or (stream[0].halves and len(self.called) < self.ranks):
            return None
        if stream[0].start_s is None:
            stream[0].start_s = max(self._free_s_R[rank], stream[0].posted_s)
        return stream[0]

    def _open_rounds(self, call: Call) -> bool:
        """Starts the transfers of rounds that may be under way. Returns whether there were any that had not been."""
        opened, ends_s = False, list[float]()  # of the rounds before that have ended
        for index, number in enumerate(sorted({half.number for half in call.halves})):
            own = [half for half in call.halves if half.number == number]
            needed = index + 1 - self._rounds_at_once
            if len(ends_s) >= needed:
                start_s = max(call.start_s, sorted(ends_s)[needed - 1] if needed > 0 else 0.0)
                for half in own:
                    opened |= half.start_s is None
                    half.start_s = start_s if half.start_s is None else half.start_s
            if all(half.end_s is not None for half in own):
                ends_s.append(max(half.end_s for half in own))
        return opened

    def _move(self, src: int, dst: int) -> list[int]:
        """Ends the transfers of a pair whose ends have begun. Returns the ranks for which one has ended."""
        sends, recvs = self._halves[src, dst, True], self._halves[src, dst, False]
        ended = []
        while sends and recvs and sends[0].start_s is not None and recvs[0].start_s is not None:
            out, into = sends.popleft(), recvs.popleft()
            size = int(out.tensor.nbytes)
            if into.tensor.nbytes != size:
                raise Mismatch(f"{src} -> {dst}: {size} bytes are sent, {into.tensor.nbytes} expected")
            start_s = max(out.start_s, into.start_s)
            if out.end_s is None:
                out.end_s = start_s + self.seconds(src, dst, size)
            into.end_s = max(out.end_s, into.start_s)
            into.tensor.view(-1).view(torch.uint8).copy_(out.tensor.view(-1).view(torch.uint8))
            self.transfers.append(Transfer(src, dst, size, start_s, into.end_s))
            ended += [src, dst]
        held_bytes = 0
        for out in sends:
            held_bytes += int(out.tensor.nbytes)
            if out.start_s is None or held_bytes >= self._buffered_bytes:
                break
            if out.end_s is None:
                out.end_s = out.start_s + self.seconds(src, dst, int(out.tensor.nbytes))
                ended.append(src)
        return ended


class EmulatedCalls:
    """GroupedCalls and timer of one rank on an NcclEmulator; each call is posted after its host's `delay_s()`.

    Attributes:
        capturing: whether the rank captures a graph.
    """

    device = "cpu"

    def __init__(self, emulator: NcclEmulator, rank: int, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.rank, self.ranks, self.timer = rank, emulator.ranks, self
        self._emulator, self._delay_s, self._now_s = emulator, delay_s, 0.0
        self._error: str | None = None
        self.capturing, self.failure = False, None

    def fail(self, error: str) -> None:
        """Makes this and every later call and query of the rank's process fail."""
        self._error = self._error or error

    def post(self, ends: Sequence[End]) -> None:
        self._check()
        if self.capturing and self.rank not in self._emulator.called:
            raise RuntimeError("a communicator cannot be made while a graph is captured")
        self._now_s += self._delay_s()
        self._emulator.post(self.rank, self._now_s, ends)

    def mark(self) -> Call:
        self._check()
        return self._emulator.mark(self.rank, self._now_s)

    def reached(self, mark: Call) -> bool:
        self._check()
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._emulator.run()
        return mark.end_s is not None

    def seconds(self, mark: Call) -> float:
        if not self.reached(mark):
            self._emulator.finish()
        return mark.end_s

    def abort(self, failure: Exception) -> None:
        """Ends all calls, also those of a thread that posts meanwhile: whatever it posts from now on fails."""
        self.failure = failure
        self.fail("NCCL communicator was aborted")

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)
