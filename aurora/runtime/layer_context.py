"""What one model on one rank shares with its layers: transport, turnstile, clock, trace and the current step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.order_calibration import OrderCalibration
from aurora.runtime.port_arbiter import PortArbiter
from aurora.runtime.result import Routing
from aurora.runtime.timers import HostTimer, StreamTimer, Timer
from aurora.types import Exchange, TraceRecorder


class LayerContext:
    """One model's run on one rank. Times are seconds since `began_s` of time.perf_counter. choice: of orders by size, instead
    of the planned ones. keep_routing: what `routing` gives. on_gpu: phases are timed on the current stream, by events."""

    def __init__(
        self,
        model: int,
        transport: Transport,
        turnstile: PortArbiter,
        recorder: TraceRecorder,
        began_s: float,
        choice: OrderCalibration | None = None,
        keep_routing: bool = False,
        on_gpu: bool = False,
    ) -> None:
        self.transport = transport
        self.by_layer = False  # as the program that is performed says
        self.mask: torch.Tensor | None = None
        self.model, self._turnstile, self._recorder, self._began_s = model, turnstile, recorder, began_s
        self._choice = choice
        self._routed: list[tuple[int, torch.Tensor, torch.Tensor | None]] | None = [] if keep_routing else None
        self._rows = 0  # of all ranks, in this layer
        self._step = -1
        self._moments: Timer = StreamTimer(began_s) if on_gpu else HostTimer(began_s)
        self._computing_since: object = None
        self._phases: list[tuple[int, int, str, object, object]] = []  # step, layer, phase, start and end
        self._busy_since: float | None = None
        self._waiting_since: float | None = None

    def agree(self, active: bool) -> bool:
        """Whether any rank still has work; a meeting of all ranks."""
        with self._told("between steps"):
            return bool(self.transport.gather(torch.tensor([active], dtype=torch.long)).any())

    def next_step(self, mask: torch.Tensor | None) -> None:
        """Begin a forward pass. mask (tokens,) bool: which of them need experts; None: all."""
        self._step += 1
        self.mask = mask

    @property
    def busy_since(self) -> float | None:
        """Since when, by time.monotonic, this rank computes; None: it does not."""
        return self._busy_since

    @property
    def waiting_since(self) -> float | None:
        """Since when, by time.monotonic, this rank is in one exchange with others; None: it is not."""
        return self._waiting_since

    @property
    def alone(self) -> bool:
        """Whether no other model waits between parts of this one's work."""
        return not self.by_layer or self._turnstile.alone

    def start_compute(self, phase: str = "gate") -> None:
        self._turnstile.start_compute(self.by_layer and phase != "expert")
        self._computing_since = self._moments.mark()
        self._busy_since = time.monotonic()

    def stop_compute(self, phase: str, layer: int) -> None:
        self._computed(phase, layer)
        self._turnstile.stop_compute()

    def _computed(self, phase: str, layer: int) -> None:
        self._phases.append((self._step, layer, phase, self._computing_since, self._moments.mark()))
        self._busy_since = None

    @contextmanager
    def computing(self, phase: str, layer: int) -> Iterator[None]:
        self.start_compute(phase)
        yield
        self.stop_compute(phase, layer)

    def part(self, phase: str, layer: int) -> None:
        """Between two parts of a phase's work."""
        if self._turnstile.part(lambda: self._computed(phase, layer)):
            self._computing_since, self._busy_since = self._moments.mark(), time.monotonic()

    def route(self, experts_NK: torch.Tensor) -> None:
        """Which experts this step's tokens chose in the next layer; kept for `routing` if `keep_routing`."""
        if self._routed is not None:
            self._routed.append((self._step, experts_NK, self.mask))

    def routing(self, layers: int) -> Routing:
        """What `route` kept, of `layers` a step."""
        assert self._routed is not None
        step_U, passes = [], []
        for first in range(0, len(self._routed), layers):
            kept = self._routed[first : first + layers]
            experts_NLK = torch.stack([experts_NK if mask is None else experts_NK[mask] for _, experts_NK, mask in kept], dim=1)
            passes.append(experts_NLK.cpu().numpy())
            step_U += [kept[0][0]] * len(experts_NLK)
        return np.concatenate(passes), np.array(step_U, dtype=np.int64)

    def counts(self, row_E: torch.Tensor, layer: int) -> torch.Tensor:
        """(R, E) int64 on the CPU: what every rank sends to every expert's place."""
        began = self._moments.mark()
        with self._told(f"layer {layer}, counts"):
            rows = self.transport.gather(row_E)
        if self._choice is not None:
            self._rows = int(rows.sum())
        self._phases.append((self._step, layer, "counts", began, self._moments.mark()))
        return rows

    def exchange(self, layer: int, op: Exchange, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        """An all-to-all, when it is this model's turn on the port."""
        phase, order = op.phase, op.order

        def observe(peer: int, sent: bool, size: int, start_s: float, end_s: float) -> None:
            self._recorder.transfer(
                self.transport.rank, self.model, self._step, layer, phase, peer, sent, size,
                start_s - self._began_s, end_s - self._began_s,
            )  # fmt: skip

        if self._choice is not None:
            rank_bytes = self._rows / self.transport.ranks * sends[0].shape[1] * sends[0].element_size()
            order = self._choice.order(order, rank_bytes)
        with self._turnstile.exchange(op.hold_port), self._told(f"layer {layer}, {phase}"):
            self.transport.exchange(order, sends, recvs, observe)

    def leave(self) -> None:
        """This model is through: it needs the port no more, and all of its phases have been timed."""
        self._turnstile.leave()
        for step, layer, phase, *ends in self._phases:
            start_s, end_s = map(self._moments.seconds, ends)
            self._recorder.add(self.transport.rank, self.model, step, layer, phase, start_s, end_s)
        self._phases.clear()

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """An error of the transport also says in which model and where."""
        self._waiting_since = time.monotonic()
        try:
            yield
        except (BadInput, RankFailed) as error:
            raise type(error)(f"{self._recorder.names_M[self.model]}, {where}: {error}") from None
        finally:
            self._waiting_since = None
