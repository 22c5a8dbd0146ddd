"""Access of one model's layers to compute and communication on one rank: arbitrated, recorded, and named in errors."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from aurora.errors import BadInput, RankFailed
from aurora.moe.transport import ExchangeStep, Observe, Transport
from aurora.planner.arbitration import slices_of
from aurora.runtime.order_choice import OrderWatch, WatchedExchanges
from aurora.runtime.phase_recorder import PhaseRecorder
from aurora.runtime.port_arbiter import PortArbiter, in_slices
from aurora.types import PREEMPTION_INTERVAL_S, Exchange, Network, Order, Program
from aurora.types.arrays import IntArray

if TYPE_CHECKING:
    from aurora.runtime.transports.push import OrderedPush


class LayerContext:
    """Access of one model's layers to compute and communication on one rank.

    Args:
        model: the model's index in the program.
        transport: carries tensors between the model's ranks.
        arbiter: the model's access to this rank's GPU and port.
        recorder: records the model's phases on this rank.
        watch: chooses the fastest order of each exchange in place of the planned one; None: the planned orders are used.
        sleep: sleeps for a number of seconds, or less if there is a reason to wake up.

    Attributes:
        mask: (N,) bool, which tokens of the current step need experts; None: all.
        tokens_LE: (L, E) int64, to which this rank's tokens of each expert are added; None: they are not counted.
        program: the program in force; None: the model is alone.
        network: the ports, by whose rates exchanges are cut into time slices, see `SlicePolicy.slice_s`; None: they are not.
        push: ordered push that carries the layers' tokens in place of the transport; None: the transport does.
        own_tokens: tokens of this rank's next forward pass, if `push` is set.
        waiting_since: when this rank began to wait for peers, by time.monotonic; None while it does not wait.
        layers_done: number of MoE layers that the present forward pass has finished.
    """

    def __init__(
        self,
        model: int,
        transport: Transport,
        arbiter: PortArbiter,
        recorder: PhaseRecorder,
        watch: OrderWatch | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.model, self.transport, self.recorder = model, transport, recorder
        self.mask: torch.Tensor | None = None
        self.tokens_LE: torch.Tensor | None = None
        self.program: Program | None = None
        self.network: Network | None = None
        self.push: OrderedPush | None = None
        self.own_tokens = 0
        self.waiting_since: float | None = None
        self.layers_done = 0
        self._arbiter, self._sleep = arbiter, sleep
        self._watched = None if watch is None else WatchedExchanges(watch, recorder.timer)
        self._compute_start: object = None

    def any_active(self, active: bool) -> bool:
        """Returns whether any rank of the model is active. A collective call: all ranks of the model make it."""
        told_R2 = self.gather_between_steps(torch.tensor([active, self.own_tokens], dtype=torch.long))
        if self.push is not None:
            self.push.batch_tokens = int(told_R2[:, 1].max())
        return bool(told_R2[:, 0].any())

    def gather_between_steps(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers the tensor `row` of every rank, all of one shape: (R, *row.shape) on the CPU. A collective call."""
        with self._waiting("between steps"):
            return self.transport.gather(row)

    def exchange_between_steps(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> float:
        """Performs an exchange that belongs to no layer, in a time slice of the port. A collective call.

        Args:
            order, sends, recvs: as in `Transport.exchange`.

        Returns:
            The seconds that it took on this rank.

        Raises:
            RankFailed: if a peer is lost.
        """
        if self.joins:
            self.join_sequence(1)
        with self._arbiter.exchange(), self._waiting("between steps"):
            start_s = time.perf_counter()
            self.transport.exchange(order, sends, recvs, self.recorder.observer("moves", 0))
            self.transport.wait()
            return time.perf_counter() - start_s

    def work_between_steps(self, work: Callable[[], None]) -> float:
        """Performs `work` on this rank's experts, outside of any layer. Returns its seconds, those on the GPU included."""
        start = self.recorder.mark()
        work()
        end = self.recorder.mark()
        self.recorder.phase("moves", 0, start)
        return self.recorder.timer.seconds(end) - self.recorder.timer.seconds(start)

    def count_tokens(self, experts_NK: torch.Tensor, layer: int) -> None:
        """Adds the experts (N, K) that the current step's tokens chose in a layer to `tokens_LE`, unless that is None."""
        if self.tokens_LE is not None:
            needs_N1 = torch.ones_like(experts_NK[:, :1]) if self.mask is None else self.mask[:, None]
            counted_NK = needs_N1.expand_as(experts_NK).to(self.tokens_LE.dtype)
            self.tokens_LE[layer].index_add_(0, experts_NK.flatten(), counted_NK.flatten())

    def next_step(self, mask: torch.Tensor | None) -> None:
        """Begins a forward pass; `mask` (N,) says which of its tokens need experts, None: all."""
        self.recorder.step += 1
        self.mask, self.layers_done = mask, 0
        if self.program is not None and self.program.time_slice == "step":
            with self._arbiter.exchange(hold_port=True):
                pass  # the port is this model's through its next exchange

    def join_sequence(self, slices: int | None = None) -> None:
        """Puts the model into the sequence of time slices; see `PortArbiter.join` for `slices`. A collective call."""

        def gather(number: float) -> list[float]:
            found: list[float] = self.transport.gather(torch.tensor([number], dtype=torch.float64)).flatten().tolist()
            return found

        with self._waiting("joining the time slices"):
            self._arbiter.join(gather, self.transport.rank == 0, slices)

    def sleep_until(self, when_s: float) -> bool:
        """Takes the model out of the sequence of time slices and sleeps until a request arrives at any of its ranks.

        A collective call.

        Args:
            when_s: when the next request arrives at this rank, by time.perf_counter; infinity: none will.

        Returns:
            False, at once, if no request will arrive at any rank; else True.
        """
        left_s = when_s - time.perf_counter()  # ranks of several hosts have clocks of their own
        next_s = float(self.gather_between_steps(torch.tensor([left_s], dtype=torch.float64)).min())
        if next_s == float("inf"):
            return False
        self._arbiter.pause()
        self._sleep(max(0.0, min(next_s, when_s - time.perf_counter())))
        if not self.joins:
            self.join_sequence()
        return True

    @property
    def joins(self) -> bool:
        """True if the model is in the sequence of time slices only while it exchanges."""
        return self._arbiter.joins

    @property
    def yields(self) -> bool:
        """True if the model's work comes after that of interactive models; see `SlicePolicy`."""
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
        """Waits for the GPU, with the urgency `Program.compute_level` of the phase.

        If other models share the rank, it first waits for this model's exchanges. Otherwise the work of this phase, queued
        behind the exchanges, would hold the GPU while it waits for them.
        """
        if not self._arbiter.exclusive:
            self.finish_exchanges()
        self._arbiter.start_compute(0 if self.program is None else self.program.compute_level(self.model, phase))
        self._compute_start = self.recorder.mark()

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
        """Preemption point within a phase: lets more urgent work that waits run first."""
        if self._arbiter.yield_to_priority(lambda: self._end_phase(phase, layer)):
            self._compute_start = self.recorder.mark()

    def preemption_point(self) -> None:
        """Preemption point between experts: lets more urgent work that waits run first."""
        if self.program is not None:
            last = len(self.program.ops_ML[self.model]) - 1
            self.yield_to_priority("gate" if self.layers_done <= last else "head", min(self.layers_done, last))

    def _end_phase(self, phase: str, layer: int) -> None:
        self.recorder.phase(phase, layer, self._compute_start)

    def gather_counts(self, counts: torch.Tensor, layer: int) -> torch.Tensor:
        """Gathers the row counts of all ranks: (R, *counts.shape) int64 on the CPU. A collective call."""
        start = self.recorder.mark()
        with self._waiting(f"layer {layer}, counts"):
            gathered = self.transport.gather(counts) if self._watched is None else self._watched.gather(self.transport, counts)
        self.recorder.phase("counts", layer, start)
        return gathered

    def over_servers(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns whether the next dispatch and combine of a hierarchical layer go over servers (True) or are flat (False).

        Args:
            flat_RR: (R, R) rows that a flat dispatch would send from each rank (row) to each rank (column).
            row_bytes: size of a row in bytes.
        """
        return self._watched is None or self._watched.over_servers(flat_RR, row_bytes)

    @contextmanager
    def exchanging(self, layer: int, op: Exchange, rows_SRR: IntArray, row_bytes: int) -> Iterator[ExchangeStep]:
        """Context manager of one all-to-all in this model's time slice of the port.

        Its value is the function to call for each exchange, with (sends, recvs).

        Args:
            layer: index of the MoE layer.
            op: the all-to-all.
            rows_SRR: (S, R, R) rows from each rank (row) to each rank (column) in each exchange.
            row_bytes: size of a row in bytes.

        Raises:
            RankFailed: if a peer is lost; the message names model, layer and phase.
        """
        observe = self.recorder.observer(op.phase, layer)
        if self.yields:
            with self._waiting(f"layer {layer}, {op.phase}"):
                yield self._in_slices(op, rows_SRR * row_bytes, observe)
            return
        with self._arbiter.exchange(op.hold_port), self._waiting(f"layer {layer}, {op.phase}"):
            if self._watched is None:
                yield lambda sends, recvs: self.transport.exchange(op.order, sends, recvs, observe)
            else:
                bytes_RR = rows_SRR.sum(axis=0) * row_bytes
                with self._watched.exchanging(op.order, op.phase, self.transport.rank, bytes_RR) as order:
                    yield lambda sends, recvs: self.transport.exchange(order, sends, recvs, observe)

    def _in_slices(self, op: Exchange, bytes_SRR: IntArray, observe: Observe) -> ExchangeStep:
        """Returns what performs each exchange of an all-to-all in time slices of its own; see `PortArbiter.joins`."""
        assert self.program is not None
        slice_s, pieces = self.program.policies_M[self.model].slice_s, 1
        if len(bytes_SRR) == 1 and self.network is not None:
            pieces = slices_of(bytes_SRR[0], self.network, slice_s)
        if self.joins:
            self.join_sequence(len(bytes_SRR) * pieces)
        return in_slices(
            self.transport, self._arbiter, pieces, lambda out, into: self.transport.exchange(op.order, out, into, observe)
        )

    def finish_exchanges(self) -> None:
        """Waits for this step's exchanges. Raises RankFailed if one was aborted; the step's results are then invalid."""
        with self._waiting("exchanges of the step"):
            self.transport.wait()
            if self.push is not None:
                self.push.check_peers()

    def leave(self) -> None:
        """Gives up the port and completes the trace. Called when the model has finished on this rank."""
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
