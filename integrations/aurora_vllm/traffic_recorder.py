"""Counts of one rank's traffic, and its timings, accumulated while it serves."""

import datetime
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.io.engine_records import TIMED, EngineRecord
from aurora.types import PHASES
from aurora.types.arrays import FloatArray, IntArray
from aurora_vllm.choice_counter import ChoiceCounts
from aurora_vllm.phase_clock import Span

MAX_WINDOWS = 64
PENDING_LIMIT = 32  # forward passes that are added up together


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the model and the rank that a record states beside the traffic."""

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


@dataclass
class _Pass:
    """A forward pass whose counts and times are not added up yet."""

    step: int
    own: ChoiceCounts
    local: ChoiceCounts
    timings: list[tuple[int, str, Span | float, int, int]]  # layer, phase, time, tokens, active experts or 0 if unknown


class TrafficRecorder:
    """Counts tokens by forward pass, in at most MAX_WINDOWS windows. When they are full, the width of all windows doubles.

    Passes are only noted at first; `accumulate` adds up many of them at once, once their counts have come from the device.

    Args:
        facts: facts about the model and this rank, for the record.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._width = 1
        self._windows: dict[int, IntArray] = {}
        self._timings: list[tuple[int, str, Span | float, int, int]] = []
        self._passes: deque[_Pass] = deque()
        self._seconds_LP = np.zeros((facts.layers, len(TIMED)))
        self._passes_L = np.zeros(facts.layers, dtype=np.int64)
        self._gram_P22, self._target_P2 = np.zeros((len(PHASES), 2, 2)), np.zeros((len(PHASES), 2))
        self._most_P = np.zeros(len(PHASES), dtype=np.int64)

    def add_timing(self, layer: int, phase: str, seconds: Span | float | None, tokens: int = 0, active: int = 1) -> None:
        """Notes how long a phase of a layer took in the pass that runs.

        Args:
            layer: the MoE layer's index.
            phase: a name in TIMED.
            seconds: how long it took; None: unknown, nothing is noted.
            tokens: number of rows in the phase; 0: the time does not enter the compute curves.
            active: number of experts with tokens; 0: those that this rank's rows of the pass chose.
        """
        if seconds is not None:
            self._timings.append((layer, phase, seconds, tokens, active))

    def end_pass(self, step: int, own: ChoiceCounts, local: ChoiceCounts) -> None:
        """Ends a forward pass of real tokens, and adds up what is noted if that is enough.

        Args:
            step: the pass's number, the same on all ranks.
            own: choices of the rows that this rank counts.
            local: choices of all rows on this rank; other tensor-parallel ranks count the rest.
        """
        self._passes.append(_Pass(step, own, local, self._timings))
        self._timings = []
        if len(self._passes) >= PENDING_LIMIT and (self._passes[-1].local.ready or len(self._passes) >= 2 * PENDING_LIMIT):
            self.accumulate()

    def accumulate(self) -> None:
        """Adds all noted passes to the record. Waits for their counts."""
        timings = []
        while self._passes:
            each = self._passes.popleft()
            self.count(each.step, range(self.facts.layers), each.own.read())
            active_L = np.count_nonzero(each.local.read(), axis=1).tolist()
            for layer, phase, time, tokens, active in each.timings:
                seconds = time.seconds if isinstance(time, Span) else time
                timings.append((layer, TIMED.index(phase), seconds, tokens, active or active_L[layer]))
        self._add_up(np.array(timings, dtype=np.float64).reshape(-1, 5))

    def _add_up(self, timings_X5: FloatArray) -> None:
        """Adds timings to the sums: each row a layer, an index in TIMED, seconds, tokens, active experts."""
        layer_X, phase_X = timings_X5[:, 0].astype(np.int64), timings_X5[:, 1].astype(np.int64)
        np.add.at(self._seconds_LP, (layer_X, phase_X), timings_X5[:, 2])
        np.add.at(self._passes_L, layer_X[phase_X == TIMED.index("expert")], 1)
        for number, phase in enumerate(PHASES):
            seconds_X, tokens_X, active_X = timings_X5[(phase_X == TIMED.index(phase)) & (timings_X5[:, 3] > 0), 2:].T
            rows_X2 = np.stack([active_X, tokens_X], axis=1)
            self._gram_P22[number] += rows_X2.T @ rows_X2
            self._target_P2[number] += rows_X2.T @ seconds_X
            self._most_P[number] = max(self._most_P[number], tokens_X.max(initial=0))

    def count(self, step: int, layers: Sequence[int], load_SE: IntArray) -> None:
        """Adds counts of chosen experts in some layers of one forward pass.

        Args:
            step: the forward pass's number.
            layers: indices of S MoE layers.
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
        """Returns the record of all traffic and timings up to now."""
        self.accumulate()
        facts, windows = self.facts, sorted(self._windows)
        shape = (len(windows), facts.layers, facts.experts)
        tokens_TLE = np.array([self._windows[window] for window in windows], dtype=np.int64).reshape(shape)
        now = datetime.datetime.now(datetime.UTC).date().isoformat()
        return EngineRecord(
            facts.model, facts.fingerprint, facts.engine, facts.kind, now, facts.rank, facts.ranks, facts.top_k,
            facts.dispatch_bytes, facts.combine_bytes, facts.expert_bytes, facts.other_bytes, facts.dense_layers, self._width,
            np.array(windows, dtype=np.int64), tokens_TLE,
            self._seconds_LP, self._passes_L, self._gram_P22, self._target_P2, self._most_P,
        )  # fmt: skip

    def _double_width(self) -> None:
        self._width *= 2
        halves, self._windows = self._windows, {}
        for window, tokens_LE in halves.items():
            whole = self._windows.setdefault(window // 2, np.zeros_like(tokens_LE))
            whole += tokens_LE
