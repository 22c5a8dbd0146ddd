"""Schedules the all-to-alls of a placed model."""

from collections.abc import Sequence

import numpy as np

from aurora.planner.alltoall.schedule import both_ways
from aurora.planner.layers_in_threads import Progress, of_layers, untold
from aurora.planner.workload.traffic import layer_traffic
from aurora.types import Cluster, ModelPlan, Order, Placement, Profile, Schedule


def schedule_model(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placement: Placement,
    order: str,
    rng: np.random.Generator,
    path: str,
    deduplicated: bool = False,
    progress: Progress = untold,
) -> ModelPlan:
    """Orders the dispatch and combine of every layer of a placed model, layers in threads.

    Args:
        cluster: the GPUs and their network.
        profiles: profiles of one model, whose traffic is summed; the plan names the first.
        placement: the GPUs of the model's experts.
        order: "auto" or a name of ORDER.
        rng: for orders that draw; each layer draws from a generator that it spawns.
        path: the first profile's file, as the plan should name it.
        deduplicated: whether a token is sent once to a GPU that holds several of its experts.
        progress: called with (what is being done, layers done, layers in all).

    Returns:
        The placed model with its orders, their times and bounds.

    Raises:
        BadInput: with `deduplicated`, if a profile holds no token-level routing.
    """
    profile = profiles[0]
    rngs = rng.spawn(profile.layers)

    def schedule_layer(layer: int) -> tuple[Order, Order, Schedule]:
        tokens_GG = np.sum([layer_traffic(each, layer, placement.split_EG(layer), deduplicated) for each in profiles], axis=0)
        there_GG, back_GG = tokens_GG * profile.row_bytes(deduplicated), tokens_GG.T * profile.combine_bytes
        return both_ways(there_GG, back_GG, cluster.network, order, rng=rngs[layer])

    made = of_layers(schedule_layer, profile.layers, "ordering all-to-alls", progress)
    dispatches, combines, schedules = zip(*made, strict=True)
    return ModelPlan(
        profile.model,
        profile.fingerprint,
        path,
        profile.digest,
        profile.top_k,
        profile.dispatch_bytes,
        profile.expert_bytes,
        profile.other_bytes,
        placement,
        dispatches,
        combines,
        np.array([schedule.makespan_s for schedule in schedules]),
        np.array([schedule.fluid_bound_s for schedule in schedules]),
        np.array([schedule.one_to_one_bound_s for schedule in schedules]),
        np.sum([each.load_LE for each in profiles], axis=0),
        profile.dense_layers,
        tuple(schedule.cut for schedule in schedules if schedule.cut),
        deduplicated,
    )
