"""Messages that are waited for, and their size: the paper's formulas, and exact distributions beside."""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import numpy as np
from scipy.special import digamma

from aurora.errors import BadInput
from aurora.planner.gradient_codes import check_sizes, drawn_share_K, group_count
from aurora.reproduce.bcc.recoverable_batches import add_drawn_batches, recoverable_share_K
from aurora.types.arrays import FloatArray


@dataclass(frozen=True)
class WaitingTime:
    """Distribution of the number of messages that make the sum recoverable, all sequences of workers equally likely.

    Args:
        scheme: its name.
        pmf_K: (W + 1,) the probability that message k is the one. The sum is less than one where all messages may not suffice.
        size: of one message, in batches' results.
    """

    scheme: str
    pmf_K: FloatArray
    size: int = 1

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

    def quantile(self, share: float) -> int:
        """Returns the fewest messages that suffice with a probability.

        Args:
            share: the probability.

        Raises:
            BadInput: if all messages do not suffice with it.
        """
        reached = np.flatnonzero(np.cumsum(self.pmf_K) >= share - 1e-12)
        if not len(reached):
            raise BadInput(
                f"scheme {self.scheme}: the sum is recoverable with probability {1 - self.impossible:.6g}, expected {share:g}"
            )
        return int(reached[0])


def waiting(scheme: str, workers: int, batches: int, load: int) -> WaitingTime:
    """Returns the exact distribution of a scheme.

    Args:
        scheme: a name in WAITING.
        workers, batches: how many.
        load: batches of a worker.

    Raises:
        BadInput: if the sizes do not fit the scheme.
        InfeasiblePlan: if the workers cannot hold all batches.
    """
    if scheme == "random":
        if workers < 1 or not 1 <= load <= batches:
            raise BadInput(f"scheme random: expected workers and a load of 1 to {batches} batches, found {workers} and {load}")
    else:
        check_sizes(scheme, workers, batches, load)
    share_K = WAITING[scheme](workers, batches, load)
    return WaitingTime(scheme, np.diff(share_K, prepend=0.0), load if scheme == "random" else 1)


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


def formula(scheme: str, workers: int, batches: int, load: int) -> tuple[float, float]:
    """Returns (K, L) as the paper gives them, for sufficiently many workers.

    Args:
        scheme: "bcc", "uncoded", "cyclic", "random", or "bound", which no scheme goes below. The paper's cyclic repetition has
            as many batches as workers; other numbers are divided into a share for each worker.
        workers, batches: how many.
        load: batches of a worker.

    Raises:
        BadInput: if the scheme is unknown; "balanced" has no formula.

    Source: BCC Thm 1 and Eq. 5 to 8.
    """
    groups = group_count(batches, load)
    formulas: dict[str, tuple[float, float]] = {
        "bcc": (groups * harmonic(groups),) * 2,
        "uncoded": (float(workers),) * 2,
        "cyclic": (float(workers - load * workers // batches + 1),) * 2,
        "random": (batches / load * float(np.log(batches)), batches * float(np.log(batches))),
        "bound": (batches / load,) * 2,
    }
    if scheme not in formulas:
        raise BadInput(f"threshold: expected one of {', '.join(formulas)}, found {scheme!r}")
    return formulas[scheme]
