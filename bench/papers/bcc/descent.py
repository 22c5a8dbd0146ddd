"""Training job of the paper: logistic regression by Nesterov's accelerated gradient, on its data model (§III.C)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.types.arrays import FloatArray

STEP = 0.2


@dataclass(frozen=True)
class Descent:
    """The data of the training job. Called with a batch and model_F as "model", returns its sum of gradients (F,) there."""

    features: int  # F, of a point
    points: int  # P, of each batch
    seed: int  # of the data

    def __call__(self, batch: int, arguments: Mapping[str, NDArray[Any]]) -> FloatArray:
        return gradient(*batch_of(self, batch), arguments["model"])


@lru_cache(maxsize=128)
def batch_of(descent: Descent, batch: int) -> tuple[FloatArray, FloatArray]:
    """Returns a batch's points (P, F) and labels (P,), the same at every call.

    Half of the points lie around each of two means. As the paper prints it, a label is 1 with probability
    1 / (exp(x w*) + 1) for true weights w*, else -1.
    """
    truth_F = np.random.default_rng([descent.seed, 0]).choice([-1.0, 1.0], descent.features)
    rng = np.random.default_rng([descent.seed, 1, batch])
    side_P = rng.choice([-1.0, 1.0], descent.points)
    x_PF = rng.standard_normal((descent.points, descent.features)) + side_P[:, None] * 1.5 / descent.features * truth_F
    with np.errstate(over="ignore"):
        y_P = np.where(rng.random(descent.points) < 1 / (np.exp(x_PF @ truth_F) + 1), 1.0, -1.0)
    return x_PF, y_P


def gradient(x_PF: FloatArray, y_P: FloatArray, model_F: FloatArray) -> FloatArray:
    """Returns (F,), the gradient of log(1 + exp(-y x w)) with respect to w = model_F, summed over points."""
    margin_P = y_P * (x_PF @ model_F)
    return np.asarray(-(y_P * np.exp(-np.logaddexp(0.0, margin_P))) @ x_PF)


def loss(descent: Descent, batches: int, model_F: FloatArray) -> float:
    """Returns the mean of log(1 + exp(-y x w)) over all points of `batches` batches, w being model_F."""
    losses = [np.logaddexp(0.0, -y_P * (x_PF @ model_F)).mean() for x_PF, y_P in (batch_of(descent, b) for b in range(batches))]
    return float(np.mean(losses))


@dataclass(frozen=True)
class _Momentum:
    """State of Nesterov's method."""

    model_F: FloatArray  # (F,) the model
    ahead_F: FloatArray  # (F,) where the next gradient is taken: one step beyond the model in the direction that it moved
    number: int = 0  # of steps so far

    def after(self, total_F: FloatArray, points: int) -> "_Momentum":
        """Returns the state after a step."""
        model_F = self.ahead_F - STEP * total_F / points
        ahead_F = model_F + self.number / (self.number + 3) * (model_F - self.model_F)
        return _Momentum(model_F, ahead_F, self.number + 1)


def start(features: int) -> _Momentum:
    """Returns the state of Nesterov's method before the first step, with all weights zero."""
    return _Momentum(np.zeros(features), np.zeros(features))
