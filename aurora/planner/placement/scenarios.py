"""AIMS: over which scenarios a placement of one model is judged, and how they count."""

from collections.abc import Callable, Sequence

import numpy as np

from aurora.planner.placement.cost_model import LayerCosts, layer_costs, scenario_costs
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray


def aimed_costs(cluster: Cluster, profile: Profile, domains: Sequence[Profile], layer: int, aim: str) -> tuple[LayerCosts, int]:
    """A layer's costs in each scenario, and how many scenarios count, the longest first.

    A scenario is a profile, or without further `domains` a window of the profile. The aim "sum" adds them all up to one.
    """
    if domains:
        found = scenario_costs(cluster, [(each, layer, slice(None)) for each in (profile, *domains)])
    elif aim in AIMS:
        found = scenario_costs(cluster, [(profile, layer, slice(t, t + 1)) for t in range(profile.windows)])
    else:
        found = layer_costs(cluster, profile, layer)
    return (found, AIMS[aim](len(found.own_WGE))) if aim in AIMS else (found.summed, 1)


def tail_mean(seconds_W: FloatArray, worst: int) -> float:
    """The mean of the `worst` largest: all give the mean, some the conditional value at risk, one gives the worst case."""
    return float(np.sort(seconds_W)[-worst:].mean())


AIMS: dict[str, Callable[[int], int]] = {  # how many of W scenarios count, the longest first
    "mean": lambda scenarios: scenarios,
    "cvar": lambda scenarios: -(-scenarios // 2),  # the longer half
    "worst": lambda scenarios: 1,
}
