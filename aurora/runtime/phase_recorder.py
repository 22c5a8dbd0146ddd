"""Recorder of the phases, transfers and routing of one model on one rank, and the timers that it uses.

A timer reads the host's clock, or records events on a CUDA stream without waiting for them.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.moe.transport import Observe
from aurora.types import TraceRecorder
from aurora.types.arrays import IntArray

Routing = tuple[NDArray[Any], IntArray]  # experts_ULK of a rank's U tokens, and in which step each was routed
MOST_QUEUED = 1024  # phases that have not been read


class Timer(Protocol):
    """Interface of timers: they put marks into this thread's work, and report later when the work reached them."""

    def mark(self) -> Any:
        """Puts a mark behind the work submitted so far. Returns the mark."""

    def reached(self, mark: Any) -> bool:
        """Returns True if the work has reached the mark; does not wait."""

    def seconds(self, mark: Any) -> float:
        """Waits until the work reaches the mark. Returns the time at which it did, in seconds since the run began."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks that have been reached."""


class HostTimer:
    """Timer that reads the host's clock. `began_s` is the start of the run, by time.perf_counter."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def mark(self) -> float:
        """Returns the present time; see `Timer.mark`."""
        return time.perf_counter() - self._began_s

    def reached(self, mark: float) -> bool:
        """Returns True, because the host is always past its marks."""
        return True

    def seconds(self, mark: float) -> float:
        """Returns when the mark was made; see `Timer.seconds`."""
        return mark

    def elapsed_s(self, start: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - start


class Event(Protocol):
    """Interface of an event on a GPU stream, such as torch.cuda.Event with enable_timing."""

    def record(self) -> None:
        """Puts the event at the end of the current stream."""

    def query(self) -> bool:
        """Returns whether the stream has reached the event."""

    def synchronize(self) -> None:
        """Waits until the stream has reached the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to `end_event`; the stream must have reached both."""


class StreamMark(NamedTuple):
    """Mark of a StreamTimer: a CUDA event, and the host's time when it was recorded."""

    event: Event
    made_s: float  # when the host recorded the event, since the run began


class StreamTimer:
    """Timer that records events on the current CUDA stream of the calling thread.

    CUDA measures the time between two events by the GPU's clock, which drifts from the host's. So each mark is timed relative
    to the mark read before it, and clipped to lie between the times at which the host recorded and read its event. Marks should
    be read roughly in the sequence in which they were made.

    Args:
        began_s: start of the run, by `clock`.
        new_event: creates an event.
        clock: the host's clock, in seconds.
    """

    def __init__(
        self,
        began_s: float,
        new_event: Callable[[], Event] = lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._began_s, self._new_event, self._clock = began_s, new_event, clock
        self._read = self.mark()  # the mark that was read last, and its time
        self._read.event.synchronize()
        self._read_s = self._now_s()

    def mark(self) -> StreamMark:
        """Records an event on the current stream; see `Timer.mark`."""
        mark = StreamMark(self._new_event(), self._now_s())
        mark.event.record()
        return mark

    def reached(self, mark: StreamMark) -> bool:
        """Returns True if the stream has reached the mark; see `Timer.reached`."""
        return mark.event.query()

    def seconds(self, mark: StreamMark) -> float:
        """Waits until the stream reaches the mark, and returns the time; see `Timer.seconds`."""
        mark.event.synchronize()
        later_s = self._read_s + self.elapsed_s(self._read, mark)
        self._read, self._read_s = mark, min(max(later_s, mark.made_s), self._now_s())
        return self._read_s

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float:
        """Returns the seconds between two marks, by the GPU's clock; see `Timer.elapsed_s`."""
        return start.event.elapsed_time(end.event) / 1e3

    def _now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began_s


class PhaseRecorder:
    """Times the phases of one model on one rank for the run's TraceRecorder; optionally records the tokens' expert choices.

    Times are seconds since the run began. With a StreamTimer they are known only once the GPU has done the work. Until then
    phases are queued; the recorder waits for the GPU only when more than MOST_QUEUED are queued.

    Args:
        recorder: this rank's TraceRecorder, shared by its models.
        rank, model: the rank and the model's index.
        began_s: start of the run, by time.perf_counter.
        timer: the timer of phases; None: a HostTimer.
        keep_routing: True: `route` stores expert choices for `routing`; False: it ignores them.

    Attributes:
        step: number of the current step, from 0.
        timer: the timer in use.
    """

    def __init__(
        self,
        recorder: TraceRecorder,
        rank: int,
        model: int,
        began_s: float,
        timer: Timer | None = None,
        keep_routing: bool = False,
    ) -> None:
        self.step = -1
        self._recorder, self._rank, self._model, self._began_s = recorder, rank, model, began_s
        self.timer: Timer = HostTimer(began_s) if timer is None else timer
        self._phases: deque[tuple[int, int, str, Any, Any]] = deque()  # step, layer, phase, start mark, end mark
        self._keep_routing = keep_routing
        self._routed: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []  # step, experts_NK, mask

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._recorder.names_M[self._model]

    def mark(self) -> Any:
        """Returns a mark of the present moment, to be passed to `phase` and `elapsed_s`."""
        return self.timer.mark()

    def elapsed_s(self, start: Any, end: Any) -> float | None:
        """Returns the seconds between two marks, or None if the work has not reached `end`."""
        return self.timer.elapsed_s(start, end) if self.timer.reached(end) else None

    def phase(self, phase: str, layer: int, start: Any) -> None:
        """Records a phase of the current step that ends now.

        Args:
            phase: name of the phase.
            layer: index of the MoE layer.
            start: the mark at which the phase began.
        """
        self._phases.append((self.step, layer, phase, start, self.timer.mark()))
        while self._phases and (len(self._phases) > MOST_QUEUED or self.timer.reached(self._phases[0][-1])):
            self._read_oldest()

    def observer(self, phase: str, layer: int) -> Observe:
        """Returns a function that records the transfers of an exchange of the current step; it may be called later.

        Args:
            phase, layer: as in `phase`.
        """
        where = (self._rank, self._model, self.step, layer, phase)

        def observe(peer: int, sent: bool, size: int, start_s: float, end_s: float) -> None:
            self._recorder.add(*where, start_s - self._began_s, end_s - self._began_s, (peer, sent, size))

        return observe

    def route(self, experts_NK: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Records the expert choices of the current step's tokens; the n-th call in a step is for MoE layer n.

        Args:
            experts_NK: (N, K) the experts of every token.
            mask: (N,) bool, True for tokens that need experts; None: all do.
        """
        if self._keep_routing:
            self._routed.append((self.step, experts_NK, mask))

    def routing(self, layers: int) -> Routing:
        """Returns the recorded routing: (U, L, K) the experts of every token, and (U,) the step of each token.

        Args:
            layers: MoE layers of the model, all recorded in every step.
        """
        step_U, passes = [], []
        for first in range(0, len(self._routed), layers):
            routed = self._routed[first : first + layers]
            experts_NLK = torch.stack([experts if mask is None else experts[mask] for _, experts, mask in routed], dim=1)
            passes.append(experts_NLK.cpu().numpy())
            step_U += [routed[0][0]] * len(experts_NLK)
        return np.concatenate(passes), np.array(step_U, dtype=np.int64)

    def flush(self) -> None:
        """Waits until the work of all recorded phases is done, and adds the phases to the TraceRecorder."""
        while self._phases:
            self._read_oldest()

    def _read_oldest(self) -> None:
        """Waits until the work of the phase that was recorded first is done, and adds the phase to the TraceRecorder."""
        step, layer, phase, *marks = self._phases.popleft()
        start_s, end_s = map(self.timer.seconds, marks)
        self._recorder.add(self._rank, self._model, step, layer, phase, start_s, end_s)
