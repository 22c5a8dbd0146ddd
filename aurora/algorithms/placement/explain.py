"""Explains a plan's time: the terms of each layer, the GPUs that attain them, and the largest term of the bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.placement.assignment import ASSIGN
from aurora.algorithms.placement.cost_model import SUMMED, layer_costs
from aurora.algorithms.placement.objective import formula
from aurora.algorithms.placement.phase_times import exclusive_XG
from aurora.errors import BadInput
from aurora.types import Plan, Profile
from aurora.types.arrays import FloatArray, IntArray

PARTS = ("gate + dispatch", "expert + combine", "aggregate")  # of Eq. 1


@dataclass(frozen=True)
class LayerExplanation:
    """The time of one layer, divided into its terms (`objective.Formula`).

    Attributes:
        layer: index of the MoE layer.
        terms: names of the X terms that make up a layer's time.
        seconds_X: (X,) seconds of each term.
        gpu_X: (X,) int64, the GPU that takes longest in each term.
        times_X: (X,) int64, how often each term occurs in the longest path.
        value_s: seconds of the layer, the sum of seconds_X * times_X.
        assignment_bound_s: lower bound on `value_s` for all assignments of one model's groups of experts to GPUs; None for
            several models.
        bound_term: name of the largest term of the best assignment; None for several models.
        phases_MYG: (M, 5, G) seconds of gate, dispatch, experts, combine and aggregation of each model on each GPU.
    """

    layer: int
    terms: tuple[str, ...]
    seconds_X: FloatArray
    gpu_X: IntArray
    times_X: IntArray
    value_s: float
    assignment_bound_s: float | None
    bound_term: str | None
    phases_MYG: FloatArray


def explain(plan: Plan, profiles: Sequence[Profile]) -> list[LayerExplanation]:
    """Divides the predicted time of every layer of a plan into its terms, with all windows added to one.

    With several models, there are as many layers as the model with the most layers has.

    Args:
        plan: the plan.
        profiles: the profiles that it was made from, one per model.

    Raises:
        BadInput: if the plan cannot be explained; see `unexplained`.
    """
    if (reason := unexplained(plan)) is not None:
        raise BadInput(f"`explain`: {reason}")
    layers = max(len(model.dispatch_L) for model in plan.models)
    return [_explained(plan, profiles, layer) for layer in range(layers)]


def unexplained(plan: Plan) -> str | None:
    """Returns the reason why `explain` does not support a plan, as text for an error message; None if it does."""
    for holds, expected, actual in (
        (all(model.placement.split_LG is None for model in plan.models), "that holds every expert once", "replicas"),
        (all(model.hierarchy is None for model in plan.models), "with flat all-to-alls", "hierarchical ones"),
        (plan.colocated or plan.options.aim in ("mean", *SUMMED), "for windows as one", f"`aim` {plan.options.aim}"),
    ):
        if not holds:
            return f"expected a plan {expected}, found {actual}"
    return None


def _explained(plan: Plan, profiles: Sequence[Profile], layer: int) -> LayerExplanation:
    """The explanation of one layer."""
    costs, times = [], []
    for profile, model, at in zip(profiles, plan.models, (layer % p.layers for p in profiles), strict=True):
        costs.append(layer_costs(plan.cluster, profile.in_steps(plan.options.tokens_per_step), at))
        times.append(costs[-1].phase_times(model.placement.split_EG(at)))
    bound_s = bound_term = None
    if len(costs) == 1:
        names: tuple[str, ...] = PARTS
        part_XG = exclusive_XG(times[0])
        times_X = np.ones(len(names), dtype=np.int64)
        groups = costs[0].grouped(plan.models[0].placement.gpu_E(layer))
        best_X = exclusive_XG(groups.times_alone(ASSIGN["exact"](groups, np.random.default_rng(0)))).max(axis=1)
        value_s, bound_s = float(part_XG.max(axis=1).sum()), float(best_X.sum())
        bound_term = names[int(best_X.argmax())]
    else:
        of = formula(len(costs), costs[0].nics is not None)
        names, part_XG = tuple(of.parts), of.term_XG(times)
        value_s = of.seconds(times)
        times_X = of.count_ZX[int((of.count_ZX @ part_XG.max(axis=1)).argmax())]
    return LayerExplanation(
        layer,
        names,
        part_XG.max(axis=1),
        part_XG.argmax(axis=1),
        times_X,
        value_s,
        bound_s,
        bound_term,
        np.stack([[t.gate_G, t.dispatch_G, t.expert_G, t.combine_G, t.aggregate_G] for t in times]),
    )
