"""Lower bound on the time of one model over all of its placements."""

from collections.abc import Sequence

import numpy as np

from aurora.planner.placement.cost_model import aimed_costs
from aurora.planner.placement.slot_counts import memory_slots_G
from aurora.types import Cluster, Placement, PlanOptions, Profile


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
        bound_s += costs.bound_s(np.maximum(slots_G, used_G or 0), replicas)
    return bound_s
