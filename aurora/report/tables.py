"""Summaries and plans as tables for a terminal or a text file."""

from collections.abc import Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table

from aurora.report.summary import Summary
from aurora.types import Cut, Layout, Plan, Profile, Schedule

LINKS = 6  # of a cut, by name


def seconds(value: float) -> str:
    """Three significant digits with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def percent(value: float) -> str:
    """One decimal, none where it would not be read."""
    return f"{value:.1%}" if abs(value) < 1 else f"{value:.0%}"


def profile_table(profile: Profile) -> Table:
    """A layer's load and skew, one row each."""
    table = Table(title=f"{profile.model}: {profile.windows} windows, {profile.sources} sources, top-{profile.top_k}")
    table.add_column("MoE layer", justify="right")
    table.add_column("tokens to experts", justify="right")
    table.add_column("max/mean expert load", justify="right")
    table.add_column("hottest expert", justify="right")
    for layer, load_E in enumerate(profile.tokens_TLSE.sum(axis=(0, 2))):
        skew = load_E.max() / load_E.mean() if load_E.any() else 0.0
        table.add_row(str(layer), str(load_E.sum()), f"{skew:.2f}", str(load_E.argmax()))
    return table


def plan_table(plan: Plan) -> Table:
    """Each model's layers: predicted dispatch, its bounds and gap."""
    methods = ", ".join(f"{what} {name}" for what, name in plan.methods.items())
    caption = (
        f"{plan.objective} objective {seconds(plan.objective_s)}, no assignment of these groups below "
        f"{seconds(plan.bound_s)}, gap {percent(plan.gap)}; no placement at all below {seconds(plan.free_bound_s)}"
    )
    if plan.cluster.fabric is not None:
        caption += "; these by the ports alone, dispatch on the fabric"
    table = Table(title=f"{plan.scenario}: {methods}", caption=caption)
    table.add_column("model")
    cut = ("cut bound",) if plan.cluster.fabric is not None else ()
    for column in ("layer", "dispatch", "fluid bound", "one-to-one bound", *cut, "gap"):
        table.add_column(column, justify="right")
    for model in plan.models:
        for layer, value in enumerate(model.dispatch_s_L):
            floor = model.bound_s_L[layer]
            table.add_row(
                model.model,
                str(layer),
                seconds(value),
                seconds(model.fluid_bound_s_L[layer]),
                seconds(model.one_to_one_bound_s_L[layer]),
                *([seconds(model.cut_L[layer].bound_s)] if model.cut_L else []),
                percent(value / floor - 1 if floor else 0.0),
            )
    return table


def summary_table(summary: Summary, bounded: bool = True) -> Table:
    """Time per layer with its exchanges; `bounded`: and their gap to the fluid bound, where the ports had those rates."""
    caption = f"utilisation {percent(summary.utilisation)}"
    if bounded:
        caption += f", exchanges {percent(summary.exchange_gap)} above the fluid bound"
    table = Table(title=f"{summary.kind}: {seconds(summary.seconds)}", caption=caption)
    table.add_column("model")
    for column in ("layer", "time", "dispatch", "combine", *(("fluid bound", "gap") if bounded else ())):
        table.add_column(column, justify="right")
    for row in summary.layers:
        cells = [seconds(value) for value in (row.seconds, row.dispatch_s, row.combine_s)]
        table.add_row(row.model, str(row.layer), *cells, *((seconds(row.bound_s), percent(row.gap)) if bounded else ()))
    return table


def order_table(schedules: Sequence[Schedule]) -> Table:
    """One row an order: its makespan, the bounds and the gap to the fluid one, or to the cut's where that is larger."""
    table = Table()
    table.add_column("method", no_wrap=True)
    cut = ("cut bound",) if any(one.cut for one in schedules) else ()
    for column in ("makespan", "fluid bound", "one-to-one bound", *cut, "gap", "rows", "one to one"):
        table.add_column(column, justify="right")
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
    """What limits an all-to-all on its fabric, in one line."""
    links = ", ".join(cut.links[:LINKS]) + (f" and {len(cut.links) - LINKS} more" if len(cut.links) > LINKS else "")
    return f"bound by {links}: {cut.load_bytes} bytes must cross, {seconds(cut.bound_s)} at least"


def layout_table(layout: Layout) -> Table:
    """A layer's largest load, one row each, with what it is measured against."""
    table = Table(title=f"{layout.method}: {seconds(layout.seconds)} for all layers")
    for column in ("layer", "max load", "mean load", "max/mean", "bound", "gap", "replicas"):
        table.add_column(column, justify="right")
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


def gantt(schedule: Schedule, ranks: int, width: int) -> str:
    """One line a sender: whom it sends to (the last digit of the rank) over time; `+` where it sends to several at once."""
    columns = max(10, width - 8)
    sender_X = schedule.src_X if schedule.hop_X2 is None else schedule.hop_X2[:, 0]
    lines = []
    for rank in range(min(ranks, 40)):
        cells = ["."] * columns
        for row in (sender_X == rank).nonzero()[0]:
            begin = int(schedule.start_s_X[row] / schedule.makespan_s * columns)
            end = max(begin + 1, int(schedule.end_s_X[row] / schedule.makespan_s * columns))
            for at in range(begin, min(end, columns)):
                cells[at] = str(schedule.dst_X[row] % 10) if cells[at] == "." else "+"
        lines.append(f"{rank:>5}  {''.join(cells)}")
    if ranks > len(lines):
        lines.append(f"  and {ranks - len(lines)} more")
    return "\n".join(lines)


def as_text(parts: Sequence[RenderableType], width: int = 110) -> str:
    """The same tables as plain text."""
    buffer = StringIO()
    console = Console(file=buffer, width=width, color_system=None, markup=False)
    for part in parts:
        console.print(part)
    return buffer.getvalue()
