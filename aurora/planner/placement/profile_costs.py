"""Costs of profiles: LayerCosts of a layer over a whole profile, in scenarios that a placement must serve, or as forecast."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from aurora.planner.network.routes import nics_of
from aurora.planner.placement.cost_model import GroupCosts, LayerCosts
from aurora.planner.workload.estimated_rows import known_or_counted
from aurora.types import OVERHEAD, Cluster, Gpu, Profile
from aurora.types.arrays import FloatArray, IntArray

OWN = "own"  # the aim that takes the recorded counts as exact
SUMMED = ("sum", OWN)  # aims that add all windows or domains to one scenario
AIMS: dict[str, Callable[[int], int]] = {  # by name: how many of W scenarios count, the longest first
    "mean": lambda scenarios: scenarios,
    "cvar": lambda scenarios: -(-scenarios // 2),  # the longer half
    "worst": lambda scenarios: 1,
    **dict.fromkeys(SUMMED, lambda scenarios: 1),
}


def layer_costs(cluster: Cluster, profile: Profile, layer: int, deduplicated: bool = False) -> LayerCosts:
    """Returns the LayerCosts of one layer with the whole profile as a single scenario.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        layer: index of the MoE layer.
        deduplicated: whether a token is counted once for a group that holds several of its experts.
    """
    costs = _scenario_costs(cluster, [(profile, slice(None))], layer)
    if not deduplicated:
        return costs
    return replace(costs, dispatch_bytes=profile.row_bytes(True), routing=known_or_counted(profile, layer))


def aimed_costs(cluster: Cluster, profile: Profile, domains: Sequence[Profile], layer: int, aim: str) -> LayerCosts:
    """Returns the LayerCosts of one layer in each scenario that a placement must serve.

    A scenario is a profile or, without further `domains`, a window of the profile. The aims of SUMMED add all scenarios to one.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model.
        layer: index of the MoE layer.
        aim: a name of AIMS.
    """
    windows = [slice(None)] if domains or aim in SUMMED else [slice(t, t + 1) for t in range(profile.windows)]
    parts = [(each, window) for each in (profile, *domains) for window in windows]
    costs = _scenario_costs(cluster, parts, layer)
    return costs.summed if aim in SUMMED else replace(costs, worst=AIMS[aim](len(parts)))


def expected_costs(cluster: Cluster, profile: Profile, tokens_WSE: FloatArray, windows_W: IntArray, worst: int) -> LayerCosts:
    """Returns the LayerCosts of one layer in scenarios that were forecast rather than recorded.

    Args:
        cluster: the GPUs.
        profile: gives the model's bytes and compute curves.
        tokens_WSE: (W, S, E) float64, (token, expert) pairs from each source rank to each expert in each scenario.
        windows_W: (W,) int64, how many equal windows the pairs of a scenario come in.
        worst: how many scenarios count, the longest first.
    """
    each_WSE = tokens_WSE / windows_W[:, None, None]
    seconds = _window_seconds(*_kinds(cluster), profile, each_WSE)
    expert_s_WVE, gate_s_WG, aggregate_s_WG = ((each.T * windows_W).T for each in seconds)
    return _layer_costs(cluster, profile, tokens_WSE, expert_s_WVE, gate_s_WG, aggregate_s_WG, worst)


def _scenario_costs(cluster: Cluster, parts: Sequence[tuple[Profile, slice]], layer: int) -> LayerCosts:
    """The LayerCosts of several scenarios, each the windows of a profile, whose tokens are summed. All are of one model."""
    gpus, kind_G = _kinds(cluster)
    distinct = {id(profile): profile for profile, _ in parts}
    seconds = {key: _window_seconds(gpus, kind_G, profile, profile.tokens_TLSE[:, layer]) for key, profile in distinct.items()}
    sums_XW: tuple[list[FloatArray], ...] = ([], [], [])
    for profile, windows in parts:
        for sums_W, each in zip(sums_XW, seconds[id(profile)], strict=True):
            sums_W.append(each[windows].sum(axis=0))
    own_WGE = np.stack([profile.tokens_TLSE[windows, layer].sum(axis=0) for profile, windows in parts])
    expert_s_WVE, gate_s_WG, aggregate_s_WG = map(np.stack, sums_XW)
    return _layer_costs(cluster, parts[0][0], own_WGE, expert_s_WVE, gate_s_WG, aggregate_s_WG)


def _layer_costs(
    cluster: Cluster,
    profile: Profile,
    own_WGE: IntArray | FloatArray,
    expert_s_WVE: FloatArray,
    gate_s_WG: FloatArray,
    aggregate_s_WG: FloatArray,
    worst: int = 1,
) -> LayerCosts:
    """The LayerCosts of scenarios from their tokens and their seconds, which are of each expert on each of V kinds of GPUs."""
    gpus, kind_G = _kinds(cluster)
    return LayerCosts(
        own_WGE=own_WGE,
        expert_s_WGE=np.broadcast_to(expert_s_WVE, own_WGE.shape) if len(gpus) == 1 else expert_s_WVE[:, kind_G],
        gate_s_WG=gate_s_WG,
        aggregate_s_WG=aggregate_s_WG,
        dispatch_bytes=profile.dispatch_bytes,
        combine_bytes=profile.combine_bytes,
        out_Bps=cluster.out_Bps_G,
        in_Bps=cluster.in_Bps_G,
        worst=worst,
        nics=nics_of(cluster.network),
    )


def _kinds(cluster: Cluster) -> tuple[list[Gpu], IntArray]:
    """One GPU of each kind that computes at a speed of its own, and (G,) the index of each GPU's kind."""
    first = {(gpu.kind, gpu.speed): gpu for gpu in cluster.gpus[::-1]}
    number = {kind: index for index, kind in enumerate(first)}
    return list(first.values()), np.array([number[gpu.kind, gpu.speed] for gpu in cluster.gpus])


def _window_seconds(
    gpus: Sequence[Gpu], kind_G: IntArray, profile: Profile, tokens_TSE: IntArray | FloatArray
) -> tuple[FloatArray, ...]:
    """Seconds of a layer in each window: (T, V, E) of each expert on each of V kinds, (T, G) of gates and of aggregations.

    Overheads of grouped kernels, which no placement changes, are counted with the aggregations.
    """
    tokens_TE, own_TG = tokens_TSE.sum(axis=1), tokens_TSE.sum(axis=2) // profile.top_k
    fixed_XTG = np.empty((2, *own_TG.shape))
    for kind, gpu in enumerate(gpus):
        here = kind_G == kind
        fixed_XTG[:, :, here] = [profile.seconds(phase, gpu, own_TG[:, here]) for phase in ("gate", "aggregate")]
        fixed_XTG[1][:, here] += profile.seconds(OVERHEAD, gpu, tokens_TE.sum(axis=1))[:, None]
    return np.stack([profile.seconds("expert", gpu, tokens_TE) for gpu in gpus], axis=1), *fixed_XTG


def group_costs(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray, deduplicated: bool = False) -> GroupCosts:
    """Returns the GroupCosts of one layer over the whole profile; arguments as in `layer_costs` and `LayerCosts.grouped`."""
    return layer_costs(cluster, profile, layer, deduplicated).grouped(group_E)
