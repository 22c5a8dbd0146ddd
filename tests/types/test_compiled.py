"""Compiled functions that make no arrays count no references to those that they are given."""

import numpy as np

from aurora.types.compiled import njit


def test_no_references_are_counted_where_nothing_is_made():
    def inner(pair, at):
        return pair[0][at] + pair[1][at]

    def sums(allocates):
        add = njit(allocates=allocates)(inner)

        @njit(allocates=allocates)
        def total(pair):
            found = 0.0
            for at in range(len(pair[0])):
                if at % 3:
                    found += add(pair, at)
            return found

        return total

    pair = np.arange(9.0), np.ones(9)
    counted, uncounted = sums(True), sums(False)
    assert counted(pair) == uncounted(pair) == 33.0
    for function, expected in ((counted, True), (uncounted, False)):
        ((_, code),) = function.inspect_llvm().items()
        assert ("@NRT_incref" in code) == expected
