"""Recoverability: whether the surviving holders have every item, and the odds of the failures that lose no item. Exact.

An item is an expert held by failure domains (recovery), or a batch held by workers (coded aggregation). Its holders are the
bits of one integer. An item is lost when all its holders have failed.
"""

from collections.abc import Sequence
from functools import cache, reduce
from itertools import zip_longest
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Polynomial = list[float]  # coefficient k: the summed odds of sets of k failures; whole numbers if all odds are


def all_held(held_WE: BoolArray, alive_MW: BoolArray) -> BoolArray:
    """Returns (...) bool, whether the alive holders, alive_MW (..., W), together have every item; held_WE is (W, E)."""
    return np.asarray((alive_MW.astype(np.float32) @ held_WE.astype(np.float32) > 0).all(axis=-1))


def minimal_holders(count_ED: NDArray[Any]) -> tuple[int, ...]:
    """Returns each expert's set of holders as bits, without duplicates and without supersets of other sets.

    count_ED (E, D) is above zero where domain d holds expert e. An expert whose holders include all holders of a second expert
    is lost only if the second is lost too.
    """
    bits = {sum(1 << int(domain) for domain in np.flatnonzero(count_D)) for count_D in count_ED}
    return _without_supersets(bits)


def _without_supersets(sets: set[int]) -> tuple[int, ...]:
    """The sets that contain no other of the sets, ascending."""
    kept: list[int] = []
    for each in sorted(sets, key=lambda bits: (bits.bit_count(), bits)):
        if all(other & ~each for other in kept):
            kept.append(each)
    return tuple(sorted(kept))


class _TooManyBranches(Exception):
    """Ends a count that takes more branches than allowed."""


def recoverable_odds(holders: tuple[int, ...], odds: Sequence[float], most: int, branches: int) -> Polynomial:
    """Returns the summed odds of the sets of 0..most failures that lose no item, by branching over domains.

    Args:
        holders: the sets of holders as bits, as `minimal_holders` returns them; an item is lost if one set fails entirely.
        odds: (D,) the odds that each domain fails, relative to the others.
        most: largest number of failures.
        branches: largest number of branches of the search.

    Returns:
        The sums for 0, 1, ..., most failures; empty if the search would take more branches.
    """
    spent = 0

    @cache
    def counted(sets: tuple[int, ...], left: int) -> Polynomial:
        """The odds of the failures of at most `left` of the domains in `sets` alone that lose no item."""
        nonlocal spent
        spent += 1
        if spent > branches:
            raise _TooManyBranches
        union = reduce(or_, sets)
        if len(sets) == 1:
            return [odd * (number < union.bit_count()) for number, odd in enumerate(subset_odds(union, odds, left))]
        parts = _components(sets)
        if len(parts) > 1:
            return _product([within(part, reduce(or_, part), left) for part in parts], left)
        pivot = _most_frequent_domain(sets)
        rest = union & ~pivot
        alive = within(tuple(each for each in sets if not each & pivot), rest, left)
        if pivot in sets or not left:
            return alive
        failed = within(_without_supersets({each & ~pivot for each in sets}), rest, left - 1)
        odd = odds[pivot.bit_length() - 1]
        return _sum(alive, [0, *(odd * value for value in failed)])

    def within(sets: tuple[int, ...], universe: int, left: int) -> Polynomial:
        """The same over all domains of `universe`."""
        short = tuple(each for each in sets if each.bit_count() <= left)  # larger sets cannot fail entirely
        free = subset_odds(universe & ~reduce(or_, short, 0), odds, left)
        return _product([counted(short, left), free], left) if short else free

    try:
        return within(holders, (1 << len(odds)) - 1, most)
    except _TooManyBranches:
        return []


def subset_odds(bits: int, odds: Sequence[float], most: int) -> Polynomial:
    """Returns, for k = 0..most, the summed odds of all sets of k of the domains in `bits`; odds multiply within a set."""
    found: Polynomial = [1]
    for domain, odd in enumerate(odds):
        if bits >> domain & 1:
            found = _sum(found, [0, *(odd * value for value in found)])[: most + 1]
    return found


def _components(sets: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets in groups, so that sets of different groups share no domain."""
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
    """The sum of two polynomials."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]


def _product(factors: Sequence[Polynomial], most: int) -> Polynomial:
    """The product of polynomials, up to coefficient `most`."""
    found: Polynomial = [1]
    for factor in factors:
        longer: Polynomial = [0] * min(len(found) + len(factor) - 1, most + 1)
        for i, a in enumerate(found[: most + 1]):
            for j, b in enumerate(factor[: most + 1 - i]):
                longer[i + j] += a * b
        found = longer
    return found
