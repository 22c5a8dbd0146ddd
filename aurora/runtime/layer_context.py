"""Compute and communication of one model on one rank, as its layers use them: arbitrated, recorded, and named in errors."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.order_calibration import OrderCalibration
from aurora.runtime.phase_recorder import PhaseRecorder
from aurora.runtime.port_arbiter import PortArbiter
from aurora.types import Exchange


class LayerContext:
    """Access of one model's layers to compute and communication on one rank.

    Args:
        model: the model's index in the program.
        transport: carries tensors between the model's ranks.
        arbiter: the model's access to this rank's GPU and port.
        recorder: records the model's phases on this rank.
        calibration: chooses the fastest order for each size in place of the planned one; None: the planned orders are used.

    Attributes:
        mask: (N,) bool, which tokens of the current step need experts; None: all.
        preemptive: whether time slices are by layer, so that expert compute has preemption points (see `Program.time_slice`).
        busy_since: when this rank's present computation began, by time.monotonic; None while it does not compute.
        waiting_since: when this rank began to wait for peers, by time.monotonic; None while it does not wait.
    """

    def __init__(
        self,
        model: int,
        transport: Transport,
        arbiter: PortArbiter,
        recorder: PhaseRecorder,
        calibration: OrderCalibration | None = None,
    ) -> None:
        self.model, self.transport, self.recorder = model, transport, recorder
        self.mask: torch.Tensor | None = None
        self.preemptive = False
        self.busy_since: float | None = None
        self.waiting_since: float | None = None
        self._arbiter, self._calibration = arbiter, calibration
        self._layer_rows = 0  # of all ranks; for the calibration
        self._compute_start: object = None

    def any_active(self, active: bool) -> bool:
        """Returns whether any rank of the model is active. A collective call: all ranks of the model make it."""
        with self._waiting("between steps"):
            return bool(self.transport.gather(torch.tensor([active], dtype=torch.long)).any())

    def next_step(self, mask: torch.Tensor | None) -> None:
        """Begins a forward pass; `mask` (N,) says which of its tokens need experts, None: all."""
        self.recorder.step += 1
        self.mask = mask

    @property
    def preemptible(self) -> bool:
        """Whether other models' high-priority work may wait for a preemption point."""
        return self.preemptive and not self._arbiter.exclusive

    def start_compute(self, phase: str = "gate") -> None:
        """Waits for the GPU. If time slices are by layer, all phases but "expert" have high priority."""
        self._arbiter.start_compute(self.preemptive and phase != "expert")
        self._compute_start, self.busy_since = self.recorder.mark(), time.monotonic()

    def stop_compute(self, phase: str, layer: int) -> None:
        """Records that a phase ends now, and releases the GPU."""
        self._end_phase(phase, layer)
        self._arbiter.stop_compute()

    @contextmanager
    def computing(self, phase: str, layer: int) -> Iterator[None]:
        """Context manager that holds the GPU for a phase, and records the phase at its end."""
        self.start_compute(phase)
        yield
        self.stop_compute(phase, layer)

    def yield_to_priority(self, phase: str, layer: int) -> None:
        """Preemption point within a phase: lets waiting high-priority work run first."""
        if self._arbiter.yield_to_priority(lambda: self._end_phase(phase, layer)):
            self._compute_start, self.busy_since = self.recorder.mark(), time.monotonic()

    def _end_phase(self, phase: str, layer: int) -> None:
        self.recorder.phase(phase, layer, self._compute_start)
        self.busy_since = None

    def gather_counts(self, counts: torch.Tensor, layer: int) -> torch.Tensor:
        """Gathers the row counts of all ranks: (R, *counts.shape) int64 on the CPU. A collective call."""
        start = self.recorder.mark()
        with self._waiting(f"layer {layer}, counts"):
            gathered = self.transport.gather(counts)
        if self._calibration is not None:
            self._layer_rows = int(gathered.sum())
        self.recorder.phase("counts", layer, start)
        return gathered

    def exchange(self, layer: int, op: Exchange, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        """Performs an all-to-all in this model's time slice of the port, by one tensor to send and one to fill for each rank.

        Raises:
            RankFailed: if a peer is lost; the message names model, layer and phase.
        """
        order = op.order

        def observe(peer: int, sent: bool, size: int, start_s: float, end_s: float) -> None:
            self.recorder.transfer(op.phase, layer, peer, sent, size, start_s, end_s)

        if self._calibration is not None:
            rank_bytes = self._layer_rows / self.transport.ranks * sends[0].shape[1] * sends[0].element_size()
            order = self._calibration.order(order, rank_bytes)
        with self._arbiter.exchange(op.hold_port), self._waiting(f"layer {layer}, {op.phase}"):
            self.transport.exchange(order, sends, recvs, observe)

    def leave(self) -> None:
        """Gives up the port and completes the trace; call when the model has finished on this rank."""
        self._arbiter.leave()
        self.recorder.flush()

    @contextmanager
    def _waiting(self, where: str) -> Iterator[None]:
        """Marks this rank as waiting for peers; names the model and `where` in the transport's errors."""
        self.waiting_since = time.monotonic()
        try:
            yield
        except (BadInput, RankFailed) as error:
            raise type(error)(f"{self.recorder.model_name}, {where}: {error}") from None
        finally:
            self.waiting_since = None
