"""Delays of workers: fitted to the paper's tables, shifted exponentials, or as recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aurora.types.arrays import FloatArray
from bench.papers.bcc.step_times import load_step_times
from bench.papers.recorded_data import is_recorded, recorded_file

# Rounded from a least squares fit to the logarithms of Tables I and II. The paper gives no delays of single workers.
SHIFT_S, MEAN_S, NETWORK_S, RECEIVE_S = 0.0001, 0.0008, 0.062, 0.0031
JOBS = ("straggler_pai/job_1_norm.csv", "straggler_pai/job_3_norm.csv")


@dataclass(frozen=True)
class Times:
    """When workers compute and answer, in each iteration."""

    compute_IW: FloatArray  # (I, W) float64, seconds of a worker for its batches
    message_IW: FloatArray  # (I, W) float64, seconds until a worker's message reaches the master
    receive_s: float  # seconds that the master then takes for each message, one at a time


Delays = Callable[[int, int, int, np.random.Generator, Path | None], Times]  # iterations, workers, load, rng, recorded data


def _compute(iterations: int, workers: int, load: int, rng: np.random.Generator) -> FloatArray:
    return SHIFT_S * load + rng.exponential(MEAN_S * load, (iterations, workers))


def _fitted(iterations: int, workers: int, load: int, rng: np.random.Generator, folder: Path | None) -> Times:
    compute_IW = _compute(iterations, workers, load, rng)
    return Times(compute_IW, compute_IW + rng.exponential(NETWORK_S, compute_IW.shape), RECEIVE_S)


def _free_receipt(iterations: int, workers: int, load: int, rng: np.random.Generator, folder: Path | None) -> Times:
    times = _fitted(iterations, workers, load, rng, folder)
    return Times(times.compute_IW, times.message_IW, 0.0)


def _recorded(iterations: int, workers: int, load: int, rng: np.random.Generator, folder: Path | None) -> Times:
    """Each worker goes on as one of the recorded did, from a random moment on; the mean delay is the fitted one's."""
    delay_IW = recorded_steps(iterations, workers, rng, folder)
    compute_IW = _compute(iterations, workers, load, rng)
    return Times(compute_IW, compute_IW + delay_IW / delay_IW.mean() * NETWORK_S, RECEIVE_S)


def _shuffled(iterations: int, workers: int, load: int, rng: np.random.Generator, folder: Path | None) -> Times:
    """The recorded delays, dealt anew to workers and iterations: the same delays, but no worker stays slow."""
    times = _recorded(iterations, workers, load, rng, folder)
    delay_IW = times.message_IW - times.compute_IW
    return Times(times.compute_IW, times.compute_IW + rng.permuted(delay_IW.ravel()).reshape(delay_IW.shape), RECEIVE_S)


DELAYS: dict[str, Delays] = {
    "as in the tables": _fitted,
    "free receipt": _free_receipt,
    "recorded": _recorded,
    "recorded, shuffled": _shuffled,
}


def recorded_steps(iterations: int, workers: int, rng: np.random.Generator, folder: Path | None) -> FloatArray:
    """Returns (I, W) times of training steps from the recordings in `folder`, scaled so that each job's mean is 1.

    Each worker follows one recorded series from a random step on.
    """
    series = []
    for job in JOBS:
        by_worker = load_step_times(recorded_file(folder, job))
        mean = np.concatenate(list(by_worker.values())).mean()
        series += [seconds_I / mean for seconds_I in by_worker.values()]
    steps_IW = np.empty((iterations, workers))
    chosen = rng.permutation(np.arange(workers) % len(series))
    for worker, number in enumerate(chosen.tolist()):
        own = series[number]
        steps_IW[:, worker] = own[(rng.integers(len(own)) + np.arange(iterations)) % len(own)]
    return steps_IW


def recorded_exists(folder: Path | None) -> bool:
    """Returns whether `folder` has the files that `recorded_steps` reads."""
    return is_recorded(folder, *JOBS)
