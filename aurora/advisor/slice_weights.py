"""Weights of models' time slices by what the models need of the ports."""

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np

from aurora.types import Plan, Profile
from aurora.types.options import MOST_WEIGHT

CLOSE = 0.1  # by how much weights may differ from needs, relative to these
LEAST_WEIGHTS = 4  # the smallest weight is at most this


def weights_by_need(plan: Plan, profiles: Sequence[Profile]) -> Mapping[tuple[int, ...], str]:
    """Returns weights of time slices that follow the models' needs, and which need each follows.

    A model needs as many slices as it has layers in all windows, and ports for as long as its bytes take. Weights of 1 each
    are left out, and where weights or priorities are given there are none.

    Args:
        plan: a plan.
        profiles: its traffic, one profile per model.
    """
    if not plan.colocated or plan.options.weights or plan.options.priorities:
        return {}
    needs = {
        "exchanges": [profile.windows * profile.layers for profile in profiles],
        "bytes": [int(each.tokens_TLSE.sum()) * (each.dispatch_bytes + each.combine_bytes) for each in profiles],
    }
    found: dict[tuple[int, ...], str] = {}
    for name, need_M in needs.items():
        if min(need_M) > 0 and max(weights_M := small_weights(need_M)) > 1:
            found.setdefault(weights_M, name)
    return found


def small_weights(need_M: Sequence[float]) -> tuple[int, ...]:
    """Returns small whole numbers in about the proportions of some needs, which are above zero.

    Example:
        >>> small_weights([8, 8.4, 4]), small_weights([3, 2]), small_weights([1, 1.05])
        ((2, 2, 1), (3, 2), (1, 1))
    """
    share_M = np.asarray(need_M, dtype=np.float64) / min(need_M)
    for least in range(1, max(1, min(LEAST_WEIGHTS, int(MOST_WEIGHT / share_M.max()))) + 1):
        weight_M = np.clip(np.rint(least * share_M), 1, MOST_WEIGHT)
        if (abs(weight_M / (least * share_M) - 1) <= CLOSE).all():
            break
    whole_M = weight_M.astype(np.int64).tolist()
    return tuple(weight // gcd(*whole_M) for weight in whole_M)
