"""Swaps of replicas between failure domains, compiled by Cython; `survival_probability` says what they are for."""

import cython
import numpy as np
from cython import cast, cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

CLOSE = declare(cython.double, 1e-12)  # relative: sums of float odds


@final
@cclass
class SurvivalAim:
    """Objective of `swap_local_search`: first few missing domains and nodes of experts, then low odds of losing an expert."""

    nodes_D: ConstInts1  # the nodes of each domain
    distinct_domains: Index  # on how many domains each expert should be
    distinct_nodes: Index  # on how many nodes each expert should be
    odds_F: Floats1  # the odds of each set of failed domains, by its bits
    rank_F: Ints1  # the measure's index for each set

    def __init__(self, nodes_D: ConstInts1, distinct_domains: Index, distinct_nodes: Index, odds_F, rank_F):
        self.nodes_D, self.distinct_domains, self.distinct_nodes = nodes_D, distinct_domains, distinct_nodes
        self.odds_F, self.rank_F = odds_F, rank_F


@final
@cclass
class DomainSlots:
    """The placement that `swap_local_search` changes. The last entry of arrays by expert stands for empty slots."""

    aim: SurvivalAim
    expert_X: Ints1  # the expert in each slot; the number of experts for an empty slot
    domain_X: Ints1  # the domain of each slot
    experts: Index
    held_ED: Ints2  # the replicas of each expert in each domain
    mask_E: Ints1  # the domains of each expert as bits
    lack_E: Ints1  # how many domains and nodes each expert lacks of its guarantee
    mark_F: Flags1  # whether a set of failed domains loses an expert
    now_V: Floats1  # the measure of the placement: what experts lack, then by aim.rank_F the odds of sets that lose an expert
    next_V: Floats1

    def __init__(self, aim: SurvivalAim, expert_X, domain_X, experts: Index):
        self.aim, self.expert_X, self.domain_X, self.experts = aim, expert_X.copy(), domain_X, experts
        self.held_ED = np.zeros((experts + 1, len(aim.nodes_D)), np.int64)
        self.mask_E, self.lack_E = np.zeros((2, experts + 1), np.int64)
        self.mark_F = np.zeros(len(aim.odds_F), np.uint8)
        self.now_V, self.next_V = np.zeros((2, max(aim.rank_F) + 1))


def search(aim: SurvivalAim, expert_X, domain_X, experts: Index, kick_R4: Ints2, most: Index):
    """Returns the experts in the slots (X,) of the best placement of the descents and their restarts.

    kick_R4: (R, 4), the slots of the two swaps of each restart.
    """
    slots = DomainSlots(aim, expert_X, domain_X, experts)
    best_X: Ints1 = expert_X.copy()
    best_V: Floats1 = np.zeros(len(slots.now_V))
    evaluations: Index = 0
    with nogil:
        _refresh(slots)
        _measure(slots, slots.now_V)
        best_V[:] = slots.now_V
        for kick in range(kick_R4.shape[0] + 1):
            evaluations = _descend(slots, evaluations, most)
            if not _is_less(best_V, slots.now_V):
                best_V[:] = slots.now_V
                best_X[:] = slots.expert_X
            if kick == kick_R4.shape[0] or evaluations >= most:
                break
            slots.expert_X[:] = best_X
            _refresh(slots)
            _swap(slots, kick_R4[kick, 0], kick_R4[kick, 1])
            _swap(slots, kick_R4[kick, 2], kick_R4[kick, 3])
            _measure(slots, slots.now_V)
    return np.asarray(best_X)


@cfunc
@nogil
@exceptval(check=False)
def _refresh(slots: DomainSlots) -> cython.void:
    """Computes what follows from the experts in the slots."""
    slots.held_ED[:, :] = 0
    for x in range(slots.expert_X.shape[0]):
        slots.held_ED[slots.expert_X[x], slots.domain_X[x]] += 1
    for expert in range(slots.experts):
        _update(slots, expert)


@cfunc
@nogil
@exceptval(check=False)
def _update(slots: DomainSlots, expert: Index) -> cython.bint:
    """Computes an expert's domains and what it lacks; returns whether either has changed."""
    mask: Int = 0
    on_domains: Index = 0
    on_nodes: Index = 0
    for domain in range(slots.held_ED.shape[1]):
        if slots.held_ED[expert, domain] > 0:
            mask |= cast(Int, 1) << domain
            on_domains += 1
            on_nodes += min(slots.held_ED[expert, domain], slots.aim.nodes_D[domain])
    lack = max(0, slots.aim.distinct_domains - on_domains) + max(0, slots.aim.distinct_nodes - on_nodes)
    changed: cython.bint = mask != slots.mask_E[expert] or lack != slots.lack_E[expert]
    slots.mask_E[expert], slots.lack_E[expert] = mask, lack
    return changed


@cfunc
@nogil
@exceptval(check=False)
def _measure(slots: DomainSlots, value_V: Floats1) -> cython.void:
    """Evaluates the measure of a placement into value_V."""
    bit: Index = 1
    value_V[:] = 0.0
    for expert in range(slots.experts):
        value_V[0] += slots.lack_E[expert]
    slots.mark_F[:] = 0
    for expert in range(slots.experts):
        slots.mark_F[slots.mask_E[expert]] = 1
    while bit < slots.mark_F.shape[0]:  # a set that contains a losing set loses an expert, too
        for failed in range(slots.mark_F.shape[0]):
            if failed & bit:
                slots.mark_F[failed] |= slots.mark_F[failed ^ bit]
        bit <<= 1
    for failed in range(slots.mark_F.shape[0]):
        if slots.mark_F[failed]:
            value_V[slots.aim.rank_F[failed]] += slots.aim.odds_F[failed]


@cfunc
@nogil
@exceptval(check=False)
def _is_less(a_V: Floats1, b_V: Floats1) -> cython.bint:
    """Returns whether measure a_V is less than b_V; the first entry that differs decides."""
    for at in range(a_V.shape[0]):
        slack = CLOSE * max(a_V[at], b_V[at])
        if a_V[at] < b_V[at] - slack:
            return True
        if a_V[at] > b_V[at] + slack:
            return False
    return False


@cfunc
@nogil
@exceptval(check=False)
def _descend(slots: DomainSlots, evaluations: Index, most: Index) -> Index:
    """Tries all pairs of slots again and again; keeps each swap that lowers the measure.

    Returns the evaluations of the measure so far; `evaluations` are those before.
    """
    lowered: cython.bint = True
    while lowered and evaluations < most:
        lowered = False
        for x in range(slots.expert_X.shape[0]):
            for y in range(x + 1, slots.expert_X.shape[0]):
                if evaluations < most and _swap(slots, x, y):
                    evaluations += 1
                    _measure(slots, slots.next_V)
                    if _is_less(slots.next_V, slots.now_V):
                        slots.now_V[:] = slots.next_V
                        lowered = True
                    else:
                        _swap(slots, x, y)
    return evaluations


@cfunc
@nogil
@exceptval(check=False)
def _swap(slots: DomainSlots, x: Index, y: Index) -> cython.bint:
    """Exchanges the experts of two slots. Returns whether that changed any expert's domains or what it lacks."""
    a, b, domain_a, domain_b = slots.expert_X[x], slots.expert_X[y], slots.domain_X[x], slots.domain_X[y]
    if domain_a == domain_b or a == b:
        return False
    slots.expert_X[x], slots.expert_X[y] = b, a
    slots.held_ED[a, domain_a] -= 1
    slots.held_ED[a, domain_b] += 1
    slots.held_ED[b, domain_b] -= 1
    slots.held_ED[b, domain_a] += 1
    changed_a, changed_b = _update(slots, a), _update(slots, b)
    return (changed_a and a < slots.experts) or (changed_b and b < slots.experts)
