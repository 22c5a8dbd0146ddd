"""Placement of experts, as charts and tables."""

from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet
from aurora.reports.numbers import ReportNumbers


def placement_section(found: ReportNumbers) -> Section:
    """Returns the section on the experts of each GPU; with replicas also on replica counts and on survival of lost GPUs."""
    plan = found.of.plan
    rows = []
    for name, model in zip(found.of.models, plan.models, strict=True):
        for layer, slots in enumerate(model.placement.slots_LG):
            shares = (None,) * len(slots) if model.placement.split_LG is None else model.placement.split_LG[layer]
            held_G = zip(found.of.gpus, slots, shares, strict=True)
            rows.append((name, str(layer), "; ".join(f"GPU {gpu}: {_held(own, share)}" for gpu, own, share in held_G)))
    held = Sheet(
        "Experts by GPU",
        ("model", "layer", "experts of each GPU"),
        tuple(rows),
        "Part of an expert's load in brackets." if any(m.placement.split_LG for m in plan.models) else "",
    )
    copies_M = [found.copies_LE(number) for number in range(len(plan.models))]
    if not any((copies_LE > 1).any() for copies_LE in copies_M):
        return Section("placement", "Placement", "Where the plan puts experts; none has replicas.", sheets=(held,))
    frames, fewest = [], []
    for name, copies_LE in zip(found.of.models, copies_M, strict=True):
        own = []
        for layer, copies_E in enumerate(copies_LE):
            few = int(copies_E.min())
            own.append(Frame(f"{name}, layer {layer}: {few} to {copies_E.max()} copies.", {"copies": copies_E}))
            rarest = int((copies_E == few).sum())
            fewest.append((name, str(layer), str(copies_E.sum()), str(few), str(rarest), str(few - 1)))
        frames.append(own)
    heads = ("model", "layer", "slots", "fewest copies", "experts with so few", "GPUs that may be lost, whichever")
    about = {"axis": "expert", "names": None, "series": [["copies", "copies"]], "unit": ""}
    choices = Selector("model", found.of.models), Selector("layer")
    tables = (Sheet("Copies and survival", heads, tuple(fewest)),)
    chart = Chart("copies", "bars", "Copies of each expert", choices, frames, about, tables)
    text = (
        "Where the plan puts experts and their replicas. A layer survives the loss of any GPUs fewer than the copies of "
        "its rarest expert."
    )
    return Section("placement", "Replicas and survival", text, (chart,), (held,))


def _held(held: tuple[int, ...], share: tuple[float, ...] | None) -> str:
    if share is None:
        return " ".join(map(str, held)) or "none"
    return " ".join(f"{e}" if part == 1 else f"{e} ({part:.0%})" for e, part in zip(held, share, strict=True)) or "none"
