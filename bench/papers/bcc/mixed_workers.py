"""Workers of different speeds: how many batches each should take. Source: BCC §IV (arXiv:1710.09990).

Worker i answers for r_i batches after a_i r_i + Exp(mean r_i / mu_i) seconds, and its results count from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from aurora.types.arrays import FloatArray, IntArray
from bench.papers.bcc.recoverable_batches import add_drawn_batches
from bench.papers.bcc.waiting import harmonic

POINTS = 1000  # of a time's distribution
TAIL = 1e-12  # probability that is left out at its ends


@dataclass(frozen=True)
class MixedWorkers:
    """Workers' speeds: worker w answers for r batches after r * shift + an exponential time of mean r / rate seconds."""

    shift_W: FloatArray  # (W,) seconds per batch, a_i >= 0
    rate_W: FloatArray  # (W,) mu_i > 0, one over the mean of further seconds per batch

    def __len__(self) -> int:
        return len(self.shift_W)

    def draw(self, load_W: IntArray, draws: int, rng: np.random.Generator) -> FloatArray:
        """Draws (draws, W) seconds until each worker answers for load_W (W,) batches; infinite for workers without any."""
        seconds = self.shift_W * load_W + rng.exponential(size=(draws, len(self))) * load_W / self.rate_W
        return np.where(load_W > 0, seconds, np.inf)

    def finished(self, load_W: IntArray | FloatArray, at_s: FloatArray) -> FloatArray:
        """Returns (X, W), the probability that each worker has answered for its load, (W,) or (X, W), by at_s (X,) seconds."""
        spare = np.maximum(at_s[:, None] - self.shift_W * load_W, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(load_W > 0, -np.expm1(-spare * self.rate_W / load_W), 0.0)


def seconds_a_batch(workers: MixedWorkers) -> FloatArray:
    """Returns (W,) x, seconds per batch: for any time t, a worker's best load is t / x batches.

    The best load is the one from which most results are expected by t. x is the positive root of
    exp(mu x) = exp(a mu) (mu x + 1).

    Source: Reisizadeh, Prakash, Pedarsani, Avestimehr, arXiv:1701.05973 (the paper's [16]).
    """
    shift = workers.shift_W * workers.rate_W
    root = shift + np.sqrt(2 * shift)  # not below the root, from where Newton's steps fall to it
    for _ in range(60):
        step = np.where(root > 0, (root - np.log1p(root) - shift) * (1 + root) / np.maximum(root, 1e-300), 0.0)
        root = np.maximum(root - step, 0.0)
        if (step <= 1e-15 * root).all():
            break
    return np.asarray(root / workers.rate_W)


def loads_by(workers: MixedWorkers, most: int, at_s: FloatArray) -> FloatArray:
    """Returns (X, W), the loads up to `most` batches from which the most results are expected by at_s (X,) seconds.

    Loads are not rounded.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        load_XW = np.minimum(at_s[:, None] / seconds_a_batch(workers), float(most))
    return np.where(at_s[:, None] > 0, load_XW, 0.0)


def expected_by(workers: MixedWorkers, most: int, at_s: FloatArray) -> FloatArray:
    """Returns (X,), the results expected by at_s (X,) seconds with the loads of `loads_by`: the most for any allocation."""
    load_XW = loads_by(workers, most, at_s)
    return np.asarray((workers.finished(load_XW, at_s) * load_XW).sum(axis=1))


def fluid_s(workers: MixedWorkers, batches: int, results: float) -> float:
    """Returns the seconds until `results` results are expected, with the loads of `loads_by` up to `batches` batches."""

    def short(at_s: float) -> float:
        return float(expected_by(workers, batches, np.array([at_s]))[0]) - results * (1 - 1e-12)

    high = 1.0
    while short(high) < 0:
        high *= 2
    return float(brentq(short, 0.0, high, xtol=1e-12, rtol=1e-12))


Allot = Callable[[MixedWorkers, int, int], IntArray]  # workers, batches, results wanted


def _p2(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    load_W = loads_by(workers, batches, np.array([fluid_s(workers, batches, results)]))[0]
    return np.asarray(np.maximum(np.rint(load_W), 1), dtype=np.int64)


def _shared_out(weight_W: FloatArray, batches: int) -> IntArray:
    """Whole batches in proportion: ends of the cumulated shares, rounded, so that none is off by more than one."""
    ends_W = np.rint(np.cumsum(weight_W) / weight_W.sum() * batches).astype(np.int64)
    return np.asarray(np.diff(ends_W, prepend=0))


def _load_balanced(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    return _shared_out(workers.rate_W, batches)


def _even(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    return _shared_out(np.ones(len(workers)), batches)


def _by_pace(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    pace_W = seconds_a_batch(workers)
    if (pace_W <= 0).any():
        return _even(workers, batches, results)
    return _shared_out(1 / pace_W, batches)


# "p2" repeats batches, as many as it takes to expect the results; the others assign every batch to one worker.
ALLOT: dict[str, Allot] = {"p2": _p2, "load-balanced": _load_balanced, "even": _even, "by-pace": _by_pace}


def results_s(workers: MixedWorkers, load_W: IntArray, results: int) -> float:
    """Returns the expected seconds until workers have answered for `results` batches in all; repeated batches count again.

    load_W is (W,) batches of each worker, with at least `results` in all. The only error is that of numerical integration.
    """
    low, high = 0.0, float((workers.shift_W * load_W + load_W / workers.rate_W).max()) + 1e-300
    while _late(workers, load_W, results, np.array([high]))[0] > TAIL:
        high *= 2
    for _ in range(40):  # to where there is something to integrate
        middle = (low + high) / 2
        if _late(workers, load_W, results, np.array([middle]))[0] > 1 - TAIL:
            low = middle
        elif _late(workers, load_W, results, np.array([(middle + high) / 2]))[0] < TAIL:
            high = (middle + high) / 2
        else:
            break
    at_s = np.linspace(low, high, POINTS)
    return low + float(np.trapezoid(_late(workers, load_W, results, at_s), at_s))


def _late(workers: MixedWorkers, load_W: IntArray, results: int, at_s: FloatArray) -> FloatArray:
    """The probability that fewer than `results` have come by each time."""
    finished_XW = workers.finished(load_W, at_s)
    if load_W.sum() == results:
        return np.asarray(1 - finished_XW[:, load_W > 0].prod(axis=1))
    sums_R, short_XR = np.zeros(1, dtype=np.int64), np.ones((len(at_s), 1))  # results that can have come, and how probably
    for worker in np.flatnonzero(load_W):
        done = finished_XW[:, worker, None]
        more_R = sums_R + load_W[worker]
        more_R, done_XR = more_R[more_R < results], (short_XR * done)[:, sums_R + load_W[worker] < results]
        both_R = np.union1d(sums_R, more_R)
        after_XR = np.zeros((len(at_s), len(both_R)))
        after_XR[:, np.searchsorted(both_R, sums_R)] = short_XR * (1 - done)
        after_XR[:, np.searchsorted(both_R, more_R)] += done_XR
        sums_R, short_XR = both_R, after_XR
    return np.asarray(short_XR.sum(axis=1))


def theorem_2(workers: MixedWorkers, batches: int) -> tuple[float, float]:
    """Returns the paper's (lower, upper) bounds on the expected seconds until the sum is recoverable (coverage time).

    Both use the p2 loads, which are optimal for many workers.

    Source: BCC Thm 2.
    """
    shift, rate = float(workers.shift_W.max()), float(workers.rate_W.min())
    log = float(np.log(batches))
    results = int((2 + np.log(shift + harmonic(len(workers)) / rate) / log) * batches * log)
    lower, upper = (results_s(workers, _enough(workers, batches, s), s) for s in (batches, results))
    return lower, upper + 1


def lower_bound_s(workers: MixedWorkers, batches: int) -> float:
    """Returns a lower bound on the expected seconds until the sum is recoverable, for any allocation and number of workers.

    At most expected_by(t) results are expected by time t. So, by Markov's inequality, the sum is recoverable by t with
    probability expected_by(t) / batches at most.
    """
    end = fluid_s(workers, batches, batches)
    at_s = np.linspace(0.0, end, POINTS + 1)[1:]
    late = np.maximum(0.0, 1 - expected_by(workers, batches, at_s) / batches)
    return float(late.mean() * end)  # right ends: below the integral


def _enough(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    """The p2 loads, one batch more for the first workers where rounding lost some."""
    load_W = np.array(_p2(workers, batches, results))
    while (short := results - int(load_W.sum())) > 0:
        load_W[np.flatnonzero(load_W < batches)[:short]] += 1
    return load_W


@dataclass(frozen=True)
class RecoveryTime:
    """Expected seconds until the sum is recoverable, from random draws."""

    mean_s: float  # over the draws where it is recoverable
    error_s: float  # standard error of the mean
    impossible: float  # share of the draws where it is not recoverable


def random_recovery_time(
    workers: MixedWorkers, batches: int, load_W: IntArray, draws: int, rng: np.random.Generator
) -> RecoveryTime:
    """Simulates `draws` times how long the sum takes to be recoverable, if workers choose load_W batches at random."""
    seconds_XW = workers.draw(load_W, draws, rng)
    times = np.full(draws, np.inf)
    for draw in range(draws):
        first_B = np.full(batches, np.inf)
        for worker in np.argsort(seconds_XW[draw])[::-1]:
            if load_W[worker]:
                first_B[rng.permutation(batches)[: load_W[worker]]] = seconds_XW[draw, worker]
        times[draw] = first_B.max()
    fine = times[np.isfinite(times)]
    error = float(fine.std(ddof=1) / np.sqrt(len(fine))) if len(fine) > 1 else np.inf
    return RecoveryTime(float(fine.mean()) if len(fine) else np.inf, error, float(1 - len(fine) / draws))


def unrecoverable_probability(batches: int, load_W: IntArray) -> float:
    """Returns the exact probability that some batch is on no worker, if workers choose load_W (W,) batches at random."""
    met_B = np.zeros(batches + 1)
    met_B[0] = 1.0
    for load in load_W.tolist():
        met_B = add_drawn_batches(met_B, load)
    return max(0.0, 1 - float(met_B[-1]))


def recommend(workers: MixedWorkers, batches: int) -> tuple[str, IntArray, float]:
    """Returns (name, loads (W,), expected seconds) of the quickest allocation in ALLOT that repeats no batch.

    Ties go to the even split.
    """
    found = []
    for name in ("even", "by-pace", "load-balanced"):
        load_W = ALLOT[name](workers, batches, batches)
        found.append((results_s(workers, load_W, batches), name, load_W))
    seconds, name, load_W = min(found, key=lambda one: one[0])
    return name, load_W, seconds
