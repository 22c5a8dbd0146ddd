"""Orders that serve traffic they were not made for."""

from collections.abc import Sequence

import numpy as np

from aurora.errors import BadInput
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.lower_bounds import fluid
from aurora.planner.network.schedule_time import timed
from aurora.planner.placement.scenarios import AIMS, tail_mean
from aurora.types import Order
from aurora.types.arrays import FloatArray, IntArray


def priced(
    order: Order, matrices: Sequence[IntArray], out_Bps: FloatArray, in_Bps: FloatArray, startup_s: FloatArray | None = None
) -> FloatArray:
    """(len(matrices),) seconds of `order` on each traffic matrix (G, G): each rank keeps its peers' order, sizes are the real
    ones."""
    return np.array([timed(order, bytes_GG, out_Bps, in_Bps, startup_s).makespan_s for bytes_GG in matrices])


def order_for_many(
    matrices: Sequence[IntArray],
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    rng: np.random.Generator,
    *,
    aim: str = "mean",
    method: str = "openshop-best",
    startup_s: FloatArray | None = None,
) -> Order:
    """One order for a set of traffic matrices (G, G) int64: the candidate with the least ratio to the bound, by an aim of AIMS.

    Candidates: `method`'s order of each matrix and of their sum, so it is never worse in its aim than the best order that was
    made for one of them. Raises BadInput for an empty set or an unknown aim or method.
    """
    if not matrices or aim not in AIMS or method not in ORDER:
        raise BadInput(
            f"order_for_many: expected matrices, an aim of {', '.join(AIMS)} and a method of ORDER, "
            f"found {len(matrices)} matrices, {aim!r} and {method!r}"
        )
    candidates = [
        ORDER[method](bytes_GG, out_Bps, in_Bps, rng, startup_s) for bytes_GG in (np.sum(matrices, axis=0), *matrices)
    ]
    bounds = np.array([max(fluid(bytes_GG, out_Bps, in_Bps), 1e-300) for bytes_GG in matrices])
    worst = AIMS[aim](len(matrices))
    scores = [tail_mean(priced(order, matrices, out_Bps, in_Bps, startup_s) / bounds, worst) for order in candidates]
    return candidates[int(np.argmin(scores))]
