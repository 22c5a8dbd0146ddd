"""AIMS: how many of its scenarios count for the placement of one model, the longest first."""

from collections.abc import Callable, Sequence

import numpy as np

from aurora.planner.placement.cost_model import LayerCosts, layer_costs, scenario_costs
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray


def aimed_costs(cluster: Cluster, profile: Profile, domains: Sequence[Profile], layer: int, aim: str) -> tuple[LayerCosts, int]:
    """Returns the costs of a layer in each scenario, and how many scenarios count.

    A scenario is a profile or, without further `domains`, a window of the profile. The aim "sum" adds all scenarios to one.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model.
        layer: which MoE layer.
        aim: "sum" or a name of AIMS.

    Returns:
        (costs, worst): costs in W scenarios, of which the `worst` longest count.
    """
    if domains:
        found = scenario_costs(cluster, [(each, layer, slice(None)) for each in (profile, *domains)])
    elif aim in AIMS:
        found = scenario_costs(cluster, [(profile, layer, slice(t, t + 1)) for t in range(profile.windows)])
    else:
        found = layer_costs(cluster, profile, layer)
    return (found, AIMS[aim](len(found.own_WGE))) if aim in AIMS else (found.summed, 1)


def tail_mean(seconds_W: FloatArray, worst: int) -> float:
    """Returns the mean of the `worst` largest seconds.

    All scenarios give the mean, some give the conditional value at risk, one gives the worst case.

    Args:
        seconds_W: (W,) seconds of each scenario.
        worst: how many count.
    """
    return float(np.sort(seconds_W)[-worst:].mean())


AIMS: dict[str, Callable[[int], int]] = {  # how many of W scenarios count, the longest first
    "mean": lambda scenarios: scenarios,
    "cvar": lambda scenarios: -(-scenarios // 2),  # the longer half
    "worst": lambda scenarios: 1,
}
