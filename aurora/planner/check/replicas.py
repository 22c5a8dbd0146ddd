"""The judge of layouts and of what survives: recomputes them from the inputs alone. It calls none of the makers."""

from itertools import combinations
from math import comb

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import FailureDomains, GpuSlots, ReplicaPlacement, ResilientPlacement
from aurora.types.arrays import FloatArray

SLACK = 1e-9  # relative, for sums of float loads
LISTED = 20_000  # sets of failures, at most, that are looked at one by one


def check_layout(layout: ReplicaPlacement, load_LE: FloatArray, room: GpuSlots) -> None:
    """BrokenPlan unless every expert is held, no GPU holds more than its slots or one expert twice, the shares of each expert
    are on GPUs that hold it, none negative, and add up to one, and the largest load is what it is said to be and not below
    the bound. load_LE (L, E) float64."""
    what = f"layout {layout.method}"
    placement = layout.placement
    if len(placement.slots_LG) != len(load_LE) or placement.gpus != room.gpus:
        raise BrokenPlan(
            f"{what}: expected {len(load_LE)} layers on {room.gpus} GPUs, found {len(placement.slots_LG)} on {placement.gpus}"
        )
    for layer, load_E in enumerate(load_LE):
        where = f"{what}, layer {layer}"
        load_G = np.zeros(room.gpus)
        share_E = np.zeros(len(load_E))
        for gpu, held in enumerate(placement.slots_LG[layer]):
            if len(held) > room.slots_G[gpu]:
                raise BrokenPlan(f"{where}: GPU {gpu} holds {len(held)} experts in {room.slots_G[gpu]} slots")
            if len(set(held)) != len(held):
                raise BrokenPlan(f"{where}: GPU {gpu} holds an expert twice: {list(held)}")
            shares = [1.0] * len(held) if placement.split_LG is None else placement.split_LG[layer][gpu]
            for expert, share in zip(held, shares, strict=True):
                if not 0 <= expert < len(load_E):
                    raise BrokenPlan(f"{where}: GPU {gpu} holds expert {expert} of {len(load_E)}")
                if not share >= 0:
                    raise BrokenPlan(f"{where}: GPU {gpu} takes {share} of expert {expert}")
                share_E[expert] += share
                load_G[gpu] += share * load_E[expert]
        if (wrong := abs(share_E - 1) > SLACK).any():
            expert = int(wrong.argmax())
            raise BrokenPlan(f"{where}: the shares of expert {expert} add up to {share_E[expert]}")
        found = float((load_G * room.cost_G).max())
        if abs(found - layout.max_load_L[layer]) > SLACK * found:
            raise BrokenPlan(f"{where}: claims a largest load of {layout.max_load_L[layer]:.9g}, its shares give {found:.9g}")
        mean = float(load_E.sum() / (1 / room.cost_G).sum())
        if abs(mean - layout.mean_load_L[layer]) > SLACK * mean:
            raise BrokenPlan(f"{where}: claims a mean load of {layout.mean_load_L[layer]:.9g}, found {mean:.9g}")
        if not mean * (1 - SLACK) <= layout.bound_L[layer] * (1 + SLACK) <= found * (1 + 3 * SLACK):
            raise BrokenPlan(
                f"{where}: expected mean {mean:.9g} <= bound <= largest load {found:.9g}, found {layout.bound_L[layer]:.9g}"
            )


def check_resilient(made: ResilientPlacement, hosts: FailureDomains, guaranteed: bool) -> None:
    """BrokenPlan unless every expert is held, no node holds more than its slots, probabilities lie in order from one down to
    zero and below their bounds, and are what few failures, looked at one by one, give. guaranteed: also that the floor is
    kept."""
    for layer, (slots_N, survival) in enumerate(zip(made.slots_LN, made.survival_L, strict=True)):
        where = f"placement {made.method}, layer {layer}"
        if len(slots_N) != hosts.nodes or any(len(held) > room for held, room in zip(slots_N, hosts.slots_N, strict=True)):
            raise BrokenPlan(f"{where}: expected at most {hosts.slots_N.tolist()} experts on nodes, found {slots_N}")
        experts = 1 + max(expert for held in slots_N for expert in held)
        held_NE = np.zeros((hosts.nodes, experts), dtype=bool)
        for node, held in enumerate(slots_N):
            held_NE[node, list(held)] = True
        held_DE = np.array([held_NE[hosts.domain_N == domain].any(axis=0) for domain in range(hosts.domains)])
        for held_XE, most, what in ((held_NE, hosts.nodes, "nodes"), (held_DE, hosts.domains, "failure domains")):
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
            if half == 0 and comb(hosts.domains, failures) <= LISTED:
                sets = list(combinations(range(hosts.domains), failures))
                odds_X = np.prod(hosts.odds_D[sets], axis=1)
                survives_X = [bool(np.delete(held_DE, failed, axis=0).any(axis=0).all()) for failed in sets]
                if abs(float(odds_X @ survives_X / odds_X.sum()) - p) > SLACK:
                    raise BrokenPlan(f"{where}: claims to survive {failures} failures with {p:.9g}, its slots do not")
