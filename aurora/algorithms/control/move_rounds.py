"""Divides the moves from one placement to another into rounds, for vLLM's EPLB."""

from collections import defaultdict, deque

import numpy as np

from aurora.algorithms.alltoall.decomposition import slots
from aurora.types.arrays import IntArray
from aurora.types.placement import EMPTY

Flow = tuple[int, int, tuple[int, ...]]  # sender, receiver, experts


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
