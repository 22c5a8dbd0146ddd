"""Tables and lines on what was planned: plans, evaluations, migrations, schedules and placements.

Tables with a row per layer take `most`: with a number they show only that many layers, the worst, and say so in the caption.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table

from aurora.planner.network.routes import nics_of
from aurora.reports.formatting import Row, add_worst, distinct, percent, right, seconds, size
from aurora.types import Cut, Plan, ReplicaPlacement, ResilientPlacement, Schedule
from aurora.types.arrays import gap

if TYPE_CHECKING:
    from aurora.planner.evaluate import Evaluation
    from aurora.planner.migrate import Migration

LINKS = 6  # of a cut, by name
USELESS = 1.0  # a gap, above which the bound on replicas over servers tells nothing: each may save a token its way by NIC
LEAST_GAIN = 5e-4  # relative; smaller gains are shown as none


def bounds_line(plan: Plan) -> str:
    """Returns a line on a plan's objective and its lower bounds over other placements."""
    slots = plan.options.slots_per_gpu
    within = "memory" if slots is None else f"{slots} slots per GPU"
    counted = {"mean": "mean of", "cvar": "worse half of", "worst": "worst of"}.get(plan.options.aim, "all")
    over = "" if plan.colocated or hierarchical(plan) else f" ({counted} windows or domains)"
    took = f"{plan.objective} objective {seconds(plan.objective_s)}{over}{estimated(plan.between_s)}"
    below = f"no placement within {within} below {seconds(plan.bound_s)}"
    if hierarchical(plan) and plan.gap > USELESS:
        below = f"no useful bound on placements with replicas within {within}"
    known_s = plan.assignment_bound_s
    if known_s is None:
        return f"{took}, {below}"
    kind = "placement that holds every expert once" if hierarchical(plan) else "other assignment of these groups of experts"
    return f"{took}, {below}, no {kind} below {seconds(known_s)}"


def estimated(between_s: tuple[float, float] | None) -> str:
    """Returns what follows seconds that are estimated from counts alone: between which they lie. Empty for exact ones."""
    return "" if between_s is None else f" (estimated, between {seconds(between_s[0])} and {seconds(between_s[1])})"


def gap_text(plan: Plan) -> str:
    """Returns the gap to a plan's bound, or to that of placements that hold every expert once if no other is useful."""
    if not hierarchical(plan) or plan.gap <= USELESS or plan.assignment_bound_s is None:
        return percent(plan.gap)
    return f"{percent(gap(plan.objective_s, plan.assignment_bound_s))} without replicas"


def hierarchical(plan: Plan) -> bool:
    """Returns whether a model's all-to-alls are hierarchical."""
    return any(model.hierarchy is not None for model in plan.models)


def expectation_lines(plan: Plan) -> list[str]:
    """Returns lines on what a plan is expected to take on traffic that it has not seen, and what one more slot would bring."""
    lines = []
    if plan.unseen_s is not None and plan.unseen_loss is not None:
        longer = f"{percent(abs(plan.unseen_loss))} {'longer' if plan.unseen_loss >= 0 else 'shorter'}"
        lines.append(
            f"on unseen windows of its own profiles: expected {seconds(plan.unseen_s)}, {longer} than on the recorded ones"
        )
    if plan.slot_gain is not None:
        model = plan.models[0]
        what = f"one more slot on each GPU ({size(model.expert_bytes * len(model.dispatch_L))}, which its memory has)"
        gain = f"{percent(plan.slot_gain)} less time" if plan.slot_gain >= LEAST_GAIN else "nothing"
        lines.append(f"{what} would bring {gain}")
    return lines


def plan_table(plan: Plan, most: int | None = None) -> Table:
    """Returns a table of each model's layers: predicted dispatch of all windows in one exchange, its bounds and gap.

    Args:
        plan: the plan to show.
        most: number of layers to show, with the largest gaps; None: all.
    """
    strategies = ", ".join(f"{what.replace('_', ' ')} {name}" for what, name in plan.strategies.items())
    caption = f"gap {gap_text(plan)}: {bounds_line(plan)}"
    if plan.cluster.fabric is not None and nics_of(plan.cluster.network) is None:
        caption += "; these by the ports only, dispatch on the fabric"
    cut = ("cut bound",) if plan.cluster.fabric is not None else ()
    table = Table(
        "model",
        *right("layer", "dispatch", "fluid bound", "one-to-one bound", *cut, "gap"),
        title=f"{plan.scenario}: {strategies}",
        caption=caption,
    )
    rows: list[Row] = []
    for name, model in zip(_names(plan), plan.models, strict=True):
        for layer, value in enumerate(model.dispatch_s_L):
            above = gap(float(value), float(model.bound_s_L[layer]))
            cells = (
                name,
                str(layer),
                seconds(value),
                seconds(model.fluid_bound_s_L[layer]),
                seconds(model.one_to_one_bound_s_L[layer]),
                *([seconds(model.cut_L[layer].bound_s)] if model.cut_L else []),
                percent(above),
            )
            rows.append((above, cells))
    return add_worst(table, rows, most)


def move_table(move: "Migration") -> Table:
    """Returns a table of a migration: the bytes of weights that travel, how long it takes, and what it saves."""
    layers = ", ".join(map(str, move.layers)) or "none"
    table = Table(
        *right("bytes", "takes", "bound", "objective before", "as planned", "after"),
        title=f"moving from the plan in force: layers {layers}",
    )
    times = (move.schedule.makespan_s, move.schedule.fluid_bound_s, move.kept_s, move.planned_s, move.moved_s)
    table.add_row(str(move.bytes_GG.sum()), *map(seconds, times))
    return table


def evaluation_table(plan: Plan, evaluation: "Evaluation", most: int | None = None) -> Table:
    """Returns a table of what a plan takes on other traffic, beside a plan made for that traffic.

    Args:
        plan: the plan.
        evaluation: the evaluation of `plan` on the other traffic.
        most: number of layers to show, with the largest losses in dispatch; None: all.
    """
    own, served_s = evaluation.own, float(evaluation.served_s_L.sum())
    table = Table(
        "model",
        *right("layer", "objective of the layer", "dispatch in the plan's order", "in its own plan"),
        title=f"{plan.objective} objective {seconds(served_s)}{estimated(evaluation.between_s)}; a plan of its own takes "
        f"{seconds(own.objective_s)}{estimated(own.between_s)}: loss {percent(evaluation.loss)}",
    )
    rows: list[Row] = []
    for name, own_model, dispatch_s_L in zip(_names(plan), own.models, evaluation.dispatch_s_ML, strict=True):
        for layer, took in enumerate(dispatch_s_L):
            cells = (evaluation.served_s_L[layer], took, own_model.dispatch_s_L[layer])
            lost_s = float(took - own_model.dispatch_s_L[layer])
            rows.append((lost_s, (name, str(layer), *(seconds(float(value)) for value in cells))))
    return add_worst(table, rows, most)


def order_table(schedules: Sequence[Schedule]) -> Table:
    """Returns a table of schedules: makespan, bounds, and the gap to the fluid bound or, if that is larger, the cut bound."""
    cut = ("cut bound",) if any(one.cut for one in schedules) else ()
    table = Table(
        Column("method", no_wrap=True), *right("makespan", "fluid bound", "one-to-one bound", *cut, "gap", "rows", "one to one")
    )
    for one in schedules:
        table.add_row(
            one.method,
            seconds(one.makespan_s),
            seconds(one.fluid_bound_s),
            seconds(one.one_to_one_bound_s),
            *([seconds(one.cut.bound_s) if one.cut else "-"] if cut else []),
            percent(one.gap),
            str(len(one.src_X)),
            "yes" if one.one_to_one else "no",
        )
    return table


def cut_line(cut: Cut) -> str:
    """Returns a line on the links that limit an all-to-all on its fabric."""
    links = ", ".join(cut.links[:LINKS]) + (f" and {len(cut.links) - LINKS} more" if len(cut.links) > LINKS else "")
    return f"bound by {links}: {cut.load_bytes} bytes must cross, {seconds(cut.bound_s)} at least"


def worst_cut(plan: Plan) -> str | None:
    """Returns a line on what limits the plan's slowest all-to-all on its fabric; None without a fabric."""
    models = zip(_names(plan), plan.models, strict=True)
    cuts = [(cut, name, layer) for name, model in models for layer, cut in enumerate(model.cut_L)]
    if not cuts:
        return None
    worst, name, layer = max(cuts, key=lambda each: each[0].bound_s)
    return f"{name}, layer {layer}: {cut_line(worst)}"


def gantt(schedule: Schedule, ranks: int, width: int) -> str:
    """Returns a text Gantt chart: one line per sender.

    A character is the last digit of the receiver's rank, or `+` while the sender sends to several ranks at once.

    Args:
        schedule: the schedule to show.
        ranks: number of ranks, of which at most 40 get a line.
        width: characters of a line.
    """
    columns = max(10, width - 8)
    lines = []
    for rank in range(min(ranks, 40)):
        cells = ["."] * columns
        for row in (schedule.src_X == rank).nonzero()[0]:
            begin = int(schedule.start_s_X[row] / schedule.makespan_s * columns)
            end = max(begin + 1, int(schedule.end_s_X[row] / schedule.makespan_s * columns))
            for at in range(begin, min(end, columns)):
                cells[at] = str(schedule.dst_X[row] % 10) if cells[at] == "." else "+"
        lines.append(f"{rank:>5}  {''.join(cells)}")
    if ranks > len(lines):
        lines.append(f"  and {ranks - len(lines)} more")
    return "\n".join(lines)


def layout_table(layout: ReplicaPlacement) -> Table:
    """Returns a table of each layer's largest load on a GPU, beside its mean, bound and gap."""
    table = Table(
        *right("layer", "max load", "mean load", "max/mean", "bound", "gap", "replicas"),
        title=f"{layout.method}: {seconds(layout.seconds)} for all layers",
    )
    for layer, (top, mean, bound) in enumerate(zip(layout.max_load_L, layout.mean_load_L, layout.bound_L, strict=True)):
        table.add_row(
            str(layer),
            f"{top:.6g}",
            f"{mean:.6g}",
            f"{top / mean if mean else 1.0:.4f}",
            f"{bound:.6g}",
            percent(float(layout.gap_L[layer])),
            str(sum(map(len, layout.placement.slots_LG[layer]))),
        )
    return table


def survival_table(made: ResilientPlacement) -> Table:
    """Returns a table of each layer's survival probability after failures, beside its upper bound."""
    table = Table(
        *right("layer", "failures", "survives", "at most"),
        title=f"{made.method}: at least {made.min_replicas} replicas each, placed in {seconds(made.seconds)}",
    )
    for layer, survival in enumerate(made.survival_L):
        for failures, (p, half, most) in enumerate(zip(survival.p_K, survival.half_width_K, survival.bound_K, strict=True), 1):
            table.add_row(str(layer), str(failures), f"{p:.6f}" + (f" ± {half:.6f}" if half else ""), f"{most:.6f}")
    return table


def _names(plan: Plan) -> tuple[str, ...]:
    """The models' names, numbered if two have the same name."""
    return distinct([model.model for model in plan.models])
