"""Recoverability: whether those that are left hold everything, and how many sets of failures lose nothing. Exact.

One mathematics for experts on failure domains (recovery) and batches on workers (coded aggregation). Each expert, or batch, has
its holders, the domains or workers that hold it, as bits of one integer. It is lost when all of its holders have failed.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Polynomial = list[float]  # coefficient k: the odds of the sets of k failures; whole numbers where all odds are


def all_held(held_WE: BoolArray, alive_MW: BoolArray) -> BoolArray:
    """Whether those that are alive hold everything.

    Args:
        held_WE: (W, E) bool, who holds what.
        alive_MW: (..., W) bool, sets of those that are alive.

    Returns:
        (...) bool, one for each set.
    """
    return np.asarray((alive_MW.astype(np.float32) @ held_WE.astype(np.float32) > 0).all(axis=-1))


def minimal_holders(count_ED: NDArray[Any]) -> tuple[int, ...]:
    """The holders of each expert, as bits, without supersets: an expert whose holders include another's is never lost alone.

    Args:
        count_ED: (E, D), above zero where domain d holds expert e.
    """
    bits = {sum(1 << int(domain) for domain in np.flatnonzero(count_D)) for count_D in count_ED}
    return _without_supersets(bits)


def _without_supersets(sets: set[int]) -> tuple[int, ...]:
    kept: list[int] = []
    for each in sorted(sets, key=lambda bits: (bits.bit_count(), bits)):
        if all(other & ~each for other in kept):
            kept.append(each)
    return tuple(sorted(kept))


class _TooManyBranches(Exception):
    pass


def recoverable_odds(holders: tuple[int, ...], odds: Sequence[float], most: int, branches: int) -> Polynomial:
    """The odds of all sets of 0..most failures that lose nothing, by branching over domains.

    Args:
        holders: sets of holders as bits, none of which may fail whole; as `minimal_holders` gives them.
        odds: how likely each domain fails, against the others.
        most: failures to count up to.
        branches: how many branches the search may take.

    Returns:
        Coefficients 0..most; empty if the search takes more branches.
    """
    spent = 0

    @cache
    def counted(sets: tuple[int, ...], left: int) -> Polynomial:
        """Over the domains in `sets` alone, up to `left` failures."""
        nonlocal spent
        spent += 1
        if spent > branches:
            raise _TooManyBranches
        union = _union(sets)
        if len(sets) == 1:
            return [odd * (number < union.bit_count()) for number, odd in enumerate(subset_odds(union, odds, left))]
        parts = _components(sets)
        if len(parts) > 1:
            return _product([within(part, _union(part), left) for part in parts], left)
        pivot = _most_frequent_domain(sets)
        rest = union & ~pivot
        alive = within(tuple(each for each in sets if not each & pivot), rest, left)
        if pivot in sets or not left:
            return alive
        failed = within(_without_supersets({each & ~pivot for each in sets}), rest, left - 1)
        odd = odds[pivot.bit_length() - 1]
        return _sum(alive, [0, *(odd * value for value in failed)])

    def within(sets: tuple[int, ...], universe: int, left: int) -> Polynomial:
        """Over all domains of `universe`."""
        short = tuple(each for each in sets if each.bit_count() <= left)  # no other can fail whole
        free = subset_odds(universe & ~_union(short), odds, left)
        return _product([counted(short, left), free], left) if short else free

    try:
        return within(holders, (1 << len(odds)) - 1, most)
    except _TooManyBranches:
        return []


def subset_odds(bits: int, odds: Sequence[float], most: int) -> Polynomial:
    """The odds of all sets of 0..most of the domains in `bits`."""
    found: Polynomial = [1]
    for domain, odd in enumerate(odds):
        if bits >> domain & 1:
            found = _sum(found, [0, *(odd * value for value in found)])[: most + 1]
    return found


def _union(sets: tuple[int, ...]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union


def _components(sets: tuple[int, ...]) -> list[tuple[int, ...]]:
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


def _most_frequent_domain(sets: tuple[int, ...]) -> int:
    """The domain, as a bit, that is in most sets; the last of several."""
    times: dict[int, int] = {}
    for each in sets:
        while each:
            low = each & -each
            times[low] = times.get(low, 0) + 1
            each ^= low
    return max(times, key=lambda bit: (times[bit], bit))


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
