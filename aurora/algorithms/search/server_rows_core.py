"""Price of experts on servers, compiled by Cython: the rows that cross between servers, and seconds above limits.

A token crosses once to each server that holds experts of it. Sets of tokens are bits in W words of 64, so that one operation
covers 64 tokens; W is a multiple of BLOCK.

Example: 2 servers; a token chooses experts 0, 1 and 2, and starts on server 0, which holds expert 0.

    hits of the token    server 0: 1 + 1 for its own server, server 1: 2
    peek: expert 2 goes to server 0        server 1 has one hit left, which still is a row: no row less
    then: expert 1 goes to server 0, too   server 1 had one hit, `sole`: one row less

1. `peek` prices a swap, or a move to an empty slot; it changes nothing.
2. `remove` and `add` take an expert off a server's counts, and put it there.
"""

import cython
import numpy as np
from cython import cast, cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.search.slots_core import *
else:
    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.slots_core import *

WORD = declare(Index, 64)  # bits
BLOCK = declare(Index, 8)  # words whose bits are counted together: at most 128 in a byte
PAIRS, FOURS = declare(Int, 0x5555555555555555), declare(Int, 0x3333333333333333)
BYTES, HALVES = declare(Int, 0x0F0F0F0F0F0F0F0F), declare(Int, 0x00FF00FF00FF00FF)


@final
@cclass
class ServerRows:
    """The tokens, limits and counts of a placement on servers whose GPUs hold what `Slots` say; for limits see `Limits`.

    Attributes:
        server_G, most_gpu_s, most_server_s: as in `Limits`.
        server_s_NE, server_s_N: seconds of each expert on each server; of each server, other work included.
        chosen_EW: the tokens that choose each expert; the last row stands for an empty slot, which no token chooses.
        hits_NBW: of each token, B bits of how many of its experts a server holds, plus one on the token's own server.
        none_NW, sole_NW: the tokens for which that number is zero, and those for which it is one.
        rows: rows that cross more than at the start.
        over_s: seconds above limits.
    """

    def __init__(self, layer: Layer, slots: Slots, experts_UK, server_U, limits):
        server_s_NE, (tokens, top_k) = limits.server_s_NE, experts_UK.shape
        gpu_E, bits = np.asarray(slots.gpu_EG)[:, 0], -(-tokens // (WORD * BLOCK)) * WORD * BLOCK
        experts, server_E, servers = len(gpu_E), limits.server_G[gpu_E], len(server_s_NE)
        self.server_G, self.most_gpu_s, self.most_server_s = limits.server_G, limits.most_gpu_s, limits.most_server_s
        server_s_N = limits.beside_s_N + np.bincount(server_E, server_s_NE[server_E, np.arange(experts)], servers)
        chosen_EU, hits_NU = np.zeros((experts + 1, bits), np.bool_), np.zeros((servers, bits), np.int64)
        chosen_EU[experts_UK, np.arange(tokens)[:, None]] = True
        for server in range(servers):
            hits_NU[server, :tokens] = (server_E[experts_UK] == server).sum(axis=1) + (server_U == server)
        digit_NBU = hits_NU[:, None] >> np.arange((top_k + 1).bit_length())[:, None] & 1
        self.chosen_EW, self.hits_NBW, self.none_NW, self.sole_NW = (
            np.packbits(is_U, axis=-1, bitorder="little").view(np.int64)
            for is_U in (chosen_EU, digit_NBU, hits_NU == 0, hits_NU == 1)
        )
        self.carry_W, self.rows = np.zeros(bits // WORD, np.int64), 0
        self.server_s_NE, self.server_s_N = server_s_NE, server_s_N
        gpu_s_G = np.asarray(slots.sum_s_GXW)[:, 0, 0]
        self.over_s = np.maximum(np.append(gpu_s_G - self.most_gpu_s, server_s_N - self.most_server_s), 0.0).sum()


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(in_bytes=cython.ulonglong, more=cython.ulonglong, less=cython.ulonglong, goes=Int, comes=Int)
def peek_rows(rows: ServerRows, a: Index, p: Index, b: Index, q: Index) -> Int:
    """Rows that cross more if expert a goes from server p to q, and b, or nothing, back (Warren, Hacker's Delight, 5-1)."""
    none_p, none_q, sole_p, sole_q = rows.none_NW[p], rows.none_NW[q], rows.sole_NW[p], rows.sole_NW[q]
    goes_W, comes_W = rows.chosen_EW[a], rows.chosen_EW[rows.chosen_EW.shape[0] - 1 if b == EMPTY else b]
    total: Int = 0
    if p == q:
        return 0
    for block in range(goes_W.shape[0] // BLOCK):
        in_bytes = 0
        for w in range(block * BLOCK, block * BLOCK + BLOCK):
            goes, comes = goes_W[w] & ~comes_W[w], comes_W[w] & ~goes_W[w]  # a token of both goes to the same servers as before
            more = cast(cython.ulonglong, (goes & none_q[w]) | (comes & none_p[w]))  # unsigned, since sums may fill all bits
            less = cast(cython.ulonglong, ~((goes & sole_p[w]) | (comes & sole_q[w])))
            more, less = (more & PAIRS) + (more >> 1 & PAIRS), (less & PAIRS) + (less >> 1 & PAIRS)
            more = (more & FOURS) + (more >> 2 & FOURS) + (less & FOURS) + (less >> 2 & FOURS)
            in_bytes += (more & BYTES) + (more >> 4 & BYTES)
        in_bytes = (in_bytes & HALVES) + (in_bytes >> 8 & HALVES)
        in_bytes += in_bytes >> 32
        total += cast(Int, in_bytes + (in_bytes >> 16) & 0xFFF) - WORD * BLOCK
    return total


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(less_g=Float, more_h=Float, less_p=Float, more_q=Float, gpus_s=Float, p=Index, q=Index)
def peek_over(rows: ServerRows, layer: Layer, slots: Slots, a: Index, g: Index, b: Index, h: Index) -> Float:
    """Seconds above limits that come on top if expert a goes from GPU g to h, and b, or nothing, back."""
    p, q = rows.server_G[g], rows.server_G[h]
    less_g, more_h = layer.part_s_GEXW[g, a, 0, 0], layer.part_s_GEXW[h, a, 0, 0]
    less_p, more_q = rows.server_s_NE[p, a], rows.server_s_NE[q, a]
    if b != EMPTY:
        less_g, more_h = less_g - layer.part_s_GEXW[g, b, 0, 0], more_h - layer.part_s_GEXW[h, b, 0, 0]
        less_p, more_q = less_p - rows.server_s_NE[p, b], more_q - rows.server_s_NE[q, b]
    gpus_s = _over(slots.sum_s_GXW[g, 0, 0], -less_g, rows.most_gpu_s)
    gpus_s += _over(slots.sum_s_GXW[h, 0, 0], more_h, rows.most_gpu_s)
    if p == q:
        return gpus_s
    gpus_s += _over(rows.server_s_N[p], -less_p, rows.most_server_s)
    return gpus_s + _over(rows.server_s_N[q], more_q, rows.most_server_s)


@cfunc
@nogil
@exceptval(check=False)
def _over(now_s: Float, more_s: Float, most_s: Float) -> Float:
    """Seconds above most_s that come on top of those of now_s if more_s are added."""
    return larger(now_s + more_s - most_s, 0.0) - larger(now_s - most_s, 0.0)


@cfunc
@nogil
@exceptval(check=False)
def add(rows: ServerRows, n: Index, a: Index) -> cython.void:
    """Adds expert a to what server n holds."""
    rows.server_s_N[n] += rows.server_s_NE[n, a]
    _count(rows, n, a, 0)


@cfunc
@nogil
@exceptval(check=False)
def remove(rows: ServerRows, n: Index, a: Index) -> cython.void:
    """Takes expert a off what server n holds."""
    rows.server_s_N[n] -= rows.server_s_NE[n, a]
    _count(rows, n, a, -1)


@cfunc
@nogil
@exceptval(check=False)
def _count(rows: ServerRows, n: Index, a: Index, less: Int) -> cython.void:
    """Adds one to a server's hits of expert a's tokens, or takes one off if `less` is -1; marks tokens with none and one."""
    none_W, sole_W, carry_W = rows.none_NW[n], rows.sole_NW[n], rows.carry_W
    carry_W[:] = rows.chosen_EW[a]
    none_W[:] = 0
    for b in range(rows.hits_NBW.shape[1]):
        digit_W = rows.hits_NBW[n, b]
        for w in range(carry_W.shape[0]):
            digit_W[w] ^= carry_W[w]
            carry_W[w] &= ~(digit_W[w] ^ less)
            if b > 0:
                none_W[w] |= digit_W[w]
    digit_W = rows.hits_NBW[n, 0]
    for w in range(carry_W.shape[0]):
        sole_W[w] = digit_W[w] & ~none_W[w]
        none_W[w] = ~(digit_W[w] | none_W[w])
