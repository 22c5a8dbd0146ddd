"""Who computes which batches and what each worker sends, by name: BCC, balanced, uncoded and cyclic repetition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.replication.recoverability import BoolArray, covered
from aurora.types.arrays import FloatArray, IntArray, locked

TOLERANCE = 1e-6  # of a decoded sum, relative to the largest batch


@dataclass(frozen=True)
class GradientCode:
    """Worker w sends the sum over b of code_WB[w, b] (W, B) times the result of batch b.

    needed: None where workers hold equal or disjoint groups and send their plain sum, so that first copies add up to the
    whole, else how many messages it takes, whichever they are.
    """

    scheme: str
    code_WB: FloatArray
    needed: int | None = None

    @property
    def holds_WB(self) -> BoolArray:
        return np.asarray(self.code_WB != 0)

    def weights(self, arrived: Sequence[int]) -> FloatArray | None:
        """What to multiply the messages of `arrived` with, so that they add up to the sum over all batches: first copies 1,
        further ones 0, or the decoding of a code; None where they do not suffice yet."""
        code_KB = self.code_WB[np.asarray(arrived, dtype=np.int64)]
        if self.needed is None:
            if not covered(code_KB != 0, np.ones(len(code_KB), dtype=np.bool_)):
                return None
            held_KB = np.logical_or.accumulate(code_KB != 0, axis=0)
            before_KB = np.vstack([np.zeros_like(held_KB[:1]), held_KB[:-1]])
            return np.asarray(((code_KB != 0) & ~before_KB).any(axis=1), dtype=np.float64)
        if len(arrived) < self.needed:
            return None
        weights_K = np.asarray(np.linalg.lstsq(code_KB.T, np.ones(code_KB.shape[1]), rcond=None)[0], dtype=np.float64)
        return weights_K if np.abs(code_KB.T @ weights_K - 1).max() <= TOLERANCE else None


Holder = Callable[[int, int, int, np.random.Generator], GradientCode]  # workers, batches, load, rng


def make_code(scheme: str, workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """The code of SCHEMES[scheme] for `load` batches a worker.

    BadInput for an unknown scheme or sizes that fit nothing; InfeasiblePlan where the workers cannot hold every batch, or
    were drawn so that they do not, with how probable that was.
    """
    check_sizes(scheme, workers, batches, load)
    return SCHEMES[scheme](workers, batches, load, rng)


def code_by_speed(seconds_W: FloatArray, batches: int, load: int) -> GradientCode:
    """Balanced groups dealt by speed, back and forth: the quickest workers hold different groups, the slowest repeat them."""
    workers = len(seconds_W)
    check_sizes("balanced", workers, batches, load)
    groups = group_count(batches, load)
    deal = np.arange(workers)
    rounds, place = deal // groups, deal % groups
    group_W = np.empty(workers, dtype=np.int64)
    group_W[np.argsort(seconds_W, kind="stable")] = np.where(rounds % 2, groups - 1 - place, place)
    return _grouped("balanced", group_W, batches, groups)


def check_sizes(scheme: str, workers: int, batches: int, load: int) -> None:
    """What make_code asks of its arguments."""
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
    """The load at which every batch has at least `redundancy` workers (BCC: as many to be expected).

    BadInput unless redundancy is from 1 to the workers; exactly 1 where nothing is repeated.
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
    """The probability that independent draws leave one of `groups` without any of `workers`.

    A walk over how many groups have been drawn, which adds nothing but probabilities.
    """
    return 1.0 - float(drawn_share_K(workers, groups)[-1])


def drawn_share_K(workers: int, groups: int) -> FloatArray:
    """(W + 1,): the probability that k independent draws have met every group."""
    met_J = np.zeros(groups + 1)
    met_J[0] = 1.0
    share_K = np.zeros(workers + 1)
    again_J = np.arange(groups + 1) / groups
    for k in range(1, workers + 1):
        met_J[1:] = met_J[1:] * again_J[1:] + met_J[:-1] * (1 - again_J[:-1])
        met_J[0] = 0.0
        share_K[k] = met_J[-1]
    return share_K


def _grouped(scheme: str, group_W: IntArray, batches: int, groups: int) -> GradientCode:
    code_JB = np.zeros((groups, batches))
    for group, members in enumerate(np.array_split(np.arange(batches), groups)):
        code_JB[group, members] = 1.0
    return GradientCode(scheme, locked(code_JB[group_W]))


def _balanced(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = group_count(batches, load)
    return _grouped("balanced", rng.permutation(np.arange(workers) % groups), batches, groups)


def _bcc(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = group_count(batches, load)
    group_W = rng.integers(groups, size=workers)
    if missing := sorted(set(range(groups)) - set(group_W.tolist())):
        raise InfeasiblePlan(
            f"scheme bcc: no worker of {workers} drew {'group' if len(missing) == 1 else 'groups'} "
            f"{', '.join(map(str, missing))} of {groups}, which has probability {misses(workers, groups):.2g}; balanced always "
            "covers, or take another seed"
        )
    return _grouped("bcc", group_W, batches, groups)


def _uncoded(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    groups = min(workers, batches)
    code = _grouped("uncoded", np.arange(groups), batches, groups)
    return GradientCode("uncoded", locked(np.vstack([code.code_WB, np.zeros((workers - groups, batches))])))


def _cyclic(workers: int, batches: int, load: int, rng: np.random.Generator) -> GradientCode:
    """Gradient coding: any workers - repeats + 1 messages give the sum. Source: Tandon, Lei, Dimakis, Karampatziakis,
    arXiv:1612.03301, Alg. 1. Batches form a share for each worker, which holds `repeats` neighbouring shares;
    where workers do not divide batches, shares that are one batch larger may bring it above `load`."""
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


SCHEMES: dict[str, Holder] = {"balanced": _balanced, "bcc": _bcc, "uncoded": _uncoded, "cyclic": _cyclic}
