"""Access of one model's layers to compute and communication on one rank: shared with other models, recorded in the trace."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aurora.algorithms.arbitration import slices_of
from aurora.errors import BadInput, RankFailed
from aurora.moe.transport import ExchangeStep, Transport
from aurora.runtime.order_choice import OrderChoice
from aurora.runtime.phase_recorder import PhaseRecorder
from aurora.runtime.port_arbiter import PortArbiter, in_slices
from aurora.types import PREEMPTION_INTERVAL_S, Exchange, Network, Op, Program
from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.runtime.transports.push import OrderedPush


class LayerContext:
    """Gives the layers of one model access to compute and communication on one rank.

    Args:
        model: the model's index in the program.
        transport: carries tensors between the model's ranks.
        arbiter: grants the model this rank's GPU and port.
        recorder: records the model's phases on this rank.
        orders: replaces planned orders by measured faster ones; None: the planned orders are used.

    Attributes:
        mask: (N,) bool, True for tokens of the current step that need experts; None: all do.
        program: the program in force; None: no other model shares the GPUs.
        network: its rates decide how exchanges are cut into time slices, see `SlicePolicy.slice_s`; None: they are not cut.
        push: ordered push, which carries the layers' tokens in place of `transport`; None: `transport` carries them.
        own_tokens: number of tokens in this rank's next forward pass; used only with `push`.
        layers_done: number of MoE layers that the present forward pass has finished.
        port: the thread of exchanges that overlap with compute; see `Exchange.groups`.
    """

    def __init__(
        self,
        model: int,
        transport: Transport,
        arbiter: PortArbiter,
        recorder: PhaseRecorder,
        orders: OrderChoice | None = None,
    ) -> None:
        self.model, self.transport, self.recorder = model, transport, recorder
        self.mask: torch.Tensor | None = None
        self.program: Program | None = None
        self.network: Network | None = None
        self.push: OrderedPush | None = None
        self.own_tokens = 0
        self.layers_done = 0
        self.port = ThreadPoolExecutor(1, thread_name_prefix="aurora-stages")
        self._arbiter, self._orders = arbiter, orders
        self._compute_start: object = None

    def any_active(self, active: bool) -> bool:
        """Returns True if `active` is True on any rank of the model. A collective call of the model's ranks."""
        told_R2 = self.gather_between_steps(torch.tensor([active, self.own_tokens], dtype=torch.long))
        if self.push is not None:
            self.push.batch_tokens = int(told_R2[:, 1].max())
        return bool(told_R2[:, 0].any())

    def gather_between_steps(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers `row`, which has the same shape on all ranks. Returns (R, *row.shape) on the CPU. A collective call."""
        with self._waiting("between steps"):
            return self.transport.gather(row)

    def next_step(self, mask: torch.Tensor | None) -> None:
        """Begins a forward pass. `mask` (N,) is True for its tokens that need experts; None: all do."""
        self.recorder.step += 1
        self.mask, self.layers_done = mask, 0
        if self.program is not None and self.program.time_slice == "step":
            with self._arbiter.exchange(hold_port=True):
                pass  # the port is this model's through its next exchange

    def join_sequence(self, slices: int | None = None) -> None:
        """Adds the model to the rotation of time slices; see `PortArbiter.join` for `slices`. A collective call."""

        def gather(number: float) -> list[float]:
            numbers: list[float] = self.transport.gather(torch.tensor([number], dtype=torch.float64)).flatten().tolist()
            return numbers

        with self._waiting("joining the time slices"):
            self._arbiter.join(gather, self.transport.rank == 0, slices)

    def sleep_until(self, when_s: float) -> bool:
        """Removes the model from the rotation of time slices, and sleeps until a request arrives at any of its ranks.

        A collective call.

        Args:
            when_s: arrival time of the next request at this rank, by time.perf_counter; infinity: no more requests.

        Returns:
            False, immediately, if no rank expects another request; else True, after the sleep.
        """
        left_s = when_s - time.perf_counter()  # ranks of several hosts have clocks of their own
        next_s = float(self.gather_between_steps(torch.tensor([left_s], dtype=torch.float64)).min())
        if next_s == float("inf"):
            return False
        self._arbiter.pause()
        time.sleep(max(0.0, min(next_s, when_s - time.perf_counter())))
        if not self.joins:
            self.join_sequence()
        return True

    @property
    def joins(self) -> bool:
        """True if the model is in the rotation of time slices only during its exchanges."""
        return self._arbiter.joins

    @property
    def yields(self) -> bool:
        """True if interactive models take precedence over this model; see `SlicePolicy`."""
        return self.program is not None and self.program.policies_M[self.model].yields

    @property
    def preemptible(self) -> bool:
        """True if this model must offer preemption points, because other models may have more urgent work."""
        return self.program is not None and self.program.preemptive(self.model) and not self._arbiter.exclusive

    @property
    def preemption_s(self) -> float:
        """Seconds between two preemption points."""
        return PREEMPTION_INTERVAL_S if self.program is None else self.program.preemption_s

    def start_compute(self, phase: str = "gate") -> None:
        """Waits until this model may use the GPU; the phase has the urgency `Program.compute_level`.

        If other models share the rank, it first waits for this model's exchanges. Otherwise the compute of this phase, queued
        behind the exchanges, would occupy the GPU while it waits for them.
        """
        if not self._arbiter.exclusive:
            self.finish_exchanges()
        self._arbiter.start_compute(0 if self.program is None else self.program.compute_level(self.model, phase))
        self._compute_start = self.recorder.mark()

    def stop_compute(self, phase: str, layer: int) -> None:
        """Records that `phase` ends now, and releases the GPU."""
        self._end_phase(phase, layer)
        self._arbiter.stop_compute()

    @contextmanager
    def computing(self, phase: str, layer: int) -> Iterator[None]:
        """Context manager that holds the GPU during a phase, and records the phase at its end."""
        self.start_compute(phase)
        yield
        self.stop_compute(phase, layer)

    def yield_to_priority(self, phase: str, layer: int) -> None:
        """Preemption point within a phase: runs waiting work of higher urgency, if any, before it returns."""
        if self._arbiter.yield_to_priority(lambda: self._end_phase(phase, layer)):
            self._compute_start = self.recorder.mark()

    def preemption_point(self) -> None:
        """Preemption point outside the experts, in "gate" or "head": runs waiting work of higher urgency, if any, first."""
        if self.program is not None:
            last = len(self.program.ops_ML[self.model]) - 1
            self.yield_to_priority("gate" if self.layers_done <= last else "head", min(self.layers_done, last))

    def _end_phase(self, phase: str, layer: int) -> None:
        self.recorder.phase(phase, layer, self._compute_start)

    def gather_counts(self, counts: torch.Tensor, layer: int) -> torch.Tensor:
        """All-gathers row counts before a dispatch. Returns (R, *counts.shape) int64 on the CPU. A collective call."""
        start = self.recorder.mark()
        with self._waiting(f"layer {layer}, counts"):
            gathered = self.transport.gather(counts)
        self.recorder.phase("counts", layer, start)
        return gathered

    @contextmanager
    def exchanging(self, layer: int, op: Exchange, rows_SRR: IntArray, row_bytes: int) -> Iterator[ExchangeStep]:
        """Context manager around one all-to-all, which holds the network port in this model's time slice.

        It yields a function(sends, recvs), to be called for each step of the all-to-all (several if hierarchical, else one).

        Args:
            layer: index of the MoE layer.
            op: the all-to-all.
            rows_SRR: (S, R, R) rows from each rank (second axis) to each rank (third axis) in each step.
            row_bytes: size of a row in bytes.

        Raises:
            RankFailed: if a peer is lost; the message names model, layer and phase.
        """
        observe = self.recorder.observer(op.phase, layer)
        bytes_SRR = rows_SRR * row_bytes
        order = op.order if self._orders is None else self._orders.order(op.order, bytes_SRR)

        def exchange(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
            self.transport.exchange(order, sends, recvs, observe)

        if self.yields:
            with self._waiting(f"layer {layer}, {op.phase}"):
                yield self._in_slices(exchange, bytes_SRR)
            return
        with self._arbiter.exchange(op.hold_port), self._waiting(f"layer {layer}, {op.phase}"):
            yield exchange

    def _in_slices(self, exchange: ExchangeStep, bytes_SRR: IntArray) -> ExchangeStep:
        """Returns what performs each exchange of an all-to-all in time slices of its own; see `PortArbiter.joins`."""
        assert self.program is not None
        slice_s, pieces = self.program.policies_M[self.model].slice_s, 1
        if len(bytes_SRR) == 1 and self.network is not None:
            pieces = slices_of(bytes_SRR[0], self.network, slice_s)
        if self.joins:
            self.join_sequence(len(bytes_SRR) * pieces)
        return in_slices(self._arbiter, pieces, exchange)

    def finish_exchanges(self) -> None:
        """Waits for all queued exchanges. Raises RankFailed if one was aborted; the step's results are then invalid."""
        with self._waiting("exchanges of the step"):
            self.transport.wait()
            if self.push is not None:
                self.push.check_peers()

    def leave(self) -> None:
        """Leaves the rotation of time slices for good, and completes the trace; called when the model ends on this rank."""
        self._arbiter.leave()
        self.port.shutdown(wait=False)
        self.recorder.flush()

    @contextmanager
    def _waiting(self, where: str) -> Iterator[None]:
        """Names the model and `where` in errors of the transport, which waits for peers."""
        try:
            yield
        except (BadInput, RankFailed) as error:
            raise type(error)(f"{self.recorder.model_name}, {where}: {error}") from None


@dataclass(frozen=True)
class LayerPort:
    """LayerTransport (aurora.moe.layer) of one layer whose model shares GPU and port with other models.

    Args:
        context: access of the layer's model to compute and communication.
        layer: index of the MoE layer.
        ops: the layer's operations, which have its orders.
    """

    context: LayerContext
    layer: int
    ops: tuple[Op, ...]

    def gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Ends the phase "gate", releases the GPU, and allgathers `counts`; see `LayerContext.gather_counts`."""
        self.context.stop_compute("gate", self.layer)
        return self.context.gather_counts(counts, self.layer)

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager around the layer's dispatch or combine; see `LayerContext.exchanging`."""
        op = next(op for op in self.ops if isinstance(op, Exchange) and op.phase == phase)
        return self.context.exchanging(self.layer, op, rows_SRR, row_bytes)
