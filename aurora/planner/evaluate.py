"""Evaluates a plan on traffic that it was not made for: its time, and its loss against a plan made for that traffic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import BrokenPlan
from aurora.planner.check.fit import check_traffic
from aurora.planner.make_plan import make_plan
from aurora.planner.network.schedule_time import timed_steps
from aurora.planner.plan_seconds import layer_seconds, objective_between
from aurora.planner.resolve_options import remade
from aurora.planner.workload.traffic import exchange_bytes, exchange_rows
from aurora.types import ModelPlan, Plan, Profile
from aurora.types.arrays import FloatArray, gap


@dataclass(frozen=True)
class Evaluation:
    """The time of a plan on traffic that it was not made for.

    Args:
        served_s_L: (L,) seconds of each layer by the plan's objective and aim.
        own: a plan made for this traffic with the options of the evaluated plan.
        dispatch_s_ML: one array (L,) per model, seconds of each layer's whole dispatch in the plan's order.
        between_s: the seconds between which the sum of served_s_L lies, where it is estimated; None where it is exact.
    """

    served_s_L: FloatArray
    own: Plan
    dispatch_s_ML: tuple[FloatArray, ...]
    between_s: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """How much longer the plan takes than `own`, as a share: 0.1 means 10 % longer."""
        return gap(float(self.served_s_L.sum()), self.own.objective_s)

    @property
    def loss_between(self) -> tuple[float, float] | None:
        """The smallest and the largest loss: at the fewest rows, at the most, or `loss`; None where the seconds are exact."""
        if self.between_s is None or self.own.between_s is None:
            return None
        found = [self.loss, *(gap(*pair) for pair in zip(self.between_s, self.own.between_s, strict=True))]
        return min(found), max(found)


def evaluate(plan: Plan, profiles: Sequence[Profile]) -> Evaluation:
    """Prices a plan on other traffic; see `aurora.evaluate`. Further domains that the plan was made for do not count."""
    check_traffic(plan, profiles)
    placements = [model.placement for model in plan.models]
    dispatch_s_ML = tuple(
        np.array([_dispatch_s(plan, model, profile, layer) for layer in range(profile.layers)])
        for model, profile in zip(plan.models, profiles, strict=True)
    )
    served_s_L = layer_seconds(plan, placements, profiles)
    _check_own_price(plan, profiles, float(served_s_L.sum()))
    own = make_plan(plan.cluster, profiles, remade(plan.options))
    return Evaluation(served_s_L, own, dispatch_s_ML, objective_between(plan, profiles))


def _dispatch_s(plan: Plan, model: ModelPlan, profile: Profile, layer: int) -> float:
    """Seconds of a layer's whole dispatch of other traffic in the plan's order."""
    placed = profile, layer, model.placement.split_EG(layer)
    rows_SGG = exchange_rows(*placed, deduplicated=model.deduplicated, hierarchy=model.hierarchy)
    bytes_SGG = exchange_bytes(rows_SGG, profile, "dispatch", model.deduplicated)
    return timed_steps(model.dispatch_L[layer], bytes_SGG, plan.cluster.network).makespan_s


def _check_own_price(plan: Plan, profiles: Sequence[Profile], served_s: float) -> None:
    """Raises BrokenPlan if the plan was made for just these profiles, and its objective is not that of its placement."""
    pairs = list(zip(plan.models, profiles, strict=True))
    made_for = all(m.profile_digest == p.digest and np.array_equal(m.load_LE, p.load_LE) for m, p in pairs)
    if made_for and abs(served_s - plan.objective_s) > 1e-6 * served_s:
        raise BrokenPlan(
            f"plan: its objective is {plan.objective_s:.6g} s, but its placement takes {served_s:.6g} s; price a changed "
            "placement anew with `aurora.price`"
        )
