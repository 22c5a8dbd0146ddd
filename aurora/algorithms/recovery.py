"""Recovery: the next placement after ranks failed or joined, with GPUs relabelled so that few experts move."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import linear_sum_assignment

from aurora.algorithms.replicas.failure_resilient import DEFAULT, SURVIVE, aim_of, allocate, capped
from aurora.errors import InfeasiblePlan
from aurora.types import FailureDomains, Placement
from aurora.types.arrays import FloatArray, IntArray

LayerSlots = Sequence[Sequence[int]]  # of one layer: the experts on each GPU or node


def holds(slots_G: LayerSlots, experts: int) -> IntArray:
    """Returns (G, E) int64: 1 where GPU g holds expert e; slots_G[g] are the experts that GPU g holds."""
    holds_GE = np.zeros((len(slots_G), experts), dtype=np.int64)
    for gpu, gpu_experts in enumerate(slots_G):
        holds_GE[gpu, list(gpu_experts)] = 1
    return holds_GE


def fewest_moves(
    old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray, alike_G: IntArray, node_G: IntArray | None = None
) -> IntArray:
    """Relabels GPUs so that the fewest bytes move in all. Exact; ties leave GPUs as they are.

    Solves a minimum-cost assignment of GPUs. With node_G, it assigns nodes; the cost of a pair of nodes is the minimum-cost
    assignment of their GPUs.

    Args:
        old_GE: (G, E) int64, 1 where GPU g holds expert e in the present placement.
        new_GE: (G, E) int64, 1 where GPU g holds expert e in the new placement. Two colocated models' experts are side by side.
        bytes_E: (E,) int64, bytes of each expert's weights.
        alike_G: (G,) int64, equal numbers for GPUs that may be exchanged.
        node_G: (G,) int64, the node of each GPU, if only nodes as a whole may be exchanged; None: each GPU by itself.

    Returns:
        (G,) int64: entry g is the GPU that takes the experts which the new placement gives to GPU g.
    """
    arriving_GG = (new_GE * bytes_E) @ (1 - old_GE).T  # what GPU h lacks of the new GPU g's experts
    n = len(old_GE)
    stays_GG = arriving_GG * (n + 1) + (1 - np.eye(n, dtype=np.int64))
    cost_GG = np.where(alike_G[:, None] == alike_G[None, :], stays_GG, np.inf)
    if node_G is None:
        return np.asarray(linear_sum_assignment(cost_GG)[1], dtype=np.int64)
    gpus_N = [np.flatnonzero(node_G == node) for node in np.unique(node_G)]
    kinds_N = [sorted(alike_G[gpus].tolist()) for gpus in gpus_N]
    cost_NN = np.full((len(gpus_N),) * 2, np.inf)
    inner: dict[tuple[int, int], IntArray] = {}
    for a, b in product(range(len(gpus_N)), repeat=2):
        if kinds_N[a] == kinds_N[b]:
            part_GG = cost_GG[np.ix_(gpus_N[a], gpus_N[b])]
            rows, inner[a, b] = linear_sum_assignment(part_GG)
            cost_NN[a, b] = part_GG[rows, inner[a, b]].sum()
    taker_G = np.empty(n, dtype=np.int64)
    for a, b in enumerate(linear_sum_assignment(cost_NN)[1].tolist()):
        taker_G[gpus_N[a]] = gpus_N[b][inner[a, b]]
    return taker_G


def recover(
    old_LN: Sequence[LayerSlots],
    load_LE: FloatArray | IntArray,
    failure_domains: FailureDomains,
    min_replicas: int,
    method: str = DEFAULT,
) -> Placement:
    """Places experts anew on the nodes that are left after others were lost or joined, so that few replicas move.

    Args:
        old_LN: old_LN[l][n] are the experts that node n holds in layer l; empty for a node that has joined.
        load_LE: (L, E), the load of each expert.
        failure_domains: the N nodes, their slots and failure domains.
        min_replicas: minimum replicas of each expert, as far as the slots allow.
        method: a name in SURVIVE.

    Returns:
        The experts on the nodes.

    Raises:
        InfeasiblePlan: if one replica of each expert does not fit.

    Source:
        Lazarus (arXiv:2407.04656) §4.3, which relabels greedily.
    """
    experts, slots, nodes = np.asarray(load_LE).shape[1], int(failure_domains.slots_N.sum()), failure_domains.nodes
    if slots < experts:
        raise InfeasiblePlan(f"{experts} experts need {experts} slots; the {nodes} nodes left have {slots}")
    distinct = int(np.minimum(failure_domains.slots_N, experts).sum()) // experts
    kept_min_replicas = max(1, min(min_replicas, slots // experts, distinct))
    bytes_E, node_N = np.ones(experts, dtype=np.int64), None
    if failure_domains.domains < nodes:  # which take each other's places as a whole
        node_N = failure_domains.domain_N
    layers = []
    for old_N, load_E in zip(old_LN, np.asarray(load_LE, dtype=np.float64), strict=True):
        count_E = capped(allocate(load_E, failure_domains, kept_min_replicas), load_E, nodes)
        aim = aim_of(kept_min_replicas, failure_domains)
        made_NE = (SURVIVE[method](count_E, failure_domains, aim, np.random.default_rng(0)).T > 0).astype(np.int64)
        taker_N = fewest_moves(holds(old_N, experts), made_NE, bytes_E, failure_domains.slots_N, node_N)
        layers.append(Placement.held(made_NE[np.argsort(taker_N)].T))
    return Placement.stack(layers)
