"""Studies: thresholds, the tables' schemes by a simulated clock and by real processes, mixed clusters, recorded stragglers."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aurora.errors import InfeasiblePlan
from aurora.planner.gradient_codes import GradientCode, make_code
from aurora.reproduce.bcc.delays import DELAYS, Times, recorded_steps
from aurora.reproduce.bcc.descent import Descent, batch_of, gradient, loss, start
from aurora.reproduce.bcc.mixed_workers import (
    ALLOT,
    MixedWorkers,
    RecoveryTime,
    lower_bound_s,
    random_recovery_time,
    recommend,
    results_s,
    theorem_2,
    unrecoverable_probability,
)
from aurora.reproduce.bcc.redundancy import choose_load, code_by_speed, replay, scaled
from aurora.reproduce.bcc.waiting import formula, waiting
from aurora.types import AggregationResult, BccOptions, WorkerReport
from aurora.types.arrays import FloatArray

SCHEMES = ("uncoded", "cyclic", "bcc", "balanced")  # the paper's three, and ours
DRAWS = 10  # placements of the simulated clock


class Pool(Protocol):
    """Processes that aggregate a sum, round after round."""

    def aggregate(self, argument: NDArray[Any] | None = None, code: int = 0) -> AggregationResult:
        """Performs one round.

        Args:
            argument: sent to all workers; None: nothing is sent.
            code: index of the round's code.
        """
        ...


class MakePool(Protocol):
    """Starts a Pool.

    Args:
        work: (batch, argument) -> the batch's result; picklable.
        codes: which workers hold which batches; each round uses one.
        like: an array of the result's shape and type.
        delay_s: (worker, round) -> seconds that the worker waits first.
        watch: called with a report of each worker whenever one changes.
    """

    def __call__(
        self,
        work: Callable[[int, NDArray[Any] | None], NDArray[Any]],
        codes: Sequence[GradientCode],
        like: NDArray[Any],
        *,
        delay_s: Callable[[int, int], float],
        watch: Callable[[Sequence[WorkerReport]], None],
    ) -> AbstractContextManager[Pool]: ...


@dataclass(frozen=True)
class Threshold:
    """One scheme at one load.

    Args:
        scheme: its name.
        load: batches of a worker.
        formula: recovery threshold by the paper's formula; None without one.
        exact: exact mean of the recovery threshold.
        communication: load of communication, in batches' results.
        impossible: the probability that the sum is not recoverable.
    """

    scheme: str
    load: int
    formula: float | None
    exact: float
    communication: float
    impossible: float


def thresholds(batches: int, loads: Sequence[int]) -> list[Threshold]:
    """Fig. 2: recovery thresholds with as many workers as batches.

    Args:
        batches: B, also the number of workers.
        loads: batches of a worker; they leave one worker a batch or more.
    """
    found = []
    for scheme in ("bcc", "balanced", "cyclic", "random"):
        for load in loads:
            exact = waiting(scheme, batches, batches, load)
            printed = None if scheme == "balanced" else formula(scheme, batches, batches, load)[0]
            found.append(Threshold(scheme, load, printed, exact.threshold, exact.communication, exact.impossible))
    return found


@dataclass(frozen=True)
class Timing:
    """One scheme's iterations.

    Attributes:
        scheme, iterations: which scheme, and how many.
        waited: messages that the master waited for, the mean over iterations.
        seconds: of all iterations.
        compute_s: the longest computation among the workers waited for, summed over iterations.
        error: the largest difference of a gradient from the serial one over its largest entry; None where none was computed.
        losses: of the model before and after; None where none was computed.
    """

    scheme: str
    iterations: int
    waited: float
    seconds: float
    compute_s: float
    error: float | None = None
    losses: tuple[float, float] | None = None


def _load_of(scheme: str, load: int) -> int:
    """Uncoded workers hold one batch each."""
    return 1 if scheme == "uncoded" else load


def _drawn_code(scheme: str, workers: int, load: int, rng: np.random.Generator) -> GradientCode:
    """A code from which the sum is recoverable: BCC draws again where it missed a batch."""
    for _ in range(200):
        try:
            return make_code(scheme, workers, workers, _load_of(scheme, load), rng)
        except InfeasiblePlan as error:
            missed = error
    raise missed


def simulated(delays: str, workers: int, load: int, iterations: int, seed: int, folder: Path | None) -> list[Timing]:
    """Times each scheme by a simulated clock: the mean over DRAWS placements of the whole job.

    Args:
        delays: a name in DELAYS.
        workers: how many.
        load: batches of a worker.
        iterations: of the job.
        seed: of the random generator.
        folder: of recorded data; None for none.
    """
    found = []
    for scheme in SCHEMES:
        rng = np.random.default_rng([seed, workers])
        seconds, waits, computes = [], [], []
        for _ in range(DRAWS):
            code = _drawn_code(scheme, workers, load, rng)
            times = DELAYS[delays](iterations, workers, _load_of(scheme, load), rng, folder)
            ended_I, waited_I = replay(code, times.message_IW, times.receive_s)
            seconds.append(ended_I.sum())
            waits.append(waited_I.mean())
            computes.append(_longest(times, waited_I).sum())
        found.append(Timing(scheme, iterations, float(np.mean(waits)), float(np.mean(seconds)), float(np.mean(computes))))
    return found


def _longest(times: Times, waited_I: NDArray[np.int64]) -> FloatArray:
    order_IW = np.argsort(times.message_IW, axis=1, kind="stable")
    sorted_IW = np.take_along_axis(times.compute_IW, order_IW, axis=1)
    return np.array([row[:k].max() for row, k in zip(sorted_IW, waited_I.tolist(), strict=True)])


@dataclass(frozen=True)
class Injected:
    """Delays that real workers wait for.

    Args:
        delay_IW: (I, W) seconds by round, from 1, and worker.
    """

    delay_IW: FloatArray

    def __call__(self, worker: int, number: int) -> float:
        return float(self.delay_IW[number - 1, worker])


def performed(
    names: Sequence[str], workers: int, options: BccOptions, folder: Path | None, pool: MakePool, advance: Callable[[], None]
) -> dict[str, list[Timing]]:
    """Times each scheme by real processes that wait for the drawn delays, stretched.

    They do gradient descent, and every sum is compared with the serial one. Seconds are as measured, over the stretch. All
    delays
    and schemes use the same processes.

    Args:
        names: in DELAYS.
        workers: how many.
        options: load, iterations, stretch and the job's size.
        folder: of recorded data; None for none.
        pool: starts the processes.
        advance: called after each scheme.

    Returns:
        By name, one Timing per scheme.
    """
    iterations, seed, features = options.process_iterations, options.seed, options.features
    descent = Descent(features, options.points, seed)
    x_PF, y_P = (np.concatenate(parts) for parts in zip(*(batch_of(descent, b) for b in range(workers)), strict=True))
    drawn: list[tuple[str, GradientCode, Times]] = []
    for name in names:
        for scheme in SCHEMES:
            rng = np.random.default_rng([seed, workers])
            code = _drawn_code(scheme, workers, options.load, rng)
            drawn.append((name, code, DELAYS[name](iterations + 1, workers, _load_of(scheme, options.load), rng, folder)))
    injected = Injected(np.concatenate([times.message_IW for _, _, times in drawn]) * options.stretch)
    receiving = _Receiving()
    before = loss(descent, workers, np.zeros(features))
    found: dict[str, list[Timing]] = {name: [] for name in names}
    with pool(descent, [code for _, code, _ in drawn], np.zeros(features), delay_s=injected, watch=receiving) as started:
        for number, (name, code, times) in enumerate(drawn):
            receiving.receive_s = times.receive_s * options.stretch
            state, seconds, waits, compute_s, error = start(features), 0.0, [], 0.0, 0.0
            started.aggregate(state.ahead_F, number)  # data are made and processes settle before the clock runs
            for iteration in range(1, iterations + 1):
                collected = started.aggregate(state.ahead_F, number)
                seconds += collected.seconds
                waits.append(len(collected.arrived))
                compute_s += float(times.compute_IW[iteration, list(collected.arrived)].max())
                serial_F = gradient(x_PF, y_P, state.ahead_F)
                error = max(error, float(np.abs(collected.total - serial_F).max() / np.abs(serial_F).max()))
                state = state.after(collected.total, len(x_PF))
            losses = (before, loss(descent, workers, state.model_F))
            seconds /= options.stretch
            found[name].append(Timing(code.scheme, iterations, float(np.mean(waits)), seconds, compute_s, error, losses))
            advance()
    return found


@dataclass
class _Receiving:
    """A master that needs receive_s seconds for every message."""

    receive_s: float = 0.0
    received: int = 0

    def __call__(self, shares: Sequence[WorkerReport]) -> None:
        received = sum(share.state in ("used", "not needed") for share in shares)
        time.sleep(self.receive_s * max(0, received - self.received))
        self.received = received


@dataclass(frozen=True)
class MixedFound:
    """Fig. 5, in expected seconds.

    Attributes:
        wanted: floor(m log m), the results to which p2_s counts.
        p2_s, balanced_s, even_s: with the paper's loads, until the load-balanced shares are all there, and the even ones.
        recovery: until the sum is recoverable where p2's loads are drawn at random.
        unrecoverable: the exact probability that it never is.
        recommended, recommended_s: the quickest allocation that assigns every batch to one worker.
        bounds_s: Theorem 2's.
        lower_bound_s: below every allocation.
    """

    wanted: int
    p2_s: float
    balanced_s: float
    recovery: RecoveryTime
    unrecoverable: float
    even_s: float
    recommended: str
    recommended_s: float
    bounds_s: tuple[float, float]
    lower_bound_s: float

    @property
    def saved(self) -> float:
        """The part of the time that P2's loads save; 29.28 % in the paper."""
        return 1 - self.p2_s / self.balanced_s


def mixed(batches: int, workers: MixedWorkers, draws: int, seed: int) -> MixedFound:
    """Fig. 5: allocations of batches to workers of different speeds.

    Args:
        batches: of the sum.
        workers: the paper's cluster or another.
        draws: of random batches.
        seed: of the random generator.
    """
    wanted = int(batches * np.log(batches))
    p2_W = ALLOT["p2"](workers, batches, wanted)
    name, _, seconds = recommend(workers, batches)
    return MixedFound(
        wanted,
        results_s(workers, p2_W, wanted),
        results_s(workers, ALLOT["load-balanced"](workers, batches, batches), batches),
        random_recovery_time(workers, batches, p2_W, draws, np.random.default_rng([seed, 5])),
        unrecoverable_probability(batches, p2_W),
        results_s(workers, ALLOT["even"](workers, batches, batches), batches),
        name,
        seconds,
        theorem_2(workers, batches),
        lower_bound_s(workers, batches),
    )


PAPERS_CLUSTER = MixedWorkers(np.full(100, 20.0), np.array([1.0] * 95 + [20.0] * 5))


@dataclass(frozen=True)
class Adapted:
    """The load that the first iterations ask for, and seconds per iteration in the later ones (recorded steps: mean 1).

    Attributes:
        stragglers, work: what is slow, and how time grows with the load.
        chosen, chosen_s: the load that a replay chooses, with groups dealt by the speeds seen so far.
        random_s: with that load and random groups.
        best, best_s: the best load and speeds in hindsight.
        uncoded_s: with one batch each.
    """

    stragglers: str
    work: str
    chosen: int
    chosen_s: float
    random_s: float
    best: int
    best_s: float
    uncoded_s: float


def adapted(workers: int, iterations: int, seed: int, folder: Path | None, stalled: bool) -> list[Adapted]:
    """Chooses the redundancy for recorded stragglers, as they are and dealt anew.

    Args:
        workers, iterations: how many.
        seed: of the random generator.
        folder: of recorded data.
        stalled: whether one worker in ten takes ten times as long on top.
    """
    found = []
    loads = [load for load in (1, 2, 5, 10) if load <= workers]
    for stragglers in ("persistent", "independent"):
        rng = np.random.default_rng([seed, workers, 7])
        steps_IW = recorded_steps(iterations, workers, rng, folder)
        if stalled:
            steps_IW[:, rng.permutation(workers)[: max(1, workers // 10)]] *= 10
        if stragglers == "independent":
            steps_IW = rng.permuted(steps_IW.ravel()).reshape(steps_IW.shape)
        early_IW, late_IW = np.split(steps_IW, [max(1, iterations // 4)])
        for work, work_s in (("grows with the load", None), ("a tenth of the step a batch", 0.1), ("is all delay", 0.0)):

            def seconds(
                codes: Sequence[GradientCode], load: int, late_IW: FloatArray = late_IW, work_s: float | None = work_s
            ) -> float:
                later_IW = scaled(late_IW, 1, load, work_s)
                return float(np.mean([replay(code, later_IW)[0].mean() for code in codes]))

            chosen = choose_load(early_IW, 1, loads, workers, work_s=work_s)
            hindsight_W = late_IW.mean(axis=0)
            best = {load: seconds([code_by_speed(hindsight_W, workers, load)], load) for load in loads}
            found.append(
                Adapted(
                    f"{stragglers}{', one in ten stalled' if stalled else ''}",
                    work,
                    chosen.load,
                    seconds([chosen.code], chosen.load),
                    seconds([make_code("balanced", workers, workers, chosen.load, rng) for _ in range(DRAWS)], chosen.load),
                    min(best, key=lambda load: best[load]),
                    min(best.values()),
                    best[1],
                )
            )
    return found
