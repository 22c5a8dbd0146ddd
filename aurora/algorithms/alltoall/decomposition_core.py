"""Birkhoff decomposition, compiled by Cython; `decomposition.slots` calls it and says what slots are."""

import cython
import numpy as np
from cython import cfunc, exceptval, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


def fill_slots(left_GG: Ints2, total_GG: Ints2, length_X: Ints1, partner_XG: Ints2, units_XG: Ints2):
    """Fills the slots of at most len(length_X), and returns how many; the arguments are `slots`' results, but for two.

    left_GG is the work, of which what the slots do not serve is left, and total_GG is work and padding.
    """
    n: Index = left_GG.shape[0]
    scratch_4G: Ints2 = np.full((4, n), -1)
    partner_G, sender_G, width_G, from_G = scratch_4G[0], scratch_4G[1], scratch_4G[2], scratch_4G[3]
    todo: Int = np.asarray(left_GG).sum()
    length: Int = np.max(total_GG, initial=0)
    slot: Index = 0
    with nogil:
        while todo > 0 and slot < length_X.shape[0]:
            for src in range(n):
                if partner_G[src] >= 0 and total_GG[src, partner_G[src]] < length:
                    sender_G[partner_G[src]] = -1
                    partner_G[src] = -1
            for src in range(n):
                if partner_G[src] < 0:
                    length = _augment(total_GG, partner_G, sender_G, src, length, width_G, from_G)
            for src in range(n):
                dst = partner_G[src]
                units = min(left_GG[src, dst], length)  # the work first, then the padding
                left_GG[src, dst] -= units
                total_GG[src, dst] -= length
                todo -= units
                partner_XG[slot, src], units_XG[slot, src] = dst, units
            length_X[slot] = length
            slot += 1
    return slot


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(dst=Index, widest=Index, sender=Index)
def _augment(total_GG: Ints2, partner_G: Ints1, sender_G: Ints1, src: Index, length: Int, width_G: Ints1, from_G: Ints1) -> Int:
    """Gives a sender a partner along an augmenting path; returns the path's smallest entry or `length`, whichever is less.

    Of the entries of at least `length` the path takes small ones, which leaves fewer parts. If there are none, it takes the
    largest there is, so that the result is as large as possible. width_G and from_G (n,) are scratch memory: each receiver's
    largest entry on a path to it, -1 once it has been seen, and the last sender of that path.
    """
    n: Index = total_GG.shape[0]
    for receiver in range(n):
        width_G[receiver], from_G[receiver] = total_GG[src, receiver], src
    while True:
        dst = widest = -1
        for receiver in range(n):
            if width_G[receiver] >= length and (dst < 0 or width_G[receiver] < width_G[dst]):
                dst = receiver
            if widest < 0 or width_G[receiver] > width_G[widest]:
                widest = receiver
        if dst < 0:
            dst, length = widest, width_G[widest]
        if sender_G[dst] < 0:
            break
        width_G[dst] = -1
        sender = sender_G[dst]
        for receiver in range(n):
            if 0 <= width_G[receiver] < total_GG[sender, receiver]:
                width_G[receiver], from_G[receiver] = total_GG[sender, receiver], sender
    while dst >= 0:
        sender = from_G[dst]
        sender_G[dst] = sender
        widest = partner_G[sender]
        partner_G[sender], dst = dst, widest
    return length
