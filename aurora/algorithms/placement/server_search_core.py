"""Simulated annealing of experts on servers, compiled by Cython; `server_search` says what it is for.

Sets of tokens are bits in W words of 64, so that one operation covers 64 tokens; W is a multiple of BLOCK.
"""

import cython
import numpy as np
from cython import cast, cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.libc.math import exp
else:
    from math import exp

    from aurora.algorithms.core_arrays import *

WORD = declare(Index, 64)  # bits
BLOCK = declare(Index, 8)  # words whose bits are counted together: at most 128 in a byte
PAIRS, FOURS = declare(Int, 0x5555555555555555), declare(Int, 0x3333333333333333)
BYTES, HALVES = declare(Int, 0x0F0F0F0F0F0F0F0F), declare(Int, 0x00FF00FF00FF00FF)


@final
@cclass
class ServerTables:
    """A placement that is annealed, and tables that follow from it, from which the gain of a move or swap is computed quickly.

    The last entry of arrays by expert (E + 1) stands for an empty slot, which has no tokens and takes no time.
    """

    server_G: ConstInts1  # the next six as in `Limits`
    slots_G: ConstInts1
    gpu_s_GE: Floats2
    server_s_NE: Floats2
    most_gpu_s: Float
    most_server_s: Float
    gpu_E: Ints1  # the GPU of each expert
    best_E: Ints1  # the same in the best placement so far
    held_G: Ints1  # how many experts each GPU holds
    gpu_s_G: Floats1  # seconds of each GPU, other work included
    server_s_N: Floats1  # seconds of each server, other work included
    chosen_EW: Ints2  # the tokens that choose each expert
    hits_NBW: Ints3  # of each token, B bits of how many of its experts a server holds, plus one on the token's own server
    none_NW: Ints2  # the tokens for which that number is zero
    sole_NW: Ints2  # the tokens for which it is one
    carry_W: Ints1
    slack_s: Float  # seconds above limits that do not count
    tiny_s: Float  # a difference that sums of floats may have
    best_over_s: Float
    best: Int  # rows that cross more than at the start
    over_s = declare(Float, visibility="public")  # seconds above limits
    change = declare(Int, visibility="public")

    def __init__(self, experts_UK, server_U, limits, slack_s: Float, tiny_s: Float, gpu_E):
        servers, gpus, (tokens, top_k) = len(limits.server_s_NE), len(limits.slots_G), experts_UK.shape
        server_E, own, bits = limits.server_G[gpu_E], np.arange(len(gpu_E)), -(-tokens // (WORD * BLOCK)) * WORD * BLOCK
        self.server_G, self.slots_G, self.gpu_E, self.best_E = limits.server_G, limits.slots_G, gpu_E, gpu_E.copy()
        self.gpu_s_GE, self.server_s_NE = (np.pad(s, ((0, 0), (0, 1))) for s in (limits.gpu_s_GE, limits.server_s_NE))
        self.most_gpu_s, self.most_server_s, self.slack_s = limits.most_gpu_s, limits.most_server_s, slack_s
        self.tiny_s = tiny_s
        self.held_G = np.bincount(gpu_E, minlength=gpus)
        gpu_s_G = limits.beside_s_G + np.bincount(gpu_E, limits.gpu_s_GE[gpu_E, own], gpus)
        server_s_N = limits.beside_s_N + np.bincount(server_E, limits.server_s_NE[server_E, own], servers)
        chosen_EU, hits_NU = np.zeros((len(gpu_E) + 1, bits), np.bool_), np.zeros((servers, bits), np.int64)
        chosen_EU[experts_UK, np.arange(tokens)[:, None]] = True
        for server in range(servers):
            hits_NU[server, :tokens] = (server_E[experts_UK] == server).sum(axis=1) + (server_U == server)
        digit_NBU = hits_NU[:, None] >> np.arange((top_k + 1).bit_length())[:, None] & 1
        self.chosen_EW, self.hits_NBW, self.none_NW, self.sole_NW = (
            np.packbits(is_U, axis=-1, bitorder="little").view(np.int64)
            for is_U in (chosen_EU, digit_NBU, hits_NU == 0, hits_NU == 1)
        )
        self.carry_W, self.best, self.change = np.zeros(bits // WORD, np.int64), 0, 0
        over_s_X = np.append(gpu_s_G - limits.most_gpu_s, server_s_N - limits.most_server_s)
        self.gpu_s_G, self.server_s_N, self.over_s = gpu_s_G, server_s_N, np.maximum(over_s_X, 0.0).sum()
        self.best_over_s = max(self.over_s, slack_s)


@cython.locals(a=Index, b=Index, g=Index, h=Index, rows=Int, excess_s=Float, cost=Float, experts=Index, gpus=Index)
def anneal(tables: ServerTables, draws_S3: ConstFloats2, heat: Float, cooler: Float, price: Float, dearer: Float):
    """Makes a step for each row of draws, which are from 0 to 1: moves an expert to another GPU, or swaps two.

    Args:
        tables: the placement, which is changed.
        draws_S3: (S, 3) float64.
        heat, cooler: the temperature in rows, and the factor by which it falls in each step.
        price, dearer: the rows that a second above a limit counts as, and the factor by which they rise.

    Returns:
        (gpu_E, (seconds, rows)): of the best placement so far the GPU of each expert, the seconds above limits beside slack_s,
        and the rows that cross more than at the start.
    """
    experts, gpus = tables.gpu_E.shape[0], tables.slots_G.shape[0]
    with nogil:
        for step in range(draws_S3.shape[0]):
            heat, price = heat * cooler, price * dearer
            a, b = cast(Index, draws_S3[step, 0] * experts), cast(Index, draws_S3[step, 1] * (experts + gpus))
            g, h = tables.gpu_E[a], tables.gpu_E[b] if b < experts else b - experts
            b = min(b, experts)  # an expert to swap with, or an empty slot
            if g == h or (b == experts and tables.held_G[h] == tables.slots_G[h]):
                continue
            rows, excess_s = _rows_changed(tables, a, b, h), _excess_changed(tables, a, b, h)
            cost = rows + price * excess_s
            if cost > 0 and draws_S3[step, 2] >= exp(-cost / heat):
                continue
            _shift(tables, a, h)
            if b < experts:
                _shift(tables, b, g)
            tables.change += rows
            tables.over_s += excess_s
            if tables.over_s < tables.best_over_s - tables.tiny_s or (
                tables.change < tables.best and tables.over_s <= tables.best_over_s
            ):
                tables.best, tables.best_over_s = tables.change, larger(tables.over_s, tables.slack_s)
                tables.best_E[:] = tables.gpu_E
    return np.asarray(tables.best_E), (tables.best_over_s - tables.slack_s, tables.best)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(in_bytes=cython.ulonglong, more=cython.ulonglong, less=cython.ulonglong, goes=Int, comes=Int)
def _rows_changed(tables: ServerTables, a: Index, b: Index, h: Index) -> Int:
    """Rows that cross more if expert a goes to GPU h, and b from there to a's GPU (Warren, Hacker's Delight, 5-1)."""
    p, q = tables.server_G[tables.gpu_E[a]], tables.server_G[h]
    none_p, none_q, sole_p, sole_q = tables.none_NW[p], tables.none_NW[q], tables.sole_NW[p], tables.sole_NW[q]
    goes_W, comes_W = tables.chosen_EW[a], tables.chosen_EW[b]
    rows: Int = 0
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
        rows += cast(Int, in_bytes + (in_bytes >> 16) & 0xFFF) - WORD * BLOCK
    return rows


@cfunc
@nogil
@exceptval(check=False)
def _excess_changed(tables: ServerTables, a: Index, b: Index, h: Index) -> Float:
    """Seconds above limits that come on top if expert a goes to GPU h, and b from there to a's GPU."""
    g, most_s = tables.gpu_E[a], tables.most_gpu_s
    p, q = tables.server_G[g], tables.server_G[h]
    at_g, at_h, at_p, at_q = tables.gpu_s_G[g], tables.gpu_s_G[h], tables.server_s_N[p], tables.server_s_N[q]
    to_g = larger(at_g - tables.gpu_s_GE[g, a] + tables.gpu_s_GE[g, b] - most_s, 0.0)
    to_h = larger(at_h + tables.gpu_s_GE[h, a] - tables.gpu_s_GE[h, b] - most_s, 0.0)
    excess_s: Float = to_g + to_h - larger(at_g - most_s, 0.0) - larger(at_h - most_s, 0.0)
    if p != q:
        most_s = tables.most_server_s
        to_p = larger(at_p - tables.server_s_NE[p, a] + tables.server_s_NE[p, b] - most_s, 0.0)
        to_q = larger(at_q + tables.server_s_NE[q, a] - tables.server_s_NE[q, b] - most_s, 0.0)
        excess_s += to_p + to_q - larger(at_p - most_s, 0.0) - larger(at_q - most_s, 0.0)
    return excess_s


@cfunc
@nogil
@exceptval(check=False)
def _shift(tables: ServerTables, a: Index, h: Index) -> cython.void:
    """Puts expert a on GPU h and brings the tables up to date."""
    g = tables.gpu_E[a]
    p, q = tables.server_G[g], tables.server_G[h]
    tables.gpu_E[a] = h
    tables.held_G[g] -= 1
    tables.held_G[h] += 1
    tables.gpu_s_G[g] -= tables.gpu_s_GE[g, a]
    tables.gpu_s_G[h] += tables.gpu_s_GE[h, a]
    if p != q:
        tables.server_s_N[p] -= tables.server_s_NE[p, a]
        tables.server_s_N[q] += tables.server_s_NE[q, a]
        _count(tables, p, a, -1)
        _count(tables, q, a, 0)


@cfunc
@nogil
@exceptval(check=False)
def _count(tables: ServerTables, n: Index, a: Index, less: Int) -> cython.void:
    """Adds one to a server's hits of expert a's tokens, or takes one off if `less` is -1; marks tokens with none and one."""
    none_W, sole_W, carry_W = tables.none_NW[n], tables.sole_NW[n], tables.carry_W
    carry_W[:] = tables.chosen_EW[a]
    none_W[:] = 0
    for b in range(tables.hits_NBW.shape[1]):
        digit_W = tables.hits_NBW[n, b]
        for w in range(carry_W.shape[0]):
            digit_W[w] ^= carry_W[w]
            carry_W[w] &= ~(digit_W[w] ^ less)
            if b > 0:
                none_W[w] |= digit_W[w]
    digit_W = tables.hits_NBW[n, 0]
    for w in range(carry_W.shape[0]):
        sole_W[w] = digit_W[w] & ~none_W[w]
        none_W[w] = ~(digit_W[w] | none_W[w])
