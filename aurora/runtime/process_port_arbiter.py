"""Port arbiter for models that run in separate processes and share the GPUs of one machine.

State: a small table in a file of a folder that all processes name alike; a process that reads or changes it holds an exclusive
flock on it. Every model has a slot of the table, and on every GPU a member file that its process keeps locked. The kernel
releases both kinds of lock when a process dies, so no process waits for a dead one and a stale folder does no harm. The folder
belongs to one user, and no link in it is followed. A waiting process is woken through a named pipe: unlike a socket's, its path
may be of any length.

GPU: one queue per GPU, first come first served, high-priority work first.

Port: an all-to-all needs all of its ranks, so two ports must not be granted to different models that then wait for each other.
The first rank of a model that wants the model's i-th exchange draws the next ticket for it; the model's other ranks use the
same ticket. Every port serves exchanges by ticket. The unfinished exchange with the smallest ticket waits for no other exchange
on any port, and its ranks finish all exchanges before it once they get their GPUs: so there is always progress. An exchange is
never overtaken once its ticket is drawn, a port is free for the next one as soon as its own rank is done, and no model waits
for one that has nothing to send. An exchange that holds the port passes its ticket to the model's next exchange in the same
step. Alternatives: a lock of rank 0 only, with the grant sent to the others, would cost a message per exchange; strict
alternation, as in `aurora.runtime.port_arbiter`, would wait for a model that is idle.

Turns: whoever has the GPU or the port, or is the next to have it, may do nothing with it for as long as it lives: it may be
stopped, or wait for a rank that is. A turn that lasts longer than TURN_S is passed on: the others go on as if it were over. Two
models then use the GPU or the port at once if the first one comes back, which costs time and changes no answer.
"""

import fcntl
import logging
import mmap
import os
import select
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput, RankFailed

LOG = logging.getLogger("aurora.run")
TABLE_VERSION = 4
TURN_S = 5.0  # how long others wait for one use of the GPU or the port
PRIORITY = 1 << 61  # subtracted from the tickets of work for each level above 0, so that it comes before all other
SLOTS, GPUS, DRAWN = 8, 64, 16  # models at most, GPUs of a machine at most, exchanges that a rank may be behind another
POLL_S = 0.02  # how often a waiting process checks whether the processes before it live
WAKEUPS = ".wakeups"  # suffix of the named pipe that a waiting process listens on
OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def colocation_folder(name: str) -> Path:
    """Makes, if needed, the folder shared by the processes of this user and machine that colocate under `name`.

    It is in the folder for temporary files, so that processes with and without a login session find the same one.

    Args:
        name: the name, without a slash.

    Returns:
        The folder's path.

    Raises:
        BadInput: if the folder, or the one that it is in, cannot be made or is not this user's alone.
    """
    ours = Path(tempfile.gettempdir()) / f"aurora-runtime-{os.getuid()}"
    folder = ours / f"{name}.{TABLE_VERSION}"
    for each in (ours, folder):
        try:
            each.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise BadInput(f"`colocate`: {each} cannot be made: {error.strerror}") from None
        if reason := _refusal_reason(each):
            raise BadInput(f"`colocate`: {each}: expected a folder of this user alone, found {reason}")
    return folder


def _refusal_reason(folder: Path) -> str | None:
    """Why a folder is not this user's alone, as part of a sentence; None if it is."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"none: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
    if found.st_uid != os.getuid():
        return f"one of user {found.st_uid}"
    return f"mode {stat.S_IMODE(found.st_mode):o}, not 700" if found.st_mode & 0o077 else None


# Columns of the shared table; axes: M slots (models), D the latest DRAWN exchanges by number modulo DRAWN, G GPUs.
COLUMNS = (
    ("drawn_M", "i8", SLOTS),  # exchanges of each model that have a ticket
    ("ticket_MD", "i8", (SLOTS, DRAWN)),  # the tickets of the latest of them
    ("done_MG", "i8", (SLOTS, GPUS)),  # exchanges that are over on each rank
    ("wants_MG", "i8", (SLOTS, GPUS)),  # ticket of the work that waits for or has a GPU; 0: none; negative: high-priority
    ("has_MG", "i8", (SLOTS, GPUS)),  # 1 where the model computes
    ("here_MG", "i8", (SLOTS, GPUS)),  # 1 where the model's process listens for wake-ups
    ("slow_M", "i8", SLOTS),  # 1 once a turn of the model was passed on, which is said once
)
TABLE = np.dtype([("last", "i8", (1,)), *COLUMNS])  # and the ticket drawn last
Turn = tuple[int, int]  # a model's slot and its ticket


class ProcessPortArbiter:
    """PortArbiter of one model on one GPU, for models that run in separate processes.

    Every rank of the model makes one, and none may be used before all are made.

    Args:
        folder: the folder shared with the other models' processes, which only this user can write to; see `colocation_folder`.
        gpu: number of the GPU on this machine.
        slot: the model's slot. Rank 0 passes None and gets a free one; the model's other ranks pass that slot.
        finish: called before the GPU or the port is released; waits for the work submitted to the GPU.
        turn_s: seconds that a turn of another model lasts before it is passed on.

    Raises:
        BadInput: if no slot is left or the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        gpu: int,
        slot: int | None = None,
        finish: Callable[[], None] = lambda: None,
        turn_s: float = TURN_S,
    ) -> None:
        if not 0 <= gpu < GPUS:
            raise BadInput(f"`colocate`: expected GPUs 0 to {GPUS - 1} of one machine, found {gpu}")
        self._folder, self._gpu, self._finish, self._turn_s = folder, gpu, finish, turn_s
        self._passed_on: dict[tuple[str, int], int] = {}  # tickets of turns that last too long, by GPU or port and slot
        self._failure: BaseException | None = None
        self._level = 0  # of the work that this model has on the GPU
        try:
            self._file = os.open(folder / "table", OPEN, 0o600)
            os.ftruncate(self._file, TABLE.itemsize)
            self._table: Any = np.frombuffer(mmap.mmap(self._file, TABLE.itemsize), TABLE).view(np.recarray)[0]
            with self._locked():
                self.slot = self._free_slot() if slot is None else slot
                self._take_slot()
        except OSError as error:
            raise BadInput(f"`colocate`: {folder} cannot be used: {error.strerror}") from None

    def _take_slot(self) -> None:
        """Locks this slot's member file on this GPU, and begins to listen for wake-ups."""
        self._member = self._lock_member(self.slot, self._gpu)
        if self._member is None:
            raise BadInput(
                f"`colocate`: GPU {self._gpu} of slot {self.slot} in {self._folder} is taken by {self._holder(self.slot)}"
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
        self._table.here_MG[self.slot, self._gpu] = 1

    @property
    def exclusive(self) -> bool:
        """Whether no other model shares this GPU."""
        return bool(self._table.here_MG[:, self._gpu].sum() == 1)

    def start_compute(self, level: int = 0) -> None:
        """Waits for the GPU; see `PortArbiter.start_compute`."""
        with self._locked():
            self._table.wants_MG[self.slot, self._gpu] = self._draw() - level * PRIORITY
            self._level = level
        self._acquire_gpu()

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        """Lets waiting high-priority work run first; see `PortArbiter.yield_to_priority`."""
        if not (self._table.wants_MG[:, self._gpu] < -self._level * PRIORITY).any():
            return False
        self._finish()
        on_yield()
        with self._locked():
            self._table.has_MG[self.slot, self._gpu] = 0
        self._wake_others()
        self._acquire_gpu()
        return True

    def stop_compute(self) -> None:
        """Releases the GPU once the work submitted to it has finished."""
        self._finish()
        with self._locked():
            self._table.wants_MG[self.slot, self._gpu] = self._table.has_MG[self.slot, self._gpu] = 0
        self._wake_others()

    def _acquire_gpu(self) -> None:
        wants_M, has_M = self._table.wants_MG[:, self._gpu], self._table.has_MG[:, self._gpu]

        def before() -> list[Turn]:
            wanted = sorted(np.flatnonzero(wants_M).tolist(), key=lambda m: (not has_M[m], wants_M[m]))
            return [(m, int(wants_M[m])) for m in wanted if m != self.slot and (has_M[m] or wants_M[m] < wants_M[self.slot])]

        def acquire() -> None:
            has_M[self.slot] = 1

        self._wait(before, "GPU", acquire)

    @contextmanager
    def exchange(self, hold_port: bool = False) -> Iterator[None]:
        """Context manager that grants this model the port; see `PortArbiter.exchange`."""
        table, done_M = self._table, self._table.done_MG[:, self._gpu]
        number = int(done_M[self.slot])
        with self._locked():
            if table.drawn_M[self.slot] == number:
                table.ticket_MD[self.slot, number % DRAWN] = self._draw()
                table.drawn_M[self.slot] += 1
            ticket = table.ticket_MD[self.slot, number % DRAWN]
            assert table.drawn_M[self.slot] - number <= DRAWN, "a rank fell behind"

        def before() -> list[Turn]:
            behind = np.flatnonzero(done_M < table.drawn_M).tolist()
            turns = [(m, int(table.ticket_MD[m, done_M[m] % DRAWN])) for m in behind if m != self.slot]
            return sorted((turn for turn in turns if turn[1] < ticket), key=lambda turn: turn[1])

        self._wait(before, "port")
        try:
            yield
            self._finish()
        except BaseException:
            hold_port = False
            raise
        finally:
            with self._locked():
                done_M[self.slot] += 1
                if hold_port and table.drawn_M[self.slot] == number + 1:  # the next exchange has this one's ticket
                    table.ticket_MD[self.slot, (number + 1) % DRAWN] = ticket
                    table.drawn_M[self.slot] += 1
            self._wake_others()

    def leave(self) -> None:
        """Ends this model's exchanges on this GPU and gives up its slot."""
        self._wakeups.close()
        if self._member is not None:  # else the slot may be another model's
            with suppress(FileNotFoundError):
                os.unlink(self._path(self.slot, WAKEUPS))
        self._release()

    def pause(self) -> None:
        """Does nothing: a model without work draws no ticket."""

    def join(self, gather: Callable[[float], Any], first: bool, slices: int | None = None) -> None:
        """Does nothing: a model takes part whenever it draws a ticket."""

    def abort(self, error: BaseException) -> None:
        """Releases the GPU and the port after this model failed with `error`; its further waits raise."""
        self._failure = self._failure or error
        self._release()

    def _release(self) -> None:
        if self._member is not None:
            with self._locked():
                self._table.here_MG[self.slot, self._gpu] = 0
                os.close(self._member)
            self._member = None
            self._wake_others()

    def _draw(self) -> int:
        self._table.last[0] += 1
        return int(self._table.last[0])

    def _wait(self, before: Callable[[], list[Turn]], what: str, acquire: Callable[[], None] = lambda: None) -> None:
        """Waits until no living process has one of the turns that come first, by sequence; acquires under the table's lock."""
        first, since_s = None, 0.0
        while True:
            with self._locked():
                turns = [turn for turn in before() if self._counts(turn, what)]
                if not turns and self._failure is None:
                    acquire()
            if self._failure is not None:
                raise RankFailed(f"stopped, because the other model on this rank failed: {self._failure}")
            if not turns:
                return
            if turns[0] != first:
                first, since_s = turns[0], time.monotonic()
            elif time.monotonic() - since_s > self._turn_s:
                self._pass_on(first, what)
                continue
            if self._woken.poll(1000 * POLL_S):
                self._wakeups.read(64)

    def _counts(self, turn: Turn, what: str) -> bool:
        """Whether a turn is a living process's and has not been passed on."""
        return self._passed_on.get((what, turn[0])) != turn[1] and self._alive(turn[0], self._gpu)

    def _pass_on(self, turn: Turn, what: str) -> None:
        """Waits no longer for a turn, and says so if no process has said it of the model before."""
        slot, self._passed_on[what, slot] = turn
        with self._locked():
            said, self._table.slow_M[slot] = bool(self._table.slow_M[slot]), 1
        if not said:
            LOG.warning(
                "%s has had the %s of rank %d for more than %g s: the others go on, now and whenever it takes as long",
                self._holder(slot), what, self._gpu, self._turn_s,
            )  # fmt: skip

    def _wake_others(self) -> None:
        """Makes the processes that wait on this GPU check again."""
        for slot in np.flatnonzero(self._table.here_MG[:, self._gpu]).tolist():
            if slot != self.slot:
                with suppress(OSError):  # no process listens there, or it is woken already
                    self._wake(slot)

    def _wake(self, slot: int) -> None:
        pipe = os.open(self._path(slot, WAKEUPS), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(pipe, b"!")
        finally:
            os.close(pipe)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _free_slot(self) -> int:
        """A slot that no process holds on any GPU, cleared."""
        for slot in range(SLOTS):
            if not any(self._alive(slot, gpu) for gpu in range(GPUS)):
                for name, *_ in COLUMNS:
                    self._table[name][slot] = 0
                return slot
        raise BadInput(f"`colocate`: {self._folder} has {SLOTS} models already")

    def _alive(self, slot: int, gpu: int) -> bool:
        if not (self._folder / f"{slot}.{gpu}").exists():
            return False
        found = self._lock_member(slot, gpu)
        if found is not None:
            os.close(found)
        return found is None

    def _lock_member(self, slot: int, gpu: int) -> int | None:
        """Descriptor of the member file, locked by this process; None if another process holds it."""
        file = os.open(self._folder / f"{slot}.{gpu}", OPEN, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def _holder(self, slot: int) -> str:
        return Path(self._path(slot)).read_text()

    def _path(self, slot: int, suffix: str = "") -> str:
        return str(self._folder / f"{slot}.{self._gpu}{suffix}")
