"""One rank's traffic and timings, added up while it serves."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from aurora.store.records import TIMED, Record
from aurora.types import PHASES
from aurora.types.arrays import IntArray

MOST_WINDOWS = 64


@dataclass(frozen=True)
class Facts:
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
class Seen:
    """A layer's part of forward pass number `step`, which is the same on all ranks. experts_NK: chosen by all rows here, of
    which `mine` are this rank's. gate_s: since the last layer, None in the first; expert_s: None where they are timed apart."""

    step: int
    layer: int
    experts_NK: torch.Tensor
    mine: slice
    gate_s: float | None
    expert_s: float | None = None


class Recording:
    """Counts by forward pass, in windows that double in width when there are more than MOST_WINDOWS; memory is bounded."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._width = 1
        self._windows: dict[int, IntArray] = {}
        self._seconds = [dict.fromkeys(TIMED, 0.0) for _ in range(facts.layers)]  # Python's own numbers: quick
        self._passes = [0] * facts.layers
        self._sums = {phase: [0.0] * 5 for phase in PHASES}  # xx, xy, yy, xs, ys
        self._most = dict.fromkeys(PHASES, 0)

    def add(self, seen: Sequence[Seen]) -> None:
        """Count and time layers: all of a pass at once, after it, so that its layers wait for no counting."""
        for step, several in groupby(seen, key=lambda each: each.step):
            layers = list(several)
            chosen_S = [each.experts_NK.cpu().numpy() for each in layers]
            load_SE = self._loads(chosen_S)
            whole = all(each.mine == slice(0, len(chosen)) for each, chosen in zip(layers, chosen_S, strict=True))
            own_S = chosen_S if whole else [chosen[each.mine] for each, chosen in zip(layers, chosen_S, strict=True)]
            self.count(step, [each.layer for each in layers], load_SE if whole else self._loads(own_S))
            for each, chosen, active in zip(layers, chosen_S, np.count_nonzero(load_SE, axis=1).tolist(), strict=True):
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

    def timed(self, layer: int, phase: str, seconds: float, tokens: int = 0, active: int = 1) -> None:
        """A phase of a layer took so long for so many tokens, with so many experts active."""
        self._seconds[layer][phase] += seconds
        if phase == "expert":
            self._passes[layer] += 1
        if phase in self._sums and tokens:
            terms = (active * active, active * tokens, tokens * tokens, active * seconds, tokens * seconds)
            self._sums[phase] = [total + term for total, term in zip(self._sums[phase], terms, strict=True)]
            self._most[phase] = max(self._most[phase], tokens)

    def record(self) -> Record:
        """What has been seen until now."""
        facts, windows = self.facts, sorted(self._windows)
        shape = (len(windows), facts.layers, facts.experts)
        tokens_TLE = np.array([self._windows[window] for window in windows], dtype=np.int64).reshape(shape)
        now = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Record(
            facts.model, facts.fingerprint, facts.engine, facts.kind, now, facts.rank, facts.ranks, facts.top_k,
            facts.dispatch_bytes, facts.combine_bytes, facts.expert_bytes, facts.other_bytes, self._width,
            np.array(windows, dtype=np.int64), tokens_TLE,
            np.array([[seconds[phase] for phase in TIMED] for seconds in self._seconds]), np.array(self._passes),
            np.array([[sums[:2], sums[1:3]] for sums in self._sums.values()]),
            np.array([sums[3:] for sums in self._sums.values()]), np.array([self._most[phase] for phase in PHASES]),
        )  # fmt: skip

    def load_LE(self) -> IntArray:
        """(L, E) int64: all that was counted."""
        nothing = np.zeros((self.facts.layers, self.facts.experts), dtype=np.int64)
        return sum(self._windows.values(), start=nothing)

    def _widen(self) -> None:
        self._width *= 2
        halves, self._windows = self._windows, {}
        for window, tokens_LE in halves.items():
            whole = self._windows.setdefault(window // 2, np.zeros_like(tokens_LE))
            whole += tokens_LE
