"""Explained layers as tables."""

from collections.abc import Sequence

from rich.table import Column, Table

from aurora.planner.placement.explain import LayerExplanation
from aurora.planner.placement.objective import letters
from aurora.reports.formatting import percent, right, seconds
from aurora.types import Plan
from aurora.types.arrays import gap


def explain_tables(plan: Plan, explained: Sequence[LayerExplanation]) -> list[Table]:
    """Returns two tables per layer: the terms of its time, and the slowest GPU of each term with its phases and experts.

    Args:
        plan: the plan that was explained.
        explained: what `explain` returned for it.
    """
    return [table for one in explained for table in (_terms(plan, one), _gpus(plan, one))]


def _terms(plan: Plan, one: LayerExplanation) -> Table:
    above = gap(one.value_s, one.assignment_bound_s)
    table = Table(
        "term",
        *right("slowest GPU takes", "on the longest path", "GPU"),
        title=f"layer {one.layer}, {plan.objective}, all windows as one: {seconds(one.value_s)}",
        caption=f"no assignment of these groups of experts below {seconds(one.assignment_bound_s)}, gap {percent(above)}; "
        f"most of that bound is {one.bound_term}",
    )
    for name, value, gpu, times in zip(one.terms, one.seconds_X, one.gpu_X, one.times_X, strict=True):
        table.add_row(name, seconds(value), ("no", "yes", "twice")[times], plan.cluster.gpus[gpu].name)
    return table


def _gpus(plan: Plan, one: LayerExplanation) -> Table:
    named = list(zip(letters(len(plan.models)), plan.models, strict=True))
    table = Table(
        Column("GPU", no_wrap=True),
        "model",
        *right("gate", "dispatch", "FFN", "combine", "aggr."),
        title=f"layer {one.layer}: the GPUs that are slowest in a term",
        caption=", ".join(f"{letter}: {model.model}" for letter, model in named),
    )
    table.add_column("experts")
    for gpu in sorted(set(one.gpu_X.tolist())):
        for (letter, model), phases_YG in zip(named, one.phases_MYG, strict=True):
            held = model.placement.slots_LG[one.layer % len(model.dispatch_L)][gpu]
            phases = [seconds(value) for value in phases_YG[:, gpu]]
            table.add_row(plan.cluster.gpus[gpu].name, letter, *phases, " ".join(map(str, held)) or "none")
    return table
