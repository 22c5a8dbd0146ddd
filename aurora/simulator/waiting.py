"""Locks and ports of simulated processes, by the rules of `aurora.algorithms.arbitration`.

Instead of blocking a thread, a simulated process yields a `Wait`, and is resumed when the wait is over.
"""

from collections.abc import Callable, Generator
from functools import partial

from aurora.algorithms.arbitration import ComputeQueue, ComputeRequest, PortSlices

Resume = Callable[[], None]
Wait = Callable[[Resume], None]  # calls its argument once the wait is over
Process = Generator[Wait, None, None]


class PriorityLock:
    """Lock with one holder at a time. A ComputeQueue decides who gets it next, by levels of urgency (higher first)."""

    def __init__(self) -> None:
        self._queue = ComputeQueue()
        self._resume: dict[ComputeRequest, Resume] = {}  # of those that wait

    def acquire(self, resume: Resume, level: int = 0) -> None:
        """Requests the lock; calls `resume` once the caller holds it. Callers of higher levels get it first."""
        self._resume[self._queue.ask(level)] = resume
        self._wake()

    @property
    def priority_waits(self) -> bool:
        """True if a caller of a higher level than the holder's waits for the lock."""
        return self._queue.priority_waits

    def yield_to_priority(self, resume: Resume) -> None:
        """Gives the lock to a waiting caller of a higher level; the holder waits again, as the next of its level."""
        self._resume[self._queue.give_way()] = resume
        self._wake()

    def release(self) -> None:
        """Gives the lock to the next waiting caller, or frees it."""
        self._queue.end()
        self._wake()

    def _wake(self) -> None:
        if (request := self._queue.first) is not None:
            self._queue.begin(request)
            self._resume.pop(request)()


class Event:
    """Something that happens once, and that simulated processes wait for."""

    def __init__(self) -> None:
        self._happened, self._waiting = False, list[Resume]()

    def set(self) -> None:
        """Resumes all that wait; who waits from now on goes on at once."""
        self._happened = True
        while self._waiting:
            self._waiting.pop(0)()

    def wait(self, resume: Resume) -> None:
        """Calls `resume` once the event has happened."""
        if self._happened:
            resume()
        else:
            self._waiting.append(resume)


class SimulatedPort:
    """A rank's network port, which goes round the models in time slices."""

    def __init__(self, slices: PortSlices) -> None:
        self.slices = slices
        self._waiting: dict[int, Resume] = {}

    def acquire(self, model: int, resume: Resume) -> None:
        """Calls `resume` once the model's exchange may begin."""
        self.slices.ask(model)
        self._waiting[model] = resume
        self.wake()

    def exchange(self, model: int, transfers: Process, hold_port: bool = False) -> Process:
        """Takes the port, runs `transfers`, and releases it; with `hold_port`, only after the model's next exchange."""
        yield partial(self.acquire, model)
        yield from transfers
        self.slices.end(model, hold_port)
        self.wake()

    def wake(self) -> None:
        """Resumes the models whose exchange may begin; one that takes no time may end its slice, and wake others, here."""
        while (model := next(filter(self.slices.may_begin, self._waiting), None)) is not None:
            self.slices.begin(model)
            self._waiting.pop(model)()
