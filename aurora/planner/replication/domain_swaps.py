"""Swap local search over failure domains: replicas are swapped until no swap makes the loss of an expert less likely. Compiled.

The measure is lexicographic: first how many domains and nodes experts lack of their guarantee, then the odds that some expert
is lost. The odds are exact where all sets of failed domains can be listed. Otherwise the measure counts the different sets of
domains that hold an expert, by size, smallest first.

It has slots of its own, not those of `placement/slot_state`: a domain may hold an expert several times, and nothing adds up.
"""

from typing import Any, NamedTuple

import numpy as np

from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit

MAX_LISTED_DOMAINS = 12  # all sets of failed domains are listed up to this number of domains
CLOSE = 1e-12  # relative: sums of float odds


class SurvivalAim(NamedTuple):
    """Objective of the search: first the domains and nodes that experts lack, then the odds of losing an expert."""

    nodes_D: Any  # (D,) int64, the nodes of each domain
    distinct_domains: Any  # on how many domains each expert should be
    distinct_nodes: Any  # on how many nodes each expert should be
    odds_F: Any  # (F,) float64, the odds of each set of failed domains, by its bits; empty where sets are not listed
    size_F: Any  # (F,) int64, the number of domains in each set; empty where sets are not listed
    rank_K: Any  # (D + 1,) int64: the measure's index for sets of k failed domains, 0 (the guarantee) if they do not count


class SwapState(NamedTuple):
    """A placement during the search. The last row of arrays by expert stands for empty slots."""

    expert_X: Any  # (X,) int64, the expert in each slot; the number of experts for an empty slot
    domain_X: Any  # (X,) int64, the domain of each slot
    held_ED: Any  # (E + 1, D) int64, the replicas of each expert in each domain
    mask_E: Any  # (E + 1,) int64, the domains of each expert as bits
    lack_E: Any  # (E + 1,) int64, how many domains and nodes each expert lacks of its guarantee


def swap_local_search(count_ED: IntArray, slots_D: IntArray, aim: SurvivalAim, kick_R2: FloatArray, most: int) -> IntArray:
    """Swaps replicas while that lowers the measure, with random restarts.

    After each descent come two random swaps (a kick) and another descent; the result is kept unless it is worse than the best.

    Args:
        count_ED: (E, D) int64, the replicas of each expert in each domain at the start.
        slots_D: (D,) int64, slots of each domain.
        aim: the measure.
        kick_R2: (R, 2) random numbers in [0, 1), a row for each kick.
        most: how often the measure is evaluated at most.

    Returns:
        (E, D) int64, as count_ED, the best placement.
    """
    (experts, domains), empty_D = count_ED.shape, slots_D - count_ED.sum(axis=0)
    expert_X = np.repeat(np.tile(np.arange(experts + 1), domains), np.vstack([count_ED, empty_D]).T.ravel())
    domain_X = np.repeat(np.arange(domains), slots_D)
    _search(expert_X, domain_X, experts, aim, kick_R2, most)
    found_ED = np.zeros((experts + 1, domains), dtype=np.int64)
    np.add.at(found_ED, (expert_X, domain_X), 1)
    return found_ED[:-1]


@njit(cache=True)
def _search(expert_X, domain_X, experts, aim, kick_R2, most):
    """The descents and their restarts; writes the experts in the slots of the best placement into expert_X."""
    slots, domains = len(expert_X), len(aim.nodes_D)
    held_ED, nothing_E = np.zeros((experts + 1, domains), np.int64), np.zeros(experts + 1, np.int64)
    state = SwapState(expert_X.copy(), domain_X, held_ED, nothing_E, nothing_E.copy())
    _refresh(state, aim)
    mark_F = np.zeros(len(aim.odds_F), np.bool_)
    now_V, next_V = np.empty(aim.rank_K.max() + 1), np.empty(aim.rank_K.max() + 1)
    _measure(state, aim, mark_F, now_V)
    best_V, taken = now_V.copy(), 0
    for kick in range(len(kick_R2) + 1):
        taken = _descend(state, aim, mark_F, now_V, next_V, taken, most)
        if _compare(now_V, best_V) <= 0:
            best_V[:] = now_V
            expert_X[:] = state.expert_X
        elif kick < len(kick_R2):
            state.expert_X[:] = expert_X
            _refresh(state, aim)
        if kick == len(kick_R2) or taken >= most:
            break
        for part in range(2):
            x = int(kick_R2[kick, part] * slots)
            y = int(kick_R2[kick, 1 - part] * slots * slots) % slots
            if state.domain_X[x] != state.domain_X[y] and state.expert_X[x] != state.expert_X[y]:
                _swap(x, y, state, aim)
        _measure(state, aim, mark_F, now_V)


@njit(cache=True)
def _measure(state, aim, mark_F, value_V):
    """Evaluates the measure of a placement into value_V; mark_F (F,) bool is working memory.

    First comes what experts lack of their guarantee, then at aim.rank_K the odds of the sets that lose an expert.
    """
    mask_E = state.mask_E[:-1]
    value_V[:] = 0.0
    value_V[0] = state.lack_E[:-1].sum()
    if len(aim.odds_F) == 0:  # too many sets
        sorted_E = np.sort(mask_E)
        for at in range(len(sorted_E)):
            if at == 0 or sorted_E[at] != sorted_E[at - 1]:
                size, rest = 0, sorted_E[at]
                while rest:
                    rest &= rest - 1
                    size += 1
                value_V[aim.rank_K[size]] += 1.0
        return
    _mark_losing_sets(mask_E, mark_F)
    for failed in range(len(mark_F)):
        if mark_F[failed]:
            value_V[aim.rank_K[aim.size_F[failed]]] += aim.odds_F[failed]


@njit(cache=True)
def _mark_losing_sets(mask_E, mark_F):
    """Mark every set of failed domains, by its bits, that contains all domains of some expert."""
    mark_F[:] = False
    for mask in mask_E:
        mark_F[mask] = True
    bit = 1
    while bit < len(mark_F):
        for failed in range(len(mark_F)):
            if failed & bit and mark_F[failed ^ bit]:
                mark_F[failed] = True
        bit <<= 1


@njit(cache=True)
def _compare(a_V, b_V):
    """-1, 0 or 1 if measure a_V is less than, equal to or more than b_V; the first entry that differs decides."""
    for at in range(len(a_V)):
        slack = CLOSE * max(a_V[at], b_V[at])
        if a_V[at] < b_V[at] - slack:
            return -1
        if a_V[at] > b_V[at] + slack:
            return 1
    return 0


@njit(cache=True)
def _descend(state, aim, mark_F, now_V, next_V, taken, most):
    """Try all pairs of slots again and again; keep each swap that lowers the measure.

    Returns the evaluations of the measure so far; `taken` are those before.
    """
    slots = len(state.expert_X)
    lowered = True
    while lowered and taken < most:
        lowered = False
        for x in range(slots):
            for y in range(x + 1, slots):
                if state.domain_X[x] == state.domain_X[y] or state.expert_X[x] == state.expert_X[y] or taken >= most:
                    continue
                if not _swap(x, y, state, aim):
                    continue  # the measure does not change
                taken += 1
                _measure(state, aim, mark_F, next_V)
                if _compare(next_V, now_V) < 0:
                    now_V[:] = next_V
                    lowered = True
                else:
                    _swap(x, y, state, aim)
    return taken


@njit(cache=True)
def _swap(x, y, state, aim):
    """Exchange the experts of two slots. Returns whether that changed any expert's domains or what it lacks."""
    a, b, here, there = state.expert_X[x], state.expert_X[y], state.domain_X[x], state.domain_X[y]
    state.expert_X[x], state.expert_X[y] = b, a
    state.held_ED[a, here] -= 1
    state.held_ED[a, there] += 1
    state.held_ED[b, there] -= 1
    state.held_ED[b, here] += 1
    changed = False
    experts = len(state.held_ED) - 1
    for expert in (a, b):
        if expert < experts:
            mask = state.mask_E[expert]
            for domain in (here, there):
                mask = mask | (1 << domain) if state.held_ED[expert, domain] else mask & ~(1 << domain)
            lack = _lack(state.held_ED[expert], aim)
            changed = changed or mask != state.mask_E[expert] or lack != state.lack_E[expert]
            state.mask_E[expert], state.lack_E[expert] = mask, lack
    return changed


@njit(cache=True)
def _lack(count_D, aim):
    """Number of domains and nodes that an expert with count_D (D,) replicas lacks."""
    on_domains, on_nodes = 0, 0
    for domain in range(len(count_D)):
        on_domains += count_D[domain] > 0
        on_nodes += min(count_D[domain], aim.nodes_D[domain])
    return max(0, aim.distinct_domains - on_domains) + max(0, aim.distinct_nodes - on_nodes)


@njit(cache=True)
def _refresh(state, aim):
    """Compute held_ED, mask_E and lack_E anew from the slots."""
    state.held_ED[:] = 0
    state.mask_E[:] = 0
    state.lack_E[:] = 0
    for x in range(len(state.expert_X)):
        state.held_ED[state.expert_X[x], state.domain_X[x]] += 1
    for expert in range(len(state.held_ED) - 1):
        for domain in range(state.held_ED.shape[1]):
            state.mask_E[expert] |= (state.held_ED[expert, domain] > 0) << domain
        state.lack_E[expert] = _lack(state.held_ED[expert], aim)
