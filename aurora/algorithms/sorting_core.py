"""Stable orders of numbers, without the GIL."""

import cython
from cython import cfunc, exceptval, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cfunc
@nogil
@exceptval(check=False)
def descending(key: Floats1, order: Ints1, spare: Ints1, n: Index) -> cython.void:
    """Sorts the first n entries of `order`, which are indices of `key`, by key: largest first, equal ones as they were."""
    width: Index = 1
    while width < n:
        begin: Index = 0
        while begin < n:
            middle, end = min(begin + width, n), min(begin + 2 * width, n)
            left, right = begin, middle
            for at in range(begin, end):
                if left < middle and (right == end or key[order[left]] >= key[order[right]]):
                    spare[at] = order[left]
                    left += 1
                else:
                    spare[at] = order[right]
                    right += 1
            begin += 2 * width
        for at in range(n):
            order[at] = spare[at]
        width *= 2
