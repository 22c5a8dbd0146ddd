"""Counts of one rank's traffic, and its timings, accumulated while it serves."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from aurora.io.engine_records import TIMED, EngineRecord
from aurora.types import PHASES
from aurora.types.arrays import IntArray

MAX_WINDOWS = 64
PENDING_LIMIT = 256  # observations and timings that are accumulated together


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
class LayerObservation:
    """A MoE layer's part of one forward pass."""

    step: int  # the forward pass's number, the same on all ranks
    layer: int  # the MoE layer's index
    experts_NK: torch.Tensor  # (N, K) experts chosen for all rows on this rank
    own_rows: slice  # the rows that this rank counts; other tensor-parallel ranks count the rest
    gate_s: float | None  # seconds since the last MoE layer; None in the first layer
    expert_s: float | None = None  # seconds of the experts; None if `add_timing` reports them


class TrafficRecorder:
    """Counts tokens by forward pass, in at most MAX_WINDOWS windows. When they are full, the width of all windows doubles.

    Observations and timings are only appended at first; `accumulate` adds up many of them at once, which is cheaper.

    Args:
        facts: facts about the model and this rank, for the record.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._width = 1
        self._windows: dict[int, IntArray] = {}
        self._observations: list[LayerObservation] = []
        self._timings: list[tuple[float, ...]] = []  # layer, index in TIMED, seconds, tokens, active experts
        self._seconds_LP = np.zeros((facts.layers, len(TIMED)))
        self._passes_L = np.zeros(facts.layers, dtype=np.int64)
        self._gram_P22, self._target_P2 = np.zeros((len(PHASES), 2, 2)), np.zeros((len(PHASES), 2))
        self._most_P = np.zeros(len(PHASES), dtype=np.int64)

    def observe(self, observation: LayerObservation) -> None:
        """Records a layer's part of a forward pass."""
        self._observations.append(observation)

    def add_timing(self, layer: int, phase: str, seconds: float, tokens: int = 0, active: int = 1) -> None:
        """Records how long a phase of a layer took.

        Args:
            layer: the MoE layer's index.
            phase: a name in TIMED.
            seconds: how long it took.
            tokens: number of rows in the phase; 0: the time does not enter the compute curves.
            active: number of experts with tokens.
        """
        self._timings.append((layer, TIMED.index(phase), seconds, tokens, active))

    def end_pass(self) -> None:
        """Ends a forward pass, and calls `accumulate` if enough is pending."""
        if len(self._timings) + 2 * len(self._observations) >= PENDING_LIMIT:
            self.accumulate()

    def accumulate(self) -> None:
        """Adds all pending observations and timings to the record."""
        if self._observations:
            self._accumulate_observations()
        timings, self._timings = np.array(self._timings, dtype=np.float64).reshape(-1, 5), []
        layer_X, phase_X = timings[:, 0].astype(np.int64), timings[:, 1].astype(np.int64)
        np.add.at(self._seconds_LP, (layer_X, phase_X), timings[:, 2])
        np.add.at(self._passes_L, layer_X[phase_X == TIMED.index("expert")], 1)
        for number, phase in enumerate(PHASES):
            seconds_X, tokens_X, active_X = timings[(phase_X == TIMED.index(phase)) & (timings[:, 3] > 0), 2:].T
            rows_X2 = np.stack([active_X, tokens_X], axis=1)
            self._gram_P22[number] += rows_X2.T @ rows_X2
            self._target_P2[number] += rows_X2.T @ seconds_X
            self._most_P[number] = max(self._most_P[number], tokens_X.max(initial=0))

    def _accumulate_observations(self) -> None:
        """Counts the chosen experts of pending observations, and notes their timings."""
        pending, self._observations = self._observations, []
        experts_S = [each.experts_NK.cpu().numpy() for each in pending]
        load_SE = self._loads(experts_S)
        own_S = [experts_NK[each.own_rows] for each, experts_NK in zip(pending, experts_S, strict=True)]
        all_own = all(len(own) == len(experts_NK) for own, experts_NK in zip(own_S, experts_S, strict=True))
        own_SE = load_SE if all_own else self._loads(own_S)
        for step, group in groupby(range(len(pending)), key=lambda number: pending[number].step):
            numbers = list(group)
            self.count(step, [pending[number].layer for number in numbers], own_SE[numbers])
        for each, experts_NK, active in zip(pending, experts_S, np.count_nonzero(load_SE, axis=1).tolist(), strict=True):
            if each.gate_s is not None:
                self.add_timing(each.layer, "gate", each.gate_s, len(experts_NK))
            if each.expert_s is not None:
                self.add_timing(each.layer, "expert", each.expert_s, experts_NK.size, active)

    def _loads(self, experts_S: Sequence[IntArray]) -> IntArray:
        """(S, E): how often each expert occurs in each of the S arrays."""
        experts = self.facts.experts
        shifted = np.concatenate([chosen.ravel() + number * experts for number, chosen in enumerate(experts_S)])
        return np.bincount(shifted, minlength=len(experts_S) * experts).reshape(-1, experts)

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
