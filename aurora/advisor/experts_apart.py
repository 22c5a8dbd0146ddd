"""Attention and experts apart: some GPUs have all requests and no experts, the others experts alone."""

from collections.abc import Sequence

import numpy as np

from aurora.errors import InfeasiblePlan
from aurora.planner.placement.grouping import balanced
from aurora.planner.placement.slot_counts import even_slots
from aurora.planner.schedule_model import schedule_model
from aurora.types import Cluster, Placement, Plan, PlanOptions, Profile
from aurora.types.arrays import BoolArray, IntArray

SPLITS = 6  # numbers of GPUs for experts that are tried, at most


def splits(cluster: Cluster, models: Sequence[Profile]) -> list[BoolArray]:
    """Returns divisions of the GPUs whose memory holds the models, each as (G,) bool: which GPUs hold experts.

    The last GPUs hold experts or, where GPUs differ, the first ones too.

    Args:
        cluster: the GPUs.
        models: profiles of all layers.

    Raises:
        InfeasiblePlan: if there is none.
    """
    gpus, found = len(cluster), []
    for number in np.unique(np.linspace(1, gpus - 1, min(SPLITS, gpus - 1)).astype(np.int64)).tolist() if gpus > 1 else []:
        last_G = np.arange(gpus) >= gpus - number
        either = [last_G] if cluster.equal else [last_G, last_G[::-1]]
        found += [experts_G for experts_G in either if _fits(cluster, models, experts_G)]
    if not found:
        raise InfeasiblePlan(
            f"cluster {cluster.name!r}: expected GPUs whose memory holds all experts of {len(models)} models, and one more GPU "
            "for the rest of them"
        )
    return found


def _fits(cluster: Cluster, models: Sequence[Profile], experts_G: BoolArray) -> bool:
    """Whether the GPUs' memory holds equal shares of all experts on some of them, and all other weights on the others."""
    number = int(experts_G.sum())
    experts = sum(-(-each.experts // number) * each.layers * each.expert_bytes for each in models)
    rest = sum(each.other_bytes for each in models)
    return all(gpu.memory_bytes >= (experts if holds else rest) for gpu, holds in zip(cluster.gpus, experts_G, strict=True))


def tokens_apart(tokens: int, experts_G: BoolArray) -> IntArray:
    """Returns (G,) int64: `tokens` of all ranks dealt evenly to the GPUs without experts.

    Example:
        >>> tokens_apart(7, np.array([False, False, True])).tolist()
        [4, 3, 0]
    """
    number, rank_G = int((~experts_G).sum()), np.cumsum(~experts_G) - 1
    return np.where(experts_G, 0, tokens // number + (rank_G < tokens % number))


def apart_plan(cluster: Cluster, planned: Profile, experts_G: BoolArray, seed: int = 0) -> Plan:
    """Returns a plan, not priced, of a model whose experts lie on some GPUs alone, as many on each, balanced by load.

    Args:
        cluster: the GPUs.
        planned: traffic to plan for, whose requests are on the other GPUs.
        experts_G: (G,) bool, which GPUs hold experts.
        seed: for orders that draw.
    """
    rng, at_J = np.random.default_rng(seed), np.flatnonzero(experts_G)
    slots_J = even_slots(planned.experts, np.full(len(at_J), planned.experts))
    slots_LG = []
    for load_E in planned.load_LE:
        gpu_E = at_J[balanced(load_E, slots_J, rng)]
        slots_LG.append(tuple(tuple(np.flatnonzero(gpu_E == gpu).tolist()) for gpu in range(len(cluster))))
    model = schedule_model(cluster, [planned], Placement(tuple(slots_LG)), "auto", rng, "")
    return Plan(cluster, (model,), PlanOptions(), 0.0, 0.0)
