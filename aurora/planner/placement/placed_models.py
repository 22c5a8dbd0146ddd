"""What placing returns: a Placement of each model, the time it takes, and bounds on that time."""

from dataclasses import dataclass

import numpy as np

from aurora.types import Placement
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class PlacedModels:
    """A placement of each model, all layers.

    Args:
        placements_M: one Placement a model.
        objective_s: seconds of all layers in the planning model.
        bound_s: no assignment of the same groups of experts to GPUs takes less.
        free_bound_s: no placement at all takes less.
        deduplicated: whether the seconds count a token once for a GPU that holds several of its experts.
    """

    placements_M: tuple[Placement, ...]
    objective_s: float
    bound_s: float
    free_bound_s: float
    deduplicated: bool = False


def unreplicated(gpu_E: IntArray, gpus: int) -> Placement:
    """The Placement of one layer with expert e on GPU gpu_E[e]."""
    return Placement((tuple(tuple(np.flatnonzero(gpu_E == gpu).tolist()) for gpu in range(gpus)),))
