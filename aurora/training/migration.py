"""Moves experts between ranks, with their weights and AdamW's state, and decides on these moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.control.controller import Controller, load_cost_G, slots_in_use
from aurora.algorithms.gpu_slots import failure_domains
from aurora.algorithms.recovery import recover
from aurora.moe.transport import Transport
from aurora.training.state import ExpertState, TrainState, exchange_tensors
from aurora.types import Cluster, ControlOptions, Placement
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY

HeldL = Sequence[Sequence[int]]  # by layer: the experts that one rank holds


def next_placement(held_R: Sequence[HeldL], load_LE: FloatArray, cluster: Cluster, slots: int, min_replicas: int) -> Placement:
    """Returns a placement with replicas chosen by load, relabelled over the ranks such that the fewest experts move.

    Args:
        held_R: for each rank, the experts that it holds now, by layer; empty for a rank that has just joined.
        load_LE: (L, E), the load of each expert.
        cluster: the ranks' GPUs; those of a node fail together.
        slots: experts that each rank holds in a layer, replicas included.
        min_replicas: least number of replicas of each expert, as far as slots allow.

    Raises:
        InfeasiblePlan: if one replica of each expert does not fit.
    """
    domains = failure_domains(cluster, np.full(len(cluster), slots, dtype=np.int64))
    return recover(list(zip(*held_R, strict=True)), load_LE, domains, min_replicas)


def tell_placement(placement: Placement | None, slots: int, transport: Transport, layers: int) -> Placement:
    """Broadcasts rank 0's placement, and returns it on all ranks. A collective call.

    Args:
        placement: on rank 0 the placement; None on the others.
        slots: largest number of slots of a rank.
        transport: carries tensors between the ranks.
        layers: number of layers of the placement.
    """
    table = np.full((2, layers, transport.ranks, slots), EMPTY, dtype=np.float64)  # experts, and the shares of their loads
    if placement is not None:
        for layer, held_G in enumerate(placement.slots_LG):
            split_EG = placement.split_EG(layer)
            for rank, experts in enumerate(held_G):
                table[:, layer, rank, : len(experts)] = experts, split_EG[list(experts), rank]
    held_LGP, share_LGP = transport.gather(torch.from_numpy(table))[0].numpy()
    return Placement.of_slots(held_LGP.astype(np.int64), share_LGP)


def held_by_all(state: TrainState, transport: Transport) -> list[list[tuple[int, ...]]]:
    """All-gathers the experts that the ranks hold. Returns them by rank and layer. A collective call."""
    holds_LE = torch.zeros(len(state.layers), state.layers[0].count, dtype=torch.uint8)
    for holds_E, layer in zip(holds_LE, state.layers, strict=True):
        holds_E[list(layer.held)] = 1
    return [[tuple(holds_E.nonzero()[:, 0].tolist()) for holds_E in peer_LE] for peer_LE in transport.gather(holds_LE)]


@dataclass(frozen=True)
class ExpertTransfer:
    """Transfer of one expert's state from rank `source` (None: from the model's files) to rank `to`."""

    layer: int
    expert: int
    source: int | None
    to: int


def expert_transfers(placement: Placement, held_R: Sequence[HeldL]) -> list[ExpertTransfer]:
    """Returns the transfers after which every rank holds the experts that the new placement gives it.

    If several ranks hold an expert, the one that has sent the fewest so far sends it.

    Args:
        placement: the new placement.
        held_R: for each rank the experts that it holds now, by layer.
    """
    transfers: list[ExpertTransfer] = []
    sent_R = [0] * len(held_R)
    for layer, slots_R in enumerate(placement.slots_LG):
        for to, slots in enumerate(slots_R):
            for expert in sorted(set(slots) - set(held_R[to][layer])):
                owners = [rank for rank, held_L in enumerate(held_R) if expert in held_L[layer]]
                source = min(owners, key=lambda rank: (sent_R[rank], rank), default=None)
                if source is not None:
                    sent_R[source] += 1
                transfers.append(ExpertTransfer(layer, expert, source, to))
    return transfers


def move_state(
    state: TrainState,
    held_R: Sequence[HeldL],
    placement: Placement,
    cluster: Cluster,
    transport: Transport,
    stale: Sequence[int] = (),
) -> tuple[int, int]:
    """Moves state between ranks, so that each holds all parameters outside experts and the experts that `placement` gives it.

    A collective call. An expert that a rank lacks is sent by a rank that holds it. Before the first step, experts that no rank
    holds are read from the model's files. Stale ranks receive the parameters outside experts, some from each other rank.

    Args:
        state: the state that this rank holds.
        held_R: the experts of all ranks, from `held_by_all`.
        placement: the experts of each rank.
        cluster: the ranks' GPUs and their network, for the order of the transfers.
        transport: carries the state between the ranks.
        stale: the ranks that lack the parameters outside experts.

    Returns:
        (number of experts that ranks have sent, bytes that they have sent in all).
    """
    rank, ranks = transport.rank, transport.ranks
    fresh, dense = [peer for peer in range(ranks) if peer not in stale], list(state.dense.values())
    dense_R = [dense[fresh.index(peer) :: len(fresh)] if peer in fresh else [] for peer in range(ranks)]
    bytes_RR = np.zeros((ranks, ranks), dtype=np.int64)
    for peer, sent in enumerate(dense_R):
        bytes_RR[peer, list(stale)] = sum(trained.state.nbytes for trained in sent)
    outgoing_R, incoming_R = ([list[ExpertTransfer]() for _ in range(ranks)] for _ in range(2))
    moved = 0
    for move in expert_transfers(placement, held_R):
        if move.source is None:
            continue
        moved += 1
        bytes_RR[move.source, move.to] += state.expert_bytes
        if move.source == rank:
            outgoing_R[move.to].append(move)
        if move.to == rank:
            incoming_R[move.source].append(move)
    order = ORDER["openshop"](bytes_RR, cluster.network, rng=np.random.default_rng(0))
    likes_L = [state.likes(layer) for layer in range(len(state.layers))]
    sent_R = [[part for move in moves for part in state.expert(move.layer, move.expert).values()] for moves in outgoing_R]
    like_R = [[like for move in moves for like in likes_L[move.layer].values()] for moves in incoming_R]
    for peer in stale:
        sent_R[peer] += [trained.state for trained in dense_R[rank]]
    if rank in stale:
        like_R = [likes + [trained.state for trained in sent] for likes, sent in zip(like_R, dense_R, strict=True)]
    arrived_R = exchange_tensors(transport, order, sent_R, like_R, dense[0].state)
    arrived_L: list[dict[int, ExpertState]] = [{} for _ in likes_L]
    for moves, sent, tensors in zip(incoming_R, dense_R, map(iter, arrived_R), strict=True):
        for move in moves:
            arrived_L[move.layer][move.expert] = {name: next(tensors) for name in likes_L[move.layer]}
        for trained, arrived in zip(sent, tensors, strict=False):  # none at a rank that is not stale
            trained.hold(arrived.clone())
    for number, slots_G in enumerate(placement.slots_LG):
        state.hold(number, slots_G[rank], arrived_L[number])
    state.continue_after(state.steps)
    return moved, int(bytes_RR.sum())


def rebalancer(
    placement: Placement, cluster: Cluster, expert_bytes: int, min_replicas: int, move_Bps: float | None
) -> Controller:
    """Returns a Controller that decides after each window of steps whether to move experts. Steps wait while experts move.

    Args:
        placement: the present placement.
        cluster: the ranks' GPUs; the GPUs of a node fail together.
        expert_bytes: bytes of an expert's state (weights and AdamW state), which are sent when it moves.
        min_replicas: least number of replicas that each expert keeps.
        move_Bps: measured rate of earlier moves in bytes per second, over all ranks; None: moves count as free until some have
            been timed.
    """
    slots = slots_in_use(placement, load_cost_G(cluster))
    held_LGP, domain_N = placement.held_LGP(), failure_domains(cluster, slots.slots_G).domain_N
    return Controller(
        held_LGP, expert_bytes, ControlOptions(), slots, move_Bps, stalls=True, min_replicas=min_replicas, domain_G=domain_N
    )


def end_window(controller: Controller, load_LE: IntArray, step_s: list[float]) -> Placement | None:
    """Ends a window of steps. Returns the new placement, with even shares of replicas; None: keep the present one.

    `Controller.moved` must be called once the experts have moved.

    Args:
        controller: the result of `rebalancer`.
        load_LE: (L, E), the tokens of each expert in the window.
        step_s: seconds of each step of the window.
    """
    wanted_LGP = controller.window(load_LE, sum(step_s) or None).held_LGP
    if np.array_equal(wanted_LGP, controller.held_LGP):
        return None
    return Placement.of_slots(wanted_LGP)
