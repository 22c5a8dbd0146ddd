"""Draws experts with replacement, and counts the choices, compiled by Cython; see `synthetic`."""

import cython
import numpy as np
from cython import nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


def count(chosen_UK: ConstInts2, first: Index, tokens: Index, counted_XE: Ints2):
    """Adds the choices of tokens from number `first` on to counted_XE (X, E), which has a row for each `tokens` tokens."""
    with nogil:
        for u in range(chosen_UK.shape[0]):
            for k in range(chosen_UK.shape[1]):
                counted_XE[(first + u) // tokens, chosen_UK[u, k]] += 1


@cython.locals(at=Index, used=Index, token=Index, k=Index, opened=Index, expert=Index, group=Index, draw=Float)
def choose(
    draws_D: ConstFloats1, upto_E: ConstFloats1, first_B: ConstInts1, group_E: ConstInts1, token_groups: Index, chosen_UK: Ints2
):
    """Sets the experts of as many tokens as the random numbers suffice for; returns the tokens, and the numbers that they took.

    Args:
        draws_D: random numbers from 0 to 1.
        upto_E: running sum of the experts' shares.
        first_B: the first expert that a random number in each of B equal parts of 0 to 1 can mean.
        group_E: the group of each expert.
        token_groups: groups of a token.
        chosen_UK: (U, K) the experts of at most U tokens.
    """
    last_E: Ints1 = np.full(len(upto_E), -1)  # the last token that chose each expert
    last_J: Ints1 = np.full(group_E[group_E.shape[0] - 1] + 1, -1)  # and each group
    at = used = token = 0
    with nogil:
        while token < chosen_UK.shape[0]:
            k = opened = 0
            while k < chosen_UK.shape[1] and at < draws_D.shape[0]:
                draw = draws_D[at]
                at += 1
                expert = first_B[cython.cast(Index, draw * first_B.shape[0])]
                while upto_E[expert] <= draw:
                    expert += 1
                group = group_E[expert]
                if last_J[group] != token and opened < token_groups:
                    last_J[group] = token
                    opened += 1
                if last_E[expert] != token and last_J[group] == token:
                    last_E[expert] = token
                    chosen_UK[token, k] = expert
                    k += 1
            if k < chosen_UK.shape[1]:
                break
            token += 1
            used = at
    return token, used
