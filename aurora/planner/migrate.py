"""Migrates from the plan in force to a new one: relabels GPUs so that few bytes move, and moves only layers that gain by it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from aurora.algorithms.recovery import fewest_moves, holds, migration_schedule, moved_bytes, worth_moving
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.plan import layer_seconds, ordered_plan, scenario_of_plan
from aurora.types import Cluster, Placement, Plan, Profile, Schedule
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Migration:
    """The expert weights that move between two plans, and the gain.

    Attributes:
        bytes_GG: (G, G) int64, bytes of expert weights from GPU to GPU.
        schedule: schedule of these bytes, as one all-to-all.
        layers: indices of the layers that move; with several models, counted in the model with the most layers.
        kept_s: objective of the plan in force, in seconds.
        planned_s: objective of the new plan as it was made, in seconds.
        moved_s: objective of the resulting plan, in seconds.
    """

    bytes_GG: IntArray
    schedule: Schedule
    layers: tuple[int, ...]
    kept_s: float
    planned_s: float
    moved_s: float


def migrate(
    plan: Plan,
    previous: Plan,
    profiles: Profile | Sequence[Profile],
    *,
    max_move_bytes: int | None = None,
    domains: Sequence[Profile] = (),
) -> tuple[Plan, Migration]:
    """Adapts a new plan to the plan in force, so that few expert weights move.

    GPUs of the new plan get other numbers so that the fewest bytes move; only equal GPUs are exchanged. A layer keeps its old
    placement unless the new one saves time or the old one has too few replicas. Layers of colocated models that run at the same
    time either all move or all stay.

    Args:
        plan: the new plan, made for `profiles` and `domains`.
        previous: the plan in force, for the same cluster and models.
        profiles: the traffic, one profile per model.
        max_move_bytes: maximum bytes of weights that move; the layers that save the most time within them move. None: all
            layers that save time move.
        domains: the further profiles that `plan` was made for.

    Returns:
        (next plan, migration): the plan to run next, one epoch after `previous`, with GPUs relabelled so that the fewest bytes
        move; and the Migration: the bytes that move, their schedule, and the gain.

    Raises:
        BadInput: if the plans are for other clusters or models.
        InfeasiblePlan: if `max_move_bytes` is less than `min_replicas` needs.

    Source:
        Lazarus (arXiv:2407.04656) §4.3, which relabels greedily.
    """
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    _check_plans(plan, previous)
    if max_move_bytes is not None and max_move_bytes < 0:
        raise BadInput(f"`max_move_bytes`: expected zero or more, found {max_move_bytes}")
    joint = _JointLayers(tuple(profiles))
    present, planned = ([model.placement for model in version.models] for version in (previous, plan))
    relabelled = _relabelled(present, planned, joint, plan)
    kept_s_L, planned_s_L, relabelled_s_L = (
        layer_seconds(plan, placements, profiles, domains) for placements in (present, planned, relabelled)
    )
    must_L = np.array([_below_min_replicas(plan, present[0], layer) for layer in range(joint.count)], dtype=np.int64)
    relabels_L = (joint.sum(relabelled_s_L) < joint.sum(kept_s_L)) | (must_L > 0)
    saved_s_L = joint.sum(kept_s_L) - np.where(relabels_L, joint.sum(relabelled_s_L), joint.sum(planned_s_L))
    bytes_L = np.array(
        [joint.moved(present, relabelled if relabels_L[layer] else planned, layer).sum() for layer in range(joint.count)]
    )
    moves_L = _moving_layers(saved_s_L, bytes_L, must_L, max_move_bytes, plan.options.min_replicas)
    final = joint.stacked(
        [
            present if not moves else relabelled if relabels else planned
            for moves, relabels in zip(moves_L, relabels_L, strict=True)
        ]
    )
    next_plan, schedule, bytes_GG = _next_plan(plan, previous, joint, present, final, domains)
    layers = tuple(np.flatnonzero(moves_L[joint.group_L]).tolist())
    kept_s, planned_s = float(kept_s_L.sum()), float(planned_s_L.sum())
    return next_plan, Migration(bytes_GG, schedule, layers, kept_s, planned_s, next_plan.objective_s)


@dataclass(frozen=True)
class _JointLayers:
    """Groups of layers that move as one: a layer of any model and all layers that run beside it at some time."""

    profiles: tuple[Profile, ...]

    @cached_property
    def group_L(self) -> IntArray:
        """(L,) int, the group of each layer, in every model that has the layer."""
        layer_L = np.arange(max(profile.layers for profile in self.profiles))
        beside = [layer_L % profile.layers for profile in self.profiles]
        pairs = np.tile(layer_L, len(beside)), np.concatenate(beside)
        graph = coo_array((np.ones(len(pairs[0])), pairs), shape=(len(layer_L),) * 2)
        return np.asarray(connected_components(graph, directed=False)[1])

    @property
    def count(self) -> int:
        """The number of groups."""
        return int(self.group_L.max()) + 1

    def _layers(self, profile: Profile, group: int) -> list[int]:
        """The layers of a model that are in a group."""
        return np.flatnonzero(self.group_L[: profile.layers] == group).tolist()

    def sum(self, value_L: FloatArray) -> FloatArray:
        """(count,) float64: the sum over each group of a value for each layer."""
        return np.asarray(np.bincount(self.group_L, weights=value_L), dtype=np.float64)

    def holds(self, placements: Sequence[Placement], group: int) -> IntArray:
        """(G, E) int64: 1 where a GPU holds an expert; the columns are the experts of all layers in a group."""
        tables = [
            holds(placement.slots_LG[l], profile.experts)
            for placement, profile in zip(placements, self.profiles, strict=True)
            for l in self._layers(profile, group)
        ]
        return np.concatenate(tables, axis=1)

    def bytes_E(self, group: int) -> IntArray:
        """(E,) int64: bytes of the weights of these experts."""
        sizes = [
            np.full(profile.experts, profile.expert_bytes, dtype=np.int64)
            for profile in self.profiles
            for _ in self._layers(profile, group)
        ]
        return np.concatenate(sizes)

    def moved(self, old: Sequence[Placement], new: Sequence[Placement], group: int) -> IntArray:
        """(G, G) int64: the bytes that move from GPU to GPU for a group."""
        return moved_bytes(self.holds(old, group), self.holds(new, group), self.bytes_E(group))

    def stacked(self, chosen: Sequence[Sequence[Placement]]) -> list[Placement]:
        """The placement of each model, whose layers come from those chosen for their group."""
        return [
            Placement.stack([chosen[self.group_L[l]][m].layer(l) for l in range(profile.layers)])
            for m, profile in enumerate(self.profiles)
        ]


def _check_plans(new: Plan, old: Plan) -> None:
    """Raise BadInput unless both plans are for the same cluster and models."""
    if old.cluster != new.cluster or len(old.models) != len(new.models):
        raise BadInput("`previous`: expected a plan for the same cluster and the same models, their layers and experts")
    for before, after in zip(old.models, new.models, strict=True):
        before.identity.check_same(after.identity, "`previous`: expected a plan for the same cluster and the same models")


def _relabelled(old: Sequence[Placement], new: Sequence[Placement], joint: _JointLayers, plan: Plan) -> list[Placement]:
    """`new` with GPUs relabelled so that the fewest bytes move from `old`; nodes as a whole if replicas must survive nodes."""
    alike_G = _alike(plan.cluster)
    node_G = None if plan.options.min_replicas is None else np.array([gpu.node for gpu in plan.cluster.gpus])
    from_LG = [
        np.argsort(fewest_moves(joint.holds(old, l), joint.holds(new, l), joint.bytes_E(l), alike_G, node_G))
        for l in range(joint.count)
    ]
    return [
        Placement.stack([placement.layer(l).relabelled(from_LG[joint.group_L[l]]) for l in range(profile.layers)])
        for placement, profile in zip(new, joint.profiles, strict=True)
    ]


def _alike(cluster: Cluster) -> IntArray:
    """(G,) int64: equal numbers for GPUs that planning cannot tell apart; with servers these are on the same node."""
    keys = [
        (g.kind, g.out_Bps, g.in_Bps, g.memory_bytes, g.speed, g.startup_s, g.node if cluster.servers else 0)
        for g in cluster.gpus
    ]
    return np.array([keys.index(key) for key in keys], dtype=np.int64)


def _below_min_replicas(new: Plan, present: Placement, layer: int) -> bool:
    """Tells if a layer of the present placement has an expert on fewer GPUs or nodes than the new plan's `min_replicas`."""
    if new.options.min_replicas is None:
        return False
    node_G = [gpu.node for gpu in new.cluster.gpus]
    fewest = zip(present.fewest_replicas(layer, node_G), (len(node_G), len(set(node_G))), strict=True)
    return any(least < min(new.options.min_replicas, most) for least, most in fewest)


def _moving_layers(
    saved_s_L: FloatArray, bytes_L: IntArray, must_L: IntArray, max_bytes: int | None, min_replicas: int | None
) -> IntArray:
    """(L,) int64: 1 for the layers that move: layers that must, and within the bytes left the layers that save the most."""
    needed = int((bytes_L * must_L).sum())
    if max_bytes is not None and needed > max_bytes:
        raise InfeasiblePlan(f"`max_move_bytes` {max_bytes}: `min_replicas` {min_replicas} takes {needed} bytes to move")
    budget = (int(bytes_L.sum()) if max_bytes is None else max_bytes) - needed
    return must_L + worth_moving(np.where(must_L, 0.0, saved_s_L), bytes_L, budget)


def _next_plan(
    new: Plan, old: Plan, joint: _JointLayers, now: Sequence[Placement], final: Sequence[Placement], domains: Sequence[Profile]
) -> tuple[Plan, Schedule, IntArray]:
    """The checked plan with the placements `final`, the schedule of the weights that move to it, and their bytes (G, G)."""
    rng = np.random.default_rng(new.options.seed)
    bytes_GG = np.zeros((len(new.cluster),) * 2, dtype=np.int64)
    for layer in range(joint.count):
        bytes_GG += joint.moved(now, final, layer)
    schedule = migration_schedule(bytes_GG, new.cluster, rng)
    scenario = scenario_of_plan(new, joint.profiles, domains)
    plan = ordered_plan(scenario, scenario.priced(final), [model.profile_path for model in new.models], rng)
    return replace(plan, options=new.options, epoch=old.epoch + 1, notes=new.notes), schedule, bytes_GG
