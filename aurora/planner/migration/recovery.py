"""From a placement and the nodes that are left, or new, to the next one: who holds what, what travels, what is gone for
good."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aurora.errors import InfeasiblePlan
from aurora.planner.alltoall.schedule import scheduled
from aurora.planner.migration.relabelling import Held, fewest_moves, holds, moved_bytes
from aurora.planner.replication.failure_resilient import DEFAULT, SURVIVE, aim_of
from aurora.planner.replication.registry import best_divided
from aurora.planner.replication.replica_counts import allocate, capped
from aurora.types import Cluster, FailureDomains, Order, Placement, Schedule
from aurora.types.arrays import FloatArray, IntArray

Relabel = Callable[[IntArray, IntArray, IntArray, IntArray], IntArray]


@dataclass(frozen=True)
class Recovery:
    """placement: of the alive nodes, in their order; floor: what it keeps. lost_L: by layer the experts that no node left
    holds, to come from a checkpoint. bytes_NN (N, N) int64 expert weights from node to node, numbered as before, and their
    schedule; moved: the replicas that arrive from other nodes. checkpoint_bytes_N (N,) int64: the weights of lost experts that
    each node must read."""

    placement: Placement
    min_replicas: int
    lost_L: tuple[tuple[int, ...], ...]
    bytes_NN: IntArray
    schedule: Schedule
    moved: int
    checkpoint_bytes_N: IntArray


def recover(
    old_LN: Sequence[Held],
    alive_N: NDArray[np.bool_],
    load_LE: FloatArray | IntArray,
    hosts: FailureDomains,
    cluster: Cluster,
    expert_bytes: int,
    min_replicas: int,
    method: str = DEFAULT,
    seed: int = 0,
    relabel: Relabel = fewest_moves,
) -> Recovery:
    """The next placement after an epoch's end, layer by layer on the alive nodes, so that the fewest replicas move.

    old_LN[l][n]: the experts that node n held, none where it was not there; alive_N (N,): who is there now. load_LE (L, E);
    hosts and cluster: all N nodes, their room, failure domains and ports. floor: as far as the slots that are left allow. A
    transfer is drawn from all owners left, and transfers are ordered as an all-to-all. Raises InfeasiblePlan where one replica
    of each does not fit. Source: Lazarus §4.3 (arXiv:2407.04656), which relabels greedily.
    """
    nodes, experts = len(alive_N), np.asarray(load_LE).shape[1]
    left = np.flatnonzero(alive_N)
    slots = int(hosts.slots_N[left].sum())
    if slots < experts:
        raise InfeasiblePlan(f"{experts} experts need {experts} slots; the {len(left)} nodes left of {nodes} have {slots}")
    among = _among(hosts, left)
    kept_min_replicas = max(1, min(min_replicas, slots // experts, int(np.minimum(among.slots_N, experts).sum()) // experts))
    bytes_E = np.full(experts, expert_bytes, dtype=np.int64)
    parts, lost_L, moved = [], [], 0
    bytes_NN, checkpoint_bytes_N = np.zeros((nodes, nodes), dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    for old_N, load_E in zip(old_LN, np.asarray(load_LE, dtype=np.float64), strict=True):
        count_E = capped(allocate(load_E, among, kept_min_replicas), load_E, len(left))
        made_EN = SURVIVE[method](count_E, among, aim_of(kept_min_replicas, among), np.random.default_rng(seed))
        before_NE, made_NE = holds([old_N[node] for node in left.tolist()], experts), (made_EN.T > 0).astype(np.int64)
        if among.domains < among.nodes:
            taker_N = fewest_moves(before_NE, made_NE, bytes_E, among.slots_N, among.domain_N)
        else:
            taker_N = relabel(before_NE, made_NE, bytes_E, among.slots_N)
        after_NE = made_NE[np.argsort(taker_N)]
        gone_E = before_NE.sum(axis=0) == 0
        bytes_NN[np.ix_(left, left)] += moved_bytes(before_NE, after_NE, bytes_E)
        checkpoint_bytes_N[left] += (after_NE * gone_E) @ bytes_E
        moved += int((after_NE * (1 - before_NE) * ~gone_E).sum())
        lost_L.append(tuple(np.flatnonzero(gone_E).tolist()))
        parts.append(best_divided(after_NE, load_E, np.ones(len(left))))
    _, schedule = scheduled(bytes_NN, cluster.network, "openshop", rng=np.random.default_rng(seed))
    return Recovery(Placement.stack(parts), kept_min_replicas, tuple(lost_L), bytes_NN, schedule, moved, checkpoint_bytes_N)


def order_among(order: Order, alive_N: NDArray[np.bool_]) -> Order:
    """The order of those alive, renumbered; the sequence stays, and the lanes where ports have some."""
    number_N = np.cumsum(alive_N) - 1
    kept_X = alive_N[order.pairs_X2].all(axis=1)
    sub_channels = order.sub_channels
    if sub_channels is not None:
        sub_channels = replace(
            sub_channels, row_X=sub_channels.row_X[kept_X], out_G=sub_channels.out_G[alive_N], in_G=sub_channels.in_G[alive_N]
        )
    share_X2 = None if order.share_X2 is None else order.share_X2[kept_X]
    return replace(order, pairs_X2=number_N[order.pairs_X2[kept_X]], share_X2=share_X2, sub_channels=sub_channels)


def _among(hosts: FailureDomains, left: IntArray) -> FailureDomains:
    """The nodes left, by themselves."""
    domains, domain_N = np.unique(hosts.domain_N[left], return_inverse=True)
    return FailureDomains(hosts.slots_N[left], domain_N, hosts.odds_D[domains])
