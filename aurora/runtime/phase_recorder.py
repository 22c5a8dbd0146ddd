"""Records what one model does on one rank: phases, transfers and routing."""

import numpy as np
import torch

from aurora.runtime.result import Routing
from aurora.runtime.timers import HostTimer, StreamTimer, Timer
from aurora.types import TraceRecorder


class PhaseRecorder:
    """Times the phases of one model on one rank for the run's TraceRecorder, and keeps the model's routing if asked to.

    Times are seconds since the run began. `flush` hands the phases to the TraceRecorder, because a GPU stream's timer knows
    their times only when the work is done.

    Args:
        recorder: this rank's TraceRecorder, shared by its models.
        rank, model: the rank and the model's index.
        began_s: when the run began, by time.perf_counter.
        on_gpu: whether phases are timed by events on the current stream.
        keep_routing: whether `route` keeps what `routing` returns.
    """

    def __init__(
        self,
        recorder: TraceRecorder,
        rank: int,
        model: int,
        began_s: float,
        on_gpu: bool = False,
        keep_routing: bool = False,
    ) -> None:
        self.step = -1
        self._recorder, self._rank, self._model, self._began_s = recorder, rank, model, began_s
        self._timer: Timer = StreamTimer(began_s) if on_gpu else HostTimer(began_s)
        self._phases: list[tuple[int, int, str, object, object]] = []  # step, layer, phase, start mark, end mark
        self._keep_routing = keep_routing
        self._routed: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []  # step, experts_NK, mask

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._recorder.names_M[self._model]

    def mark(self) -> object:
        """Marks the present moment. Returns the mark, to be given to `phase`."""
        return self._timer.mark()

    def seconds(self, mark: object) -> float:
        """Returns when a mark was made, in seconds since the run began; waits for the GPU's work before it."""
        return self._timer.seconds(mark)

    def phase(self, phase: str, layer: int, start: object) -> None:
        """Records a phase of the current step that ends now.

        Args:
            phase: name of the phase.
            layer: index of the MoE layer.
            start: the mark at which the phase began.
        """
        self._phases.append((self.step, layer, phase, start, self._timer.mark()))

    def transfer(self, phase: str, layer: int, peer: int, sent: bool, size: int, start_s: float, end_s: float) -> None:
        """Records this rank's end of a transfer.

        Args:
            phase, layer: as in `phase`.
            peer: the rank at the other end.
            sent: whether this rank is the sender.
            size: bytes.
            start_s, end_s: when the transfer began and ended, by time.perf_counter.
        """
        self._recorder.transfer(
            self._rank, self._model, self.step, layer, phase, peer, sent, size, start_s - self._began_s, end_s - self._began_s
        )

    def route(self, experts_NK: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Records which experts the current step's tokens chose in the next layer.

        Args:
            experts_NK: (N, K) the experts that every token chose.
            mask: (N,) bool, which tokens need experts; None: all.
        """
        if self._keep_routing:
            self._routed.append((self.step, experts_NK, mask))

    def routing(self, layers: int) -> Routing:
        """Returns what `route` recorded: (U, L, K) the experts of every token, and (U,) the step of each.

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
        """Waits until the work of the recorded phases is done, and adds them to the TraceRecorder."""
        for step, layer, phase, *marks in self._phases:
            start_s, end_s = map(self._timer.seconds, marks)
            self._recorder.add(self._rank, self._model, step, layer, phase, start_s, end_s)
        self._phases.clear()
