"""Table of the models that run in separate processes and share the GPUs of one machine.

It is a file of integers in a folder whose name all processes know. Every model has a slot in it, and on every GPU a member file
that its process keeps locked. The kernel releases this lock, and that of the table, when a process dies. So no process waits
for a dead one, and a stale folder does no harm. The folder belongs to one user, and no link in it is followed. A waiting
process is woken through a named pipe: unlike a socket's, its path may be of any length.

Models that share the table read and change it under its lock. A model that is alone takes no lock. It changes only cells of its
own (`done_M`, `entered_M`, `ticket_M`, `has_M`), and after each change reads MODELS, which tells whether it is still alone. A
model that joins first sets its bit of MODELS, then waits SETTLE_S, and then reads the cells. A processor may delay a store past
a later load, but by far less than SETTLE_S. So either the model that was alone sees the bit and takes the lock, or the one that
joined sees the cell.
"""

import fcntl
import functools
import mmap
import os
import select
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from aurora.errors import BadInput
from aurora.types.private_folders import make_private

TABLE_VERSION = 5
SLOTS, GPUS, DRAWN = 8, 64, 16  # models at most, GPUs of a machine at most, exchanges that a rank may be behind another
SETTLE_S = 0.01  # after which all processes see what was written before; nanoseconds on most machines
WAKEUPS = ".wakeups"  # suffix of the named pipe that a waiting process listens on
OPEN = os.O_RDWR | os.O_NOFOLLOW
GPU, PORT = 1, 2  # what a process waits for
# Cells of `counters`: a bit for each model that is here, processes that have joined, tickets drawn, exchanges begun, and
# the virtual time at which the last one of them started, of ordinary and, one cell on, of interactive models
MODELS, JOINED, TICKETS, BEGUN, STARTED = range(5)


def colocation_folder(name: str) -> Path:
    """Returns the folder through which models colocate under `name`: all processes of this user on this machine share it.

    The folder is created if it is missing. It is in the folder for temporary files, so that processes with and without a login
    session find it.

    Args:
        name: name of the colocation, without a slash.

    Raises:
        BadInput: if the folder or its parent cannot be created, or if other users can write to it.
    """
    ours = Path(tempfile.gettempdir()) / f"aurora-runtime-{os.getuid()}"
    folder = ours / f"{name}.{TABLE_VERSION}"
    for path in (ours, folder):
        try:
            make_private(path)
        except BadInput as error:
            raise BadInput(f"`colocate`: {error}") from None
    return folder


class _FileLock:
    """Context manager of the table's lock, which no two open files hold at once."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


class ColocationTable:
    """Gives one process, which runs one model on one GPU, access to the table.

    Methods marked "under the lock" may be called only while this process holds `lock`. A ticket is a number that an exchange or
    a computation takes when it begins to wait; smaller tickets came first. Arrays are indexed by slot.

    Args:
        folder: the folder shared with the other models' processes, which only this user can write to; see `colocation_folder`.
        gpu: number of the GPU on this machine.
        slot: the model's slot; None: takes a free one.

    Attributes:
        slot: the model's slot.
        lock: context manager of the table's lock.
        own_bit: this model's bit in `counters[MODELS]`; the two are equal if no other model is in the table.
        counters: cells with the indices MODELS, JOINED, TICKETS, BEGUN and STARTED.
        slow_M: 1 after another process has skipped an overdue turn of the model and logged a warning.
        begun_M: number of the model's exchanges that have begun on some GPU.
        position_MD: positions of the model's latest exchanges in the sequence of all exchanges, by number modulo DRAWN.
        wants_M: ticket of the exchange with which the model waits for the port; 0: it waits with none.
        interactive_M: 1 for an interactive model.
        next_finish_M: virtual time at which the model's next exchange will finish (fair queueing).
        finish_M: virtual time at which the model's last exchange finished.
        late_M: how often interactive models have overtaken the model's next exchange.
        here_M: number of the model's process on this GPU; 0: none.
        done_M: number of the model's exchanges that have ended on this GPU.
        entered_M: number of exchanges that the model had begun on this GPU when it was last the only model.
        ticket_M: ticket of the model's computation that waits for this GPU or runs on it; 0: none.
        has_M: 1 if the computation of `ticket_M` runs on this GPU.
        level_M: urgency of that computation; see `PortArbiter.start_compute`.
        overtaken_M: how often that computation was overtaken.
        waits_M: resource for which the model's process sleeps, GPU or PORT; 0: it does not sleep.

    Raises:
        BadInput: if no slot is left or the folder cannot be used.
    """

    def __init__(self, folder: Path, gpu: int, slot: int | None) -> None:
        if not 0 <= gpu < GPUS:
            raise BadInput(f"`colocate`: expected GPUs 0 to {GPUS - 1} of one machine, found {gpu}")
        self._folder, self._gpu = folder, gpu
        self._member: int | None = None
        self.own_bit = 0
        try:
            self._file = os.open(folder / "table", OPEN | os.O_CREAT, 0o600)
            self._map()
            self.lock = _FileLock(self._file)
            with self.lock:
                self.remove_dead()
                self.slot = self._free_slot() if slot is None else slot
                self.own_bit = 1 << self.slot
                self._take_slot()
            if slot is None and self.counters[MODELS] != self.own_bit:
                time.sleep(SETTLE_S)
                with self.lock:
                    self.record_begun()
        except OSError as error:
            raise BadInput(f"`colocate`: {folder} cannot be used: {error.strerror}") from None

    def _map(self) -> None:
        shared, on_gpu = (6, SLOTS, SLOTS, SLOTS * DRAWN, *[SLOTS] * 5), [SLOTS] * 8
        sizes = (*shared, *on_gpu * GPUS)
        os.ftruncate(self._file, 8 * sum(sizes))
        cells = memoryview(mmap.mmap(self._file, 8 * sum(sizes))).cast("q")
        ends = accumulate(sizes)
        parts = [cells[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.counters, self.slow_M, self.begun_M, self.position_MD = parts[:4]
        self.wants_M, self.interactive_M, self.next_finish_M, self.finish_M, self.late_M = parts[4 : len(shared)]
        self._parts_G = [parts[first : first + len(on_gpu)] for first in range(len(shared), len(parts), len(on_gpu))]
        self.here_M, self.done_M, self.entered_M, *rest = self._parts_G[self._gpu]
        self.ticket_M, self.has_M, self.level_M, self.overtaken_M, self.waits_M = rest
        self._of_model = [part for part in parts if len(part) == SLOTS]

    def _free_slot(self) -> int:
        """A slot that no process holds on any GPU, cleared. Under the lock."""
        for slot in range(SLOTS):
            if not self.counters[MODELS] >> slot & 1:
                for part in self._of_model:
                    part[slot] = 0
                return slot
        raise BadInput(f"`colocate`: {self._folder} has {SLOTS} models already")

    def _take_slot(self) -> None:
        """Locks this slot's member file on this GPU, and begins to listen for wake-ups. Under the lock."""
        self._member = self._lock_member(self.slot, self._gpu, os.O_CREAT)
        if self._member is None:
            raise BadInput(
                f"`colocate`: GPU {self._gpu} of slot {self.slot} in {self._folder} is taken by {self.holder(self.slot)}"
            )
        os.ftruncate(self._member, 0)
        os.pwrite(self._member, f"process {os.getpid()}".encode(), 0)
        pipe = self._path(self.slot, WAKEUPS)
        with suppress(FileNotFoundError):
            os.unlink(pipe)
        os.mkfifo(pipe, 0o600)
        self._wakeups = os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        self._woken = select.poll()
        self._woken.register(self._wakeups, select.POLLIN)
        self.counters[JOINED] += 1
        self.here_M[self.slot] = self.counters[JOINED]
        self.counters[MODELS] |= self.own_bit

    def others(self) -> tuple[int, ...]:
        """Returns the slots of the other models."""
        return _slots(self.counters[MODELS] & ~self.own_bit)

    def record_begun(self) -> None:
        """Assigns positions to all exchanges that a model began without the lock, while it was alone. Under the lock."""
        for slot in _slots(self.counters[MODELS]):
            entered = max(part_G[2][slot] for part_G in self._parts_G)
            for number in range(max(self.begun_M[slot], entered - DRAWN), entered):
                self.begin(slot, number)

    def begin(self, slot: int, number: int) -> None:
        """Assigns the next position in the sequence of exchanges to exchange `number` of model `slot`. Under the lock."""
        self.counters[BEGUN] += 1
        self.position_MD[slot * DRAWN + number % DRAWN] = self.counters[BEGUN]
        self.begun_M[slot] = number + 1
        self.wants_M[slot] = 0

    def draw(self) -> int:
        """Returns the next ticket. Under the lock."""
        self.counters[TICKETS] += 1
        return self.counters[TICKETS]

    def leave(self) -> None:
        """Removes this process from the table, wakes the processes that wait for its GPU, and closes all files. Idempotent."""
        self.give_up()
        if not self._wakeups.closed:
            self._wakeups.close()
            os.close(self._file)

    def give_up(self) -> None:
        """Removes this process from the table; any thread may call it, also while another holds `lock`. Closes no files."""
        if self._member is None:
            return
        file = os.open(self._folder / "table", OPEN)  # another lock than that of the thread which may have it
        try:
            with _FileLock(file):
                if (member := self._forget_member()) is None:  # another thread was faster
                    return
                with suppress(FileNotFoundError):
                    os.unlink(self._path(self.slot, WAKEUPS))
                os.close(member)
                self._remove(self.slot, self._gpu)
                waiting = self.waiting()
        finally:
            os.close(file)
        self.wake(waiting)

    def _forget_member(self) -> int | None:
        member, self._member = self._member, None
        return member

    # Who lives

    def remove_dead(self) -> None:
        """Removes every process that has died from the table. Under the lock."""
        for slot in self.others():
            for gpu, (here_M, *_) in enumerate(self._parts_G):
                if here_M[slot]:
                    self.bury_if_dead(slot, gpu)

    def bury_if_dead(self, slot: int, gpu: int | None = None) -> bool:
        """Removes a model's process on `gpu` (None: this GPU) if it has died. Returns True if removed. Under the lock."""
        gpu = self._gpu if gpu is None else gpu
        try:
            descriptor = self._lock_member(slot, gpu)
        except FileNotFoundError:
            descriptor = None
        if descriptor is None:
            return False
        os.close(descriptor)
        self._remove(slot, gpu)
        return True

    def _remove(self, slot: int, gpu: int) -> None:
        self._parts_G[gpu][0][slot] = 0
        if not any(part_G[0][slot] for part_G in self._parts_G):
            self.counters[MODELS] &= ~(1 << slot)

    def _lock_member(self, slot: int, gpu: int, create: int = 0) -> int | None:
        """Descriptor of the member file, locked by this process; None if another process holds it."""
        file = os.open(self._folder / f"{slot}.{gpu}", OPEN | create, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def holder(self, slot: int) -> str:
        """Returns the name of the process that holds a slot on this GPU, such as "process 1234"."""
        return Path(self._path(slot)).read_text()

    # Wake-ups

    def waiting(self, what: int = 0) -> list[int]:
        """Returns the slots of the processes that wait on this GPU, and marks them as awake. Under the lock.

        The caller must pass them to `wake`. `what` is the resource that they wait for, GPU or PORT; 0: both.
        """
        slots = [slot for slot in self.others() if (waits := self.waits_M[slot]) and what in (0, waits)]
        for slot in slots:
            self.waits_M[slot] = 0
        return slots

    def wake(self, slots: Iterable[int]) -> None:
        """Wakes the processes in `slots`, a result of `waiting()`."""
        for slot in slots:
            with suppress(OSError):  # no process listens there any more, or it is woken already
                pipe = os.open(self._path(slot, WAKEUPS), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    os.write(pipe, b"!")
                finally:
                    os.close(pipe)

    def wait_to_be_woken(self, seconds: float) -> bool:
        """Waits until another process wakes this one. Returns False if none did within `seconds`."""
        if not self._woken.poll(1000 * seconds):
            return False
        self._wakeups.read(64)
        return True

    def _path(self, slot: int, suffix: str = "") -> str:
        return str(self._folder / f"{slot}.{self._gpu}{suffix}")


@functools.cache
def _slots(models: int) -> tuple[int, ...]:
    """The slots whose bits are set."""
    return tuple(slot for slot in range(SLOTS) if models >> slot & 1)
