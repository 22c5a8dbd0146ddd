"""Figures of Lazarus that one machine can run for real: processes train a small model elastically, and some are killed."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from aurora.io import shipped
from aurora.training.data import read_samples
from aurora.training.elastic_run import Watch, train_elastic
from aurora.training.migration import next_placement
from aurora.training.trainer import alike_ranks
from aurora.training.training_run import TrainResult
from aurora.types import TrainOptions
from bench.papers.lazarus.evaluation import LazarusFigure, figure_of
from bench.papers.lazarus.membership_traces import MembershipEvent
from bench.papers.lazarus.model_survival import model_survival

MODEL, TEXT = "models/mixtral-topics", "models/train.py"
LAYERS, EXPERTS = 4, 8  # of the model
STRUCK_AT = 2  # the step after which ranks are killed
RECONFIGURE_S = 30.0  # the pause of simulated systems
SECTION = "Real"


@dataclass(frozen=True)
class RealRuns:
    """How much is run for real.

    Args:
        ranks: processes that train.
        lost: how many of them are killed at once, in runs of their own.
        draws: runs for each of these; other ranks are killed in each.
        steps: steps of these runs.
        spot_steps: steps of the run on the spot trace; 0: no such run.
        compressed: how many times as fast the spot trace is.
    """

    ranks: int = 8
    lost: tuple[int, ...] = (1, 2, 3, 4)
    draws: int = 3
    steps: int = 8
    spot_steps: int = 400
    compressed: float = 60.0


def train_for_real(
    runs: RealRuns, trace: Sequence[MembershipEvent], simulated_share: float, progress: Callable[[str, int, int], None]
) -> Iterator[LazarusFigure]:
    """Trains the shipped Mixtral on local processes, some of which are killed (SIGKILL); yields what was measured.

    Args:
        runs: how much is run.
        trace: of spot instances; as many ranks are killed at once as it loses nodes.
        simulated_share: part of the time that the replay of the trace spends in steps.
        progress: called with (what, done, in all).
    """
    options = TrainOptions(ranks=runs.ranks, batch=runs.ranks, length=32, elastic=True, min_replicas=2, steps=runs.steps)
    in_all = len(runs.lost) * runs.draws + bool(runs.spot_steps)
    for number, count in enumerate(runs.lost):
        case, kept, results = f"{count} of {runs.ranks} ranks killed", [], []
        for draw in range(runs.draws):
            progress("trained", number * runs.draws + draw, in_all)
            killer = _Killer(np.random.default_rng((count, draw)), partial(_at_once, count))
            results.append(_trained(options, killer))
            kept.append(float(not killer.went_back))
        longest = [max(result.pauses, key=lambda pause: pause.seconds) for result in results if result.pauses]
        moved = [float(sum(step.moved for step in result.steps if step.pause is not None)) for result in results]
        yield figure_of(SECTION, f"{case}: goes on from replicas", "trained", None, float(np.mean(kept)))
        yield figure_of(SECTION, f"{case}: goes on from replicas", "simulated", None, survival(options, count))
        if longest:
            yield figure_of(SECTION, f"{case}: seconds of the pause", "trained", None, [pause.seconds for pause in longest])
            yield figure_of(SECTION, f"{case}: seconds of the pause", "simulated", None, RECONFIGURE_S)
            yield figure_of(SECTION, f"{case}: seconds of moves", "trained", None, [pause.moves_s for pause in longest])
        yield figure_of(SECTION, f"{case}: experts moved", "trained", None, moved)
    if runs.spot_steps:
        progress("trained", in_all - 1, in_all)
        yield from _on_spot_trace(replace(options, steps=runs.spot_steps), runs.compressed, trace, simulated_share)
    progress("trained", in_all, in_all)


def _at_once(count: int, step: int) -> int:
    """How many ranks are killed after a step: all of them after the same one."""
    return count if step == STRUCK_AT else 0


def _on_spot_trace(
    options: TrainOptions, compressed: float, trace: Sequence[MembershipEvent], simulated_share: float
) -> Iterator[LazarusFigure]:
    """A run whose ranks are killed as the trace loses nodes; each is started again at once."""
    waiting, begun_s = [event for event in trace if event.removed], list[float]()

    def killed(step: int) -> int:
        begun_s.append(time.monotonic())
        at_s, count = (begun_s[-1] - begun_s[0]) * compressed, 0
        while waiting and waiting[0].time_s <= at_s:
            count += len(waiting.pop(0).removed)
        return min(count, options.ranks // 2)

    killer = _Killer(np.random.default_rng(0), killed)
    result = _trained(replace(options, respawn=1000, checkpoint_every=50), killer)
    seconds, paused_s = sum(step.seconds for step in result.steps), sum(pause.seconds for pause in result.pauses)
    case = f"spot trace, {compressed:g} times as fast, {killer.killed} ranks killed"
    yield figure_of(SECTION, f"{case}: part of the time in steps", "trained", None, 1 - paused_s / seconds)
    yield figure_of(SECTION, f"{case}: part of the time in steps", "simulated", None, simulated_share)
    yield figure_of(SECTION, f"{case}: tokens a second", "trained", None, result.tokens_per_s)
    undisturbed = float(np.median([step.seconds for step in result.steps if step.pause is None]))
    yield figure_of(SECTION, f"{case}: tokens a second without pauses", "trained", None, result.tokens / undisturbed)


def survival(options: TrainOptions, count: int) -> float:
    """Returns the probability that replicas of all experts are left when `count` drawn ranks are lost after a few steps."""
    ranks, nothing = options.ranks, [((),) * LAYERS] * options.ranks
    least = options.min_replicas_among(ranks)
    slots = -(-EXPERTS * least // ranks)
    placement = next_placement(nothing, np.ones((LAYERS, EXPERTS)), alike_ranks(range(ranks)), slots, least)
    return model_survival(placement.slots_LG, count)


def _trained(options: TrainOptions, watch: Watch) -> TrainResult:
    """Trains once, in a folder that is removed."""
    model = shipped(MODEL)
    samples_NT = read_samples(model, [shipped(TEXT)], options.length)
    with tempfile.TemporaryDirectory() as output:
        return train_elastic(str(model), samples_NT, options, Path(output), watch)


class _Killer:
    """Called after each step, kills drawn ranks.

    Args:
        rng: draws the ranks.
        wanted: called with the step, returns how many ranks are to be killed.

    Attributes:
        killed: how many were.
        went_back: whether steps were taken again, because no replica of some expert was left.
    """

    def __init__(self, rng: np.random.Generator, wanted: Callable[[int], int]) -> None:
        self._rng, self._wanted, self._last = rng, wanted, -1
        self.killed, self.went_back = 0, False

    def __call__(self, step: int, pids: dict[int, int]) -> None:
        if step <= self._last:
            self.went_back = True
            self._last = step
            return
        self._last = step
        for rank in self._rng.permutation(sorted(pids)).tolist()[: min(self._wanted(step), len(pids) - 1)]:
            os.kill(pids[rank], signal.SIGKILL)
            self.killed += 1
