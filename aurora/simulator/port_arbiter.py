"""Port arbiter of the simulator: the interface and rules of `aurora.runtime.port_arbiter`, in simulated time.

Where the runtime's thread would wait, a simulated process yields a `Wait`, and is resumed when the wait is over.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from aurora.types import has_next_slice

Resume = Callable[[], None]
Wait = Callable[[Resume], None]  # calls its argument once the wait is over
T = TypeVar("T")
Steps = Generator[Wait, None, T]
Process = Steps[None]


class PriorityLock:
    """Lock for one holder at a time: high-priority work first, otherwise first come first served."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Resume] = []
        self._high_priority: list[Resume] = []

    def acquire(self, resume: Resume, high_priority: bool = False) -> None:
        """Calls `resume` once the caller holds the lock; with `high_priority`, before all callers without."""
        if self._held:
            (self._high_priority if high_priority else self._waiting).append(resume)
        else:
            self._held = True
            resume()

    @property
    def priority_waits(self) -> bool:
        """Whether high-priority work waits for the lock."""
        return bool(self._high_priority)

    def yield_to_priority(self, resume: Resume) -> None:
        """Hands the lock to waiting high-priority work; the caller is the next without high priority."""
        self._waiting.insert(0, resume)
        self.release()

    def release(self) -> None:
        """Hands the lock to the next caller, or frees it."""
        if self._high_priority or self._waiting:
            (self._high_priority or self._waiting).pop(0)()
        else:
            self._held = False


class _Port:
    """A rank's network port, whose time slices go round the models."""

    def __init__(self, models: int) -> None:
        self._slices_done_M = [0.0] * models
        self._waiting: dict[int, Resume] = {}

    def acquire(self, model: int, resume: Resume) -> None:
        """Calls `resume` once the next time slice is the model's."""
        self._waiting[model] = resume
        self._wake()

    def finish_slices(self, model: int, count: float) -> None:
        """Ends `count` time slices of the model."""
        self._slices_done_M[model] += count
        self._wake()

    def _wake(self) -> None:
        """Resumes the models that have the next time slice; one that takes no time may end its slice, and wake others, here."""
        while (model := next(filter(self._has_next_slice, self._waiting), None)) is not None:
            self._waiting.pop(model)()

    def _has_next_slice(self, model: int) -> bool:
        return has_next_slice(self._slices_done_M, model)


class SimulatedPortArbiter:
    """One model's access to the GPU and the port of its rank."""

    def __init__(self, compute: PriorityLock, port: _Port, model: int) -> None:
        self._compute, self._port, self._model = compute, port, model

    def start_compute(self, high_priority: bool = False) -> Wait:
        """Waits for the GPU; with `high_priority`, before all waiting work without."""
        return lambda resume: self._compute.acquire(resume, high_priority)

    def yield_to_priority(self, on_yield: Callable[[], None]) -> Steps[bool]:
        """Calls `on_yield` and lets waiting high-priority work run first, if there is any. Returns whether there was."""
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
        yield lambda resume: self._port.acquire(self._model, resume)
        yield from transfers
        self._port.finish_slices(self._model, 0 if hold_port else 1)

    def leave(self) -> None:
        """Ends this model's exchanges; its time slices are skipped from now on."""
        self._port.finish_slices(self._model, float("inf"))


def simulated_port_arbiters(models: int) -> list[SimulatedPortArbiter]:
    """Returns one arbiter for each of the models that share a rank."""
    compute, port = PriorityLock(), _Port(models)
    return [SimulatedPortArbiter(compute, port, model) for model in range(models)]
