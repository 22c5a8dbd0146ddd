"""Recovery: the next placement after nodes failed or joined, the weights that move, and the experts that no node holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aurora.errors import InfeasiblePlan
from aurora.planner.migration.pricing import migration_schedule, moved_bytes
from aurora.planner.migration.relabelling import LayerSlots, fewest_moves, holds
from aurora.planner.replication.failure_resilient import DEFAULT, SURVIVE, aim_of
from aurora.planner.replication.registry import best_divided
from aurora.planner.replication.replica_counts import allocate, capped
from aurora.types import Cluster, FailureDomains, Order, Placement, Schedule
from aurora.types.arrays import FloatArray, IntArray

Relabel = Callable[[IntArray, IntArray, IntArray, IntArray], IntArray]  # as `fewest_moves` without node_G


@dataclass(frozen=True)
class Recovery:
    """The next placement after a change of membership.

    Attributes:
        placement: the experts on the alive nodes, in their order.
        min_replicas: replicas of each expert at least; lower than asked for where slots are short.
        lost_L: by layer, the experts that no alive node holds; their weights come from a checkpoint.
        bytes_NN: (N, N) int64, bytes of expert weights from node to node; nodes have their numbers from before the change.
        schedule: the schedule of these transfers.
        moved: how many replicas arrive from other nodes.
        checkpoint_bytes_N: (N,) int64, bytes of lost experts' weights that each node reads from the checkpoint.
    """

    placement: Placement
    min_replicas: int
    lost_L: tuple[tuple[int, ...], ...]
    bytes_NN: IntArray
    schedule: Schedule
    moved: int
    checkpoint_bytes_N: IntArray


def recover(
    old_LN: Sequence[LayerSlots],
    alive_N: NDArray[np.bool_],
    load_LE: FloatArray | IntArray,
    failure_domains: FailureDomains,
    cluster: Cluster,
    expert_bytes: int,
    min_replicas: int,
    method: str = DEFAULT,
    seed: int = 0,
    relabel: Relabel = fewest_moves,
) -> Recovery:
    """Makes the next placement after a change of membership, layer by layer on the alive nodes, so that few replicas move.

    Args:
        old_LN: old_LN[l][n] are the experts that node n held in layer l; empty for a node that has joined.
        alive_N: (N,) bool, whether each node is alive now.
        load_LE: (L, E), the load of each expert.
        failure_domains: all N nodes, their slots and failure domains.
        cluster: all N nodes and their network.
        expert_bytes: bytes of one expert's weights.
        min_replicas: replicas of each expert at least, as far as the slots left allow.
        method: one of SURVIVE.
        seed: for the placement method.
        relabel: relabels the nodes if each is a failure domain of its own; otherwise `fewest_moves` is used.

    Raises:
        InfeasiblePlan: if one replica of each expert does not fit.

    Source:
        Lazarus (arXiv:2407.04656) §4.3, which relabels greedily.
    """
    nodes, experts = len(alive_N), np.asarray(load_LE).shape[1]
    left = np.flatnonzero(alive_N)
    remaining = _remaining(failure_domains, left)
    slots = int(remaining.slots_N.sum())
    if slots < experts:
        raise InfeasiblePlan(f"{experts} experts need {experts} slots; the {len(left)} nodes left of {nodes} have {slots}")
    distinct = int(np.minimum(remaining.slots_N, experts).sum()) // experts
    kept_min_replicas = max(1, min(min_replicas, slots // experts, distinct))
    bytes_E = np.full(experts, expert_bytes, dtype=np.int64)
    layers, lost_L, moved = [], [], 0
    bytes_NN, checkpoint_bytes_N = np.zeros((nodes, nodes), dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    for old_N, load_E in zip(old_LN, np.asarray(load_LE, dtype=np.float64), strict=True):
        count_E = capped(allocate(load_E, remaining, kept_min_replicas), load_E, len(left))
        rng = np.random.default_rng(seed)
        made_EN = SURVIVE[method](count_E, remaining, aim_of(kept_min_replicas, remaining), rng)
        before_NE = holds([old_N[node] for node in left.tolist()], experts)
        after_NE = _relabelled(before_NE, (made_EN.T > 0).astype(np.int64), bytes_E, remaining, relabel)
        lost_E = before_NE.sum(axis=0) == 0
        bytes_NN[np.ix_(left, left)] += moved_bytes(before_NE, after_NE, bytes_E)
        checkpoint_bytes_N[left] += (after_NE * lost_E) @ bytes_E
        moved += int((after_NE * (1 - before_NE) * ~lost_E).sum())
        lost_L.append(tuple(np.flatnonzero(lost_E).tolist()))
        layers.append(best_divided(after_NE, load_E, np.ones(len(left))))
    schedule = migration_schedule(bytes_NN, cluster, np.random.default_rng(seed))
    return Recovery(Placement.stack(layers), kept_min_replicas, tuple(lost_L), bytes_NN, schedule, moved, checkpoint_bytes_N)


def order_among(order: Order, alive_N: NDArray[np.bool_]) -> Order:
    """Returns the order of the alive ranks alone, renumbered; transfers keep their sequence, sub-channels and tiers."""
    number_N = np.cumsum(alive_N) - 1
    kept_X = alive_N[order.pairs_X2].all(axis=1)
    sub_channels = order.sub_channels
    if sub_channels is not None:
        sub_channels = replace(
            sub_channels, row_X=sub_channels.row_X[kept_X], out_G=sub_channels.out_G[alive_N], in_G=sub_channels.in_G[alive_N]
        )
    share_X2 = None if order.share_X2 is None else order.share_X2[kept_X]
    tier_X = None if order.tier_X is None else order.tier_X[kept_X]
    pairs_X2 = number_N[order.pairs_X2[kept_X]]
    return replace(order, pairs_X2=pairs_X2, share_X2=share_X2, sub_channels=sub_channels, tier_X=tier_X)


def _remaining(failure_domains: FailureDomains, left: IntArray) -> FailureDomains:
    """The nodes `left`, renumbered, and their failure domains."""
    domains, domain_N = np.unique(failure_domains.domain_N[left], return_inverse=True)
    return FailureDomains(failure_domains.slots_N[left], domain_N, failure_domains.odds_D[domains])


def _relabelled(
    before_NE: IntArray, made_NE: IntArray, bytes_E: IntArray, remaining: FailureDomains, relabel: Relabel
) -> IntArray:
    """(N, E) int64: made_NE with nodes of equally many slots relabelled, failure domains as a whole, so that few bytes move."""
    if remaining.domains < remaining.nodes:
        taker_N = fewest_moves(before_NE, made_NE, bytes_E, remaining.slots_N, remaining.domain_N)
    else:
        taker_N = relabel(before_NE, made_NE, bytes_E, remaining.slots_N)
    return made_NE[np.argsort(taker_N)]
