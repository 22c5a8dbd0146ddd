"""Rounds of moves that each follow from the slots after the last, compiled by Cython; `move_rounds` says what they are for."""

import cython
import numpy as np
from cython import cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

SENDS = declare(cython.int, 1)
RECEIVES = declare(cython.int, 2)


@final
@cclass
class MovedSlots:
    """The slots while moves are put in sequence. In a round, slots are emptied at once, and filled when it ends.

    Axes: R the experts of all layers, L * E; N the GPUs of all layers, L * G; X the moves to make.
    """

    held_NP: Ints2  # the index on axis R of what each slot holds, EMPTY for none, less where a GPU has no slot
    wants_RG: Flags2  # whether a GPU is to hold an expert
    holds_RG: Flags2  # whether a GPU holds it
    least_2R: Ints2  # how many GPUs, and how many failure domains, hold an expert at least
    domain_G: ConstInts1  # the failure domain of each GPU
    expert_X: Ints1  # on axis R, the expert that a GPU is to receive
    gpu_X: Ints1  # that GPU
    place_X: Ints1  # that GPU on axis N
    waits_X: Flags1  # whether a move is left
    sort_3X: Ints2  # of moves that are left: their needs, where moves of each need begin, the moves by need
    move_X4: Ints2  # `moves` moves: round, index on axis X, sender, slot
    moves: Index
    round: Index
    busy_G: Flags1  # SENDS and RECEIVES, in this round
    seen_G: Flags1  # whether a failure domain is counted
    count_R: Ints1  # how many GPUs hold an expert
    sum_R: Ints1  # the sum of their numbers: where only one holds it, that one
    at_R: Ints1  # the last move that brings an expert to an idle GPU
    work_5G: Ints2  # experts that each GPU lacks, and that it alone can send; for `_circles`

    def __init__(self, held_NP, wants_RG, holds_RG, least_2R, domain_G, expert_X: Ints1, gpu_X: Ints1, place_X: Ints1):
        gpus, moves = len(domain_G), len(gpu_X)
        self.held_NP, self.wants_RG, self.holds_RG, self.least_2R = held_NP, wants_RG, holds_RG, least_2R
        self.domain_G, self.expert_X, self.gpu_X, self.place_X = domain_G, expert_X, gpu_X, place_X
        self.waits_X, self.sort_3X = np.ones(moves, np.uint8), np.zeros((3, moves + 2), np.int64)
        self.move_X4, self.moves, self.round = np.zeros((moves, 4), np.int64), 0, 0
        self.busy_G, self.seen_G = np.zeros((2, max(gpus, domain_G.max() + 1)), np.uint8)
        self.count_R, self.sum_R, self.at_R = (
            holds_RG.sum(axis=1),
            holds_RG @ np.arange(gpus),
            np.zeros(len(holds_RG), np.int64),
        )
        self.work_5G = np.zeros((5, gpus), np.int64)


def sequence(slots: MovedSlots):
    """Returns the moves round by round (X, 4), with the fields of `move_X4`, and those that cannot be made."""
    before: Index = -1
    with nogil:
        while slots.moves > before:
            before = slots.moves
            _one_round(slots)
    return np.asarray(slots.move_X4)[: slots.moves], np.flatnonzero(slots.waits_X)


@cfunc
@nogil
@exceptval(check=False)
def _one_round(slots: MovedSlots) -> cython.void:
    """Adds the moves of a round, and fills their slots."""
    before: Index = slots.moves
    slots.busy_G[:] = 0
    _sort_by_need(slots)
    for at in range(slots.gpu_X.shape[0] - before):
        x = slots.sort_3X[2, at]
        source = EMPTY if slots.busy_G[slots.gpu_X[x]] & RECEIVES else _source(slots, slots.expert_X[x])
        slot = EMPTY if source == EMPTY else _free_slot(slots, slots.place_X[x], slots.gpu_X[x])
        if slot != EMPTY:
            _move(slots, x, source, slot)
    _circles(slots)
    for at in range(before, slots.moves):
        x = slots.move_X4[at, 1]
        expert, g = slots.expert_X[x], slots.gpu_X[x]
        slots.held_NP[slots.place_X[x], slots.move_X4[at, 3]] = expert
        slots.holds_RG[expert, g] = True
        slots.count_R[expert] += 1
        slots.sum_R[expert] += g
    slots.round += 1


@cfunc
@nogil
@exceptval(check=False)
def _sort_by_need(slots: MovedSlots) -> cython.void:
    """Sorts the moves that are left: first those of the GPUs that must receive most, or send most that no other GPU holds."""
    most: Index = 0
    need_X, begin_X, sorted_X = slots.sort_3X[0], slots.sort_3X[1], slots.sort_3X[2]
    lacking_G, sending_G = slots.work_5G[0], slots.work_5G[1]
    slots.work_5G[:2] = 0
    for x in range(slots.gpu_X.shape[0]):
        if slots.waits_X[x]:
            lacking_G[slots.gpu_X[x]] += 1
            if slots.count_R[slots.expert_X[x]] == 1:
                sending_G[slots.sum_R[slots.expert_X[x]]] += 1
    for g in range(lacking_G.shape[0]):
        most = max(most, lacking_G[g], sending_G[g])
    begin_X[: most + 2] = 0
    for x in range(slots.gpu_X.shape[0]):
        if slots.waits_X[x]:
            need_X[x] = most - lacking_G[slots.gpu_X[x]]
            if slots.count_R[slots.expert_X[x]] == 1:
                need_X[x] = min(need_X[x], most - sending_G[slots.sum_R[slots.expert_X[x]]])
            begin_X[need_X[x] + 1] += 1
    for need in range(most):
        begin_X[need + 1] += begin_X[need]
    for x in range(slots.gpu_X.shape[0]):
        if slots.waits_X[x]:
            sorted_X[begin_X[need_X[x]]] = x
            begin_X[need_X[x]] += 1


@cfunc
@nogil
@exceptval(check=False)
def _source(slots: MovedSlots, expert: Index) -> Index:
    """A GPU that holds the expert and does not send in this round, or EMPTY."""
    for g in range(slots.domain_G.shape[0]):
        if slots.holds_RG[expert, g] and not slots.busy_G[g] & SENDS:
            return g
    return EMPTY


@cfunc
@nogil
@exceptval(check=False)
def _free_slot(slots: MovedSlots, place: Index, g: Index) -> Index:
    """A slot of the GPU that may be filled when the round ends, empty or with an expert that it may give up; or EMPTY."""
    for p in range(slots.held_NP.shape[1]):
        held = slots.held_NP[place, p]
        if held == EMPTY or (held >= 0 and not slots.wants_RG[held, g] and _keeps(slots, held, g, EMPTY)):
            return p
    return EMPTY


@cfunc
@nogil
@exceptval(check=False)
def _keeps(slots: MovedSlots, expert: Index, g: Index, to: Index) -> cython.bint:
    """Returns whether an expert keeps enough replicas and failure domains, once GPU g gives its to `to`, or to none (EMPTY)."""
    domains: Index = 0
    if slots.count_R[expert] - (to == EMPTY) < slots.least_2R[0, expert]:
        return False
    if slots.least_2R[1, expert] == 1:
        return True
    slots.seen_G[:] = 0
    for h in range(slots.domain_G.shape[0]):
        if h == to or (h != g and slots.holds_RG[expert, h]):
            domains += not slots.seen_G[slots.domain_G[h]]
            slots.seen_G[slots.domain_G[h]] = 1
    return domains >= slots.least_2R[1, expert]


@cfunc
@nogil
@exceptval(check=False)
def _move(slots: MovedSlots, x: Index, source: Index, slot: Index) -> cython.void:
    """Adds a move to the round, and empties the slot that it takes."""
    g, held = slots.gpu_X[x], slots.held_NP[slots.place_X[x], slot]
    if held != EMPTY:
        slots.held_NP[slots.place_X[x], slot] = EMPTY
        slots.holds_RG[held, g] = False
        slots.count_R[held] -= 1
        slots.sum_R[held] -= g
    slots.busy_G[source] |= SENDS
    slots.busy_G[g] |= RECEIVES
    slots.waits_X[x] = False
    slots.move_X4[slots.moves, 0], slots.move_X4[slots.moves, 1] = slots.round, x
    slots.move_X4[slots.moves, 2], slots.move_X4[slots.moves, 3] = source, slot
    slots.moves += 1


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index, onward=Index)
def _circles(slots: MovedSlots) -> cython.void:
    """Adds moves of GPUs that wait for each other: each sends an expert to the next, in place of what that sends."""
    gpus: Index = slots.domain_G.shape[0]
    begun_G, slot_G, sent_G = slots.work_5G[2], slots.work_5G[3], slots.work_5G[4]
    slots.at_R[:] = EMPTY
    for x in range(slots.gpu_X.shape[0]):
        if slots.waits_X[x] and not slots.busy_G[slots.gpu_X[x]]:
            slots.at_R[slots.expert_X[x]] = x
    for layer in range(slots.held_NP.shape[0] // gpus):
        slots.work_5G[2:] = EMPTY
        for start in range(gpus):
            g = start
            while g != EMPTY and begun_G[g] == EMPTY and not slots.busy_G[g]:
                begun_G[g], onward = start, EMPTY
                for p in range(slots.held_NP.shape[1]):
                    held = slots.held_NP[layer * gpus + g, p]
                    if held < 0 or slots.wants_RG[held, g] or slots.at_R[held] == EMPTY:
                        continue
                    to = slots.gpu_X[slots.at_R[held]]
                    if not slots.busy_G[to] and _keeps(slots, held, g, to):
                        slot_G[g], sent_G[g], onward = p, slots.at_R[held], to
                        break
                g = onward
            while g != EMPTY and begun_G[g] == start and not slots.busy_G[g] & SENDS:
                to = slots.gpu_X[sent_G[g]]
                _move(slots, sent_G[g], g, slot_G[to])
                g = to
