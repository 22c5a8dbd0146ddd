"""Lower bounds on the time of one model over all of its placements: linear programs, and counting of slots.

The share of an expert's tokens that a GPU takes is a number from 0 to 1, so a linear program covers all placements with
replicas and every split of tokens over them. Its dual solution is evaluated apart from the solver: rounding in the solver makes
a bound lower, never false. Counting adds what the linear program does not see: an expert whose tokens keep a GPU too long needs
a second slot, and slots are few.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from aurora.planner.placement.cost_model import LayerCosts, aimed_costs
from aurora.planner.placement.phase_program import phase_program
from aurora.planner.placement.slot_counts import memory_slots_G
from aurora.planner.placement.slot_search import SearchLayer
from aurora.planner.replication.load_bounds import least_largest
from aurora.types import Cluster, Placement, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray

SMALL = 4096  # experts times GPUs times scenarios of a linear program; one of that size takes about 50 ms


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

    Small layers are one linear program for all scenarios together. In larger ones each scenario has a program of its own, in
    which GPUs of a kind count as one GPU with their mean time, which is no more than the slowest one's.

    Args:
        costs: one layer in W scenarios.
        slots_G: (G,) int64, how many experts each GPU can hold.
        replicas: whether the bound covers placements with replicas, if there are slots for any.
    """
    layer = SearchLayer.of(costs, slots_G)
    gpus, experts, _, scenarios = layer.part_s_GEXW.shape
    spare = max(0, int(layer.slots_G.sum()) - experts) if replicas else 0
    least_YW = _least_phases(layer, spare)
    if gpus * experts * scenarios <= SMALL:
        return _relaxed(layer, least_YW)
    if gpus * experts > SMALL:
        layer = _merged(layer, _blocks(costs, max(1, SMALL // experts)))
    if len(layer.part_s_GEXW) == 1:
        seconds_W = np.maximum(_whole_YW(layer), least_YW).sum(axis=0) + layer.aggregate_s_W
    else:
        seconds_W = np.array([_relaxed(_scenario(layer, w), least_YW[:, w : w + 1]) for w in range(scenarios)])
    return float(np.sort(seconds_W)[-layer.worst :].mean())


def _least_phases(layer: SearchLayer, spare: int) -> FloatArray:
    """(2, W) seconds that each phase takes at least, by counting: `spare` more replicas than one of each expert."""
    _, received_GEW, expert_GEW, _ = np.moveaxis(layer.part_s_GEXW, 2, 0)
    gate_GW = layer.base_s_GXW[:, 1]
    first_W, second_W = (
        [least_largest(_divided_ER(part_GEW[..., w].T), spare) for w in range(part_GEW.shape[2])]
        for part_GEW in (received_GEW, expert_GEW)
    )
    return np.stack([np.maximum(gate_GW.max(axis=0), gate_GW.min(axis=0) + first_W), second_W])


def _divided_ER(part_EG: FloatArray) -> FloatArray:
    """(E, R) seconds of each expert divided over 1 to R GPUs, those on which it takes least, so that all take equally long."""
    with np.errstate(divide="ignore"):
        return np.asarray(1 / np.cumsum(1 / np.sort(part_EG, axis=1), axis=1))


def _blocks(costs: LayerCosts, most: int) -> IntArray:
    """(G,) int64: The same number for GPUs with the same ports and expert times; at most `most` numbers."""
    kind_GX = np.column_stack([costs.expert_s_WGE.sum(axis=(0, 2)), *costs.port_s_XG])
    kinds_KX, kind_G = np.unique(kind_GX, axis=0, return_inverse=True)
    return np.asarray(kind_G.reshape(-1) * min(most, len(kinds_KX)) // len(kinds_KX), dtype=np.int64)


def _merged(layer: SearchLayer, block_G: IntArray) -> SearchLayer:
    """The layer with a GPU for each block: no placement takes longer on its slowest block than on its slowest GPU.

    A block's sums are the means of its GPUs', and an expert costs there what it costs on the block's best GPU for each sum.
    """
    members = [block_G == block for block in range(int(block_G.max()) + 1)]
    return layer._replace(
        part_s_GEXW=np.stack([layer.part_s_GEXW[own].min(axis=0) / own.sum() for own in members]),
        base_s_GXW=np.stack([layer.base_s_GXW[own].mean(axis=0) for own in members]),
        slots_G=np.array([layer.slots_G[own].sum() for own in members]),
    )


def _whole_YW(layer: SearchLayer) -> FloatArray:
    """(2, W) seconds of each phase of a layer with a single GPU, which holds all experts."""
    (sum_s_XW,) = layer.base_s_GXW + layer.part_s_GEXW.sum(axis=1)
    return np.asarray(sum_s_XW.reshape(2, -1, sum_s_XW.shape[1]).max(axis=1))


def _scenario(layer: SearchLayer, w: int) -> SearchLayer:
    """The layer in its scenario w alone."""
    return layer._replace(
        part_s_GEXW=layer.part_s_GEXW[..., w : w + 1],
        base_s_GXW=layer.base_s_GXW[..., w : w + 1],
        aggregate_s_W=layer.aggregate_s_W[w : w + 1],
        worst=1,
    )


def _relaxed(layer: SearchLayer, least_YW: FloatArray) -> float:
    """The linear program's bound, from its dual solution; least_YW (2, W) are bounds on the phases that hold as well."""
    program = phase_program(layer, least_YW)
    found = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
        program.cost_V,
        program.at_most_XV,
        program.limit_X,
        program.once_EV,
        np.ones(program.once_EV.shape[0]),
        np.column_stack([program.lower_V, np.full(len(program.lower_V), np.inf)]),
        method="highs-ds",
    )
    prices = found.ineqlin.marginals if found.status == 0 else np.zeros(len(program.limit_X))
    return program.dual_s(np.maximum(0.0, -prices))
