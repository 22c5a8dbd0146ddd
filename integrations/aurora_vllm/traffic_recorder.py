"""One rank's traffic and timings, added up while it serves."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from aurora.io.engine_records import TIMED, EngineRecord
from aurora.types import PHASES
from aurora.types.arrays import IntArray

MOST_WINDOWS = 64
NOTES = 256  # of layers and timings are added up at once


@dataclass(frozen=True)
class EngineFacts:
    """What a record says of the model and the rank beside its traffic."""

    model: str
    fingerprint: str
    engine: str
    kind: str
    rank: int
    ranks: int
    top_k: int
    layers: int
    experts: int
    dispatch_bytes: int
    combine_bytes: int
    expert_bytes: int
    other_bytes: int


@dataclass
class LayerObservation:
    """A layer's part of forward pass number `step`, which is the same on all ranks. experts_NK: chosen by all rows here, of
    which `mine` are this rank's. gate_s: since the last layer, None in the first; expert_s: None where they are timed apart."""

    step: int
    layer: int
    experts_NK: torch.Tensor
    mine: slice
    gate_s: float | None
    expert_s: float | None = None


class TrafficRecorder:
    """Counts by forward pass, in windows that double in width when there are more than MOST_WINDOWS; memory is bounded.

    What layers saw and how long they took is noted at once and added up by `settle`, many of them together.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._width = 1
        self._windows: dict[int, IntArray] = {}
        self._seen: list[LayerObservation] = []
        self._timings: list[tuple[float, ...]] = []  # layer, place in TIMED, seconds, tokens, active experts
        self._seconds_LP = np.zeros((facts.layers, len(TIMED)))
        self._passes_L = np.zeros(facts.layers, dtype=np.int64)
        self._gram_P22, self._target_P2 = np.zeros((len(PHASES), 2, 2)), np.zeros((len(PHASES), 2))
        self._most_P = np.zeros(len(PHASES), dtype=np.int64)

    def saw(self, seen: LayerObservation) -> None:
        """A layer's part of a pass."""
        self._seen.append(seen)

    def timed(self, layer: int, phase: str, seconds: float, tokens: int = 0, active: int = 1) -> None:
        """A phase of a layer took so long for so many tokens, with so many experts active."""
        self._timings.append((layer, TIMED.index(phase), seconds, tokens, active))

    def passed(self) -> None:
        """A forward pass is over: add up what is noted, if it is enough to be worth it."""
        if len(self._timings) + 2 * len(self._seen) >= NOTES:
            self.settle()

    def settle(self) -> None:
        """Add up all that is noted."""
        if self._seen:
            self._look()
        timings, self._timings = np.array(self._timings, dtype=np.float64).reshape(-1, 5), []
        layer_X, phase_X = timings[:, 0].astype(np.int64), timings[:, 1].astype(np.int64)
        np.add.at(self._seconds_LP, (layer_X, phase_X), timings[:, 2])
        np.add.at(self._passes_L, layer_X[phase_X == TIMED.index("expert")], 1)
        for place, phase in enumerate(PHASES):
            seconds_X, tokens_X, active_X = timings[(phase_X == TIMED.index(phase)) & (timings[:, 3] > 0), 2:].T
            rows_X2 = np.stack([active_X, tokens_X], axis=1)
            self._gram_P22[place] += rows_X2.T @ rows_X2
            self._target_P2[place] += rows_X2.T @ seconds_X
            self._most_P[place] = max(self._most_P[place], tokens_X.max(initial=0))

    def _look(self) -> None:
        """Count what layers saw, and note how long they took."""
        seen, self._seen = self._seen, []
        chosen_S = [each.experts_NK.cpu().numpy() for each in seen]
        load_SE = self._loads(chosen_S)
        whole = all(each.mine == slice(0, len(chosen)) for each, chosen in zip(seen, chosen_S, strict=True))
        own_SE = load_SE if whole else self._loads([chosen[each.mine] for each, chosen in zip(seen, chosen_S, strict=True)])
        for step, places in groupby(range(len(seen)), key=lambda place: seen[place].step):
            here = list(places)
            self.count(step, [seen[place].layer for place in here], own_SE[here])
        for each, chosen, active in zip(seen, chosen_S, np.count_nonzero(load_SE, axis=1).tolist(), strict=True):
            if each.gate_s is not None:
                self.timed(each.layer, "gate", each.gate_s, len(chosen))
            if each.expert_s is not None:
                self.timed(each.layer, "expert", each.expert_s, chosen.size, active)

    def _loads(self, chosen_S: Sequence[IntArray]) -> IntArray:
        experts = self.facts.experts
        counted = np.concatenate([chosen.ravel() + number * experts for number, chosen in enumerate(chosen_S)])
        return np.bincount(counted, minlength=len(chosen_S) * experts).reshape(-1, experts)

    def count(self, step: int, layers: Sequence[int], load_SE: IntArray) -> None:
        """How often each expert of the layers was chosen in forward pass number `step`."""
        window = step // self._width
        while window not in self._windows and len(self._windows) >= MOST_WINDOWS:
            self._widen()
            window = step // self._width
        if window not in self._windows:
            self._windows[window] = np.zeros((self.facts.layers, self.facts.experts), dtype=np.int64)
        np.add.at(self._windows[window], layers, load_SE)

    def record(self) -> EngineRecord:
        """What has been seen until now."""
        self.settle()
        facts, windows = self.facts, sorted(self._windows)
        shape = (len(windows), facts.layers, facts.experts)
        tokens_TLE = np.array([self._windows[window] for window in windows], dtype=np.int64).reshape(shape)
        now = datetime.datetime.now(datetime.UTC).date().isoformat()
        return EngineRecord(
            facts.model, facts.fingerprint, facts.engine, facts.kind, now, facts.rank, facts.ranks, facts.top_k,
            facts.dispatch_bytes, facts.combine_bytes, facts.expert_bytes, facts.other_bytes, self._width,
            np.array(windows, dtype=np.int64), tokens_TLE,
            self._seconds_LP, self._passes_L, self._gram_P22, self._target_P2, self._most_P,
        )  # fmt: skip

    def load_LE(self) -> IntArray:
        """(L, E) int64: all that was counted."""
        self.settle()
        nothing = np.zeros((self.facts.layers, self.facts.experts), dtype=np.int64)
        return sum(self._windows.values(), start=nothing)

    def _widen(self) -> None:
        self._width *= 2
        halves, self._windows = self._windows, {}
        for window, tokens_LE in halves.items():
            whole = self._windows.setdefault(window // 2, np.zeros_like(tokens_LE))
            whole += tokens_LE
