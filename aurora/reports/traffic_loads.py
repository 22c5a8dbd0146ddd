"""Tokens between GPUs and the load that they make, before the plan and after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.planner.network.bounds import port_seconds, spread, spread_split
from aurora.planner.network.routes import nics_of
from aurora.planner.placement.bounds import placement_bound_s
from aurora.planner.placement.cost_model import layer_costs
from aurora.planner.placement.grouping import PLACE
from aurora.planner.placement.slot_counts import even_slots
from aurora.planner.plan import layer_seconds
from aurora.planner.workload.serving_gpus import served_split
from aurora.planner.workload.traffic import exchange_rows
from aurora.types import Cluster, ModelPlan, Placement, Plan, Profile
from aurora.types.arrays import FloatArray, IntArray, gap


@dataclass(frozen=True)
class Traffic:
    """Traffic of one model's whole profile, and the loads that it makes. On the first axis 0 is index order, 1 the plan.

    Attributes:
        tokens_BLGG: (2, L, G, G) int64, tokens of the dispatch from GPU to GPU, in all of its steps; zero diagonals.
        row_bytes: bytes of one token's row.
        port_s_BLG: (2, L, G) float64, seconds that each GPU's port, or the NIC that it uses, needs for the dispatch.
        expert_s_BLG: (2, L, G) float64, seconds that each GPU needs for its experts; a replica takes its part of the load.
        expert_bound_s_L: (L,) float64, lower bound on the slowest GPU's seconds for its experts, for all placements.
    """

    tokens_BLGG: IntArray
    row_bytes: int
    port_s_BLG: FloatArray
    expert_s_BLG: FloatArray
    expert_bound_s_L: FloatArray


def contiguous(profile: Profile) -> Placement:
    """Returns the placement of experts in the order of their numbers, as engines place them without a plan."""
    own_G = even_slots(profile.experts, np.full(profile.sources, profile.experts))
    group_E = PLACE["contiguous"](np.zeros(profile.experts, dtype=np.int64), own_G, np.random.default_rng(0))
    layer = tuple(tuple(np.flatnonzero(group_E == gpu).tolist()) for gpu in range(profile.sources))
    return Placement((layer,) * profile.layers)


def traffic(cluster: Cluster, model: ModelPlan, profile: Profile) -> Traffic:
    """Computes the traffic of a profile under the model's plan and without it.

    Args:
        cluster: the plan's cluster.
        model: the model's part of the plan.
        profile: a profile of the same model.
    """
    placements = contiguous(profile), model.placement
    row_bytes = profile.row_bytes(model.deduplicated)
    tokens_BLGG = np.array(
        [[planned_rows(profile, layer, model, placed).sum(axis=0) for layer in range(profile.layers)] for placed in placements]
    )
    port_s_BLG = np.array([[_port_seconds(tokens_GG * row_bytes, cluster) for tokens_GG in side] for side in tokens_BLGG])
    cost_LGE = [layer_costs(cluster, profile, layer).expert_s_WGE[0] for layer in range(profile.layers)]
    expert_s_BLG = np.array(
        [
            [(cost_GE * _served_EG(profile, l, model, placed).T).sum(axis=1) for l, cost_GE in enumerate(cost_LGE)]
            for placed in placements
        ]
    )
    below = spread if model.placement.split_LG is None else spread_split
    return Traffic(tokens_BLGG, row_bytes, port_s_BLG, expert_s_BLG, np.array([below(cost_GE) for cost_GE in cost_LGE]))


def _port_seconds(bytes_GG: IntArray, cluster: Cluster) -> FloatArray:
    """(G,) seconds of each GPU's port, or of the NIC that it uses if that takes longer."""
    port_s_G, nics = port_seconds(bytes_GG, cluster.network), nics_of(cluster.network)
    return port_s_G if nics is None else np.maximum(port_s_G, nics.seconds(bytes_GG))


def _served_EG(profile: Profile, layer: int, model: ModelPlan, placement: Placement) -> FloatArray:
    """(E, G) the share of each expert's tokens that each GPU serves."""
    split_EG = placement.split_EG(layer)
    if model.hierarchy is None:
        return split_EG
    return served_split(profile.tokens_TLSE[:, layer].sum(axis=0), split_EG, model.hierarchy.server_G)


def planned_rows(profile: Profile, layer: int, model: ModelPlan, placement: Placement) -> IntArray:
    """Returns (S, G, G) int64 rows of a layer's dispatch in each step of the model's all-to-all, under a given placement."""
    split_EG = placement.split_EG(layer)
    return exchange_rows(profile, layer, split_EG, deduplicated=model.deduplicated, hierarchy=model.hierarchy)


def tokens_of(profile: Profile) -> float:
    """Returns how many tokens a profile holds, of all windows and sources."""
    return float(profile.tokens_TLSE.sum()) / (profile.layers * profile.top_k)


def objective_s(plan: Plan, profiles: Sequence[Profile]) -> tuple[float, float]:
    """Returns (without, with), the seconds of all layers by the plan's objective: experts in index order, and as planned.

    Args:
        plan: the plan.
        profiles: one profile for each of its models.
    """
    ways = [contiguous(profile) for profile in profiles], [model.placement for model in plan.models]
    before_s, after_s = (float(layer_seconds(plan, way, profiles).sum()) for way in ways)
    return before_s, after_s


def placement_bounds_s(plan: Plan, profile: Profile) -> tuple[float, float]:
    """Returns the seconds of all layers that no placement of one model beats: without replicas, and with them.

    Args:
        plan: gives the cluster and the aim.
        profile: the traffic.
    """
    given = plan.cluster, profile, (), plan.options, plan.models[0].placement
    return placement_bound_s(*given, replicas=False), placement_bound_s(*given, replicas=True)


def relative_loads(flows: Traffic, profile: Profile) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns loads divided by the mean of their layer: (L, E) of experts, and (L, G) of GPUs in index order and as planned.

    Args:
        flows: the traffic of `profile`.
        profile: the traffic's profile. An expert's load is its tokens, a GPU's the seconds of its dispatch and its experts.
    """
    before_LG, after_LG = flows.port_s_BLG + flows.expert_s_BLG
    experts, before, after = (
        load_LX / load_LX.mean(axis=1, keepdims=True).clip(1e-30) for load_LX in (profile.load_LE, before_LG, after_LG)
    )
    return experts, before, after


def skew(value_G: FloatArray) -> float:
    """Returns the largest of (G,) values divided by their mean, minus one."""
    return gap(float(value_G.max()), float(value_G.mean()))
