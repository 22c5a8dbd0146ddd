"""SCHEMES: gradient codes by name. A code says which batches each worker computes; a worker sends their sum.

The schemes are `balanced` and `bcc` (batched coupon's collector). A new scheme takes one function
(workers, batches, load, rng) -> GradientCode and one line in SCHEMES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.types.arrays import BoolArray, FloatArray, IntArray, locked


@dataclass(frozen=True)
class GradientCode:
    """A gradient code: disjoint groups of batches; each worker computes one group, or nothing, and sends its sum."""

    scheme: str
    holds_WB: BoolArray  # (W, B) True where a worker computes a batch

    def covered(self, workers: Sequence[int]) -> bool:
        """Returns whether these workers' messages have every batch, so that one of each group sums to the whole."""
        return bool(self.holds_WB[np.asarray(workers, dtype=np.int64)].any(axis=0).all())


Scheme = Callable[[int, int, int, np.random.Generator], GradientCode]  # workers, batches, load, rng


def make_code(scheme: str, workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Makes a gradient code by a scheme's name: the batches that each worker computes.

    Args:
        scheme: a name of SCHEMES.
        workers: number of workers.
        batches: number of batches whose results are summed.
        load: largest number of batches that a worker computes.
        rng: random generator, for schemes that assign batches at random.

    Raises:
        BadInput: if the scheme is unknown, or a size is out of range.
        InfeasiblePlan: if the workers cannot hold every batch, or the random draw leaves a batch to no worker; the message
            gives the probability of such a draw.

    Source:
        BCC: Li, Mousavi Kalan, Avestimehr, Soltanolkotabi (arXiv:1710.09990).
    """
    check_sizes(scheme, workers, batches, load)
    return SCHEMES[scheme](workers, batches, load, rng)


def check_sizes(scheme: str, workers: int, batches: int, load: int) -> None:
    """Checks a scheme's name and sizes as `make_code` does, without drawing a code."""
    check_one_of("scheme", scheme, SCHEMES)
    if workers < 1 or batches < 1:
        raise BadInput(f"scheme {scheme}: expected at least one worker and one batch, found {workers} and {batches}")
    if not 1 <= load <= batches:
        raise BadInput(f"scheme {scheme}: expected a load of 1 to {batches} batches a worker, found {load}")
    if load * workers < batches:
        raise InfeasiblePlan(f"scheme {scheme}: {workers} workers of {load} batches each cannot hold all {batches} batches")
    if (groups := group_count(batches, load)) > workers:
        raise InfeasiblePlan(f"scheme {scheme}: {batches} batches in {groups} groups need as many workers, found {workers}")


def load_of(workers: int, batches: int, redundancy: int) -> int:
    """Returns the number of batches per worker at which at least `redundancy` workers compute every batch (BCC: on average).

    Raises:
        BadInput: if `redundancy` is not from 1 to the number of workers, or there are no workers.
    """
    if workers < 1:
        raise BadInput(f"`workers`: expected more than zero, found {workers}")
    if not 1 <= redundancy <= workers:
        raise BadInput(f"`redundancy`: expected from 1 to the {workers} workers, found {redundancy}")
    return -(-batches // min(batches, workers // redundancy))


def group_count(batches: int, load: int) -> int:
    """Returns the number of groups into which batches are divided, with at most `load` batches each."""
    return -(-batches // load)


def misses(workers: int, groups: int) -> float:
    """Returns the probability that at least one group has no worker, if each worker draws its group uniformly."""
    return 1.0 - float(drawn_share_K(workers, groups)[-1])


def drawn_share_K(workers: int, groups: int) -> FloatArray:
    """Returns (W + 1,) float64: entry k is the probability that k uniform draws include every group (coupon collector)."""
    met_J = np.zeros(groups + 1)
    met_J[0] = 1.0
    share_K = np.zeros(workers + 1)
    again_J = np.arange(groups + 1) / groups
    for k in range(1, workers + 1):
        met_J[1:] = met_J[1:] * again_J[1:] + met_J[:-1] * (1 - again_J[:-1])
        met_J[0] = 0.0
        share_K[k] = met_J[-1]
    return share_K


def grouped_code(scheme: str, group_W: IntArray, batches: int, groups: int) -> GradientCode:
    """Makes a code from the group of batches that each worker computes.

    Args:
        scheme: the code's name.
        group_W: (W,) int64, the group that each worker computes.
        batches: number of batches.
        groups: number of groups, which consist of consecutive batches and are of nearly equal size.
    """
    holds_JB = np.zeros((groups, batches), dtype=np.bool_)
    for group, members in enumerate(np.array_split(np.arange(batches), groups)):
        holds_JB[group, members] = True
    return GradientCode(scheme, locked(holds_JB[group_W]))


def _balanced(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Every group goes to nearly equally many workers, drawn at random."""
    groups = group_count(batches, load)
    return grouped_code("balanced", rng.permutation(np.arange(workers) % groups), batches, groups)


def _bcc(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Every worker draws its group independently (batched coupon's collector)."""
    groups = group_count(batches, load)
    group_W = rng.integers(groups, size=workers)
    if missing := sorted(set(range(groups)) - set(group_W.tolist())):
        raise InfeasiblePlan(
            f"scheme bcc: no worker of {workers} drew {'group' if len(missing) == 1 else 'groups'} "
            f"{', '.join(map(str, missing))} of {groups}, which has probability {misses(workers, groups):.2g}; balanced "
            "always covers every group; or take another seed"
        )
    return grouped_code("bcc", group_W, batches, groups)


SCHEMES: dict[str, Scheme] = {"balanced": _balanced, "bcc": _bcc}
