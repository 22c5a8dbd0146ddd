"""Recoverability of the sum over all batches by the number of workers that have answered: by sequence, and by probability."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import numpy as np
from scipy.stats import hypergeom

from aurora.algorithms.replicas.survival_probability import BoolArray, all_held, minimal_holders, recoverable_odds
from aurora.errors import BadInput
from aurora.types.arrays import FloatArray

MOST_BRANCHES = 1 << 17  # of an exact count


def messages_needed(holds_WB: BoolArray, finished: Sequence[int]) -> int | None:
    """Returns how many of the workers in `finished`, from its start, hold every batch together; None if all do not.

    holds_WB is (W, B) bool, whether a worker holds a batch.
    """
    enough_K = all_held(holds_WB[np.asarray(finished, dtype=np.int64)], np.tri(len(finished), dtype=np.bool_))
    return int(enough_K.argmax()) + 1 if enough_K.any() else None


def recoverable_sets(holds_WB: BoolArray) -> list[int]:
    """Returns W + 1 exact counts: how many sets of k workers together hold every batch, k = 0..W; holds_WB is (W, B) bool."""
    workers = len(holds_WB)
    if not holds_WB.any(axis=0).all():
        return [0] * (workers + 1)
    by_failures = recoverable_odds(minimal_holders(holds_WB.T), [1] * workers, workers, MOST_BRANCHES)
    if not by_failures:
        raise BadInput(f"recoverability: expected sets of workers that are counted in {MOST_BRANCHES} branches, found more")
    return [int(sets) for sets in reversed(by_failures + [0] * (workers + 1 - len(by_failures)))]


def recoverable_share_K(holds_WB: BoolArray) -> FloatArray:
    """Returns (W + 1,) float64, the probability that k random workers together hold every batch, k = 0..W."""
    workers = len(holds_WB)
    return np.array([sets / comb(workers, k) for k, sets in enumerate(recoverable_sets(holds_WB))])


def add_drawn_batches(met_B: FloatArray, load: int) -> FloatArray:
    """Returns the distribution of the number of held batches after one more worker chose `load` batches at random.

    met_B and the result are (B + 1,): entry n is the probability that n batches are held.
    """
    batches = len(met_B) - 1
    after_B = np.zeros_like(met_B)
    for new, share_B in enumerate(_new_share(batches, load)):
        after_B[new:] += (met_B * share_B)[: batches + 1 - new]
    return after_B


@lru_cache(maxsize=64)
def _new_share(batches: int, load: int) -> FloatArray:
    """(load + 1, B + 1): the probability that so many of the drawn batches are new where so many are held."""
    return np.asarray(
        hypergeom.pmf(np.arange(load + 1)[:, None], batches, batches - np.arange(batches + 1), load), dtype=np.float64
    )
