"""BCC's headlines (arXiv:1710.09990), the paper's and ours: `python -m bench.papers.bcc -o DIR`.

As many batches as workers; a worker holds one (uncoded) or LOAD of them. The paper gives no delays of single workers: four
constants are fitted to the twelve seconds of Tables I and II, so that their totals are no finding; what each scheme waits for
is, and what follows for the time. `balanced` is ours: BCC's groups, each given to equally many workers. In Fig. 5 the paper
counts results, of which random ones repeat.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma

from aurora.algorithms.gradient_codes import GradientCode, group_count, make_code
from aurora.errors import InfeasiblePlan
from aurora.types.arrays import FloatArray, IntArray
from bench.papers.headlines import Headline, write

SHIFT_S, MEAN_S, NETWORK_S, RECEIVE_S = 0.0001, 0.0008, 0.062, 0.0031  # least squares on the logarithms of Tables I and II
LOAD, ITERATIONS, DRAWS = 10, 100, 10
SCHEMES = ("uncoded", "cyclic", "bcc", "balanced")
PAPER = {  # workers: by scheme messages waited for and seconds (Tables I and II); time less than uncoded, than cyclic (§III.C)
    50: ({"uncoded": (50, 28.786), "cyclic": (41, 13.990), "bcc": (11, 4.205)}, ("85.4 %", "69.9 %")),
    100: ({"uncoded": (100, 33.020), "cyclic": (91, 29.482), "bcc": (25, 8.931)}, ("73.0 %", "69.7 %")),
}
POINTS, TAIL = 1000, 1e-12  # of a distribution of times; probability that is left out at its ends


def drawn_code(scheme: str, workers: int, rng: np.random.Generator) -> GradientCode | None:
    """Returns a code from which the sum is recoverable; BCC draws again where it missed a batch. None: of cyclic repetition."""
    while scheme != "cyclic":
        try:
            if scheme == "uncoded":  # one batch a worker
                return make_code("balanced", workers, workers, 1, rng)
            return make_code(scheme, workers, workers, LOAD, rng)
        except InfeasiblePlan:
            continue
    return None


def messages_needed(code: GradientCode | None, order: IntArray) -> int:
    """Returns how many of the workers in `order`, from its start, the sum is recoverable from; see `drawn_code`."""
    if code is None:  # any so many, by Tandon et al. (arXiv:1612.03301)
        return len(order) - LOAD + 1
    return int(np.logical_or.accumulate(code.holds_WB[order]).all(axis=1).argmax()) + 1


def clock(scheme: str, workers: int) -> tuple[list[float], list[float]]:
    """Returns the messages waited for on average, and the seconds of ITERATIONS iterations, by draw of the batches."""
    rng, waits, seconds = np.random.default_rng([0, workers]), [], []
    load = 1 if scheme == "uncoded" else LOAD
    for _ in range(DRAWS):
        code = drawn_code(scheme, workers, rng)
        compute_IW = SHIFT_S * load + rng.exponential(MEAN_S * load, (ITERATIONS, workers))
        needed_I, ended_s = [], 0.0
        for message_W in compute_IW + rng.exponential(NETWORK_S, compute_IW.shape):
            order = np.argsort(message_W, kind="stable")
            needed_I.append(messages_needed(code, order))
            received_s = 0.0
            for at_s in message_W[order[: needed_I[-1]]].tolist():
                received_s = max(received_s, at_s) + RECEIVE_S
            ended_s += received_s
        waits.append(float(np.mean(needed_I)))
        seconds.append(ended_s)
    return waits, seconds


def threshold(scheme: str, workers: int) -> float | None:
    """Returns the recovery threshold by the paper's formula (Thm 1, Eq. 5 to 8); None for schemes of ours."""
    groups = group_count(workers, LOAD)
    harmonic = float(digamma(groups + 1) - digamma(1))
    return {"uncoded": float(workers), "cyclic": float(workers - LOAD + 1), "bcc": groups * harmonic}.get(scheme)


@dataclass(frozen=True)
class MixedWorkers:
    """Workers' speeds: worker w answers for r batches after r * shift + an exponential time of mean r / rate seconds."""

    shift_W: FloatArray  # (W,) seconds per batch
    rate_W: FloatArray  # (W,) one over the mean of further seconds per batch

    def finished(self, load_W: IntArray | FloatArray, at_s: FloatArray) -> FloatArray:
        """Returns (X, W), the probability that each worker has answered for its load, (W,) or (X, W), by at_s (X,) seconds."""
        spare = np.maximum(at_s[:, None] - self.shift_W * load_W, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(load_W > 0, -np.expm1(-spare * self.rate_W / load_W), 0.0)


def seconds_a_batch(workers: MixedWorkers) -> FloatArray:
    """Returns (W,) x: for any time t, most results are expected of a worker with t / x batches.

    x is the positive root of exp(mu x) = exp(a mu) (mu x + 1).

    Source: arXiv:1701.05973 (the paper's [16]).
    """
    shift = workers.shift_W * workers.rate_W
    root = shift + np.sqrt(2 * shift)  # not below the root, from where Newton's steps fall to it
    for _ in range(60):
        root = np.maximum(root - (root - np.log1p(root) - shift) * (1 + root) / root, 0.0)
    return np.asarray(root / workers.rate_W)


def p2_loads(workers: MixedWorkers, batches: int, results: int) -> IntArray:
    """Returns (W,) batches of each worker by the paper's problem P2: the soonest time by which `results` are expected."""
    pace_W = seconds_a_batch(workers)

    def short(at_s: float) -> float:
        load_W = np.minimum(at_s / pace_W, float(batches))
        return float((workers.finished(load_W, np.array([at_s]))[0] * load_W).sum()) - results

    high = 1.0
    while short(high) < 0:
        high *= 2
    return np.asarray(np.maximum(np.rint(np.minimum(brentq(short, 0.0, high) / pace_W, batches)), 1), dtype=np.int64)


def results_s(workers: MixedWorkers, load_W: IntArray, results: int) -> float:
    """Returns the expected seconds until workers have answered for `results` batches in all; repeated batches count again."""
    high = float((workers.shift_W * load_W + load_W / workers.rate_W).max())
    while _late(workers, load_W, results, np.array([high]))[0] > TAIL:
        high *= 2
    at_s = np.linspace(0.0, high, POINTS)
    return float(np.trapezoid(_late(workers, load_W, results, at_s), at_s))


def _late(workers: MixedWorkers, load_W: IntArray, results: int, at_s: FloatArray) -> FloatArray:
    """The probability that fewer than `results` have come by each time: a walk over the workers' sums."""
    finished_XW = workers.finished(load_W, at_s)
    sums_XR = np.zeros((len(at_s), results))
    sums_XR[:, 0] = 1.0
    for worker in np.flatnonzero(load_W).tolist():
        done_X1, load = finished_XW[:, [worker]], int(load_W[worker])
        come_XR = sums_XR[:, : max(0, results - load)] * done_X1
        sums_XR = sums_XR * (1 - done_X1)
        sums_XR[:, load:] += come_XR
    return np.asarray(sums_XR.sum(axis=1))


def measured() -> Iterator[Headline]:
    """Yields each headline."""
    for workers, (tables, claims) in PAPER.items():
        found = {scheme: clock(scheme, workers) for scheme in SCHEMES}
        for scheme, (waits, seconds) in found.items():
            formula, paper = threshold(scheme, workers), tables.get(scheme)
            stated = "" if paper is None else f"{paper[0]} (its formula {formula:.3g})"
            yield Headline("Tables I, II", f"{workers} workers, {scheme}: messages waited for", stated, waits)
            yield Headline("Tables I, II", f"{workers} workers, {scheme}: seconds", f"{paper[1]}" if paper else "", seconds)
        for scheme in ("bcc", "balanced"):
            for over, claim in zip(("uncoded", "cyclic"), claims, strict=True):
                less = 100 * (1 - np.mean(found[scheme][1]) / np.mean(found[over][1]))
                what = f"{workers} workers: seconds of {scheme} less than of {over}, %"
                yield Headline("§III.C", what, claim if scheme == "bcc" else "", [float(less)])
    batches, mixed = 500, MixedWorkers(np.full(100, 20.0), np.array([1.0] * 95 + [20.0] * 5))
    wanted = int(batches * np.log(batches))
    shares_W = np.diff(np.rint(np.cumsum(mixed.rate_W) / mixed.rate_W.sum() * batches).astype(np.int64), prepend=0)
    saved = 1 - results_s(mixed, p2_loads(mixed, batches, wanted), wanted) / results_s(mixed, shares_W, batches)
    yield Headline("5", "mixed workers: time less than by load-balanced shares, %", "29.28 %", [100 * saved])


if __name__ == "__main__":
    write("bcc", __doc__, measured)
