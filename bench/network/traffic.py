"""The matrices that are sent: skewed, even, balanced, and one that hurts posting everything at once."""

from collections.abc import Callable

import numpy as np

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.port_bounds import fluid_bound
from aurora.algorithms.network.switch import timed
from aurora.types import Network

Maker = Callable[[int, np.random.Generator], np.ndarray]
WORST_OF = 200


def zipf(n: int, rng: np.random.Generator) -> np.ndarray:
    """Some destinations are popular with everybody."""
    return np.tile(rng.permutation(1 / (1.0 + np.arange(n))), (n, 1))


def zipfperm(n: int, rng: np.random.Generator) -> np.ndarray:
    """Every source has its own popular destinations."""
    return np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)])


def randint(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 100, (n, n)).astype(float)


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.ones((n, n))


def balperm(n: int, rng: np.random.Generator) -> np.ndarray:
    """Every row and column carries as much, in unequal parts."""
    weights, order = rng.permutation(np.arange(1.0, n)), rng.permutation(n)
    matrix = np.zeros((n, n))
    for step, weight in enumerate(weights, start=1):
        matrix[order, order[(np.arange(n) + step) % n]] = weight
    return matrix


def worstpar(n: int, rng: np.random.Generator) -> np.ndarray:
    """Of WORST_OF sparse matrices the one on which fair shares waste most."""
    ones = Network.equal(n)

    def waste(matrix: np.ndarray) -> float:
        sizes = (matrix * 1000).astype(np.int64)
        at_once = ORDER["all-at-once"](sizes, ones, rng=rng)
        return timed(at_once, sizes, ones).makespan_s / max(fluid_bound(sizes, ones), 1e-9)

    drawn = [rng.integers(1, 100, (n, n)) * (rng.random((n, n)) < 0.5) * (1 - np.eye(n)) for _ in range(WORST_OF)]
    return max(drawn, key=waste)


MATRICES: dict[str, Maker] = {
    "zipf": zipf,
    "zipfperm": zipfperm,
    "randint": randint,
    "uniform": uniform,
    "balperm": balperm,
    "worstpar": worstpar,
}


def traffic(name: str, rates_Bps: np.ndarray, seconds: float, seed: int = 0) -> np.ndarray:
    """(n, n) int64 bytes whose fluid bound at these rates is `seconds`."""
    n = len(rates_Bps)
    shape = MATRICES[name](n, np.random.default_rng(seed)).astype(float)
    np.fill_diagonal(shape, 0.0)
    busiest = max((shape.sum(axis=1) / rates_Bps).max(), (shape.sum(axis=0) / rates_Bps).max())
    return np.round(shape * (seconds / busiest)).astype(np.int64)
