"""Phases and transfers on a GPU stream, emulated: kernels are queued and take their time, the host runs ahead."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime import phase_recorder
from aurora.runtime.distributed_experts import MIN_CHUNK_BYTES, DistributedExperts
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.phase_recorder import PhaseRecorder, StreamTimer
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.types import (
    PREEMPTION_INTERVAL_S,
    TRACE_PHASES,
    Barrier,
    Compute,
    Exchange,
    Network,
    Placement,
    TraceRecorder,
)

LAUNCH_S = 10e-6  # of the host, a kernel


class EmulatedStream:
    """A GPU stream and its host: kernels run one after the other, each from its launch or the end of the one before.

    Attributes:
        now_s: the host's clock.
        events: those that are alive.
        waited: how often the host waited for an event that had not been reached.
    """

    def __init__(self, drift=0.0):
        self.now_s, self._end_s, self._drift = 100.0, 0.0, drift
        self.events, self.waited = weakref.WeakSet(), 0

    def clock(self):
        return self.now_s

    def launch(self, seconds):
        self.now_s += LAUNCH_S
        self._end_s = max(self._end_s, self.now_s) + seconds

    def drain(self):
        """The host waits for the stream, as it does for what a kernel computes."""
        self.now_s = max(self.now_s, self._end_s)

    def timer(self):
        return StreamTimer(100.0, lambda: EmulatedEvent(self), self.clock)


class EmulatedEvent:
    def __init__(self, stream):
        self._stream = stream
        stream.events.add(self)

    def record(self):
        self._at_s = max(self._stream._end_s, self._stream.now_s)

    def query(self):
        return self._stream.now_s >= self._at_s

    def synchronize(self):
        self._stream.waited += not self.query()
        self._stream.now_s = max(self._stream.now_s, self._at_s)

    def elapsed_time(self, end_event):
        assert all(event.query() for event in (self, end_event)), "CUDA refuses events that have not been reached"
        return float(np.float32((end_event._at_s - self._at_s) * (1 + self._stream._drift) * 1e3))


class QueuedTransport:
    """Rank 0 of two: queues an exchange on the stream and reports it when somebody waits, as over NCCL."""

    rank, ranks = 0, 2
    seconds = 0.002

    def __init__(self, stream):
        self._stream, self._timer, self._queued = stream, stream.timer(), []

    def gather(self, row):
        self._stream.drain()  # the counts are computed on the GPU
        self.wait()
        return torch.stack([row, row])

    def exchange(self, order, sends, recvs, observe):
        start = self._timer.mark()
        self._stream.launch(self.seconds)
        recvs[1].copy_(sends[1])
        self._queued.append((observe, sends[1].nbytes, start, self._timer.mark()))

    def wait(self):
        for observe, size, *marks in self._queued:
            start_s, end_s = (self._timer.seconds(mark) + 100.0 for mark in marks)
            observe(1, True, size, start_s, end_s)
            observe(1, False, size, start_s, end_s)
        self._queued.clear()


class Experts(nn.Module):
    """Two experts whose kernels take row_s a row."""

    def __init__(self, stream, row_s):
        super().__init__()
        self.num_experts, self._stream, self._row_s = 2, stream, row_s
        self.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self._stream.launch(self._row_s * len(hidden_states))
        return hidden_states


def layer_on(stream, row_s):
    recorder = TraceRecorder("measured", ("m",), 2)
    context = LayerContext(
        0, QueuedTransport(stream), *thread_port_arbiters(1), PhaseRecorder(recorder, 0, 0, 100.0, stream.timer())
    )
    order = ORDER["openshop"](1 - np.eye(2, dtype=np.int64), Network.equal(2), rng=np.random.default_rng(0))
    layer = DistributedExperts(Experts(stream, row_s))
    ops = (Compute("gate"), Barrier("counts"), Exchange("dispatch", order), Compute("expert"),
           Exchange("combine", order.reversed), Compute("aggregate"))  # fmt: skip
    layer.set_placement(Placement((((0,), (1,)),)), ops, 0, context)
    return layer, context, recorder


def spans(trace, step, phase):
    own_X = (trace.step_X == step) & (trace.phase_X == TRACE_PHASES.index(phase))
    return trace.start_s_X[own_X], trace.end_s_X[own_X]


@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_queued_expert_kernels_are_not_combine(drift):
    """Phases and transfers begin when the stream comes to them, in the step that queued them, whatever the clocks' drift."""
    stream = EmulatedStream(drift)
    layer, context, recorder = layer_on(stream, row_s=0.001)
    hidden, index = torch.ones(8, 4), torch.tensor([[0], [1]] * 4)
    for _ in range(40):
        context.next_step(None)
        context.start_compute()
        layer(hidden, index, torch.ones(8, 1))
        context.stop_compute("head", 0)
    assert not stream.waited, "no phase waits for the stream"
    context.transport.wait()
    context.leave()
    trace = recorder.trace()
    assert len(trace) == 40 * (5 + 4)  # gate, counts, expert, aggregate, head, and both ends of two transfers
    for step in (0, 20, 39):
        (expert_s,), (experts_end_s,) = spans(trace, step, "expert")
        _, dispatch_end_s = spans(trace, step, "dispatch")
        combine_s, combine_end_s = spans(trace, step, "combine")
        assert experts_end_s - expert_s == pytest.approx(0.008, rel=0.02)
        assert combine_end_s - combine_s == pytest.approx(np.full(2, QueuedTransport.seconds), rel=0.05)
        assert (dispatch_end_s <= expert_s + 1e-4).all()
        assert (combine_s >= experts_end_s - 1e-4).all()
        (gate_s,), _ = spans(trace, step, "gate")
        assert gate_s == pytest.approx(step * (0.012 + 4 * LAUNCH_S), rel=0.2, abs=0.005)


def test_marks_that_are_kept_are_bounded_and_old_ones_are_read_without_waiting(monkeypatch):
    monkeypatch.setattr(phase_recorder, "MOST_QUEUED", 16)
    stream = EmulatedStream()
    recorder = TraceRecorder("measured", ("m",), 1)
    phases = PhaseRecorder(recorder, 0, 0, 100.0, stream.timer())
    phases.step = 0
    for number in range(1000):
        start = phases.mark()
        stream.launch(LAUNCH_S)  # the stream keeps up with the host
        phases.phase("expert", number % 7, start)
    del start
    gc.collect()
    assert not stream.waited
    assert len(stream.events) < 8
    assert len(recorder.rows) >= 990
    for _ in range(100):
        start = phases.mark()
        stream.launch(1.0)  # the host runs ahead by as much as the bound allows
        phases.phase("expert", 0, start)
    del start
    gc.collect()
    assert len(stream.events) <= 2 * 16 + 4
    phases.flush()
    assert len(recorder.rows) == 1100
    start_s, end_s = np.array([row[:2] for row in recorder.rows]).T
    assert end_s[-100:] - start_s[-100:] == pytest.approx(np.ones(100), rel=1e-3)


def test_times_keep_their_precision_in_a_long_run():
    """Single-precision milliseconds since the start would be a quarter of a millisecond wrong after an hour."""
    stream = EmulatedStream()
    timer = stream.timer()
    for _ in range(4 * 3600):
        stream.launch(0.9)
        stream.drain()
        timer.seconds(timer.mark())
        stream.now_s += 0.1
    stream.launch(0.0)
    start = timer.mark()
    stream.launch(0.0123)
    end = timer.mark()
    stream.drain()
    start_s, end_s = timer.seconds(start), timer.seconds(end)
    assert end_s - start_s == pytest.approx(0.0123, abs=2e-5)
    assert end_s == pytest.approx(stream.now_s - 100.0, abs=1e-5)


def test_chunks_are_judged_by_their_execution_and_not_by_their_launch():
    """Kernels of 1 us a row that the host launches in 10 us, so that it queues many chunks before the first has run."""
    stream, row_s = EmulatedStream(), 1e-6
    layer, context, _ = layer_on(stream, row_s)
    context.next_step(None)
    rows = torch.ones(20_000, 128)
    row_bytes = 4 * 128
    index, ones = torch.zeros(len(rows), 1, dtype=torch.long), torch.ones(len(rows), 1)
    for _ in range(3):
        assert torch.equal(layer._compute_in_chunks(rows, index, ones), rows)
        assert MIN_CHUNK_BYTES <= layer._chunk_bytes <= PREEMPTION_INTERVAL_S / row_s * row_bytes * 1.01
        stream.drain()
    assert layer._chunk_bytes == pytest.approx(PREEMPTION_INTERVAL_S / row_s * row_bytes, rel=0.01)
