"""Experts that tokens choose together: traffic in which a token counts once a GPU, groups to start from, and a bound."""

import numpy as np

from aurora.plan.bounds import spread_split
from aurora.types.arrays import FloatArray, IntArray


def once_GG(experts_UK: IntArray, source_U: IntArray, gpu_E: IntArray, gpus: int) -> IntArray:
    """(G, G) int64: tokens from each source to each GPU, however many of their experts sit there; the diagonal does not travel.

    experts_UK (U, K): the experts of each token; source_U (U,): the GPU that it starts on; gpu_E (E,): where experts sit.
    """
    at_UK = np.sort(gpu_E[experts_UK], axis=1)
    first_UK = np.ones(at_UK.shape, dtype=np.bool_)
    first_UK[:, 1:] = at_UK[:, 1:] != at_UK[:, :-1]
    pairs_UK = source_U[:, None] * gpus + at_UK
    return np.bincount(pairs_UK[first_UK], minlength=gpus * gpus).reshape(gpus, gpus)


def merged(experts_UK: IntArray, source_U: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Tokens alike as one: their experts in rising order (V, K), their source (V,), and how many they are (V,), all int64."""
    ranked_UX = np.column_stack([source_U, np.sort(experts_UK.astype(np.int64), axis=1)])
    rows_VX, count_V = np.unique(ranked_UX, axis=0, return_counts=True)
    return rows_VX[:, 1:], rows_VX[:, 0], count_V


def chosen_together(experts_VK: IntArray, count_V: IntArray, experts: int) -> IntArray:
    """(E, E) int64: tokens that choose both experts; on the diagonal those that choose the one."""
    together = np.zeros(experts * experts, dtype=np.int64)
    for a_V in experts_VK.T:
        for b_V in experts_VK.T:
            together += np.bincount(a_V * experts + b_V, weights=count_V, minlength=len(together)).astype(np.int64)
    return together.reshape(experts, experts)


def clustered(together_EE: IntArray, room_G: IntArray) -> IntArray:
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


def once_bound(
    own_GE: IntArray,
    top_k: int,
    room_G: IntArray,
    expert_s_GE: FloatArray,
    gate_s_G: FloatArray,
    aggregate_s_G: FloatArray,
    send_s_G: FloatArray,
    recv_s_G: FloatArray,
    csend_s_G: FloatArray,
    crecv_s_G: FloatArray,
) -> float:
    """Seconds below Eq. 1 of every placement of single experts when a token counts once a GPU.

    own_GE (G, E) int64: tokens of source g for expert e. A GPU gets a row for at most min(top_k, its room) choices, and one for
    every token of each expert that it holds. A source keeps no token whose experts are not all of the room_G[g] (G,) that it
    has, so at most a top_k-th of its busiest ones' tokens, and none where its room is below top_k. Seconds a row (G,) on ports.
    """
    arriving_GE = own_GE.sum(axis=0) - own_GE  # an expert on GPU g spares the tokens that start there
    shared_GE = arriving_GE / np.clip(room_G, 1, top_k)[:, None]
    tokens_G = own_GE.sum(axis=1) // top_k
    busiest_GE = -np.sort(-own_GE, axis=1)
    kept_G = np.array([row[:room].sum() // top_k for row, room in zip(busiest_GE, room_G.tolist(), strict=True)])
    sent_G = np.where(room_G < top_k, tokens_G, tokens_G - kept_G)

    def either(work_GE: FloatArray, row_s_G: FloatArray) -> float:
        """The dearest expert on its cheapest GPU, or all of them spread out."""
        whole_GE, part_GE = (work_GE + rows_GE * row_s_G[:, None] for rows_GE in (arriving_GE, shared_GE))
        return max(float(whole_GE.min(axis=0).max(initial=0.0)), spread_split(part_GE))

    idle_GE = np.zeros_like(expert_s_GE)
    first_s = max(float((gate_s_G + sent_G * send_s_G).max()), float(gate_s_G.min()) + either(idle_GE, recv_s_G))
    second_s = max(float((sent_G * crecv_s_G).max()), either(expert_s_GE, csend_s_G))
    return first_s + second_s + float(aggregate_s_G.max())
