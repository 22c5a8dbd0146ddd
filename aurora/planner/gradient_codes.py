"""Gradient codes by name (SCHEMES): which batches each worker computes, what it sends, and how the sum is decoded.

`balanced`, `bcc` (batched coupon's collector), `uncoded` and `cyclic` (cyclic repetition, gradient coding). Adding a scheme
takes one function (workers, batches, load, rng) -> GradientCode and one line in SCHEMES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.replication.recoverability import BoolArray, all_held
from aurora.types.arrays import FloatArray, IntArray, locked

TOLERANCE = 1e-6  # of a decoded sum, relative to the largest batch


@dataclass(frozen=True)
class GradientCode:
    """What each worker computes and sends: worker w sends the sum over batches b of code_WB[w, b] times the result of b.

    Attributes:
        scheme: its name in SCHEMES.
        code_WB: (W, B) float64 coefficients, zero where the worker does not compute the batch.
        needed: how many messages it takes to decode, whichever they are. None where workers hold equal or disjoint groups of
            batches and send plain sums, so that the first message of each group is enough.
    """

    scheme: str
    code_WB: FloatArray
    needed: int | None = None

    @property
    def holds_WB(self) -> BoolArray:
        """(W, B) bool: which batches each worker computes."""
        return np.asarray(self.code_WB != 0)

    def weights(self, arrived: Sequence[int]) -> FloatArray | None:
        """Decode: factors with which the messages of `arrived` add up to the sum over all batches.

        Args:
            arrived: workers whose messages are there, in their order.

        Returns:
            (K,) float64, a factor for each message (1 for first copies and 0 for further ones, where sums are plain); None if
            the messages do not suffice yet.
        """
        code_KB = self.code_WB[np.asarray(arrived, dtype=np.int64)]
        if self.needed is None:
            if not all_held(code_KB != 0, np.ones(len(code_KB), dtype=np.bool_)):
                return None
            held_KB = np.logical_or.accumulate(code_KB != 0, axis=0)
            before_KB = np.vstack([np.zeros_like(held_KB[:1]), held_KB[:-1]])
            return np.asarray(((code_KB != 0) & ~before_KB).any(axis=1), dtype=np.float64)
        if len(arrived) < self.needed:
            return None
        weights_K = np.asarray(np.linalg.lstsq(code_KB.T, np.ones(code_KB.shape[1]), rcond=None)[0], dtype=np.float64)
        return weights_K if np.abs(code_KB.T @ weights_K - 1).max() <= TOLERANCE else None


Scheme = Callable[[int, int, int, np.random.Generator], GradientCode]  # workers, batches, load, rng


def make_code(scheme: str, workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Make the code of one of SCHEMES.

    Args:
        scheme: its name.
        workers: how many there are.
        batches: how many results are summed.
        load: batches that each worker computes at most.
        rng: for schemes that draw.

    Raises:
        BadInput: if the scheme is unknown, or sizes are out of range.
        InfeasiblePlan: if the workers cannot hold every batch, or were drawn so that they do not; says how probable that was.

    Source:
        BCC: Li, Mousavi Kalan, Avestimehr, Soltanolkotabi (arXiv:1710.09990).
    """
    check_sizes(scheme, workers, batches, load)
    return SCHEMES[scheme](workers, batches, load, rng)


def check_sizes(scheme: str, workers: int, batches: int, load: int) -> None:
    """Raise as `make_code` does for a scheme or sizes that fit nothing."""
    if scheme not in SCHEMES:
        raise BadInput(f"`scheme`: expected one of {', '.join(SCHEMES)}, found {scheme!r}")
    if workers < 1 or batches < 1:
        raise BadInput(f"scheme {scheme}: expected at least one worker and one batch, found {workers} and {batches}")
    if not 1 <= load <= batches:
        raise BadInput(f"scheme {scheme}: expected a load of 1 to {batches} batches a worker, found {load}")
    if load * workers < batches:
        raise InfeasiblePlan(f"scheme {scheme}: {workers} workers of {load} batches each cannot hold all {batches} batches")
    if scheme != "cyclic" and (groups := group_count(batches, load)) > workers:
        raise InfeasiblePlan(f"scheme {scheme}: {batches} batches in {groups} groups need as many workers, found {workers}")


def load_of(scheme: str, workers: int, batches: int, redundancy: int) -> int:
    """The load, in batches per worker, at which at least `redundancy` workers compute every batch (BCC: on average).

    Raises:
        BadInput: unless redundancy is from 1 to the number of workers, and exactly 1 for the uncoded scheme.
    """
    if workers < 1:
        raise BadInput(f"`workers`: expected more than zero, found {workers}")
    if not 1 <= redundancy <= workers:
        raise BadInput(f"`redundancy`: expected from 1 to the {workers} workers, found {redundancy}")
    if scheme == "uncoded" and redundancy > 1:
        raise BadInput(f"`redundancy`: expected 1 with the uncoded scheme, which repeats nothing, found {redundancy}")
    if scheme == "cyclic":
        return min(batches, -(-batches * redundancy // workers))
    return -(-batches // min(batches, workers // redundancy))


def group_count(batches: int, load: int) -> int:
    """Groups of at most `load` batches each."""
    return -(-batches // load)


def misses(workers: int, groups: int) -> float:
    """The probability that `workers` independent draws miss at least one of `groups` groups."""
    return 1.0 - float(drawn_share_K(workers, groups)[-1])


def drawn_share_K(workers: int, groups: int) -> FloatArray:
    """(W + 1,) float64: the probability that k = 0..workers independent draws have met every group (coupon collector)."""
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
    """Batches in `groups` runs of near-equal size; worker w computes group group_W[w] and sends its plain sum."""
    code_JB = np.zeros((groups, batches))
    for group, members in enumerate(np.array_split(np.arange(batches), groups)):
        code_JB[group, members] = 1.0
    return GradientCode(scheme, locked(code_JB[group_W]))


def _balanced(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = group_count(batches, load)
    return grouped_code("balanced", rng.permutation(np.arange(workers) % groups), batches, groups)


def _bcc(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = group_count(batches, load)
    group_W = rng.integers(groups, size=workers)
    if missing := sorted(set(range(groups)) - set(group_W.tolist())):
        raise InfeasiblePlan(
            f"scheme bcc: no worker of {workers} drew {'group' if len(missing) == 1 else 'groups'} "
            f"{', '.join(map(str, missing))} of {groups}, which has probability {misses(workers, groups):.2g}; balanced always "
            "covers, or take another seed"
        )
    return grouped_code("bcc", group_W, batches, groups)


def _uncoded(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = min(workers, batches)
    code = grouped_code("uncoded", np.arange(groups), batches, groups)
    return GradientCode("uncoded", locked(np.vstack([code.code_WB, np.zeros((workers - groups, batches))])))


def _cyclic(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Cyclic repetition: any workers - repeats + 1 messages give the sum.

    Batches form one share per worker, and each worker holds `repeats` neighbouring shares. Where workers do not divide batches,
    shares that are one batch larger may bring a worker above `load`. Source: Tandon, Lei, Dimakis, Karampatziakis
    (arXiv:1612.03301), Alg. 1.
    """
    repeats = min(workers, load * workers // batches)
    shares = np.array_split(np.arange(batches), workers)
    code_WS = np.zeros((workers, workers))
    if repeats == 1:
        np.fill_diagonal(code_WS, 1.0)
    else:
        check_RS = rng.standard_normal((repeats - 1, workers))
        check_RS[:, -1] = -check_RS[:, :-1].sum(axis=1)
        for worker in range(workers):
            held = (worker + np.arange(repeats)) % workers
            code_WS[worker, worker] = 1.0
            code_WS[worker, held[1:]] = np.linalg.solve(check_RS[:, held[1:]], -check_RS[:, worker])
    code_WB = np.zeros((workers, batches))
    for share, members in enumerate(shares):
        code_WB[:, members] = code_WS[:, [share]]
    return GradientCode("cyclic", locked(code_WB), needed=workers - repeats + 1)


SCHEMES: dict[str, Scheme] = {"balanced": _balanced, "bcc": _bcc, "uncoded": _uncoded, "cyclic": _cyclic}
