"""Experts that tokens choose together: traffic in which a token counts once a GPU, groups to start from, and a bound."""

from itertools import product

import numpy as np

from aurora.planner.network.lower_bounds import spread_split
from aurora.types.arrays import FloatArray, IntArray


def distinct_tokens(experts_UK: IntArray, source_U: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Tokens alike as one: their experts in rising order (V, K), their source (V,), and how many they are (V,), all int64."""
    ranked_UX = np.column_stack([source_U, np.sort(experts_UK.astype(np.int64), axis=1)])
    rows_VX, count_V = np.unique(ranked_UX, axis=0, return_counts=True)
    return rows_VX[:, 1:], rows_VX[:, 0], count_V


def coactivation_counts(experts_VK: IntArray, source_V: IntArray, count_V: IntArray, experts: int, gpus: int) -> IntArray:
    """(S, E, E) int64: tokens of each source that choose both experts; on the diagonal those that choose the one."""
    together_SX = np.zeros((gpus, experts * experts), dtype=np.int64)
    for source in range(gpus):
        own_V = source_V == source
        for a_V, b_V in product(experts_VK[own_V].T, repeat=2):
            pairs = np.bincount(a_V * experts + b_V, weights=count_V[own_V], minlength=experts * experts)
            together_SX[source] += pairs.astype(np.int64)
    return together_SX.reshape(gpus, experts, experts)


def coactivation_groups(together_EE: IntArray, room_G: IntArray) -> IntArray:
    """(E,) int64: groups of experts that tokens choose together, GPU g's of at most room_G[g], which are enough in all.

    Each group starts with the busiest expert that is left and takes the expert most often chosen with those it has, per token
    that chooses that expert, until its room is full or its load above its fair share of what is left.
    """
    experts, load_E = len(together_EE), np.diag(together_EE)
    gpu_E = np.full(experts, -1, dtype=np.int64)
    for gpu, room in enumerate(room_G.tolist()):
        later = int(room_G[gpu + 1 :].sum())
        near_E, held, load = np.zeros(experts, dtype=np.int64), 0, 0
        fair = load_E[gpu_E < 0].sum() / (len(room_G) - gpu)
        while held < room and (left := np.flatnonzero(gpu_E < 0)).size:
            must = left.size > later
            if held:
                left = left[np.argsort(-(near_E[left] / np.maximum(load_E[left], 1)), kind="stable")]
                if not must and load + load_E[left[0]] / 2 > fair:
                    break
            else:
                left = left[np.argsort(-load_E[left], kind="stable")]
            chosen = int(left[0])
            gpu_E[chosen] = gpu
            near_E += together_EE[chosen]
            held, load = held + 1, load + int(load_E[chosen])
    return gpu_E


def deduplicated_bound(
    together_SEE: IntArray,
    top_k: int,
    room_G: IntArray,
    expert_s_GE: FloatArray,
    gate_s_G: FloatArray,
    aggregate_s_G: FloatArray,
    port_s_XG: FloatArray,
) -> float:
    """Seconds below Eq. 1 of every placement of single experts when a token counts once a GPU.

    together_SEE as of `chosen_together`; room_G (G,) int64: experts that fit; port_s_XG (4, G): seconds a token on each port,
    sending and receiving in the dispatch, then in the combine. A GPU receives at least the tokens of each expert that it holds,
    and of all of them `_shared_GE`; a source sends at least `_sent_G`.
    """
    send_s_G, recv_s_G, csend_s_G, crecv_s_G = port_s_XG
    own_GE = np.diagonal(together_SEE, axis1=1, axis2=2)
    arriving_GE = own_GE.sum(axis=0) - own_GE  # an expert on GPU g spares the tokens that start there
    shared_GE, sent_G = _shared_GE(together_SEE, arriving_GE, room_G), _sent_G(together_SEE, own_GE, top_k, room_G)

    def either(work_GE: FloatArray, row_s_G: FloatArray) -> float:
        """The dearest expert on its cheapest GPU, or all of them spread out."""
        whole_GE, part_GE = (work_GE + rows_GE * row_s_G[:, None] for rows_GE in (arriving_GE, shared_GE))
        return max(float(whole_GE.min(axis=0).max(initial=0.0)), spread_split(part_GE))

    idle_GE = np.zeros_like(expert_s_GE)
    first_s = max(float((gate_s_G + sent_G * send_s_G).max()), float(gate_s_G.min()) + either(idle_GE, recv_s_G))
    second_s = max(float((sent_G * crecv_s_G).max()), either(expert_s_GE, csend_s_G))
    return first_s + second_s + float(aggregate_s_G.max())


def _shared_GE(together_SEE: IntArray, arriving_GE: IntArray, room_G: IntArray) -> FloatArray:
    """(G, E): below expert e's part of the tokens that arrive at GPU g, each divided evenly over its experts there.

    With n tokens of e, which have c_u experts on g, that part is sum 1 / c_u >= n^2 / sum c_u (Cauchy-Schwarz), and sum c_u is
    at most n plus what the room_G[g] - 1 experts most often chosen with e have in common with it.
    """
    elsewhere_GEE = together_SEE.sum(axis=0) - together_SEE
    met_GE = np.stack(
        [_busiest(_others(each_EE), room - 1) for each_EE, room in zip(elsewhere_GEE, room_G.tolist(), strict=True)]
    )
    return np.where(arriving_GE > 0, arriving_GE**2 / np.maximum(arriving_GE + met_GE, 1), 0.0)


def _sent_G(together_SEE: IntArray, own_GE: IntArray, top_k: int, room_G: IntArray) -> IntArray:
    """(G,) int64: at least so many tokens of each source travel, as it keeps none whose experts are not all there.

    A token that stays is chosen by top_k of the experts there, and by as many pairs of them as top_k experts make.
    """
    left = []
    for own_E, own_EE, room in zip(own_GE, together_SEE, room_G.tolist(), strict=True):
        stay = int(_busiest(own_E, room)) // top_k
        if top_k > 1:
            pairs_E = _busiest(_others(own_EE), room - 1)
            stay = min(stay, int(_busiest(pairs_E, room)) // (top_k * (top_k - 1)))
        left.append(int(own_E.sum()) // top_k - (stay if room >= top_k else 0))
    return np.array(left, dtype=np.int64)


def _others(together_EE: IntArray) -> IntArray:
    return together_EE - np.diag(np.diag(together_EE))


def _busiest(value_XE: IntArray, many: int) -> IntArray:
    """The sum of the `many` largest along the last axis."""
    return np.asarray(np.sort(value_XE, axis=-1)[..., ::-1][..., : max(0, many)].sum(axis=-1))
