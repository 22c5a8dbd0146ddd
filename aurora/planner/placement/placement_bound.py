"""Lower bounds on the time of one model over all of its placements: linear programs, and counting of slots.

The share of an expert's tokens that a GPU takes is a number from 0 to 1, so a linear program covers all placements with
replicas and every split of tokens over them. Its dual solution is evaluated apart from the solver: rounding in the solver makes
a bound lower, never false. Counting adds what the linear program does not see: an expert whose tokens keep a GPU too long needs
a second slot, and slots are few.
"""

from collections.abc import Sequence

import numpy as np

from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.phase_program import SMALL, blocks, merged, phase_program
from aurora.planner.placement.phase_sums import PhaseSums
from aurora.planner.placement.profile_costs import aimed_costs
from aurora.planner.placement.slot_counts import memory_slots_G
from aurora.planner.replication.load_bounds import least_largest
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray

MOST = 4 * SMALL  # the same for all programs of a layer together, above which GPUs of a kind count as one


def placement_bound_s(
    cluster: Cluster,
    profile: Profile,
    domains: Sequence[Profile],
    options: PlanOptions,
    placement: Placement | None = None,
    replicas: bool = True,
) -> float:
    """Returns seconds of all layers that no placement of one model within the slots beats.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the model that the placement must serve.
        options: `aim` says how scenarios count, `slots_per_gpu` how many slots a GPU has; otherwise its memory does.
        placement: one that the bound must hold for, though a layer of it may use more slots than the others.
        replicas: whether the bound covers placements with replicas, if there are slots for any.
    """
    slots_G = memory_slots_G(cluster, [profile])
    if options.slots_per_gpu is not None:
        slots_G = np.minimum(slots_G, options.slots_per_gpu)
    bound_s = 0.0
    for layer in range(profile.layers):
        used_G = [] if placement is None else [len(held) for held in placement.slots_LG[layer]]
        costs = aimed_costs(cluster, profile, domains, layer, options.aim)
        bound_s += layer_bound_s(costs, np.maximum(slots_G, used_G or 0), replicas)
    return bound_s


def layer_bound_s(costs: LayerCosts, slots_G: IntArray, replicas: bool = True) -> float:
    """Returns a lower bound in seconds on `costs.value_s` that holds for all placements within the slots.

    What crosses between servers is bounded as what crosses between GPUs, with one GPU for each server.

    Args:
        costs: one layer in W scenarios.
        slots_G: (G,) int64, how many experts each GPU can hold.
        replicas: whether the bound covers placements with replicas, if there are slots for any.
    """
    bound_s = _bound_s(costs, slots_G, replicas)
    if costs.nics is None or costs.of_servers is None:
        return bound_s
    slots_N = (costs.nics.members_NG @ slots_G).astype(np.int64)
    return max(bound_s, _bound_s(costs.of_servers, slots_N, replicas))


def _bound_s(costs: LayerCosts, slots_G: IntArray, replicas: bool) -> float:
    """The bound on ports alone.

    Small layers are one linear program for all scenarios together. In larger ones each scenario has a program of its own; in
    still larger ones GPUs of a kind count as one GPU with their mean time, which is no more than the slowest one's.
    """
    layer = PhaseSums.of(costs, slots_G)
    gpus, experts, _, scenarios = layer.part_s_GEXW.shape
    spare = max(0, int(layer.slots_G.sum()) - experts) if replicas else 0
    least_YW = _least_phases(layer, spare)
    if gpus * experts * scenarios <= SMALL:
        return _relaxed(layer, least_YW)
    if gpus * experts > SMALL or gpus * experts * scenarios > MOST:
        layer = merged(layer, blocks(costs, max(1, SMALL // experts)))
    if len(layer.part_s_GEXW) == 1:
        seconds_W = np.maximum(_whole_YW(layer), least_YW).sum(axis=0) + layer.aggregate_s_W
    else:
        seconds_W = np.array([_relaxed(_scenario(layer, w), least_YW[:, w : w + 1]) for w in range(scenarios)])
    return float(np.sort(seconds_W)[-layer.worst :].mean())


def _least_phases(layer: PhaseSums, spare: int) -> FloatArray:
    """(2, W) seconds that each phase takes at least, by counting: `spare` more replicas than one of each expert."""
    _, received_GEW, expert_GEW, _ = np.moveaxis(layer.part_s_GEXW, 2, 0)
    gate_GW = layer.base_s_GXW[:, 1]
    first_W, second_W = (
        [least_largest(_replicated_ER(part_GEW[..., w], layer.slots_G), spare) for w in range(part_GEW.shape[2])]
        for part_GEW in (received_GEW, expert_GEW)
    )
    return np.stack([np.maximum(gate_GW.max(axis=0), gate_GW.min(axis=0) + first_W), second_W])


def _replicated_ER(part_GE: FloatArray, slots_G: IntArray) -> FloatArray:
    """(E, R) seconds that a GPU with each expert takes at least, if 1 to R GPUs hold it.

    Replicas on the R best GPUs all take equally long. A GPU with an expert that no other holds has further such experts if all
    other GPUs' slots are too few for the rest.
    """
    with np.errstate(divide="ignore", over="ignore"):
        divided_ER = 1 / np.cumsum(1 / np.sort(part_GE.T, axis=1), axis=1)
    alone_G = np.maximum(1, part_GE.shape[1] - (slots_G.sum() - slots_G))[:, None]  # experts on this GPU alone
    ranked_GE = np.sort(part_GE, axis=1)
    last_G1 = np.take_along_axis(ranked_GE, alone_G - 1, axis=1)
    others_G1 = np.take_along_axis(ranked_GE.cumsum(axis=1), alone_G - 1, axis=1) - last_G1
    divided_ER[:, 0] = (others_G1 + np.maximum(last_G1, part_GE)).min(axis=0)
    return divided_ER


def _whole_YW(layer: PhaseSums) -> FloatArray:
    """(2, W) seconds of each phase of a layer with a single GPU, which holds all experts."""
    (sum_s_XW,) = layer.base_s_GXW + layer.part_s_GEXW.sum(axis=1)
    return np.asarray(sum_s_XW.reshape(2, -1, sum_s_XW.shape[1]).max(axis=1))


def _scenario(layer: PhaseSums, w: int) -> PhaseSums:
    """The layer in its scenario w alone."""
    return layer._replace(
        part_s_GEXW=layer.part_s_GEXW[..., w : w + 1],
        base_s_GXW=layer.base_s_GXW[..., w : w + 1],
        aggregate_s_W=layer.aggregate_s_W[w : w + 1],
        worst=1,
    )


def _relaxed(layer: PhaseSums, least_YW: FloatArray) -> float:
    """The linear program's bound, from its dual solution; least_YW (2, W) are bounds on the phases that hold as well."""
    program = phase_program(layer, least_YW)
    _, price_X = program.solved()
    return program.dual_s(price_X)
