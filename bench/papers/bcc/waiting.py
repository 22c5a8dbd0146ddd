"""Messages that are waited for: the paper's formulas, and exact distributions beside."""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import numpy as np
from scipy.special import digamma

from aurora.algorithms.gradient_codes import drawn_share_K, group_count
from aurora.types.arrays import FloatArray
from bench.papers.bcc.recoverable_batches import add_drawn_batches, recoverable_share_K


@dataclass(frozen=True)
class _WaitingTime:
    """Distribution of the number of messages that make the sum recoverable, all sequences of workers equally likely."""

    pmf_K: FloatArray  # (W + 1,) the probability that message k is the one; its sum is below one if all may not suffice
    size: int = 1  # of one message, in batches' results

    @property
    def impossible(self) -> float:
        """The probability that the sum is not recoverable from all workers: they miss a batch."""
        return max(0.0, 1.0 - float(self.pmf_K.sum()))

    @property
    def threshold(self) -> float:
        """The recovery threshold K: messages waited for on average, where the sum is recoverable."""
        return float(self.pmf_K @ np.arange(len(self.pmf_K)) / self.pmf_K.sum())

    @property
    def communication(self) -> float:
        """The communication load L: the size of these messages, in batches' results."""
        return self.size * self.threshold


def waiting(scheme: str, workers: int, batches: int, load: int) -> _WaitingTime:
    """Returns the exact distribution of the messages that a scheme in WAITING needs, if workers hold `load` batches each."""
    share_K = WAITING[scheme](workers, batches, load)
    return _WaitingTime(np.diff(share_K, prepend=0.0), load if scheme == "random" else 1)


def _bcc(workers: int, batches: int, load: int) -> FloatArray:
    return drawn_share_K(workers, group_count(batches, load))


def _balanced(workers: int, batches: int, load: int) -> FloatArray:
    groups = group_count(batches, load)
    return recoverable_share_K(np.arange(workers)[:, None] % groups == np.arange(groups))


def _uncoded(workers: int, batches: int, load: int) -> FloatArray:
    shares = min(workers, batches)
    share_K = [comb(workers - shares, k - shares) / comb(workers, k) if k >= shares else 0.0 for k in range(workers + 1)]
    return np.array(share_K)


def _cyclic(workers: int, batches: int, load: int) -> FloatArray:
    needed = workers - min(workers, load * workers // batches) + 1
    return (np.arange(workers + 1) >= needed).astype(np.float64)


def _random(workers: int, batches: int, load: int) -> FloatArray:
    """Every worker draws `load` different batches and sends each by itself: a walk over how many batches have come."""
    share_K, met_B = np.zeros(workers + 1), np.zeros(batches + 1)
    met_B[0] = 1.0
    for k in range(1, workers + 1):
        met_B = add_drawn_batches(met_B, load)
        share_K[k] = met_B[-1]
    return share_K


WAITING: dict[str, Callable[[int, int, int], FloatArray]] = {
    "balanced": _balanced,
    "bcc": _bcc,
    "uncoded": _uncoded,
    "cyclic": _cyclic,
    "random": _random,
}


def harmonic(n: int) -> float:
    """Returns 1 + 1/2 + ... + 1/n."""
    return float(digamma(n + 1) - digamma(1))


def formula(scheme: str, workers: int, batches: int, load: int) -> float | None:
    """Returns the recovery threshold by the paper's formula, for sufficiently many workers; None for schemes of ours.

    Source: BCC Thm 1 and Eq. 5 to 8.
    """
    groups = group_count(batches, load)
    formulas = {
        "bcc": groups * harmonic(groups),
        "uncoded": float(workers),
        "cyclic": float(workers - load * workers // batches + 1),
        "random": batches / load * float(np.log(batches)),
    }
    return formulas.get(scheme)
