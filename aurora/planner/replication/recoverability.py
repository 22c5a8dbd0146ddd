"""Whether what some workers hold is everything: the finished ones, or those that are alive. One mathematics for both.

Every batch, or expert, has its holders: the workers, or failure domains, that hold it, as bits of one integer.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray

BoolArray = NDArray[np.bool_]
Polynomial = list[float]  # by number of failures: the odds of the sets of so many that lose nothing; whole where odds are
MOST_BRANCHES = 1 << 17  # of an exact count


def covered(held_WE: BoolArray, alive_MW: BoolArray) -> BoolArray:
    """Whether those alive hold everything: held_WE (W, E) bool, alive_MW (..., W) bool -> (...) bool."""
    return np.asarray((alive_MW.astype(np.float32) @ held_WE.astype(np.float32) > 0).all(axis=-1))


def waited_for(holds_WB: BoolArray, finished: Sequence[int]) -> int | None:
    """How many of `finished`, in their order, it takes to cover every batch; None where all of them do not."""
    enough_K = covered(holds_WB[np.asarray(finished, dtype=np.int64)], np.tri(len(finished), dtype=np.bool_))
    return int(enough_K.argmax()) + 1 if enough_K.any() else None


def covering_sets(holds_WB: BoolArray) -> list[int]:
    """How many sets of k workers cover every batch, for k = 0..W; exact: the sets of W - k whose loss loses nothing.

    BadInput where that takes too many branches.
    """
    workers = len(holds_WB)
    if not holds_WB.any(axis=0).all():
        return [0] * (workers + 1)
    by_failures = losing_nothing(minimal(holds_WB.T), [1] * workers, workers, MOST_BRANCHES)
    if not by_failures:
        raise BadInput(f"coverage: expected sets of workers that are counted in {MOST_BRANCHES} branches, found more")
    return [int(sets) for sets in reversed(by_failures + [0] * (workers + 1 - len(by_failures)))]


def covering_share_K(holds_WB: BoolArray) -> FloatArray:
    """(W + 1,): the probability that k workers, any k of them equally likely, cover every batch."""
    workers = len(holds_WB)
    return np.array([sets / comb(workers, k) for k, sets in enumerate(covering_sets(holds_WB))])


def minimal(count_ED: NDArray[Any]) -> tuple[int, ...]:
    """The holders of experts, as bits, without those that hold all of another expert's: these are never lost alone."""
    bits = {sum(1 << int(domain) for domain in np.flatnonzero(count_D)) for count_D in count_ED}
    return _smallest(bits)


def _smallest(sets: set[int]) -> tuple[int, ...]:
    kept: list[int] = []
    for each in sorted(sets, key=lambda bits: (bits.bit_count(), bits)):
        if all(other & ~each for other in kept):
            kept.append(each)
    return tuple(sorted(kept))


class _TooLong(Exception):
    pass


def losing_nothing(holders: tuple[int, ...], odds: Sequence[float], most: int, branches: int) -> Polynomial:
    """The odds of all sets of 0..most failures that contain none of `holders` (minimal); empty after so many branches."""
    spent = 0

    @cache
    def counted(sets: tuple[int, ...], left: int) -> Polynomial:
        """Over the domains in `sets` alone, up to `left` failures."""
        nonlocal spent
        spent += 1
        if spent > branches:
            raise _TooLong
        union = _union(sets)
        if len(sets) == 1:
            return [odd * (number < union.bit_count()) for number, odd in enumerate(any_of(union, odds, left))]
        parts = _parts(sets)
        if len(parts) > 1:
            return _product([inside(part, _union(part), left) for part in parts], left)
        pivot = _busiest(sets)
        rest = union & ~pivot
        alive = inside(tuple(each for each in sets if not each & pivot), rest, left)
        if pivot in sets or not left:
            return alive
        failed = inside(_smallest({each & ~pivot for each in sets}), rest, left - 1)
        odd = odds[pivot.bit_length() - 1]
        return _sum(alive, [0, *(odd * value for value in failed)])

    def inside(sets: tuple[int, ...], universe: int, left: int) -> Polynomial:
        """Over all domains of `universe`."""
        short = tuple(each for each in sets if each.bit_count() <= left)  # no other can fail whole
        free = any_of(universe & ~_union(short), odds, left)
        return _product([counted(short, left), free], left) if short else free

    try:
        return inside(holders, (1 << len(odds)) - 1, most)
    except _TooLong:
        return []


def _union(sets: tuple[int, ...]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union


def _parts(sets: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets in groups that share no domain."""
    groups: list[tuple[int, list[int]]] = []
    for each in sets:
        union, joined = each, [each]
        apart = []
        for other, members in groups:
            if other & union:
                union, joined = union | other, joined + members
            else:
                apart.append((other, members))
        groups = [*apart, (union, joined)]
    return [tuple(sorted(members)) for _, members in groups]


def _busiest(sets: tuple[int, ...]) -> int:
    """The domain, as a bit, that is in most sets; the last of several."""
    times: dict[int, int] = {}
    for each in sets:
        while each:
            low = each & -each
            times[low] = times.get(low, 0) + 1
            each ^= low
    return max(times, key=lambda bit: (times[bit], bit))


def any_of(bits: int, odds: Sequence[float], most: int) -> Polynomial:
    """The odds of all sets of 0..most of the domains in `bits`."""
    found: Polynomial = [1]
    for domain, odd in enumerate(odds):
        if bits >> domain & 1:
            found = _sum(found, [0, *(odd * value for value in found)])[: most + 1]
    return found


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    return [value + (short[at] if at < len(short) else 0) for at, value in enumerate(long)]


def _product(factors: Sequence[Polynomial], most: int) -> Polynomial:
    found: Polynomial = [1]
    for factor in factors:
        longer: Polynomial = [0] * min(len(found) + len(factor) - 1, most + 1)
        for i, a in enumerate(found[: most + 1]):
            for j, b in enumerate(factor[: most + 1 - i]):
                longer[i + j] += a * b
        found = longer
    return found


def meet_more(met_B: FloatArray, load: int) -> FloatArray:
    """How many batches are covered after one more worker drew `load` different ones at random.

    met_B (B + 1,): the probability that 0..B batches were covered before.
    """
    batches = len(met_B) - 1
    after_B = np.zeros_like(met_B)
    for new, share_B in enumerate(_new_share(batches, load)):
        after_B[new:] += (met_B * share_B)[: batches + 1 - new]
    return after_B


@lru_cache(maxsize=64)
def _new_share(batches: int, load: int) -> FloatArray:
    """(load + 1, B + 1): the probability that so many of the drawn are new where so many are covered."""
    return np.asarray(
        hypergeom.pmf(np.arange(load + 1)[:, None], batches, batches - np.arange(batches + 1), load), dtype=np.float64
    )
