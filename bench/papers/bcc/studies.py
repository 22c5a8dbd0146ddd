"""Studies: thresholds, the tables' schemes by a simulated clock and by real processes, mixed clusters, recorded stragglers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aurora.algorithms.gradient_codes import GradientCode, make_code
from aurora.errors import BadInput, InfeasiblePlan
from aurora.training.coded_aggregation import NOT_NEEDED, USED, CodedAggregator
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.options import MOST_SEED, at_most, check_options, option
from bench.papers.bcc.delays import DELAYS, Times, recorded_steps
from bench.papers.bcc.descent import Descent, batch_of, gradient, loss, start
from bench.papers.bcc.mixed_workers import (
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
from bench.papers.bcc.redundancy import choose_load, code_by_speed, replay, scaled
from bench.papers.bcc.waiting import formula, waiting

SCHEMES = ("uncoded", "cyclic", "bcc", "balanced")  # the paper's three, and ours
DRAWS = 10  # placements of the simulated clock


@dataclass(frozen=True)
class BccOptions:
    """Options of the evaluation.

    Args:
        workers: numbers of workers to try; each time there are as many batches as workers.
        load: batches per worker, in schemes with redundancy.
        iterations: gradient descent iterations in simulated time.
        process_iterations: iterations by real processes; 0: none.
        stretch: factor on the processes' delays, so that the processes' own overhead on one machine is small beside them.
        points: examples per batch of the process runs.
        features: features of an example.
        draws: random placements on the mixed cluster.
        seed: for all draws.
    """

    workers: tuple[int, ...] = (50, 100)
    load: int = option(10, above=0, most=1000)
    iterations: int = option(100, above=0, most=10_000)
    process_iterations: int = option(6, least=0, most=10_000)
    stretch: float = option(3.0, above=0, most=1000)
    points: int = option(10, above=0, most=10_000)
    features: int = option(8000, above=0, most=1_000_000)
    draws: int = option(400, above=0, most=100_000)
    seed: int = option(0, least=0, most=MOST_SEED)

    def __post_init__(self) -> None:
        check_options(self)
        for workers in self.workers:
            at_most("workers", workers, 1024)
            if workers < self.load:
                raise BadInput(f"`workers`: expected at least `load` {self.load} workers, found {workers}")


@dataclass(frozen=True)
class Threshold:
    """Recovery threshold and communication load of one scheme at one load."""

    scheme: str  # its name
    load: int  # batches of a worker
    formula: float | None  # recovery threshold by the paper's formula; None without one
    exact: float  # exact mean of the recovery threshold
    communication: float  # load of communication, in batches' results
    impossible: float  # the probability that the sum is not recoverable


def thresholds(batches: int, loads: Sequence[int]) -> list[Threshold]:
    """Computes Fig. 2: recovery thresholds of each scheme at each load, with as many workers as batches."""
    found = []
    for scheme in ("bcc", "balanced", "cyclic", "random"):
        for load in loads:
            exact = waiting(scheme, batches, batches, load)
            printed = formula(scheme, batches, batches, load)
            found.append(Threshold(scheme, load, printed, exact.threshold, exact.communication, exact.impossible))
    return found


@dataclass(frozen=True)
class Timing:
    """Measured or simulated times of one scheme's iterations."""

    scheme: str  # a name in SCHEMES
    iterations: int  # how many
    waited: float  # messages that the master waited for, the mean over iterations
    seconds: float  # of all iterations
    compute_s: float  # the longest computation among the workers waited for, summed over iterations
    error: float | None = None  # of a gradient from the serial one, at most, over its largest entry; None: none computed
    losses: tuple[float, float] | None = None  # of the model before and after; None where none was computed


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
    """Returns one Timing per scheme by a simulated clock, the mean over DRAWS placements of the batches.

    `delays` is a name in DELAYS, `load` the batches of a worker, `folder` the recorded data or None.
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


def _longest(times: Times, waited_I: IntArray) -> FloatArray:
    order_IW = np.argsort(times.message_IW, axis=1, kind="stable")
    sorted_IW = np.take_along_axis(times.compute_IW, order_IW, axis=1)
    return np.array([row[:k].max() for row, k in zip(sorted_IW, waited_I.tolist(), strict=True)])


@dataclass(frozen=True)
class Injected:
    """Delays that real workers wait for. Called with (worker, round from 1), returns the seconds."""

    delay_IW: FloatArray  # (I, W) seconds by round, from 1, and worker

    def __call__(self, worker: int, number: int) -> float:
        return float(self.delay_IW[number - 1, worker])


def performed(
    names: Sequence[str],
    workers: int,
    options: BccOptions,
    folder: Path | None,
    advance: Callable[[], None],
) -> dict[str, list[Timing]]:
    """Returns, for each name of DELAYS in `names`, one Timing per scheme, measured with real processes.

    The processes do gradient descent and wait for the drawn delays times `options.stretch`, by which measured seconds are then
    divided. Every sum is compared with the serial one. All delays and schemes use the same processes. `advance` is called after
    each scheme.
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
    with CodedAggregator(descent, [code for _, code, _ in drawn], delay_s=injected, watch=receiving) as started:
        for number, (name, code, times) in enumerate(drawn):
            receiving.receive_s = times.receive_s * options.stretch
            state, seconds, waits, compute_s, error = start(features), 0.0, [], 0.0, 0.0
            started.aggregate(
                state.ahead_F, {"model": state.ahead_F}, number
            )  # data are made and processes settle before the clock runs
            for iteration in range(1, iterations + 1):
                collected = started.aggregate(state.ahead_F, {"model": state.ahead_F}, number)
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

    def __call__(self, states: Sequence[str]) -> None:
        received = sum(state in (USED, NOT_NEEDED) for state in states)
        time.sleep(self.receive_s * max(0, received - self.received))
        self.received = received


@dataclass(frozen=True)
class MixedFound:
    """The numbers of Fig. 5; all times are expected seconds."""

    wanted: int  # floor(m log m), the results to which p2_s counts
    p2_s: float  # with the paper's loads
    balanced_s: float  # until the load-balanced shares are all there
    recovery: RecoveryTime  # until the sum is recoverable where p2's loads are drawn at random
    unrecoverable: float  # the exact probability that it never is
    even_s: float  # until the even shares are all there
    recommended: str  # the quickest allocation that assigns every batch to one worker
    recommended_s: float
    bounds_s: tuple[float, float]  # Theorem 2's
    lower_bound_s: float  # below every allocation

    @property
    def saved(self) -> float:
        """Share of the load-balanced allocation's time that P2's loads save; 29.28 % in the paper."""
        return 1 - self.p2_s / self.balanced_s


def mixed(batches: int, workers: MixedWorkers, draws: int, seed: int) -> MixedFound:
    """Computes Fig. 5: allocations of batches to workers of different speeds."""
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
    """The load chosen from the first iterations, and seconds per iteration of the later ones (recorded steps have mean 1)."""

    stragglers: str  # what is slow
    work: str  # how time grows with the load
    chosen: int  # the load that a replay chooses, with groups dealt by the speeds seen so far
    chosen_s: float
    random_s: float  # with that load and random groups
    best: int  # the best load, with speeds in hindsight
    best_s: float
    uncoded_s: float  # with one batch each


def adapted(workers: int, iterations: int, seed: int, folder: Path | None, stalled: bool) -> list[Adapted]:
    """Chooses the load for recorded stragglers, as they are and dealt anew, for three ways in which time grows with the load.

    With `stalled`, one worker in ten takes ten times as long. `folder` has the recorded data.
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
            later = {load: scaled(late_IW, load, work_s) for load in loads}
            chosen, code = choose_load(early_IW, loads, workers, work_s=work_s)
            random = [make_code("balanced", workers, workers, chosen, rng) for _ in range(DRAWS)]
            hindsight_W = late_IW.mean(axis=0)
            best = {load: _seconds([code_by_speed(hindsight_W, workers, load)], later[load]) for load in loads}
            found.append(
                Adapted(
                    f"{stragglers}{', one in ten stalled' if stalled else ''}",
                    work,
                    chosen,
                    _seconds([code], later[chosen]),
                    _seconds(random, later[chosen]),
                    min(best, key=lambda load: best[load]),
                    min(best.values()),
                    best[1],
                )
            )
    return found


def _seconds(codes: Sequence[GradientCode], seconds_IW: FloatArray) -> float:
    """Seconds per iteration, the mean over codes."""
    return float(np.mean([replay(code, seconds_IW)[0].mean() for code in codes]))
