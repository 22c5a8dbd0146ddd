"""One process that keeps ranks going: it starts them, watches them, and tells who belongs together, epoch after epoch.

It alone decides on membership, so there is nothing for ranks to agree on. A change (a rank died, hangs, lost a peer, or has
come) ends the epoch: every member is told to stop, says what it holds, and gets its part of the next one. A rank that dies in
between is left out, and one that says nothing is ended.
"""

import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from aurora.errors import AuroraError, RankFailed
from aurora.ranks.launcher import Seat, hosted_store, start, what_happened

BEAT_S = 0.1
WITHOUT_PROGRESS = 5  # epochs of the same members in which nothing was told, before the supervisor gives up


@dataclass(frozen=True)
class Epoch:
    """From the supervisor to a member. seats: of all members, ascending; a member's rank is its place among them. part: what
    the steward assigned to it."""

    number: int
    seats: tuple[int, ...]
    part: Any


@dataclass(frozen=True)
class Stop:
    """From the supervisor: the epoch is over."""


@dataclass(frozen=True)
class Finish:
    """From the supervisor: all is done, bring home what you have."""


@dataclass(frozen=True)
class Beat:
    """From a rank, every BEAT_S. busy_s: for how long it has been in one piece of work that waits for nobody."""

    busy_s: float


@dataclass(frozen=True)
class Standing:
    """From a rank: it is in no epoch and waits for one. lost: why it left the last one by itself; None: it was told to."""

    value: Any
    lost: str | None = None


@dataclass(frozen=True)
class Told:
    """From a rank in an epoch, for the steward."""

    value: Any


@dataclass(frozen=True)
class Brought:
    """From a rank at the end: its result, or the error that it cannot go on from."""

    value: Any


@dataclass(frozen=True)
class Crashed:
    """Brought by a rank that met an error of its own; the others go on."""

    how: str


class Steward(Protocol):
    """What the members of each epoch are to do, and when all of it is done. Errors that it raises end the run."""

    @property
    def finished(self) -> bool: ...

    @property
    def restless(self) -> bool:
        """Whether it has something better for the same members: they get it in an epoch of its own."""

    def assign(self, epoch: int, standing: Mapping[int, Any]) -> Mapping[int, Any]:
        """A part for each seat, given what each said when it stood by."""

    def told(self, seat: int, value: Any) -> bool:
        """Whether the work has got on by this."""

    def lost(self, seat: int, how: str) -> None: ...


class Link:
    """A rank's way to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._next: Epoch | Finish | None = None
        self._abort: Callable[[], None] = lambda: None
        self._busy_since: Callable[[], float | None] = lambda: None
        threading.Thread(target=self._listen, daemon=True, name="aurora-link").start()
        threading.Thread(target=self._beat, daemon=True, name="aurora-beat").start()

    def stand_by(self, value: Any, lost: str | None = None) -> Epoch | Finish:
        """Say what this rank holds, and wait for what comes next."""
        self._say(Standing(value, lost))
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None)
            found, self._next = self._next, None
        assert found is not None
        return found

    @property
    def stopped(self) -> threading.Event:
        """Set when the epoch is over; `during` clears it."""
        return self._stop

    def on_stop(self, abort: Callable[[], None]) -> None:
        """Call `abort` when the epoch is over, at once if it is."""
        self._abort = abort
        if self._stop.is_set():
            abort()

    def busy(self, since: Callable[[], float | None]) -> None:
        """`since` tells by time.monotonic when this rank began what it is doing, None: it waits for others."""
        self._busy_since = since

    def tell(self, value: Any) -> None:
        self._say(Told(value))

    def bring(self, value: Any) -> None:
        self._say(Brought(value))

    def _say(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to work for
            if isinstance(message, Stop):
                self._stop.set()
                self._abort()
                continue
            with self._changed:
                self._stop.clear()
                self._abort = lambda: None
                self._next = message
                self._changed.notify_all()

    def _beat(self) -> None:
        while True:
            since = self._busy_since()
            try:
                self._say(Beat(0.0 if since is None else time.monotonic() - since))
            except OSError:
                os._exit(1)
            time.sleep(BEAT_S)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    seen_s: float
    standing: Standing | None = None
    serving: bool = False
    told_to_stop: bool = False
    brought: Brought | None = None


class Supervisor:
    """Keeps `seats` ranks at `target(seat, link, *args)` until the steward's work is done.

    hang_s: a rank that has not been heard of for so long is killed. timeout_s: so is one that has been busy with one thing for
    so long. respawn: how many times a lost rank is started anew, at each seat; it joins when it stands by. watch: told of each
    epoch's number and of the process of every member.
    """

    def __init__(
        self,
        target: Callable[..., None],
        seats: int,
        steward: Steward,
        args: tuple[Any, ...],
        *,
        timeout_s: float,
        hang_s: float,
        respawn: int = 0,
        port: int = 0,
        watch: Callable[[int, dict[int, int]], None] | None = None,
    ) -> None:
        self._target, self._args, self._steward, self._watch = target, args, steward, watch
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._seats = seats
        self._respawn_left = [respawn] * seats
        self._port = port
        self._workers: dict[int, _Worker] = {}
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="aurora-beside")  # who serves waits for none who comes or goes
        self._starting: dict[int, Future[tuple[Any, Connection]]] = {}
        self._epoch = 0
        self._members: tuple[int, ...] = ()
        self._silent = 0  # epochs of the same members since the work got on
        self._changing = True
        self._newcomers = self._moved = False  # who has come waits until those who serve have got on
        self._reason = ""

    def run(self) -> dict[int, Any]:
        """What each rank that is left brought home, by seat. Raises RankFailed when none is left or nothing moves any more,
        and what ranks or the steward raise; all processes are gone then, and on return."""
        with hosted_store(self._port) as (host, port):
            self._host, self._listening = host, port
            try:
                for seat in range(self._seats):
                    self._start(seat)
                while not self._steward.finished:
                    self._step()
                return self._bring_home()
            finally:
                self._respawn_left = [0] * self._seats
                self._welcome(wait=True)
                for seat in list(self._workers):
                    self._end(seat)
                self._beside.shutdown()

    def _start(self, seat: int) -> None:
        place = Seat(seat, self._seats, self._host, self._listening, self._timeout_s, seat, self._seats, launched=True)
        self._starting[seat] = self._beside.submit(start, place, _member, self._target, self._args)

    def _welcome(self, wait: bool = False) -> None:
        for seat, started in list(self._starting.items()):
            if wait or started.done():
                del self._starting[seat]
                try:
                    process, connection = started.result()
                except OSError as error:  # it died before it had its arguments
                    self._lost(seat, f"did not start: {error}")
                    continue
                self._workers[seat] = _Worker(process, connection, time.monotonic() + self._timeout_s)  # to load its models

    def _end(self, seat: int) -> None:
        worker = self._workers.pop(seat)
        worker.process.kill()
        self._beside.submit(worker.process.join)
        worker.connection.close()

    def _step(self) -> None:
        self._welcome()
        by_connection = {worker.connection: seat for seat, worker in self._workers.items()}
        for ready in multiprocessing.connection.wait(list(by_connection), timeout=BEAT_S):
            assert isinstance(ready, Connection)
            seat = by_connection[ready]
            try:
                self._hear(seat, ready.recv())
            except (EOFError, OSError):
                self._lose(seat, self._how(seat))
        now = time.monotonic()
        for seat, worker in list(self._workers.items()):
            if now - worker.seen_s > self._hang_s and not worker.connection.poll():
                self._lose(seat, f"said nothing for {self._hang_s:g} s")
        if not self._workers and not self._starting:
            raise RankFailed(f"all ranks are lost; the last, {self._reason}")
        better = self._moved and (self._newcomers or self._steward.restless)
        if (self._changing or better) and not self._steward.finished:
            self._change()

    def _hear(self, seat: int, message: Any) -> None:
        worker = self._workers[seat]
        worker.seen_s = max(worker.seen_s, time.monotonic())
        match message:
            case Beat(busy_s):
                if busy_s > self._timeout_s:
                    self._lose(seat, f"was busy with one thing for {busy_s:.0f} s")
            case Standing():
                self._newcomers |= not worker.serving
                self._changing |= worker.serving
                worker.standing, worker.serving = message, False
                worker.seen_s = time.monotonic()
                if message.lost is not None:
                    self._reason = f"rank {seat}: {message.lost}"
            case Told(value):
                if self._steward.told(seat, value):
                    self._silent, self._moved = 0, True
            case Brought(AuroraError() as error):
                raise error
            case Brought(Crashed(how)):
                self._lose(seat, how)
            case Brought():
                worker.brought = message

    def _how(self, seat: int) -> str:
        process = self._workers[seat].process
        process.join(1.0)
        code = process.exitcode
        if code is None:
            return "its process ended"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _lose(self, seat: int, how: str) -> None:
        self._end(seat)
        self._lost(seat, how)
        self._changing = True

    def _lost(self, seat: int, how: str) -> None:
        self._reason = f"rank {seat}: {how}"
        self._steward.lost(seat, how)
        if self._respawn_left[seat] > 0:
            self._respawn_left[seat] -= 1
            self._start(seat)

    def _change(self) -> None:
        """End the epoch, and begin the next when all who were in it stand by, or at first when all seats do."""
        for worker in self._workers.values():
            if worker.serving and not worker.told_to_stop:
                worker.told_to_stop = True
                _send(worker, Stop())
        standing = {
            seat: worker.standing.value for seat, worker in sorted(self._workers.items()) if worker.standing is not None
        }
        loading = self._epoch == 0 and len(standing) < len(self._workers) + len(self._starting)
        if loading or not standing or any(worker.serving for worker in self._workers.values()):
            return
        self._silent += tuple(standing) == self._members and not self._steward.restless
        if self._silent > WITHOUT_PROGRESS:
            raise RankFailed(f"nothing moved in {WITHOUT_PROGRESS} epochs; the last ended by {self._reason}")
        self._epoch, self._members = self._epoch + 1, tuple(standing)
        parts = self._steward.assign(self._epoch, standing)
        self._changing = self._newcomers = self._moved = False
        if self._watch is not None:
            self._watch(self._epoch, {seat: self._workers[seat].process.pid for seat in standing})
        for seat in standing:
            worker = self._workers[seat]
            worker.standing, worker.serving, worker.told_to_stop = None, True, False
            _send(worker, Epoch(self._epoch, tuple(standing), parts[seat]))

    def _bring_home(self) -> dict[int, Any]:
        self._respawn_left = [0] * self._seats
        for worker in self._workers.values():
            if worker.serving:
                _send(worker, Stop())
        asked: set[int] = set()
        deadline = time.monotonic() + self._hang_s
        members = {seat for seat, worker in self._workers.items() if worker.serving or worker.standing is not None}
        while time.monotonic() < deadline:
            members &= self._workers.keys()  # less those that crashed on their way home
            for seat in sorted(members - asked):
                if self._workers[seat].standing is not None:
                    _send(self._workers[seat], Finish())
                    asked.add(seat)
            waiting = {self._workers[seat].connection: seat for seat in members if self._workers[seat].brought is None}
            if not waiting:
                break
            for ready in multiprocessing.connection.wait(list(waiting), timeout=BEAT_S):
                assert isinstance(ready, Connection)
                seat = waiting[ready]
                try:
                    self._hear(seat, ready.recv())
                except (EOFError, OSError):
                    members.discard(seat)
        found = {seat: self._workers[seat].brought for seat in sorted(members & self._workers.keys())}
        return {seat: brought.value for seat, brought in found.items() if brought is not None}


def _send(worker: _Worker, message: object) -> None:
    with suppress(OSError):  # it is dying: its end of the pipe says so next
        worker.connection.send(message)


def _hush() -> None:
    """gloo tells of every lost connection on descriptor 2, and losing them is what is expected here; Python keeps its own."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as silent:
        os.dup2(silent.fileno(), 2)


def _member(connection: Connection, seat: Seat, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    if not os.environ.get("AURORA_DEBUG"):
        _hush()
    link = Link(connection)
    try:
        target(seat, link, *args)
    except AuroraError as error:
        link.bring(error)
    except BaseException as error:
        link.bring(Crashed(what_happened(error)))
