"""Recorder of one rank's traffic and timings while it serves.

It counts the experts that tokens choose and times the phases of forward passes, without making the host wait for the GPU.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from aurora.io.plugin_records import TIMED, EngineRecord
from aurora.types import PHASES
from aurora.types.arrays import FloatArray, IntArray


class ChoiceCounts:
    """Expert counts of one forward pass, whose copy from the GPU to the host may be unfinished.

    Args:
        counts_LE: (L, E) int64 in host memory; or a function that computes them.
        copied: CUDA event behind the copy to the host; None: the counts are on the host.
    """

    def __init__(self, counts_LE: torch.Tensor | Callable[[], torch.Tensor], copied: Any = None) -> None:
        self._counts_LE, self._copied = counts_LE, copied

    @property
    def ready(self) -> bool:
        """True if the counts can be read without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> IntArray:
        """Waits for the counts. Returns (L, E) int64, how often each expert was chosen in each MoE layer."""
        if self._copied is not None:
            self._copied.synchronize()
        if not isinstance(self._counts_LE, torch.Tensor):
            self._counts_LE = self._counts_LE()
        return self._counts_LE.numpy()


class ChoiceCounter:
    """Counts expert choices from the buffer into which the routers write them.

    Args:
        chosen_NLK: (N, L, K) integers, the experts chosen for each row in each decoder layer of the last pass. The buffer is
            never reallocated, so that replayed CUDA graphs write into it, too.
        decoder_layers: {MoE layer of this process: its decoder layer}.
        layers: number of MoE layers of the whole model.
        experts: number of experts of a layer.
    """

    def __init__(self, chosen_NLK: torch.Tensor, decoder_layers: Mapping[int, int], layers: int, experts: int) -> None:
        self._chosen_NLK, self._shape = chosen_NLK, (layers, experts + 2)  # counts begin and end with those of no expert
        self._sum_LE: torch.Tensor | None = None
        numbers, device = [*decoder_layers.values()], chosen_NLK.device
        self._layers = slice(numbers[0], numbers[-1] + 1)  # a view, where they follow each other
        self._layer_L: torch.Tensor | None = None
        if numbers != [*range(self._layers.start, self._layers.stop)]:
            self._layers, self._layer_L = slice(None), torch.tensor(numbers, device=device)
        self._first_L1 = torch.tensor(list(decoder_layers), device=device)[:, None] * (experts + 2) + 1  # in the flat counts
        self._one = torch.ones((), dtype=torch.int64, device=device)

    def count(self, rows: slice) -> ChoiceCounts:
        """Counts how often each expert was chosen in some rows of the last pass, and starts the copy to the host.

        Called after the pass, on its stream; queues the work and returns.

        Args:
            rows: the rows that are counted; others are padding, or another rank counts them.
        """
        counts_LE = self._add_to(self._zeros(), rows)[:, 1:-1]
        if not counts_LE.is_cuda:
            return ChoiceCounts(counts_LE)
        on_host = torch.empty(counts_LE.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(counts_LE, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return ChoiceCounts(on_host, copied)

    def add(self, rows: slice) -> None:
        """Adds the same counts to a sum on the device, which `take` reads out."""
        if self._sum_LE is None:
            self._sum_LE = self._zeros()
        self._add_to(self._sum_LE, rows)

    def take(self) -> IntArray | None:
        """Returns the (L, E) sum of the passes added since the last call; None: there are none. Waits for the device."""
        added_LE, self._sum_LE = self._sum_LE, None
        return None if added_LE is None else added_LE[:, 1:-1].cpu().numpy()

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.int64, device=self._chosen_NLK.device)

    def _add_to(self, counts_LE: torch.Tensor, rows: slice) -> torch.Tensor:
        """Adds the choices of some rows, in three launches: a launch takes longer than its work."""
        chosen_NLK = self._chosen_NLK[rows, self._layers]
        chosen_NLK = chosen_NLK if self._layer_L is None else chosen_NLK.index_select(1, self._layer_L)
        flat = (chosen_NLK.clamp(-1, self._shape[1] - 2) + self._first_L1).flatten()
        counts_LE.view(-1).scatter_add_(0, flat, self._one.expand(flat.shape))
        return counts_LE


class KeptCounter:
    """ChoiceCounter for passes on CPUs, whose routers create a new tensor per layer: stores these tensors and counts later.

    Arguments as in `ChoiceCounter`.
    """

    def __init__(self, decoder_layers: Mapping[int, int], layers: int, experts: int) -> None:
        self._shape, self._decoder_layers = (layers, experts), list(decoder_layers.values())
        self._first_L11 = np.array(list(decoder_layers))[:, None, None] * experts
        self._kept: dict[int, torch.Tensor] = {}
        self._added: list[list[torch.Tensor]] = []  # by pass and layer
        self._sum_LE: IntArray | None = None

    def keeper(self, decoder_layer: int) -> Callable[[torch.Tensor], None]:
        """Returns a function that stores a decoder layer's choices: the experts (N, K) of this rank's rows."""
        return partial(self._kept.__setitem__, decoder_layer)

    def count(self, rows: slice) -> ChoiceCounts:
        """Returns the counts of some rows of the last pass; up to FEW_ROWS rows are counted only when the result is read."""
        chosen_LNK = [self._kept[layer] for layer in self._decoder_layers]

        def counted() -> torch.Tensor:
            return torch.from_numpy(self._counted(torch.stack(chosen_LNK)[:, rows]))

        return ChoiceCounts(counted if len(chosen_LNK[0]) <= FEW_ROWS else counted())

    def add(self, rows: slice) -> None:
        """Keeps the choices of some rows of the last pass, which `take` counts."""
        chosen_LNK = [self._kept[layer] for layer in self._decoder_layers]
        if (rows.start, rows.stop) != (0, len(chosen_LNK[0])):
            chosen_LNK = [chosen_NK[rows] for chosen_NK in chosen_LNK]
        self._added.append(chosen_LNK)
        if len(chosen_LNK[0]) > FEW_ROWS:
            self._sum_LE = self.take()

    def take(self) -> IntArray | None:
        """Returns the (L, E) counts of the passes added since the last call; None: there are none."""
        before_LE, added, self._sum_LE, self._added = self._sum_LE, self._added, None, []
        if not added:
            return before_LE
        counts_LE = self._counted(torch.stack([torch.cat(of_layer) for of_layer in zip(*added, strict=True)]))
        return counts_LE if before_LE is None else counts_LE + before_LE

    def _counted(self, chosen_LNK: torch.Tensor) -> IntArray:
        layers, experts = self._shape
        chosen_X = (chosen_LNK.numpy() + self._first_L11).ravel()
        return np.bincount(chosen_X, minlength=layers * experts).reshape(layers, experts)


Mark = Any  # host seconds, or an event on the GPU's stream


@dataclass(frozen=True)
class Span:
    """Time interval between two marks of a PhaseClock."""

    start: Mark
    end: Mark

    @property
    def reached(self) -> bool:
        """True if the work has reached the second mark."""
        return isinstance(self.end, float) or bool(self.end.query())

    @property
    def seconds(self) -> float:
        """Seconds between the marks. On a GPU, reading this waits for the second mark."""
        if isinstance(self.end, float):
            return float(self.end - self.start)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


class PhaseClock:
    """Marks points in this rank's work: host time on a CPU, events on the current stream on a GPU.

    Args:
        on_gpu: True: the work runs on a GPU.

    Attributes:
        mark: returns a mark; None while a CUDA graph is captured.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.mark: Callable[[], Mark | None] = self._event if on_gpu else time.perf_counter

    def _event(self) -> Mark | None:
        """Returns an event; None while a CUDA graph is captured, because replays of the graph do not run this code."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def span(start: Mark | None, end: Mark | None) -> Span | None:
    """Returns the Span between two marks; None if one of them is None."""
    return None if start is None or end is None else Span(start, end)


MAX_WINDOWS = 64
FEW_ROWS = 64  # of a pass whose choices are kept until then, which takes memory
SAMPLED = 16  # once windows have so many passes, one of as many is timed and read out by itself; the others' counts are summed
PENDING_LIMIT = 32  # forward passes that are added up together


@dataclass(frozen=True)
class EngineFacts:
    """Model and rank metadata that a record contains beside the traffic."""

    model: str  # the model's name
    fingerprint: str  # a hash of the router weights; empty if unknown
    engine: str  # the engine's name and version
    kind: str  # kind of GPU, or "cpu"
    rank: int  # this expert-parallel rank, of `ranks`
    ranks: int
    top_k: int  # experts that a token chooses
    layers: int  # number of MoE layers of the whole model
    experts: int  # experts per layer
    dispatch_bytes: int  # of a token's row; `combine_bytes` on its way back
    combine_bytes: int
    expert_bytes: int  # bytes of one expert's weights in one layer
    other_bytes: int  # bytes of all other weights
    dense_layers: tuple[int, ...] = ()  # numbers of the decoder layers without experts


class LayerMarks(NamedTuple):
    """Times of one MoE layer in a forward pass.

    Attributes:
        layer: the MoE layer's index.
        shape_NK: number of rows on this rank, and number of experts that each row chooses.
        stock: True: the layer's all-to-all was vLLM's own.
        began: mark at the layer's beginning.
        ended: mark at its end; None while a CUDA graph is captured.
    """

    layer: int
    shape_NK: Sequence[int]
    stock: bool
    began: Mark
    ended: Mark | None


@dataclass
class _Pass:
    """A forward pass whose counts and times are not added up yet."""

    step: int
    own: ChoiceCounts
    local: ChoiceCounts
    timings: list[tuple[int, str, Span | float, int, int]]  # layer, phase, time, tokens, active experts or 0 if unknown
    layers: Sequence[LayerMarks]


def _timings(layers: Sequence[LayerMarks]) -> Iterator[tuple[int, str, Span | float, int, int]]:
    """Yields the times between MoE layers, and those of the experts of layers whose all-to-all was vLLM's own."""
    before: Mark | None = None  # the end of the layer before
    for layer, (rows, top_k), stock, began, ended in layers:
        for phase, start, end, tokens, active in (("gate", before, began, rows, 1), ("expert", began, ended, rows * top_k, 0)):
            if start is not None and end is not None and (phase == "gate" or stock):
                yield layer, phase, end - start if isinstance(end, float) else Span(start, end), tokens, active
        before = ended


class TrafficRecorder:
    """Counts tokens in at most MAX_WINDOWS windows of consecutive forward passes, and times phases.

    When the windows are used up, pairs of them are merged, so that each covers twice as many passes. Passes are first queued;
    `accumulate` adds up many of them at once, when their counts have arrived from the GPU.

    Args:
        facts: metadata about the model and this rank, for the record.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._width = 1
        self._windows: dict[int, IntArray] = {}
        self._timings: list[tuple[int, str, Span | float, int, int]] = []
        self._passes: deque[_Pass] = deque()
        self._seconds_LP = np.zeros((facts.layers, len(TIMED)))
        self._passes_L = np.zeros(facts.layers, dtype=np.int64)
        self._gram_P33, self._target_P3 = np.zeros((len(PHASES), 3, 3)), np.zeros((len(PHASES), 3))
        self._most_P = np.zeros(len(PHASES), dtype=np.int64)

    def add_timing(self, layer: int, phase: str, seconds: Span | float | None, tokens: int = 0, active: int = 1) -> None:
        """Records the duration of a phase of a layer in the present pass.

        Args:
            layer: the MoE layer's index.
            phase: a name in TIMED.
            seconds: its duration; None: unknown, nothing is recorded.
            tokens: number of rows in the phase; 0: the time does not enter the compute curves.
            active: number of experts with tokens; 0: the number of experts that this rank's rows of the pass chose.
        """
        if seconds is not None:
            self._timings.append((layer, phase, seconds, tokens, active))

    def end_pass(
        self,
        step: int,
        own: ChoiceCounts,
        local: ChoiceCounts,
        layers: Sequence[LayerMarks] = (),
    ) -> None:
        """Ends a forward pass of real tokens, and calls `accumulate` if PENDING_LIMIT passes are waiting.

        Args:
            step: the pass's number, the same on all ranks.
            own: counts of the rows that this rank counts; other tensor-parallel ranks count the rest.
            local: counts of all rows on this rank.
            layers: the pass's MoE layers, in the sequence in which they ended.
        """
        self._passes.append(_Pass(step, own, local, self._timings, layers))
        self._timings = []
        if len(self._passes) >= PENDING_LIMIT and (self._passes[-1].local.ready or len(self._passes) >= 2 * PENDING_LIMIT):
            self.accumulate()

    @property
    def dense(self) -> bool:
        """True while windows have fewer than SAMPLED passes, so that each pass's counts are needed by themselves."""
        return self._width < SAMPLED

    def accumulate(self) -> None:
        """Waits for the counts of all queued passes, and adds them to the record."""
        timings = []
        while self._passes:
            forward_pass = self._passes.popleft()
            self.count(forward_pass.step, range(self.facts.layers), forward_pass.own.read())
            active_L = np.count_nonzero(forward_pass.local.read(), axis=1).tolist()
            for layer, phase, took, tokens, active in (*forward_pass.timings, *_timings(forward_pass.layers)):
                seconds = took.seconds if isinstance(took, Span) else took
                timings.append((layer, TIMED.index(phase), seconds, tokens, active or active_L[layer]))
        self._add_up(np.array(timings, dtype=np.float64).reshape(-1, 5))

    def _add_up(self, timings_X5: FloatArray) -> None:
        """Adds timings to the sums: each row a layer, an index in TIMED, seconds, tokens, active experts."""
        layer_X, phase_X = timings_X5[:, 0].astype(np.int64), timings_X5[:, 1].astype(np.int64)
        np.add.at(self._seconds_LP, (layer_X, phase_X), timings_X5[:, 2])
        np.add.at(self._passes_L, layer_X[phase_X == TIMED.index("expert")], 1)
        for number, phase in enumerate(PHASES):
            seconds_X, tokens_X, active_X = timings_X5[(phase_X == TIMED.index(phase)) & (timings_X5[:, 3] > 0), 2:].T
            rows_X3 = np.stack([np.ones_like(tokens_X), active_X, tokens_X], axis=1)
            self._gram_P33[number] += rows_X3.T @ rows_X3
            self._target_P3[number] += rows_X3.T @ seconds_X
            self._most_P[number] = max(self._most_P[number], tokens_X.max(initial=0))

    def count(self, step: int, layers: Sequence[int], load_SE: IntArray) -> None:
        """Adds expert counts of some layers of one forward pass.

        Args:
            step: the forward pass's number.
            layers: indices of some MoE layers, S of them.
            load_SE: (S, E) how often each expert was chosen in each of these layers.
        """
        window = step // self._width
        while window not in self._windows and len(self._windows) >= MAX_WINDOWS:
            self._double_width()
            window = step // self._width
        if window not in self._windows:
            self._windows[window] = np.zeros((self.facts.layers, self.facts.experts), dtype=np.int64)
        np.add.at(self._windows[window], layers, load_SE)

    def record(self) -> EngineRecord:
        """Returns the record of all traffic and timings so far."""
        self.accumulate()
        facts, windows = self.facts, sorted(self._windows)
        shape = (len(windows), facts.layers, facts.experts)
        tokens_TLE = np.array([self._windows[window] for window in windows], dtype=np.int64).reshape(shape)
        now = datetime.datetime.now(datetime.UTC).date().isoformat()
        return EngineRecord(
            facts.model, facts.fingerprint, facts.engine, facts.kind, now, facts.rank, facts.ranks, facts.top_k,
            facts.dispatch_bytes, facts.combine_bytes, facts.expert_bytes, facts.other_bytes, facts.dense_layers, self._width,
            np.array(windows, dtype=np.int64), tokens_TLE,
            self._seconds_LP, self._passes_L, self._gram_P33, self._target_P3, self._most_P,
        )  # fmt: skip

    def _double_width(self) -> None:
        self._width *= 2
        halves, self._windows = self._windows, {}
        for window, tokens_LE in halves.items():
            whole = self._windows.setdefault(window // 2, np.zeros_like(tokens_LE))
            whole += tokens_LE
