"""From the plan in force to a new one: relabel GPUs so that little moves, move what is worth it, price and order the move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.alltoall.schedule import scheduled
from aurora.planner.check.plans import check_plan
from aurora.planner.evaluate import layer_seconds
from aurora.planner.make_plan import surviving
from aurora.planner.migration.relabelling import fewest_moves, holds, moved_bytes, worth_moving
from aurora.planner.placement.scenarios import aimed_costs, tail_mean
from aurora.planner.schedule_model import schedule_model
from aurora.types import Cluster, Placement, Plan, Profile, Schedule
from aurora.types.arrays import IntArray
from aurora.types.profile import same_model


@dataclass(frozen=True)
class Migration:
    """What travels between the plans. bytes_GG (G, G) int64 expert weights; schedule: their all-to-all, in order.

    layers: those that move, of the longer of two models; kept_s, planned_s, moved_s: the objective of the plan in force, of the
    new plan as it was made, and of what comes out.
    """

    bytes_GG: IntArray
    schedule: Schedule
    layers: tuple[int, ...]
    kept_s: float
    planned_s: float
    moved_s: float


def move(
    new: Plan,
    old: Plan,
    profiles: Sequence[Profile],
    max_bytes: int | None = None,
    domains: Sequence[Profile] = (),
) -> tuple[Plan, Migration]:
    """The plan that follows `old`: `new` with its GPUs relabelled so that the fewest bytes move, layer by layer.

    GPUs stand in for each other where they are alike. A layer keeps its old placement unless the new one saves time; with
    max_bytes the layers move that save most within it. Both plans must be for the same cluster and models, else BadInput.
    Layers of two models that meet move together. profiles, domains: those that `new` was made for.
    """
    shapes = [(p.cluster, [(m.placement.experts, len(m.dispatch_L)) for m in p.models]) for p in (old, new)]
    if shapes[0] != shapes[1] or not all(
        same_model(*(m.fingerprint for m in pair)) for pair in zip(old.models, new.models, strict=True)
    ):
        raise BadInput("`previous`: expected a plan for the same cluster and the same models, their layers and experts")
    if max_bytes is not None and max_bytes < 0:
        raise BadInput(f"`max_move_bytes`: expected zero or more, found {max_bytes}")
    periods = min(profile.layers for profile in profiles)
    kept, planned = ([model.placement for model in plan.models] for plan in (old, new))
    node_G = (
        None if new.options.min_replicas is None else np.array([gpu.node for gpu in new.cluster.gpus])
    )  # that fail together
    relabelled = _relabelled(kept, planned, profiles, periods, _alike(new.cluster), node_G)
    kept_s_L, planned_s_L, again_s_L = (layer_seconds(new, each, profiles, domains) for each in (kept, planned, relabelled))
    must_P = np.array([_below_min_replicas(new, kept[0], period) for period in range(periods)], dtype=np.int64)
    choices, saved_s, size_P = [], [], []
    for period in range(periods):
        kept_s, planned_s, again_s = (float(s_L[period::periods].sum()) for s_L in (kept_s_L, planned_s_L, again_s_L))
        choice = relabelled if again_s < kept_s or must_P[period] else planned
        choices.append(choice)
        saved_s.append(kept_s - (again_s if choice is relabelled else planned_s))
        size_P.append(int(moved_bytes(*_held(kept, choice, profiles, period, periods)).sum()))
    needed = int((np.array(size_P) * must_P).sum())
    if max_bytes is not None and needed > max_bytes:
        raise InfeasiblePlan(
            f"`max_move_bytes` {max_bytes}: `min_replicas` {new.options.min_replicas} takes {needed} bytes to move"
        )
    saved_s_P = np.where(must_P, 0.0, saved_s)
    moves_P = must_P + worth_moving(saved_s_P, np.array(size_P), (sum(size_P) if max_bytes is None else max_bytes) - needed)
    final = [
        Placement.stack(
            [
                (choices[layer % periods] if moves_P[layer % periods] else kept)[m].layer(layer)
                for layer in range(profile.layers)
            ]
        )
        for m, profile in enumerate(profiles)
    ]
    bytes_GG = sum(
        (moved_bytes(*_held(kept, final, profiles, period, periods)) for period in range(periods)),
        start=np.zeros((len(new.cluster),) * 2, dtype=np.int64),
    )
    rng = np.random.default_rng(new.options.seed)
    _, schedule = scheduled(bytes_GG, new.cluster.network, "openshop", rng=rng)
    models = tuple(
        schedule_model(
            new.cluster, [profile, *domains], placement, new.options.order, rng, model.profile_path, model.deduplicated
        )
        for model, profile, placement in zip(new.models, profiles, final, strict=True)
    )
    moved_s = float(layer_seconds(new, final, profiles, domains).sum())
    bound_s = min(_free_bound_s(new, final, profiles, domains), moved_s)
    plan = replace(new, models=models, objective_s=moved_s, bound_s=bound_s, free_bound_s=bound_s, epoch=old.epoch + 1)
    if plan.options.min_replicas is not None:
        plan = replace(plan, survival_LK=surviving(new.cluster, final[0], new.options.seed))
    check_plan(plan)
    layers = tuple(layer for layer in range(max(profile.layers for profile in profiles)) if moves_P[layer % periods])
    return plan, Migration(bytes_GG, schedule, layers, float(kept_s_L.sum()), float(planned_s_L.sum()), moved_s)


def _below_min_replicas(new: Plan, kept: Placement, layer: int) -> bool:
    """Whether a layer of the placement in force has an expert on fewer GPUs or nodes than the new plan's floor."""
    if new.options.min_replicas is None:
        return False
    held_EG = kept.holds_EG(layer)
    node_G = np.array([gpu.node for gpu in new.cluster.gpus])
    held_EN = np.array([held_EG[:, node_G == node].any(axis=1) for node in np.unique(node_G)]).T
    return any(held_EX.sum(axis=1).min() < min(new.options.min_replicas, held_EX.shape[1]) for held_EX in (held_EG, held_EN))


def _free_bound_s(new: Plan, final: Sequence[Placement], profiles: Sequence[Profile], domains: Sequence[Profile]) -> float:
    """Below every placement; where layers that stay hold replicas, also below those with replicas."""
    if final[0].split_LG is None or len(profiles) > 1:
        return new.free_bound_s
    aimed = [aimed_costs(new.cluster, profiles[0], domains, layer, new.options.aim) for layer in range(profiles[0].layers)]
    return sum(tail_mean(costs.bounds(replicated=True), worst) for costs, worst in aimed)


def _relabelled(
    old: Sequence[Placement],
    new: Sequence[Placement],
    profiles: Sequence[Profile],
    periods: int,
    alike_G: IntArray,
    node_G: IntArray | None,
) -> list[Placement]:
    """`new` with GPUs renamed, layers that meet together, such that the fewest bytes move from `old`; with node_G (G,), nodes
    as a whole."""
    from_PG = [
        np.argsort(fewest_moves(*_held(old, new, profiles, period, periods), alike_G, node_G)) for period in range(periods)
    ]
    return [
        Placement.stack([placement.layer(l).relabelled(from_PG[l % periods]) for l in range(profile.layers)])
        for placement, profile in zip(new, profiles, strict=True)
    ]


def _alike(cluster: Cluster) -> IntArray:
    """(G,) int64: one number for GPUs that planning cannot tell apart; on a fabric each has its own place."""
    keys = [
        (g.kind, g.out_Bps, g.in_Bps, g.memory_bytes, g.speed, g.startup_s, g.node if cluster.fabric else 0)
        for g in cluster.gpus
    ]
    return np.array([keys.index(key) for key in keys], dtype=np.int64)


def _held(
    old: Sequence[Placement], new: Sequence[Placement], profiles: Sequence[Profile], period: int, periods: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Who holds what before and after, (G, E) each, and the experts' bytes (E,): all layers that move with `period` side by
    side."""
    before, after, sizes = [], [], []
    for a, b, profile in zip(old, new, profiles, strict=True):
        for layer in range(period, profile.layers, periods):
            before.append(holds(a.slots_LG[layer], profile.experts))
            after.append(holds(b.slots_LG[layer], profile.experts))
            sizes.append(np.full(profile.experts, profile.expert_bytes, dtype=np.int64))
    return np.concatenate(before, axis=1), np.concatenate(after, axis=1), np.concatenate(sizes)
