"""The result of placing one model or several: a Placement of each, the time that they take, and bounds on that time."""

from dataclasses import dataclass

import numpy as np

from aurora.types import Placement
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class PlacedModels:
    """A placement of each model, all layers.

    Attributes:
        placements_M: one Placement per model.
        objective_s: seconds of all layers in the planning model.
        bound_s: lower bound on `objective_s` for all placements within the slots, with replicas where slots are left for any.
        assignment_bound_s: lower bound on `objective_s` for all assignments of these groups of experts to GPUs; None where
            experts have replicas, or several scenarios count.
        unseen_s: seconds to be expected on traffic that the profiles hold no record of; None if not estimated.
        slot_gain: by what share these would fall with one more slot on each GPU; None if memory has none, or not estimated.
        deduplicated: whether the seconds count a token once for a GPU that holds several of its experts.
    """

    placements_M: tuple[Placement, ...]
    objective_s: float
    bound_s: float
    assignment_bound_s: float | None
    unseen_s: float | None = None
    slot_gain: float | None = None
    deduplicated: bool = False


def unreplicated(gpu_E: IntArray, gpus: int) -> Placement:
    """Returns the Placement of one layer whose expert e is on GPU gpu_E[e] alone."""
    return Placement((tuple(tuple(np.flatnonzero(gpu_E == gpu).tolist()) for gpu in range(gpus)),))
