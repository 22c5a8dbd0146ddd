"""Co-activation: how often tokens choose both of two experts, groups of such experts, and a bound for deduplicated traffic."""

from itertools import product

import numpy as np

from aurora.planner.network.lower_bounds import spread_split
from aurora.types.arrays import FloatArray, IntArray


def distinct_tokens(experts_UK: IntArray, source_U: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Merges tokens that have the same experts (U, K) and source rank (U,).

    Returns:
        (experts_VK, source_V, count_V), int64: (V, K) the experts of each distinct token in rising order, (V,) its source rank
        and (V,) how many tokens are equal to it.
    """
    ranked_UX = np.column_stack([source_U, np.sort(experts_UK.astype(np.int64), axis=1)])
    rows_VX, count_V = np.unique(ranked_UX, axis=0, return_counts=True)
    return rows_VX[:, 1:], rows_VX[:, 0], count_V


def coactivation_counts(experts_VK: IntArray, source_V: IntArray, count_V: IntArray, experts: int, gpus: int) -> IntArray:
    """Returns (S, E, E) int64: tokens of each source that choose both experts; the diagonal counts the tokens of each expert.

    experts_VK, source_V, count_V: as `distinct_tokens` returns them.
    """
    counts_SX = np.zeros((gpus, experts * experts), dtype=np.int64)
    for source in range(gpus):
        own_V = source_V == source
        for a_V, b_V in product(experts_VK[own_V].T, repeat=2):
            pairs = np.bincount(a_V * experts + b_V, weights=count_V[own_V], minlength=experts * experts)
            counts_SX[source] += pairs.astype(np.int64)
    return counts_SX.reshape(gpus, experts, experts)


def coactivation_groups(counts_EE: IntArray, slots_G: IntArray) -> IntArray:
    """Groups experts that the same tokens choose, one group per GPU.

    Each group starts with the busiest expert that is left. It then takes the expert whose tokens most often also choose
    experts of the group, until its slots are full or its load would pass an equal share of the load that is left.

    Args:
        counts_EE: (E, E) int64, tokens that choose both experts, as `coactivation_counts` summed over sources.
        slots_G: (G,) int64, how many experts each GPU can hold; at least E in all.

    Returns:
        (E,) int64, the GPU of each expert.
    """
    experts, load_E = len(counts_EE), np.diag(counts_EE)
    gpu_E = np.full(experts, -1, dtype=np.int64)
    for gpu, slots in enumerate(slots_G.tolist()):
        later = int(slots_G[gpu + 1 :].sum())
        near_E, held, load = np.zeros(experts, dtype=np.int64), 0, 0
        fair = load_E[gpu_E < 0].sum() / (len(slots_G) - gpu)
        while held < slots and (left := np.flatnonzero(gpu_E < 0)).size:
            must = left.size > later
            if held:
                left = left[np.argsort(-(near_E[left] / np.maximum(load_E[left], 1)), kind="stable")]
                if not must and load + load_E[left[0]] / 2 > fair:
                    break
            else:
                left = left[np.argsort(-load_E[left], kind="stable")]
            chosen = int(left[0])
            gpu_E[chosen] = gpu
            near_E += counts_EE[chosen]
            held, load = held + 1, load + int(load_E[chosen])
    return gpu_E


def deduplicated_bound(
    counts_SEE: IntArray,
    top_k: int,
    slots_G: IntArray,
    expert_s_GE: FloatArray,
    gate_s_G: FloatArray,
    port_s_XG: FloatArray,
) -> float:
    """Returns a lower bound on Eq. 1 without aggregation, for all unreplicated placements, if tokens are deduplicated.

    A GPU receives at least the tokens of any one expert that it holds, and at least `_shared_GE` for all its experts together.
    A source sends at least `least_sent`.

    Args:
        counts_SEE: (S, E, E) int64, as `coactivation_counts` returns them.
        top_k: experts per token.
        slots_G: (G,) int64, how many experts each GPU can hold.
        expert_s_GE: (G, E) seconds of each expert on each GPU.
        gate_s_G: (G,) seconds of the gate.
        port_s_XG: (4, G) seconds per token: sent and received in the dispatch, sent and received in the combine.

    Returns:
        Seconds.

    Source:
        Eq. 1: Aurora (arXiv:2410.17043).
    """
    send_s_G, recv_s_G, csend_s_G, crecv_s_G = port_s_XG
    own_GE = np.diagonal(counts_SEE, axis1=1, axis2=2)
    arriving_GE = own_GE.sum(axis=0) - own_GE  # tokens that start on GPU g are not sent to experts there
    shared_GE, sent_G = _shared_GE(counts_SEE, top_k, slots_G), least_sent(counts_SEE, top_k, slots_G)

    def either(work_GE: FloatArray, row_s_G: FloatArray) -> float:
        """The larger of two bounds: the longest expert on its fastest GPU, and all experts divided over all GPUs."""
        whole_GE, part_GE = (work_GE + rows_GE * row_s_G[:, None] for rows_GE in (arriving_GE, shared_GE))
        return max(float(whole_GE.min(axis=0).max(initial=0.0)), spread_split(part_GE))

    idle_GE = np.zeros_like(expert_s_GE)
    first_s = max(float((gate_s_G + sent_G * send_s_G).max()), float(gate_s_G.min()) + either(idle_GE, recv_s_G))
    second_s = max(float((sent_G * crecv_s_G).max()), either(expert_s_GE, csend_s_G))
    return first_s + second_s


def _shared_GE(counts_SEE: IntArray, top_k: int, slots_G: IntArray) -> FloatArray:
    """(G, E): a lower bound on expert e's part of the tokens that GPU g receives, each divided evenly over its experts there.

    The experts there that tokens of e choose too are at most the slots_G[g] - 1 that they choose most often.
    """
    elsewhere_GEE = counts_SEE.sum(axis=0) - counts_SEE
    common_GE = np.stack(
        [_busiest(_others(each_EE), slots - 1) for each_EE, slots in zip(elsewhere_GEE, slots_G.tolist(), strict=True)]
    )
    return _divided(np.diagonal(elsewhere_GEE, axis1=1, axis2=2), common_GE, top_k)


def _divided(tokens_XE: IntArray, common_XE: IntArray, top_k: int) -> FloatArray:
    """A lower bound on sum 1 / c_u over tokens, where the numbers c_u, from 1 to top_k, sum to tokens_XE + common_XE at most.

    1 / c is convex, so that the sum is least where all c_u are one of the two whole numbers next to their mean.
    """
    mean_XE = 1 + common_XE / np.maximum(tokens_XE, 1)
    numbers = np.arange(1, top_k + 1)
    return np.asarray(tokens_XE * np.interp(mean_XE, numbers, 1 / numbers))


def least_arriving(counts_SEE: IntArray, top_k: int, slots_G: IntArray, holders: int) -> FloatArray:
    """Returns (R, E) float64: a lower bound on expert e's part of the tokens that GPUs receive, if R GPUs hold it.

    A token that starts on none of these GPUs goes to one of them, which divides it evenly over the token's experts there, as in
    `_shared_GE`. Neither the tokens that start elsewhere nor what they have in common with other experts on R GPUs depend on
    which GPUs these are by more than the largest and the smallest counts say.

    Args:
        counts_SEE: (S, E, E) int64, as `coactivation_counts` returns them.
        top_k: experts per token.
        slots_G: (G,) int64, how many experts each GPU can hold.
        holders: R at most.
    """
    own_GE = np.diagonal(counts_SEE, axis1=1, axis2=2)
    total_E, total_EE = own_GE.sum(axis=0), _others(counts_SEE.sum(axis=0))
    parts = [_shared_GE(counts_SEE, top_k, slots_G).min(axis=0)]
    if holders > 1:
        own_GE, fewest_GEE = -np.sort(-own_GE, axis=0).cumsum(axis=0), np.sort(counts_SEE, axis=0).cumsum(axis=0)
        others_G = np.sort(slots_G - 1)[::-1].cumsum()
    for held in range(1, holders):
        far_E = total_E - own_GE[held]
        common_E = _busiest(_others(total_EE - fewest_GEE[held]), int(others_G[held]))
        parts.append(_divided(far_E, common_E, top_k))
    return np.stack(parts)


def least_sent(counts_SEE: IntArray, top_k: int, slots_G: IntArray) -> IntArray:
    """Returns (G,) int64: a lower bound on the tokens that each source sends; a token stays only if all its experts are there.

    A token that stays counts for top_k of the experts there, and for top_k * (top_k - 1) ordered pairs of them. Arguments are
    as in `deduplicated_bound`.
    """
    left, own_GE = [], np.diagonal(counts_SEE, axis1=1, axis2=2)
    for own_E, own_EE, slots in zip(own_GE, counts_SEE, slots_G.tolist(), strict=True):
        stay = int(_busiest(own_E, slots)) // top_k
        if top_k > 1:
            pairs_E = _busiest(_others(own_EE), slots - 1)
            stay = min(stay, int(_busiest(pairs_E, slots)) // (top_k * (top_k - 1)))
        left.append(int(own_E.sum()) // top_k - (stay if slots >= top_k else 0))
    return np.array(left, dtype=np.int64)


def _others(counts_EE: IntArray) -> IntArray:
    """The counts with a diagonal of zeros."""
    return counts_EE - np.diag(np.diag(counts_EE))


def _busiest(value_XE: IntArray, many: int) -> IntArray:
    """The sum of the `many` largest along the last axis."""
    return np.asarray(np.sort(value_XE, axis=-1)[..., ::-1][..., : max(0, many)].sum(axis=-1))
