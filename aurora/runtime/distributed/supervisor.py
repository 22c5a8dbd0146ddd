"""One process that keeps ranks going: it starts them, watches them, and tells who belongs together, epoch after epoch.

It alone decides on membership, so there is nothing for ranks to agree on. A change (a rank died, hangs, lost a peer, or has
come) ends the epoch: every member is told to stop, says what it holds, and gets its part of the next one. A rank that dies in
between is left out, and one that says nothing is ended.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.control_channel import (
    BEAT_S,
    EpochStart,
    Finish,
    Heartbeat,
    MemberCrashed,
    MemberResult,
    MemberState,
    Progress,
    Stop,
    member,
)
from aurora.runtime.distributed.launcher import RankInfo, hosted_store, start

EXIT_S = 0.3  # to hear how a process ended: the others wait meanwhile
WITHOUT_PROGRESS = 5  # epochs of the same members in which nothing was told, before the supervisor gives up


class Coordinator(Protocol):
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


@dataclass
class _Worker:
    seat: int
    process: Any
    connection: Connection
    seen_s: float
    standing: MemberState | None = None
    serving: bool = False
    told_to_stop: bool = False
    brought: MemberResult | None = None


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
        steward: Coordinator,
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
        self._inbox: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()  # what they say; None: nothing more
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
        place = RankInfo(seat, self._seats, self._host, self._listening, self._timeout_s, seat, self._seats, launched=True)
        self._starting[seat] = self._beside.submit(start, place, member, self._target, self._args)

    def _welcome(self, wait: bool = False) -> None:
        for seat, started in list(self._starting.items()):
            if wait or started.done():
                del self._starting[seat]
                try:
                    process, connection = started.result()
                except OSError as error:  # it died before it had its arguments
                    self._lost(seat, f"did not start: {error}")
                    continue
                worker = _Worker(seat, process, connection, time.monotonic() + self._timeout_s)  # to load its models
                self._workers[seat] = worker
                # A thread each: a rank that is stopped in the middle of a message keeps nobody else waiting.
                threading.Thread(target=_listen, args=(worker, self._inbox), daemon=True, name=f"aurora-rank-{seat}").start()

    def _end(self, seat: int) -> None:
        worker = self._workers.pop(seat)
        worker.process.kill()  # which ends its thread, and that closes the connection
        self._beside.submit(worker.process.join)

    def _step(self) -> None:
        self._welcome()
        for seat, message in self._heard():
            if message is None:
                self._lose(seat, self._how(seat))
            else:
                self._hear(seat, message)
        now = time.monotonic()
        for seat, worker in list(self._workers.items()):
            if now - worker.seen_s > self._hang_s:
                self._lose(seat, f"said nothing for {self._hang_s:g} s")
        if not self._workers and not self._starting:
            raise RankFailed(f"all ranks are lost; the last, {self._reason}")
        better = self._moved and (self._newcomers or self._steward.restless)
        if (self._changing or better) and not self._steward.finished:
            self._change()

    def _heard(self) -> Iterator[tuple[int, Any]]:
        """What workers have said until now, by seat; if that is nothing, what comes first within BEAT_S."""
        with suppress(Empty):
            for _ in range(max(1, self._inbox.qsize())):
                worker, message = self._inbox.get(timeout=BEAT_S)
                if self._workers.get(worker.seat) is worker:
                    yield worker.seat, message

    def _hear(self, seat: int, message: Any) -> None:
        worker = self._workers[seat]
        worker.seen_s = max(worker.seen_s, time.monotonic())
        match message:
            case Heartbeat(busy_s):
                if busy_s > self._timeout_s:
                    self._lose(seat, f"was busy with one thing for {busy_s:.0f} s")
            case MemberState():
                self._newcomers |= not worker.serving
                self._changing |= worker.serving
                worker.standing, worker.serving = message, False
                worker.seen_s = time.monotonic()
                if message.lost is not None:
                    self._reason = f"rank {seat}: {message.lost}"
            case Progress(value):
                if self._steward.told(seat, value):
                    self._silent, self._moved = 0, True
            case MemberResult(AuroraError() as error):
                raise error
            case MemberResult(MemberCrashed(how)):
                self._lose(seat, how)
            case MemberResult():
                worker.brought = message

    def _how(self, seat: int) -> str:
        process = self._workers[seat].process
        process.join(EXIT_S)
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
            _send(worker, EpochStart(self._epoch, tuple(standing), parts[seat]))

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
            if all(self._workers[seat].brought is not None for seat in members):
                break
            for seat, message in self._heard():
                if message is not None:
                    self._hear(seat, message)
                elif self._workers[seat].brought is None:
                    members.discard(seat)
        found = {seat: self._workers[seat].brought for seat in sorted(members & self._workers.keys())}
        return {seat: brought.value for seat, brought in found.items() if brought is not None}


def _listen(worker: _Worker, inbox: "SimpleQueue[tuple[_Worker, Any]]") -> None:
    """Until the worker is dead."""
    with worker.connection, suppress(EOFError, OSError):
        while True:
            inbox.put((worker, worker.connection.recv()))
    inbox.put((worker, None))


def _send(worker: _Worker, message: object) -> None:
    with suppress(OSError):  # it is dying: its end of the pipe says so next
        worker.connection.send(message)
