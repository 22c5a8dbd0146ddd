"""Divides the moves from one placement to another into rounds: in a round each GPU sends and receives at most one expert.

`move_sequence` moves experts in place. A GPU sends only experts that it holds when the round begins; received weights take
their slots when the round ends. After every round the slots are a valid placement, in which every expert has its min replicas.
So a system can serve between rounds, and can stop after any of them if a GPU is lost.

`buffered_rounds` moves experts into buffers, whose contents take their slots after the last round, as in vLLM's EPLB.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall.decomposition import slots
from aurora.types.arrays import BoolArray, IntArray
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY

Flow = tuple[int, int, tuple[int, ...]]  # sender, receiver, experts


class Move(NamedTuple):
    """A transfer of one expert's weights to a slot.

    Attributes:
        round: number of the round; moves of a round run at the same time, rounds one after the other.
        layer: index of the MoE layer.
        expert: the expert.
        src: the GPU that sends the weights.
        dst: the GPU that receives the weights.
        slot: the slot of `dst` that the expert takes when the round ends.
    """

    round: int
    layer: int
    expert: int
    src: int
    dst: int
    slot: int


def rounds_of(moves: Sequence[Move]) -> list[list[Move]]:
    """Returns one list of moves for each round, in sequence."""
    return [list(of_round) for _, of_round in groupby(moves, attrgetter("round"))]


def fill(held_LGP: IntArray, moves: Sequence[Move]) -> None:
    """Writes the experts of `moves` into their slots in held_LGP (L, G, P)."""
    for move in moves:
        held_LGP[move.layer, move.dst, move.slot] = move.expert


class _State(NamedTuple):
    """The slots while moves are put in sequence. In a round, slots are emptied at once, and filled when it ends.

    Attributes:
        held_LGP: (L, G, P) int64, the expert in each slot, EMPTY for none.
        used_LGP: (L, G, P) bool, whether a GPU has the slot.
        wants_LGE: (L, G, E) bool, whether a GPU is to hold an expert.
        holds_LEG: (L, E, G) bool, whether a GPU holds it.
        count_LE: (L, E) int64, how many GPUs hold it.
        sum_LE: (L, E) int64, the sum of their numbers: where only one holds it, that one.
        domain_G: (G,) int64, the failure domain of each GPU.
        least_LE: (L, E) int64, how many GPUs hold an expert at least.
        least_domains_LE: (L, E) int64, how many failure domains hold an expert at least.
    """

    held_LGP: IntArray
    used_LGP: BoolArray
    wants_LGE: BoolArray
    holds_LEG: BoolArray
    count_LE: IntArray
    sum_LE: IntArray
    domain_G: IntArray
    least_LE: IntArray
    least_domains_LE: IntArray


class _Wanted(NamedTuple):
    """The experts that GPUs are to receive."""

    layer_X: IntArray
    gpu_X: IntArray
    expert_X: IntArray


def move_sequence(
    held_LGP: IntArray, wanted_LGP: IntArray, min_replicas: int = 1, domain_G: IntArray | None = None
) -> tuple[tuple[Move, ...], IntArray]:
    """Divides the moves between two placements into rounds.

    A move waits while the slot that it needs holds a replica without which an expert would have fewer than `min_replicas`. If
    moves wait for each other in a cycle, all moves of the cycle are made in one round.

    Args:
        held_LGP: (L, G, P) int64, the expert in each slot now, EMPTY for none. Each expert of `wanted_LGP` is held. If a GPU
            holds an expert twice, as EPLB's may, the second slot counts as empty.
        wanted_LGP: (L, G, P) int64, the experts that each GPU is to hold; their slots on the GPU do not matter.
        min_replicas: minimum number of GPUs, and of failure domains, that hold each expert after every round; if `held_LGP` has
            fewer, as many as there.
        domain_G: (G,) int64, the failure domain of each GPU; None: each is its own.

    Returns:
        (moves, reached_LGP): the moves, sorted by round, and the slots after all of them. Each GPU then holds its experts of
        `wanted_LGP`; experts that stay on a GPU keep their slots there, and slots without a wanted expert are empty. A layer
        stays as it is if no sequence was found that keeps `min_replicas`.
    """
    gpus, experts = held_LGP.shape[1], int(max(held_LGP.max(), wanted_LGP.max())) + 1
    domain_G = np.arange(gpus) if domain_G is None else domain_G
    again_LGP = np.tril(held_LGP[..., None] == held_LGP[..., None, :], -1).any(axis=3)
    now_LGP = np.where(again_LGP, EMPTY, held_LGP)
    wants_LGE, holds_LGE = _holds(wanted_LGP, experts), _holds(now_LGP, experts)
    state = _State(
        now_LGP,
        (held_LGP != EMPTY) | (wanted_LGP != EMPTY),  # GPUs may have fewer slots than the tables
        np.ascontiguousarray(wants_LGE),
        np.ascontiguousarray(holds_LGE.swapaxes(1, 2)),
        holds_LGE.sum(axis=1),
        (holds_LGE * np.arange(gpus)[:, None]).sum(axis=1),
        domain_G,
        _least_LE(wants_LGE, holds_LGE, np.arange(gpus), min_replicas),
        _least_LE(wants_LGE, holds_LGE, domain_G, min_replicas),
    )
    missing = _Wanted(*map(np.ascontiguousarray, np.nonzero(wants_LGE & ~holds_LGE)))
    move_X6, left_X = _sequence(state, missing)
    if len(left_X):
        assert min_replicas > 1, "each expert of `wanted_LGP` is held"
        stays_L = np.isin(np.arange(len(held_LGP)), missing.layer_X[left_X])
        possible_LGP = np.where(stays_L[:, None, None], held_LGP, wanted_LGP)
        return move_sequence(held_LGP, possible_LGP, min_replicas, domain_G)
    kept_LGP = (now_LGP != EMPTY) & np.take_along_axis(wants_LGE, np.maximum(now_LGP, 0), axis=2)
    return tuple(map(Move._make, move_X6.tolist())), np.where(kept_LGP, now_LGP, EMPTY)


def buffered_rounds(held_RP: IntArray, wanted_RP: IntArray) -> list[list[Flow]]:
    """Divides a layer's moves into rounds in which each rank sends to at most one rank and receives from at most one.

    Weights arrive in buffers, so ranks send what they held before the first round, and no slot has to be free. All rounds
    together take as long as the busiest rank sends or receives, which is the least possible.

    Args:
        held_RP: (R, P) int64, the expert in each slot of each rank, EMPTY for none.
        wanted_RP: (R, P) int64, the same afterwards.

    Returns:
        For each round its flows: (sender, receiver, experts). Each expert that a rank wants and does not hold arrives once;
        experts that no rank holds are left out.

    Source: Birkhoff 1946, see `aurora.algorithms.alltoall.decomposition.slots`.
    """
    ranks = len(held_RP)
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, held_P in enumerate(held_RP.tolist()):
        for expert in set(held_P) - {EMPTY}:
            holders[expert].append(rank)
    lacking = [
        (expert, rank)
        for rank, wanted_P in enumerate(wanted_RP.tolist())
        for expert in sorted(set(wanted_P) - set(held_RP[rank].tolist()) - {EMPTY})
        if expert in holders
    ]
    lacking.sort(key=lambda move: len(holders[move[0]]))  # those with a choice of senders last
    work_RR = np.zeros((ranks, ranks), dtype=np.int64)
    waiting: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for expert, rank in lacking:
        sender = min(holders[expert], key=lambda holder: work_RR[holder].sum())
        work_RR[sender, rank] += 1
        waiting[sender, rank].append(expert)
    _, partner_XR, units_XR = slots(work_RR, ranks * ranks)
    return [
        [
            (sender, partner, tuple(waiting[sender, partner].popleft() for _ in range(units)))
            for sender, (partner, units) in enumerate(zip(partner_R.tolist(), units_R.tolist(), strict=True))
            if units
        ]
        for partner_R, units_R in zip(partner_XR, units_XR, strict=True)
    ]


def _holds(held_LGP: IntArray, experts: int) -> BoolArray:
    """(L, G, E) whether a GPU holds an expert."""
    holds_LGE = np.zeros((*held_LGP.shape[:2], experts + 1), dtype=np.bool_)
    np.put_along_axis(holds_LGE, held_LGP, True, axis=2)  # EMPTY is the last
    return holds_LGE[:, :, :experts]


def _least_LE(wants_LGE: BoolArray, holds_LGE: BoolArray, domain_G: IntArray, min_replicas: int) -> IntArray:
    """(L, E) how many failure domains hold an expert at least: `min_replicas`, unless either table has it on fewer; or one."""
    if min_replicas == 1:
        return np.ones((len(wants_LGE), wants_LGE.shape[2]), dtype=np.int64)
    sorted_G = np.argsort(domain_G, kind="stable")
    first_D = np.unique(domain_G[sorted_G], return_index=True)[1]
    sum_2LE = [np.logical_or.reduceat(has_LGE[:, sorted_G], first_D, axis=1).sum(axis=1) for has_LGE in (wants_LGE, holds_LGE)]
    return np.asarray(np.clip(np.minimum(*sum_2LE), 1, min_replicas), dtype=np.int64)


@njit(cache=True, nogil=True)
def _sequence(state, missing):
    """Returns the moves round by round (X, 6), with the fields of Move, and what cannot be moved."""
    gpus = state.held_LGP.shape[1]
    move_X6, moves, number = np.empty((len(missing.layer_X), 6), dtype=np.int64), np.int64(0), np.int64(0)
    left_X, at_LE = np.arange(len(missing.layer_X)), np.full(state.count_LE.shape, -1)
    waits_X = np.ones(len(missing.layer_X), dtype=np.bool_)
    while len(left_X):
        out_G, into_G, before = np.zeros(gpus, dtype=np.bool_), np.zeros(gpus, dtype=np.bool_), moves
        for x in _by_need(state, missing, left_X):
            layer, g, e = missing.layer_X[x], missing.gpu_X[x], missing.expert_X[x]
            source = _source(state, layer, e, out_G) if not into_G[g] else EMPTY
            slot = _free_slot(state, layer, g) if source != EMPTY else EMPTY
            if slot != EMPTY:
                _empty(state, layer, g, slot)
                move_X6[moves] = number, layer, e, source, g, slot
                moves += 1
                out_G[source] = into_G[g] = True
                waits_X[x] = False
        if (~(out_G | into_G)).sum() > 1:
            left_X = left_X[waits_X[left_X]]
            moves = _circles(state, missing, left_X, at_LE, waits_X, out_G, into_G, move_X6, moves, number)
        if moves == before:
            break
        for x in range(before, moves):
            layer, e, g, slot = move_X6[x, 1], move_X6[x, 2], move_X6[x, 4], move_X6[x, 5]
            state.held_LGP[layer, g, slot] = e
            state.holds_LEG[layer, e, g] = True
            state.count_LE[layer, e] += 1
            state.sum_LE[layer, e] += g
        left_X = left_X[waits_X[left_X]]
        number += 1
    return move_X6[:moves], left_X


@njit(cache=True, nogil=True)
def _by_need(state, missing, left_X):
    """Sorts the moves that are left: first those of the GPUs that must receive most, or send most that no other GPU holds."""
    lacking_G, sending_G = np.zeros(state.held_LGP.shape[1], dtype=np.int64), np.zeros(state.held_LGP.shape[1], dtype=np.int64)
    for x in left_X:
        layer, g, e = missing.layer_X[x], missing.gpu_X[x], missing.expert_X[x]
        lacking_G[g] += 1
        if state.count_LE[layer, e] == 1:
            sending_G[state.sum_LE[layer, e]] += 1
    need_X, most = np.empty(len(left_X), dtype=np.int64), max(lacking_G.max(), sending_G.max())
    begin_N = np.zeros(most + 2, dtype=np.int64)
    for at, x in enumerate(left_X):
        layer, g, e = missing.layer_X[x], missing.gpu_X[x], missing.expert_X[x]
        alone = sending_G[state.sum_LE[layer, e]] if state.count_LE[layer, e] == 1 else 0
        need_X[at] = most - max(lacking_G[g], alone)
        begin_N[need_X[at] + 1] += 1
    begin_N = begin_N.cumsum()
    sorted_X = np.empty_like(left_X)
    for at, x in enumerate(left_X):
        sorted_X[begin_N[need_X[at]]] = x
        begin_N[need_X[at]] += 1
    return sorted_X


@njit(cache=True, nogil=True)
def _source(state, layer, e, out_G):
    """A GPU that holds the expert and does not send in this round, or EMPTY."""
    if state.count_LE[layer, e] == 1:
        only = state.sum_LE[layer, e]
        return EMPTY if out_G[only] else only
    for g in range(len(out_G)):
        if state.holds_LEG[layer, e, g] and not out_G[g]:
            return g
    return EMPTY


@njit(cache=True, nogil=True)
def _free_slot(state, layer, g):
    """A slot of the GPU that may be filled when the round ends, empty or with an expert that it may give up; or EMPTY."""
    for p in range(state.held_LGP.shape[2]):
        e = state.held_LGP[layer, g, p]
        if not state.used_LGP[layer, g, p]:
            continue
        if e == EMPTY or (not state.wants_LGE[layer, g, e] and _keeps(state, layer, e, g, EMPTY)):
            return p
    return EMPTY


@njit(cache=True, nogil=True)
def _keeps(state, layer, e, g, to):
    """Returns whether an expert keeps enough replicas and failure domains, once GPU g gives its to `to`, or to none (EMPTY)."""
    if state.count_LE[layer, e] - (to == EMPTY) < state.least_LE[layer, e]:
        return False
    if state.least_domains_LE[layer, e] == 1:
        return True
    seen_D = np.zeros(state.domain_G.max() + 1, dtype=np.bool_)
    for h in range(len(state.domain_G)):
        if h == to or (h != g and state.holds_LEG[layer, e, h]):
            seen_D[state.domain_G[h]] = True
    return seen_D.sum() >= state.least_domains_LE[layer, e]


@njit(cache=True, nogil=True)
def _empty(state, layer, g, p):
    """Empties a slot."""
    e = state.held_LGP[layer, g, p]
    if e != EMPTY:
        state.held_LGP[layer, g, p] = EMPTY
        state.holds_LEG[layer, e, g] = False
        state.count_LE[layer, e] -= 1
        state.sum_LE[layer, e] -= g


@njit(cache=True, nogil=True)
def _circles(state, missing, left_X, at_LE, waits_X, out_G, into_G, move_X6, moves, number):
    """Adds moves of GPUs that wait for each other: each sends an expert to the next, in place of what that sends."""
    layers, gpus, width = state.held_LGP.shape
    at_LE[:] = -1
    for x in left_X:
        if not into_G[missing.gpu_X[x]] and not out_G[missing.gpu_X[x]]:
            at_LE[missing.layer_X[x], missing.expert_X[x]] = x
    for layer in range(layers):
        seen_G, slot_G, sent_G = np.full(gpus, -1), np.full(gpus, -1), np.full(gpus, -1)
        for start in range(gpus):
            g = start
            while g != EMPTY and seen_G[g] == -1 and not out_G[g] and not into_G[g]:
                seen_G[g], onward = start, EMPTY
                for p in range(width):
                    e = state.held_LGP[layer, g, p]
                    if e == EMPTY or state.wants_LGE[layer, g, e] or at_LE[layer, e] == -1:
                        continue
                    to = missing.gpu_X[at_LE[layer, e]]
                    if not out_G[to] and not into_G[to] and _keeps(state, layer, e, g, to):
                        slot_G[g], sent_G[g], onward = p, at_LE[layer, e], to
                        break
                g = onward
            if g == EMPTY or seen_G[g] != start or out_G[g] or into_G[g]:
                continue
            first = g
            while True:
                x = sent_G[g]
                to = missing.gpu_X[x]
                move_X6[moves] = number, layer, missing.expert_X[x], g, to, slot_G[to]
                moves += 1
                out_G[g] = into_G[to] = True
                waits_X[x] = False
                _empty(state, layer, g, slot_G[g])
                g = to
                if g == first:
                    break
    return moves
