"""Divides the moves from one placement to another into rounds: in a round each GPU sends and receives at most one expert.

`move_sequence` moves experts in place. A GPU sends only experts that it holds when the round begins; received weights take
their slots when the round ends. After every round the slots are a valid placement, in which every expert has its min replicas.
So a system can serve between rounds, and can stop after any of them if a GPU is lost.

`buffered_rounds` moves experts into buffers, whose contents take their slots after the last round, as in vLLM's EPLB.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall.decomposition import slots
from aurora.algorithms.control import move_rounds_core as core
from aurora.types.arrays import BoolArray, IntArray
from aurora.types.placement import EMPTY

NO_SLOT = -2  # in place of an expert: a GPU has fewer slots than the tables
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
    (layers, gpus, _), experts = held_LGP.shape, int(max(held_LGP.max(), wanted_LGP.max())) + 1
    domain_G = np.arange(gpus) if domain_G is None else domain_G
    again_LGP = np.tril(held_LGP[..., None] == held_LGP[..., None, :], -1).any(axis=3)
    now_LGP = np.where(again_LGP, EMPTY, held_LGP)
    wants_LGE, holds_LGE = _holds(wanted_LGP, experts), _holds(now_LGP, experts)
    layer_X, gpu_X, expert_X = map(np.ascontiguousarray, np.nonzero(wants_LGE & ~holds_LGE))
    wants_RG, holds_RG = (has_LGE.swapaxes(1, 2).copy().reshape(-1, gpus) for has_LGE in (wants_LGE, holds_LGE))
    least_2R = np.stack([_least_LE(wants_LGE, holds_LGE, of_G, min_replicas).ravel() for of_G in (np.arange(gpus), domain_G)])
    held_NP = np.concatenate(np.where(now_LGP >= 0, now_LGP + experts * np.arange(layers)[:, None, None], EMPTY))
    held_NP[np.concatenate((held_LGP == EMPTY) & (wanted_LGP == EMPTY))] = NO_SLOT
    expert_R, gpu_N = layer_X * experts + expert_X, layer_X * gpus + gpu_X
    state = core.MovedSlots(held_NP, wants_RG, holds_RG, least_2R, domain_G, expert_R, gpu_X, gpu_N)
    move_X4, left_X = core.sequence(state)
    if len(left_X):
        assert min_replicas > 1, "each expert of `wanted_LGP` is held"
        stays_L = np.isin(np.arange(layers), layer_X[left_X])
        possible_LGP = np.where(stays_L[:, None, None], held_LGP, wanted_LGP)
        return move_sequence(held_LGP, possible_LGP, min_replicas, domain_G)
    round_X, made_X, source_X, slot_X = move_X4.T
    fields = round_X, layer_X[made_X], expert_X[made_X], source_X, gpu_X[made_X], slot_X
    now_LGP = np.where(held_NP >= 0, held_NP % experts, EMPTY).reshape(held_LGP.shape)
    kept_LGP = (now_LGP != EMPTY) & np.take_along_axis(wants_LGE, np.maximum(now_LGP, 0), axis=2)
    return tuple(map(Move._make, np.stack(fields, axis=1).tolist())), np.where(kept_LGP, now_LGP, EMPTY)


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
