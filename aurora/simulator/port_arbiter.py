"""Port arbiter of the simulator: the interface and rules of `aurora.runtime.port_arbiter`, in simulated time.

Where the runtime's thread would wait, a simulated process yields a `Wait`, and is resumed when the wait is over.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from aurora.planner.arbitration import ComputeQueue, ComputeRequest, PortSlices
from aurora.types import SlicePolicy

Resume = Callable[[], None]
Wait = Callable[[Resume], None]  # calls its argument once the wait is over
T = TypeVar("T")
Steps = Generator[Wait, None, T]
Process = Steps[None]


class PriorityLock:
    """Lock for one holder at a time, by the rules of a ComputeQueue."""

    def __init__(self) -> None:
        self._queue = ComputeQueue()
        self._resume: dict[ComputeRequest, Resume] = {}  # of those that wait

    def acquire(self, resume: Resume, level: int = 0) -> None:
        """Calls `resume` once the caller holds the lock, before all callers of lower levels."""
        self._resume[self._queue.ask(level)] = resume
        self._wake()

    @property
    def priority_waits(self) -> bool:
        """True if work that is more urgent than the holder's waits for the lock."""
        return self._queue.priority_waits

    def yield_to_priority(self, resume: Resume) -> None:
        """Hands the lock to more urgent work that waits; the caller is the next of its level."""
        self._resume[self._queue.give_way()] = resume
        self._wake()

    def release(self) -> None:
        """Hands the lock to the next caller, or frees it."""
        self._queue.end()
        self._wake()

    def _wake(self) -> None:
        if (request := self._queue.first) is not None:
            self._queue.begin(request)
            self._resume.pop(request)()


class _Port:
    """A rank's network port, which goes round the models in time slices."""

    def __init__(self, slices: PortSlices) -> None:
        self.slices = slices
        self._waiting: dict[int, Resume] = {}

    def acquire(self, model: int, resume: Resume) -> None:
        """Calls `resume` once the model's exchange may begin."""
        self.slices.ask(model)
        self._waiting[model] = resume
        self.wake()

    def wake(self) -> None:
        """Resumes the models whose exchange may begin; one that takes no time may end its slice, and wake others, here."""
        while (model := next(filter(self.slices.may_begin, self._waiting), None)) is not None:
            self.slices.begin(model)
            self._waiting.pop(model)()


class SimulatedPortArbiter:
    """One model's access to the GPU and the port of its rank."""

    def __init__(self, compute: PriorityLock, port: _Port, model: int) -> None:
        self._compute, self._port, self._model = compute, port, model

    def start_compute(self, level: int = 0) -> Wait:
        """Waits for the GPU, before all waiting work of lower levels."""
        return lambda resume: self._compute.acquire(resume, level)

    def yield_to_priority(self, on_yield: Callable[[], None]) -> Steps[bool]:
        """Calls `on_yield` and lets waiting work of higher levels run first, if there is any. Returns whether there was."""
        if not self._compute.priority_waits:
            return False
        on_yield()
        yield self._compute.yield_to_priority
        return True

    def stop_compute(self) -> None:
        """Releases the GPU."""
        self._compute.release()

    def exchange(self, transfers: Process, hold_port: bool = False) -> Process:
        """Runs `transfers` with the port. With `hold_port`, the grant extends through the model's next exchange."""
        yield self.hold_port()
        yield from transfers
        self._port.slices.end(self._model, hold_port)
        self._port.wake()

    def hold_port(self) -> Wait:
        """Waits for the port and keeps it through the model's next exchange."""
        return lambda resume: self._port.acquire(self._model, resume)

    @property
    def joins(self) -> bool:
        """True if this model is in the sequence of slices only while it exchanges."""
        return self._port.slices.joins_M[self._model]

    def draw(self) -> float:
        """Returns a virtual time for the model to join at; see `SliceSequence.draw`."""
        return self._port.slices.draw(self._model)

    def join(self, base: float, slices: int | None = None) -> None:
        """Puts this model into the sequence of slices."""
        self._port.slices.join(self._model, base, slices)
        self._port.wake()

    def leave(self) -> None:
        """Ends this model's exchanges; its time slices are skipped from now on."""
        self._port.slices.leave(self._model)
        self._port.wake()


def simulated_port_arbiters(policies_M: Sequence[SlicePolicy], overlapping: bool = True) -> list[SimulatedPortArbiter]:
    """Returns one arbiter for each of the models that share a rank; `overlapping` as of `PortSlices`."""
    compute, port = PriorityLock(), _Port(PortSlices(policies_M, overlapping))
    return [SimulatedPortArbiter(compute, port, model) for model in range(len(policies_M))]
