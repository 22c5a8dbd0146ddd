"""The turnstile of models that serve in processes of their own on the same GPUs of one machine.

What all share is a small table in a file of the folder that they name alike; whoever reads or changes it holds an exclusive
flock on it. Every model has a slot of the table, and on every GPU a member file that its process keeps locked: the kernel
releases both kinds of lock when a process dies, however it dies, so nobody waits for the dead and a stale folder does no harm.

GPU: a queue on each, first come first served, brief work before other work.

Port: an all-to-all needs all of its ranks, so two ports must not be granted to different models that then wait for each other.
Whichever rank of a model first wants the model's i-th exchange draws the next ticket for it, and the other ranks find it
drawn. On every port exchanges go by ticket. Of all unfinished exchanges the one with the smallest ticket waits for no other on
any port, and its ranks, once their GPUs let them, are through with all before it: so something always moves. Nobody is passed
once its ticket is drawn, a port is free for the next one as soon as its own rank is done, and no model waits for one that has
nothing to send. Who keeps the port gives its next exchange the same ticket, before anyone else looks. A lock of rank 0 alone,
with the grant told to the others, would cost a message an exchange; strict alternation would wait for a model that is idle.
"""

import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aurora.errors import BadInput, RankFailed
from aurora.types.arrays import IntArray

LAYOUT = 2  # of the table
BRIEF = 1 << 62  # less than its ticket is wanted by brief work, so that it comes before all other
SLOTS, GPUS, DRAWN = 8, 64, 16  # models at most, GPUs of a machine at most, exchanges that a rank may be behind another
LOOK_S = 0.02  # how often whoever waits looks whether those before it live


def folder_of(name: str) -> Path:
    """Where the processes that colocate under `name` meet, for this user and machine."""
    return Path(tempfile.gettempdir()) / f"aurora-{os.getuid()}" / f"{name}.{LAYOUT}"


class _Table(NamedTuple):
    """drawn_M: exchanges that have a ticket; ticket_MD: of the latest of them, by number modulo DRAWN; done_MG: exchanges
    behind each rank; wants_MG: the ticket for a GPU, 0: none; has_MG: who computes there; here_MG: who has a bell; last: ticket
    drawn."""

    last: IntArray
    drawn_M: IntArray
    ticket_MD: IntArray
    done_MG: IntArray
    wants_MG: IntArray
    has_MG: IntArray
    here_MG: IntArray


class ProcessPortArbiter:
    """A `PortArbiter` of one model on one GPU. slot: rank 0 takes a free one (None) and tells it to the model's other ranks.

    All ranks of the model must have made theirs before any of them uses its own. timeout_s: how long it waits for its turn
    before RankFailed says who has it. finish: waits for what was handed to the GPU, before that is given back. BadInput where
    there is no slot left or the folder cannot be used.
    """

    def __init__(
        self, folder: Path, gpu: int, timeout_s: float, slot: int | None = None, finish: Callable[[], None] = lambda: None
    ) -> None:
        if not 0 <= gpu < GPUS:
            raise BadInput(f"`colocate`: expected GPUs 0 to {GPUS - 1} of one machine, found {gpu}")
        self._folder, self._gpu, self._timeout_s, self._finish = folder, gpu, timeout_s, finish
        self._broken: BaseException | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "table", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(f"`colocate`: {folder} cannot be used: {error.strerror}") from None
        sizes = (1, SLOTS, SLOTS * DRAWN, *[SLOTS * GPUS] * 4)
        os.ftruncate(self._file, 8 * sum(sizes))
        whole = np.frombuffer(mmap.mmap(self._file, 8 * sum(sizes)), dtype=np.int64)
        last, drawn_M, *of_M = np.split(whole, np.cumsum(sizes)[:-1])
        self._table = _Table(last, drawn_M, *(column.reshape(SLOTS, -1) for column in of_M))
        with self._locked():
            self.slot = self._free_slot() if slot is None else slot
            self._member = self._held(self.slot, gpu)
            if self._member is None:
                raise BadInput(f"`colocate`: GPU {gpu} of slot {self.slot} in {folder} is taken by {self._whose(self.slot)}")
            os.ftruncate(self._member, 0)
            os.pwrite(self._member, f"process {os.getpid()}".encode(), 0)
            self._bell, self._caller = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
            self._bell.settimeout(LOOK_S)
            self._caller.setblocking(False)
            with suppress(FileNotFoundError):
                os.unlink(self._path(self.slot, ".bell"))
            self._bell.bind(self._path(self.slot, ".bell"))
            self._table.here_MG[self.slot, gpu] = 1

    @property
    def alone(self) -> bool:
        return bool(self._table.here_MG[:, self._gpu].sum() == 1)

    def start_compute(self, brief: bool = False) -> None:
        with self._locked():
            self._table.wants_MG[self.slot, self._gpu] = self._draw() - (BRIEF if brief else 0)
        self._take()

    def part(self, stopped: Callable[[], None]) -> bool:
        if not (self._table.wants_MG[:, self._gpu] < 0).any():
            return False
        self._finish()
        stopped()
        with self._locked():
            self._table.has_MG[self.slot, self._gpu] = 0
        self._ring()
        self._take()
        return True

    def stop_compute(self) -> None:
        self._finish()
        with self._locked():
            self._table.wants_MG[self.slot, self._gpu] = self._table.has_MG[self.slot, self._gpu] = 0
        self._ring()

    def _take(self) -> None:
        wants_M, has_M = self._table.wants_MG[:, self._gpu], self._table.has_MG[:, self._gpu]

        def before() -> list[int]:
            wanted = np.flatnonzero(wants_M).tolist()
            return [m for m in wanted if m != self.slot and (has_M[m] or wants_M[m] < wants_M[self.slot])]

        def take() -> None:
            has_M[self.slot] = 1

        self._wait(before, "GPU", take)

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        table, done_M = self._table, self._table.done_MG[:, self._gpu]
        number = int(done_M[self.slot])
        with self._locked():
            if table.drawn_M[self.slot] == number:
                table.ticket_MD[self.slot, number % DRAWN] = self._draw()
                table.drawn_M[self.slot] += 1
            ticket = table.ticket_MD[self.slot, number % DRAWN]
            assert table.drawn_M[self.slot] - number <= DRAWN, "a rank fell behind"

        def before() -> list[int]:
            behind = np.flatnonzero(done_M < table.drawn_M).tolist()
            return [m for m in behind if m != self.slot and table.ticket_MD[m, done_M[m] % DRAWN] < ticket]

        self._wait(before, "port")
        try:
            yield
        except BaseException:
            hold_port = False
            raise
        finally:
            with self._locked():
                done_M[self.slot] += 1
                if hold_port and table.drawn_M[self.slot] == number + 1:  # the next exchange has this one's ticket
                    table.ticket_MD[self.slot, (number + 1) % DRAWN] = ticket
                    table.drawn_M[self.slot] += 1
            self._ring()

    def leave(self) -> None:
        self._release()
        for end in (self._bell, self._caller):
            end.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path(self.slot, ".bell"))

    def abort(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._release()

    def _release(self) -> None:
        if self._member is not None:
            with self._locked():
                self._table.here_MG[self.slot, self._gpu] = 0
                os.close(self._member)
            self._member = None
            self._ring()

    def _draw(self) -> int:
        self._table.last[0] += 1
        return int(self._table.last[0])

    def _wait(self, before: Callable[[], list[int]], what: str, take: Callable[[], None] = lambda: None) -> None:
        """Until no living member is in `before`, the slots whose turn on this GPU comes first; then `take`, before any other
        looks."""
        until = time.monotonic() + self._timeout_s
        while True:
            with self._locked():
                others = [slot for slot in before() if self._alive(slot, self._gpu)]
                if not others and self._broken is None:
                    take()
            if self._broken is not None:
                raise RankFailed(f"stopped, because the other model on this rank failed: {self._broken}")
            if not others:
                return
            if time.monotonic() > until:
                raise RankFailed(
                    f"rank {self._gpu} waited {self._timeout_s:g} s for its {what}, which {self._whose(others[0])} has"
                )
            with suppress(TimeoutError):
                self._bell.recv(1)

    def _ring(self) -> None:
        """Whoever waits on this GPU looks again."""
        for slot in np.flatnonzero(self._table.here_MG[:, self._gpu]).tolist():
            if slot != self.slot:
                with suppress(OSError):  # nobody there, or rung already
                    self._caller.sendto(b"!", self._path(slot, ".bell"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _free_slot(self) -> int:
        """One that no process holds on any GPU, cleared."""
        for slot in range(SLOTS):
            if not any(self._alive(slot, gpu) for gpu in range(GPUS)):
                for of_M in self._table[1:]:
                    of_M[slot] = 0
                return slot
        raise BadInput(f"`colocate`: {self._folder} has {SLOTS} models already")

    def _alive(self, slot: int, gpu: int) -> bool:
        if not (self._folder / f"{slot}.{gpu}").exists():
            return False
        found = self._held(slot, gpu)
        if found is not None:
            os.close(found)
        return found is None

    def _held(self, slot: int, gpu: int) -> int | None:
        """The member's file, locked by us, unless another process lives there."""
        file = os.open(self._folder / f"{slot}.{gpu}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def _whose(self, slot: int) -> str:
        return Path(self._path(slot)).read_text()

    def _path(self, slot: int, suffix: str = "") -> str:
        return str(self._folder / f"{slot}.{self._gpu}{suffix}")
