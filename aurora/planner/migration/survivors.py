"""The program of the surviving ranks after a failure: their experts and orders, and the weights that each must fetch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aurora.planner.alltoall.hierarchical_order import hierarchical_order
from aurora.planner.migration.recovery import order_among, recover
from aurora.planner.migration.relabelling import LayerSlots
from aurora.planner.placement.slot_counts import failure_domains
from aurora.types import Cluster, Exchange, Network, Op, Placement, Program
from aurora.types.arrays import FloatArray, IntArray

HeldML = Sequence[Sequence[Sequence[int]]]  # by model and layer: the experts whose weights one rank has


def program_among(program: Program, alive: Sequence[int], load_MLE: Sequence[FloatArray], held_R: Sequence[HeldML]) -> Program:
    """Returns the program of the surviving ranks alone, renumbered; they keep their experts.

    Remaining replicas take over the load of lost ones in proportion to their own, or evenly if they had none. Experts without
    replicas go, heaviest first, to the rank with the least load; ties go to a rank that has the weights.

    Args:
        program: the program of all ranks.
        alive: the surviving ranks, ascending.
        load_MLE: for each model, (L, E) tokens of each expert.
        held_R: for each surviving rank, the experts whose weights it has, by model and layer.
    """
    alive_G = np.isin(np.arange(program.ranks), alive)
    placements, ops = [], []
    for model, (placement, load_LE) in enumerate(zip(program.placements_M, load_MLE, strict=True)):
        held_LR = [[held_ML[model][layer] for held_ML in held_R] for layer in range(len(placement.slots_LG))]
        placements.append(
            Placement.stack([_layer(placement.layer(n), alive, load_LE[n], held_LR[n]) for n in range(len(held_LR))])
        )
        ops.append(tuple(tuple(_among(op, alive_G) for op in layer) for layer in program.ops_ML[model]))
    return replace(program, ranks=len(alive), placements_M=tuple(placements), ops_ML=tuple(ops))


def program_in_force(program: Program, alive: Sequence[int], held_R: Sequence[HeldML]) -> Program:
    """Returns the program of all ranks with the placement that its surviving ranks have come to hold since it was made.

    Layers that they hold as in the program stay as they are; in others, replicas take even parts. Experts that no surviving
    rank holds count as a lost rank's.

    Args:
        program, alive, held_R: as of `program_among`.
    """
    lost = min(set(range(program.ranks)) - set(alive), default=0)
    placements = []
    for model, placement in enumerate(program.placements_M):
        layers = []
        for number, slots_G in enumerate(placement.slots_LG):
            held_of = {rank: held_ML[model][number] for rank, held_ML in zip(alive, held_R, strict=True)}
            if all(set(held) == set(slots_G[rank]) for rank, held in held_of.items()):
                layers.append(placement.layer(number))
                continue
            missing = set(range(placement.experts)).difference(*held_of.values())
            held_of[lost] = (*held_of.get(lost, ()), *sorted(missing))
            layers.append(Placement.evenly((tuple(tuple(held_of.get(rank, ())) for rank in range(program.ranks)),)))
        placements.append(Placement.stack(layers))
    return replace(program, placements_M=tuple(placements))


def restored(
    program: Program,
    cluster: Cluster,
    alive: Sequence[int],
    load_LE: FloatArray,
    held_LR: Sequence[LayerSlots],
    min_replicas: int,
) -> Program:
    """Returns the program of the surviving ranks with `min_replicas` restored, as far as slots allow, so that few weights move.

    A rank has as many slots as the plan gave it experts, and more if all experts need them.

    Args:
        program: the program of all ranks, for one model.
        cluster: all ranks' GPUs; those of a node fail as a whole.
        alive: the surviving ranks, ascending.
        load_LE: (L, E), the tokens of each expert.
        held_LR: by layer and surviving rank, the experts whose weights it has.
        min_replicas: on how many nodes each expert should be at least.
    """
    (placement,), at_least = program.placements_M, -(-program.placements_M[0].experts // len(alive))
    slots_G = np.array([max(at_least, *map(len, held_L)) for held_L in zip(*placement.slots_LG, strict=True)])
    alive_G = np.isin(np.arange(program.ranks), alive)
    held_LG = [[held_R[list(alive).index(gpu)] if gpu in alive else () for gpu in range(program.ranks)] for held_R in held_LR]
    found = recover(held_LG, alive_G, load_LE, failure_domains(cluster, slots_G), cluster, 1, min_replicas)
    ops = tuple(tuple(_among(op, alive_G) for op in layer) for layer in program.ops_ML[0])
    return replace(program, ranks=len(alive), placements_M=(found.placement,), ops_ML=(ops,))


def _among(op: Op, alive_G: NDArray[np.bool_]) -> Op:
    """An operation with the order and the servers of the surviving ranks alone."""
    if not isinstance(op, Exchange):
        return op
    if op.hierarchy is None or op.order.tier_X is None:
        return replace(op, order=order_among(op.order, alive_G), hierarchy=op.hierarchy and op.hierarchy.among(alive_G))
    hierarchy = op.hierarchy.among(alive_G)  # whose gateways are others, so that other pairs of ranks use the NICs
    ranks = hierarchy.ranks
    even_GG = np.ones((ranks, ranks), dtype=np.int64) - np.eye(ranks, dtype=np.int64)
    order = hierarchical_order(even_GG, hierarchy, Network.equal(ranks), rng=np.random.default_rng(0))
    return replace(op, order=order if op.phase == "dispatch" else order.reversed, hierarchy=hierarchy)


def _layer(placement: Placement, alive: Sequence[int], load_E: FloatArray, held_R: Sequence[Sequence[int]]) -> Placement:
    """One layer's placement on the surviving ranks, see `program_among`."""
    split_ER = placement.split_EG(0)[:, list(alive)]
    slots_R = [list(placement.slots_LG[0][gpu]) for gpu in alive]
    kept_ER = np.zeros(split_ER.shape, dtype=bool)
    for rank, slots in enumerate(slots_R):
        kept_ER[slots, rank] = True
    idle_E = split_ER.sum(axis=1) == 0
    split_ER[idle_E] = kept_ER[idle_E]
    total_E = split_ER.sum(axis=1)
    split_ER[total_E > 0] /= total_E[total_E > 0, None]
    load_R = load_E @ split_ER
    orphans = np.flatnonzero(total_E == 0)
    for expert in orphans[np.argsort(-load_E[orphans], kind="stable")].tolist():
        rank = min(range(len(alive)), key=lambda rank: (load_R[rank], expert not in held_R[rank], len(slots_R[rank]), rank))
        slots_R[rank].append(expert)
        split_ER[expert, rank] = 1.0
        load_R[rank] += load_E[expert]
    held = tuple(tuple(sorted(slots)) for slots in slots_R)
    if sum(map(len, held)) == placement.experts:
        return Placement((held,))
    return Placement((held,), (tuple(tuple(split_ER[list(slots), rank].tolist()) for rank, slots in enumerate(held)),))


@dataclass(frozen=True)
class ExpertTransfer:
    """One expert's weights that rank `to` must fetch from rank `source`, or from the checkpoint if that is None."""

    model: int
    layer: int
    expert: int
    source: int | None
    to: int


def expert_transfers(
    placements_M: Sequence[Placement], held_R: Sequence[HeldML], expert_bytes_M: Sequence[int]
) -> list[ExpertTransfer]:
    """Returns the transfers that bring each rank the weights it lacks of the experts that each model's placement gives it.

    If several ranks have the weights, the one that has sent the fewest bytes so far sends them. held_R: as in `program_among`.
    """
    found: list[ExpertTransfer] = []
    ranks = len(held_R)
    sent_R = [0] * ranks
    for model, placement in enumerate(placements_M):
        for layer, slots_R in enumerate(placement.slots_LG):
            for to, slots in enumerate(slots_R):
                for expert in sorted(set(slots) - set(held_R[to][model][layer])):
                    owners = [rank for rank in range(ranks) if expert in held_R[rank][model][layer]]
                    source = min(owners, key=lambda rank: (sent_R[rank], rank), default=None)
                    if source is not None:
                        sent_R[source] += expert_bytes_M[model]
                    found.append(ExpertTransfer(model, layer, expert, source, to))
    return found


def transfer_bytes(found: Sequence[ExpertTransfer], expert_bytes_M: Sequence[int], ranks: int) -> IntArray:
    """Returns (R, R) int64: bytes of weights from each rank to each, without those from the checkpoint."""
    bytes_RR = np.zeros((ranks, ranks), dtype=np.int64)
    for move in found:
        if move.source is not None:
            bytes_RR[move.source, move.to] += expert_bytes_M[move.model]
    return bytes_RR
