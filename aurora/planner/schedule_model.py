"""Schedules the all-to-alls of a placed model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.planner.alltoall.hierarchical import carriers, level_from
from aurora.planner.alltoall.schedule import both_ways, hierarchical_order_s
from aurora.planner.check.hierarchical import check_hierarchical, check_serving
from aurora.planner.layers_in_threads import Progress, of_layers, untold
from aurora.planner.network.schedule_time import steps_seconds
from aurora.planner.workload.serving_gpus import serving_gpus
from aurora.planner.workload.traffic import exchange_bytes, exchange_rows
from aurora.types import Cluster, Fabric, Hierarchy, ModelPlan, Order, Placement, Profile, Schedule
from aurora.types.arrays import IntArray

CHUNKS = (1, 2, 4, 8)  # of a hierarchical all-to-all, of which the fastest is taken
LEVEL_GAIN = 0.02  # what levelling must save of the predicted seconds, as it also costs steps and memory
MOST_COUNTS = 1 << 18  # numbers that ranks tell each other before a dispatch, at most, where NICs are levelled
PRICED = 8192  # pairs of ranks of all exchanges that each number of chunks is priced by


def schedule_model(
    cluster: Cluster,
    profiles: Sequence[Profile],
    placement: Placement,
    order: str,
    rng: np.random.Generator,
    path: str,
    deduplicated: bool = False,
    hierarchy: Hierarchy | None = None,
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
        hierarchy: the servers and chunks of hierarchical all-to-alls, whose tokens are deduplicated; None: they are flat.
        progress: called with (what is being done, layers done, layers in all).

    Returns:
        The placed model with its orders, their times and bounds.

    Raises:
        BadInput: with `deduplicated` and no hierarchy, if a profile holds no token-level routing.
    """
    profile = profiles[0]
    rngs = rng.spawn(profile.layers)

    def schedule_layer(layer: int) -> tuple[Order, Order, Schedule]:
        split_EG, rows_SGG = placement.split_EG(layer), np.zeros((), dtype=np.int64)
        for each in profiles:
            own_SGG = exchange_rows(each, layer, split_EG, deduplicated=deduplicated, hierarchy=hierarchy)
            if hierarchy is not None and each.routing is not None:  # rows that are estimated are of no single token
                experts_UK, source_U = each.routing.layer(layer)
                rank_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
                check_serving(rank_UK, experts_UK, source_U, split_EG, hierarchy.server_G)
                check_hierarchical(own_SGG, own_SGG[::-1].transpose(0, 2, 1), rank_UK, source_U, hierarchy, carriers)
            rows_SGG = rows_SGG + own_SGG
        there_SGG, back_SGG = (exchange_bytes(rows_SGG, profile, phase, deduplicated) for phase in ("dispatch", "combine"))
        return both_ways(there_SGG, back_SGG, hierarchy, cluster.network, order, rng=rngs[layer])

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
        hierarchy,
    )


def fastest_hierarchy(
    cluster: Cluster, profile: Profile, placement: Placement, order: str, rng: np.random.Generator
) -> Hierarchy:
    """Returns the servers of the cluster's fabric with the number of chunks whose exchanges are predicted to be fastest.

    NICs are levelled if exchanges then take less by more than LEVEL_GAIN. Dispatches and combines of some windows and layers
    are priced, evenly spread, in the order that "auto" or `order` names.

    Args:
        cluster: a cluster with a fabric of servers.
        profile: the model's traffic.
        placement: the GPUs of the model's experts.
        order: "auto" or a name of ORDER.
        rng: for orders that draw.
    """
    assert cluster.fabric is not None, "resolve_options refuses others"
    cases = profile.windows * profile.layers
    some = np.unique(np.linspace(0, cases - 1, min(cases, max(1, PRICED // len(cluster) ** 2))).astype(int)).tolist()

    def rows_SGG(case: int, hierarchy: Hierarchy) -> IntArray:
        window, layer = divmod(case, profile.layers)
        placed = profile, layer, placement.split_EG(layer)
        return exchange_rows(*placed, deduplicated=True, hierarchy=hierarchy, window=window)

    def seconds(hierarchy: Hierarchy) -> float:
        total_s = 0.0
        for case in some:
            steps_SGG = rows_SGG(case, hierarchy)
            there_SGG, back_SGG = (exchange_bytes(steps_SGG, profile, phase, True) for phase in ("dispatch", "combine"))
            made, there_s = hierarchical_order_s(there_SGG, hierarchy, cluster.network, order, rng=rng)
            total_s += there_s + steps_seconds(made.reversed, back_SGG, cluster.network)
        return total_s

    plain = [Hierarchy(np.array(cluster.fabric.server_G), chunks) for chunks in CHUNKS]
    seconds_of = {each: seconds(each) for each in plain}
    best = min(plain, key=lambda each: seconds_of[each])
    if _most_levelled([rows_SGG(case, plain[0]) for case in some], cluster.fabric) <= LEVEL_GAIN:
        return best
    row_bytes = profile.row_bytes(deduplicated=True)
    levelled = [replace(each, level_from=level_from(each.chunks, row_bytes, cluster.network)) for each in plain]
    told = [each for each in levelled if each.parts > 1 and each.pieces * len(cluster) ** 2 <= MOST_COUNTS]
    seconds_of.update((each, seconds(each) / (1 - LEVEL_GAIN)) for each in told)
    return min(seconds_of, key=lambda each: seconds_of[each])


def _most_levelled(rows_CSGG: Sequence[IntArray], fabric: Fabric) -> float:
    """What part of the busiest NICs' rows levelling can save at most, of some all-to-alls."""
    if fabric.shared_nic:
        return 0.0
    server_G, busiest, even = np.array(fabric.server_G), 0.0, 0.0
    for rows_SGG in rows_CSGG:
        between_GG = np.where(server_G[:, None] == server_G, 0, rows_SGG.sum(axis=0))
        nics_2G = np.stack([between_GG.sum(axis=1), between_GG.sum(axis=0)])
        busiest += float(nics_2G.max())
        even += max(float((np.bincount(server_G, nic_G) / np.bincount(server_G)).max()) for nic_G in nics_2G)
    return 1 - even / busiest if busiest else 0.0
