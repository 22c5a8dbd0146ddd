"""Checkers of replica placements and of survival probabilities: recompute them from the inputs, without calling any planner."""

from itertools import combinations
from math import comb

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import FailureDomains, GpuSlots, ReplicaPlacement, ResilientPlacement
from aurora.types.arrays import FloatArray

SLACK = 1e-9  # relative, for sums of float loads
LISTED = 20_000  # sets of failures that are tried one by one, at most


def check_layout(layout: ReplicaPlacement, load_LE: FloatArray, slots: GpuSlots) -> None:
    """Checks a replica placement against the loads that it was made for; experts and shares check themselves when it is made.

    No GPU may hold more experts than its slots. The largest and the mean load must be as the placement states, with the bound
    between them.

    Args:
        layout: the placement.
        load_LE: (L, E) float64, the load of each expert.
        slots: the slots of each GPU, and the cost of load there.

    Raises:
        BrokenPlan: if any of this fails.
    """
    what, placement = f"layout {layout.method}", layout.placement
    sizes = (len(placement.slots_LG), placement.experts, placement.gpus)
    if sizes != (expected := (*load_LE.shape, slots.gpus)):
        raise BrokenPlan(f"{what}: expected (layers, experts, GPUs) {expected}, found {sizes}")
    for layer, load_E in enumerate(load_LE):
        where = f"{what}, layer {layer}"
        for gpu, held in enumerate(placement.slots_LG[layer]):
            if len(held) > slots.slots_G[gpu]:
                raise BrokenPlan(f"{where}: GPU {gpu} holds {len(held)} experts in {slots.slots_G[gpu]} slots")
        load_G = load_E @ placement.split_EG(layer)
        found = float((load_G * slots.cost_G).max())
        if abs(found - layout.max_load_L[layer]) > SLACK * found:
            raise BrokenPlan(f"{where}: claims a largest load of {layout.max_load_L[layer]:.9g}, its shares give {found:.9g}")
        mean = float(load_E.sum() / (1 / slots.cost_G).sum())
        if abs(mean - layout.mean_load_L[layer]) > SLACK * mean:
            raise BrokenPlan(f"{where}: claims a mean load of {layout.mean_load_L[layer]:.9g}, found {mean:.9g}")
        if not mean * (1 - SLACK) <= layout.bound_L[layer] * (1 + SLACK) <= found * (1 + 3 * SLACK):
            raise BrokenPlan(
                f"{where}: expected mean {mean:.9g} <= bound <= largest load {found:.9g}, found {layout.bound_L[layer]:.9g}"
            )


def check_resilient(made: ResilientPlacement, failure_domains: FailureDomains, guaranteed: bool) -> None:
    """Checks a failure-resilient placement and its survival probabilities.

    Every expert is held, and no node holds more experts than its slots. Each probability is between zero and one and not above
    its bound. Exact probabilities equal what trying every set of failures gives, if there are at most LISTED sets.

    Args:
        made: the placement.
        failure_domains: nodes, their slots and the odds that they fail.
        guaranteed: check also that every expert is on `min_replicas` nodes and failure domains, or on all if fewer exist.

    Raises:
        BrokenPlan: if any of this fails.
    """
    for layer, (slots_N, survival) in enumerate(zip(made.slots_LN, made.survival_L, strict=True)):
        where = f"placement {made.method}, layer {layer}"
        if len(slots_N) != failure_domains.nodes or any(
            len(held) > slots for held, slots in zip(slots_N, failure_domains.slots_N, strict=True)
        ):
            raise BrokenPlan(f"{where}: expected at most {failure_domains.slots_N.tolist()} experts on nodes, found {slots_N}")
        experts = 1 + max(expert for held in slots_N for expert in held)
        held_NE = np.zeros((failure_domains.nodes, experts), dtype=bool)
        for node, held in enumerate(slots_N):
            held_NE[node, list(held)] = True
        held_DE = np.array([held_NE[failure_domains.domain_N == d].any(axis=0) for d in range(failure_domains.domains)])
        levels = ((held_NE, failure_domains.nodes, "nodes"), (held_DE, failure_domains.domains, "failure domains"))
        for held_XE, most, what in levels:
            least = int(held_XE.sum(axis=0).min())
            if least < (min(made.min_replicas, most) if guaranteed else 1):
                raise BrokenPlan(
                    f"{where}: expected every expert on {min(made.min_replicas, most)} {what}, found one on {least}"
                )
        for failures, (p, half, most_p) in enumerate(
            zip(survival.p_K, survival.half_width_K, survival.bound_K, strict=True), 1
        ):
            if not -SLACK <= p - half <= min(1, most_p) + SLACK or p + half > 1 + SLACK:
                raise BrokenPlan(f"{where}: claims to survive {failures} failures with {p:.9g} of at most {most_p:.9g}")
            if half == 0 and comb(failure_domains.domains, failures) <= LISTED:
                sets = list(combinations(range(failure_domains.domains), failures))
                odds_X = np.prod(failure_domains.odds_D[sets], axis=1)
                survives_X = [bool(np.delete(held_DE, failed, axis=0).any(axis=0).all()) for failed in sets]
                if abs(float(odds_X @ survives_X / odds_X.sum()) - p) > SLACK:
                    raise BrokenPlan(f"{where}: claims to survive {failures} failures with {p:.9g}, its slots do not")
