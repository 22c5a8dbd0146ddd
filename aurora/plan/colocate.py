"""COLOCATE: where the second model's groups sit, given the first's.

Each takes (a, b, held_G, movable, rng): both models' GroupCosts, the group of a on each GPU (G,), and whether a may still
move; and gives (a's group on each GPU, b's group on each GPU).
"""

from collections.abc import Callable

import numpy as np

from aurora.plan.costs import GroupCosts
from aurora.plan.matching import bottleneck
from aurora.types.arrays import IntArray

ColocateMaker = Callable[[GroupCosts, GroupCosts, IntArray, bool, np.random.Generator], tuple[IntArray, IntArray]]


def matching(
    a: GroupCosts, b: GroupCosts, held_G: IntArray, movable: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Bottleneck matching on the port time of both models' dispatches, max(send_a + send_b, recv_a + recv_b).

    Optimal for |N_a + N_b| given a's place. Source: Aurora §6.2, case II.
    """
    gpus = np.arange(len(held_G))
    send = a.send_GJ[gpus, held_G][:, None] * a.dispatch_bytes + b.send_GJ * b.dispatch_bytes
    recv = a.recv_GJ[gpus, held_G][:, None] * a.dispatch_bytes + b.recv_GJ * b.dispatch_bytes
    return held_G, bottleneck(np.maximum(send / a.out_Bps[:, None], recv / a.in_Bps[:, None]))


def sorted_pairs(
    a: GroupCosts, b: GroupCosts, held_G: IntArray, movable: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """a's groups by rising load meet b's by falling load. Optimal where sends equal receives (Aurora Thm 6.2, case I)."""
    group_G = np.empty(len(held_G), dtype=np.int64)
    group_G[np.argsort(a.load_J[held_G], kind="stable")] = np.argsort(-b.load_J, kind="stable")
    return held_G, group_G


def decoupled(
    a: GroupCosts, b: GroupCosts, held_G: IntArray, movable: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Two matchings, one after the other: a's groups with b's, blind to GPUs; then pairs with GPUs by the pair's time.

    Where a may not move, only b's groups are matched with GPUs, by the same time. Source: Aurora §7.2 (a heuristic).
    """
    if not movable:
        gpus = np.arange(len(held_G))
        return held_G, bottleneck(a.alone_s_GJ[gpus, held_G][:, None] + b.alone_s_GJ)
    # A group's own bytes, averaged over the GPUs that it could sit on.
    send_a, recv_a, send_b, recv_b = (
        costs.dispatch_bytes * tokens_GJ.mean(axis=0) for costs in (a, b) for tokens_GJ in (costs.send_GJ, costs.recv_GJ)
    )
    partner_J = bottleneck(np.maximum(send_a[:, None] + send_b[None, :], recv_a[:, None] + recv_b[None, :]))
    group_G = bottleneck(a.alone_s_GJ + b.alone_s_GJ[:, partner_J])
    return group_G, partner_J[group_G]


def contiguous(
    a: GroupCosts, b: GroupCosts, held_G: IntArray, movable: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """b's group g on GPU g."""
    return held_G, np.arange(len(held_G))


def shuffled(
    a: GroupCosts, b: GroupCosts, held_G: IntArray, movable: bool, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """REC, random expert colocation (Aurora §8.1)."""
    return held_G, rng.permutation(len(held_G))


COLOCATE: dict[str, ColocateMaker] = {
    "matching": matching,
    "sorted": sorted_pairs,
    "decoupled": decoupled,
    "contiguous": contiguous,
    "random": shuffled,
}
