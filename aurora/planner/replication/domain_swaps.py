"""Replicas swapped between failure domains until no swap loses fewer experts: compiled.

Where all sets of domains can be listed the measure is exact, else the number of different holders by size, rarest first.
"""

import numpy as np
from numba import njit

LISTED = 12  # domains, at most, whose sets are listed
CLOSE = 1e-12  # relative: sums of float odds


@njit(cache=True)
def measured(mask_E, lacking, odds_F, size_F, turn_K, mark_F, value_V):
    """value_V: what experts lack of their guarantee; then, in the turn of turn_K, the odds of the sets that lose some
    expert."""
    value_V[:] = 0.0
    value_V[0] = lacking
    if len(odds_F) == 0:  # too many sets
        sorted_E = np.sort(mask_E)
        for at in range(len(sorted_E)):
            if at == 0 or sorted_E[at] != sorted_E[at - 1]:
                size, rest = 0, sorted_E[at]
                while rest:
                    rest &= rest - 1
                    size += 1
                value_V[turn_K[size]] += 1.0
        return
    mark_F[:] = False
    for mask in mask_E:
        mark_F[mask] = True
    bit = 1
    while bit < len(mark_F):
        for failed in range(len(mark_F)):
            if failed & bit and mark_F[failed ^ bit]:
                mark_F[failed] = True
        bit <<= 1
    for failed in range(len(mark_F)):
        if mark_F[failed]:
            value_V[turn_K[size_F[failed]]] += odds_F[failed]


@njit(cache=True)
def better(a_V, b_V):
    """-1, 0 or 1: whether a is less than b, equal or more; the first that differs decides."""
    for at in range(len(a_V)):
        slack = CLOSE * max(a_V[at], b_V[at])
        if a_V[at] < b_V[at] - slack:
            return -1
        if a_V[at] > b_V[at] + slack:
            return 1
    return 0


@njit(cache=True)
def lacks(count_D, nodes_D, distinct_domains, distinct_nodes):
    """How many domains and nodes an expert is short of."""
    on_domains, on_nodes = 0, 0
    for domain in range(len(count_D)):
        on_domains += count_D[domain] > 0
        on_nodes += min(count_D[domain], nodes_D[domain])
    return max(0, distinct_domains - on_domains) + max(0, distinct_nodes - on_nodes)


@njit(cache=True)
def improve(count_ED, slots_D, nodes_D, distinct_domains, distinct_nodes, odds_F, size_F, turn_K, kick_R2, most):
    """Swap replicas of count_ED (E, D), in place, while that lowers the measure; gives it, (1 + K,).

    After each descent two random swaps and another one, kick_R2 (R, 2) in [0, 1), kept unless worse. most: measures taken.
    turn_K: where in the measure sets of each size count, 0 for none (its first place, the guarantee, is added to).
    """
    experts, domains = count_ED.shape
    slots = slots_D.sum()
    expert_X, domain_X = np.full(slots, experts), np.empty(slots, np.int64)  # `experts` is an empty slot
    at = 0
    for domain in range(domains):
        end = at + slots_D[domain]
        domain_X[at:end] = domain
        for expert in range(experts):
            expert_X[at : at + count_ED[expert, domain]] = expert
            at += count_ED[expert, domain]
        at = end
    mask_E, lack_E = np.zeros(experts + 1, np.int64), np.zeros(experts + 1, np.int64)
    for expert in range(experts):
        for domain in range(domains):
            mask_E[expert] |= (count_ED[expert, domain] > 0) << domain
        lack_E[expert] = lacks(count_ED[expert], nodes_D, distinct_domains, distinct_nodes)
    held_ED = np.zeros((experts + 1, domains), np.int64)
    held_ED[:experts] = count_ED
    mark_F = np.zeros(len(odds_F), np.bool_)
    now_V, next_V, best_V = np.empty(turn_K.max() + 1), np.empty(turn_K.max() + 1), np.empty(turn_K.max() + 1)
    measured(mask_E[:experts], lack_E.sum(), odds_F, size_F, turn_K, mark_F, now_V)
    best_V[:] = now_V
    best_X = expert_X.copy()
    taken = 0
    for kick in range(len(kick_R2) + 1):
        lowered = True
        while lowered and taken < most:
            lowered = False
            for x in range(slots):
                for y in range(x + 1, slots):
                    if domain_X[x] == domain_X[y] or expert_X[x] == expert_X[y] or taken >= most:
                        continue
                    if not swap(x, y, expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes):
                        continue  # nobody's holders change, nor what they lack
                    taken += 1
                    measured(mask_E[:experts], lack_E[:experts].sum(), odds_F, size_F, turn_K, mark_F, next_V)
                    if better(next_V, now_V) < 0:
                        now_V[:] = next_V
                        lowered = True
                    else:
                        swap(x, y, expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes)
        if better(now_V, best_V) <= 0:
            best_V[:] = now_V
            best_X[:] = expert_X
        elif kick < len(kick_R2):
            for x in range(slots):  # back to the best
                expert_X[x] = best_X[x]
            refresh(expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes)
        if kick == len(kick_R2) or taken >= most:
            break
        for part in range(2):
            x = int(kick_R2[kick, part] * slots)
            y = int(kick_R2[kick, 1 - part] * slots * slots) % slots
            if domain_X[x] != domain_X[y] and expert_X[x] != expert_X[y]:
                swap(x, y, expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes)
        measured(mask_E[:experts], lack_E[:experts].sum(), odds_F, size_F, turn_K, mark_F, now_V)
    count_ED[:] = 0
    for x in range(slots):
        if best_X[x] < experts:
            count_ED[best_X[x], domain_X[x]] += 1
    return best_V


@njit(cache=True)
def swap(x, y, expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes):
    """The experts of two slots change places; gives whether that changed any expert's holders or what it lacks."""
    a, b, here, there = expert_X[x], expert_X[y], domain_X[x], domain_X[y]
    expert_X[x], expert_X[y] = b, a
    held_ED[a, here] -= 1
    held_ED[a, there] += 1
    held_ED[b, there] -= 1
    held_ED[b, here] += 1
    changed = False
    experts = len(held_ED) - 1
    for expert in (a, b):
        if expert < experts:
            mask = mask_E[expert]
            for domain in (here, there):
                mask = mask | (1 << domain) if held_ED[expert, domain] else mask & ~(1 << domain)
            lack = lacks(held_ED[expert], nodes_D, distinct_domains, distinct_nodes)
            changed = changed or mask != mask_E[expert] or lack != lack_E[expert]
            mask_E[expert], lack_E[expert] = mask, lack
    return changed


@njit(cache=True)
def refresh(expert_X, domain_X, held_ED, mask_E, lack_E, nodes_D, distinct_domains, distinct_nodes):
    """Holders and what experts lack, from the slots."""
    held_ED[:] = 0
    mask_E[:] = 0
    lack_E[:] = 0
    for x in range(len(expert_X)):
        held_ED[expert_X[x], domain_X[x]] += 1
    for expert in range(len(held_ED) - 1):
        for domain in range(held_ED.shape[1]):
            mask_E[expert] |= (held_ED[expert, domain] > 0) << domain
        lack_E[expert] = lacks(held_ED[expert], nodes_D, distinct_domains, distinct_nodes)
