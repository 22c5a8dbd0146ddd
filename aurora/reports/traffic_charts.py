"""Traffic and the loads that it makes, as charts: before the plan and after it, and its drift."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet, sheet
from aurora.reports.formatting import percent, seconds
from aurora.reports.input_tables import drift_table, profile_table
from aurora.reports.numbers import ReportNumbers
from aurora.reports.traffic_loads import relative_loads
from aurora.types.arrays import FloatArray, IntArray

SIDES = ("before", "after")
EXPERT_SCALE = 0.01  # of a layer's mean: what one step of a packed load stands for


def experts_section(found: ReportNumbers) -> Section:
    """Returns the section with heat maps of all layers at once: the load of each expert, and of each GPU before and after."""
    text = (
        "Every layer at a glance. First, how many tokens each expert draws; then how long each GPU is busy with the dispatch "
        "and its experts, with experts in the order of their numbers and as planned. Colours tell the load relative to the "
        "mean of the layer: a layer in balance has one colour."
    )
    if not found.traffic_M:
        return Section("experts", "Experts and layers", text, missing=found.of.without)
    frames, rows = [], []
    for model, flows, profile in zip(found.of.models, found.traffic_M, found.of.profiles, strict=False):
        parts = relative_loads(flows, profile)
        most_L, before_L, after_L = (part_LX.max(axis=1) for part_LX in parts)
        words = (
            f"{model}: the hottest expert has {most_L.max():.2f} times its layer's mean; the busiest GPU "
            f"{before_L.max():.2f} times before, {after_L.max():.2f} times after."
        )
        columns = {
            name: np.rint(part_LX.T.ravel() / EXPERT_SCALE).astype(np.int64)
            for name, part_LX in zip(("experts", *SIDES), parts, strict=True)
        }
        columns["rows"] = np.array([part_LX.shape[1] for part_LX in parts])
        frames.append(Frame(words, columns, scale=EXPERT_SCALE))
        for layer in range(profile.layers):
            cells = [(str(part_LX[layer].argmax()), f"{part_LX[layer].max():.2f}") for part_LX in parts]
            rows.append((model, str(layer), *(cell for pair in cells for cell in pair)))
    heads = ("model", "layer", "hottest expert", "times", "busiest GPU before", "times", "busiest GPU after", "times")
    maps = [["Tokens of experts", "experts", "expert", "layer"]]
    maps += [["GPUs before: index order", "before", "GPU", "layer"], ["GPUs after: as planned", "after", "GPU", "layer"]]
    about = {"maps": maps, "relative": True, "square": False}
    tables = (Sheet("Largest loads by layer, relative to the mean", heads, tuple(rows)),)
    models = Selector("model", found.of.models)
    chart = Chart("expert-map", "heat", "Load by expert and layer", (models,), frames, about, tables)
    return Section("experts", "Experts and layers", text, (chart,))


def traffic_section(found: ReportNumbers) -> Section:
    """Returns the section with heat maps of every layer's dispatch."""
    text = (
        "Tokens from each GPU (rows) to each GPU (columns) in the dispatch of one layer, over the whole profile: with experts "
        "in the order of their numbers, and as planned. What stays on a GPU is left out. Bars beside the maps are what each "
        "port sends and receives in all."
    )
    if not found.traffic_M:
        return Section("traffic", "Traffic before and after", text, missing=found.of.without)
    frames, rows = [], []
    for model, flows in zip(found.of.models, found.traffic_M, strict=True):
        own = []
        for layer in range(flows.tokens_BLGG.shape[1]):
            sides_BGG = flows.tokens_BLGG[:, layer]
            columns: dict[str, IntArray] = {"rows": np.array([len(found.of.gpus)] * 2)}
            for side, tokens_GG in zip(SIDES, sides_BGG, strict=True):
                columns |= {side: tokens_GG.ravel(), f"{side}-out": tokens_GG.sum(axis=1), f"{side}-in": tokens_GG.sum(axis=0)}
            tops = [_busiest(flows.port_s_BLG[side, layer]) for side in (0, 1)]
            travel = [str(int(tokens_GG.sum())) for tokens_GG in sides_BGG]
            words = (
                f"{model}, layer {layer}. Busiest port before: {tops[0]}; after: {tops[1]}. "
                f"Tokens that travel: {travel[0]} before, {travel[1]} after."
            )
            own.append(Frame(words, columns, scale=float(flows.row_bytes)))
            rows.append((model, str(layer), *travel, *tops))
        frames.append(own)
    heads = ("model", "layer", "tokens before", "tokens after", "busiest port before", "busiest port after")
    choices = Selector("model", found.of.models), Selector("layer")
    tables = (Sheet("Traffic by layer", heads, tuple(rows)),)
    maps = [["Before: experts in index order", "before", "GPU", "GPU"], ["After: as planned", "after", "GPU", "GPU"]]
    about = {"maps": maps, "relative": False, "square": True}
    chart = Chart("traffic-map", "heat", "Tokens between GPUs", choices, frames, about, tables)
    return Section("traffic", "Traffic before and after", text, (chart,))


def loads_section(found: ReportNumbers) -> Section:
    """Returns the section on ports and experts of each GPU, and the busiest ports of all layers."""
    text = (
        "What ports and experts need, over the whole profile. No order of the dispatch ends before its busiest port, and no "
        "placement makes the slowest GPU's experts faster than the dashed bound."
    )
    if not found.traffic_M:
        return Section("loads", "Load per GPU", text, missing=found.of.without)
    frames, port_lines = [], []
    for model, flows, planned_LW in zip(found.of.models, found.traffic_M, found.planned_MLW, strict=True):
        took_L = np.array([there.seconds for there, _ in planned_LW])
        bound_L = np.array([there.bound_s for there, _ in planned_LW])
        before_L, after_L = flows.port_s_BLG.max(axis=2)
        before, after, took = (seconds(float(value_L.sum())) for value_L in (before_L, after_L, took_L))
        words = f"{model}, dispatches of all layers: {before} before, {after} after, {took} in the planned order."
        frames.append(Frame(words, {"before": before_L, "after": after_L, "ordered": took_L}))
        port_lines.append({"bound of any order": bound_L, "planned order": took_L})
    port_MBLG, expert_MBLG = zip(*((flows.port_s_BLG, flows.expert_s_BLG) for flows in found.traffic_M), strict=True)
    expert_lines = [{"bound of any placement": flows.expert_bound_s_L} for flows in found.traffic_M]
    title = "One layer, ports: seconds of the dispatch"
    ports = _by_layer(found, "port-loads", title, "dispatch", port_MBLG, port_lines)
    title = "One layer, experts: seconds of computing"
    experts = _by_layer(found, "expert-loads", title, "experts", expert_MBLG, expert_lines)
    series = [["before", "before"], ["after", "after"], ["after, in the planned order", "ordered"]]
    about = {"axis": "layer", "names": None, "series": series, "unit": "s"}
    layers = Chart("layers", "bars", "Every layer: its busiest port", ports.choices[:1], frames, about, ports.sheets)
    return Section("loads", "Load per GPU", text, (layers, ports, experts))


def _by_layer(
    found: ReportNumbers,
    name: str,
    title: str,
    what: str,
    load_MBLG: Sequence[FloatArray],
    line_ML: Sequence[Mapping[str, FloatArray]],
) -> Chart:
    """A chart of every GPU's seconds in one layer, before and after; line_ML: seconds of lines across, by label and layer."""
    frames, rows = [], []
    for model, load_BLG, line_L in zip(found.of.models, load_MBLG, line_ML, strict=True):
        own = []
        for layer, load_BG in enumerate(load_BLG.transpose(1, 0, 2)):
            lines = tuple((label, float(value_L[layer])) for label, value_L in line_L.items())
            before, after = map(_busiest, load_BG)
            told = "; ".join(f"{label}: {seconds(value)}" for label, value in lines)
            words = f"{model}, layer {layer}, {what}. Before: {before}; after: {after}; {told}."
            own.append(Frame(words, dict(zip(SIDES, load_BG, strict=True)), lines))
            rows.append((model, str(layer), before, after, *(seconds(value) for _, value in lines)))
        frames.append(own)
    heads = ("model", "layer", "busiest before", "after", *line_ML[0])
    about = {"axis": "GPU", "names": list(found.of.gpus), "series": [[side, side] for side in SIDES], "unit": "s"}
    choices = Selector("model", found.of.models), Selector("layer")
    return Chart(name, "bars", title, choices, frames, about, (Sheet(f"Load by layer: {what}", heads, tuple(rows)),))


def _busiest(load_G: FloatArray) -> str:
    return f"GPU {int(load_G.argmax())}, {seconds(float(load_G.max()))}"


def drift_section(found: ReportNumbers) -> Section | None:
    """Returns the section on how far later traffic has moved; None without later traffic."""
    if not found.drift_M:
        return None
    text = (
        "How much of the later traffic goes to other experts than the first profile's did: the total variation between their "
        "shares of tokens, layer by layer, beside what two samples as small as these would differ by."
    )
    frames, sheets = [], []
    for model, moved in zip(found.of.models, found.drift_M, strict=True):
        layer = int(moved.variation_L.argmax())
        most, mean = percent(float(moved.variation_L[layer])), percent(float(moved.variation_L.mean()))
        words = f"{model}: {most} in layer {layer}, {mean} on average; {moved.reason}."
        frames.append(Frame(words, {"moved": moved.variation_L, "chance": moved.noise_L}))
        table = sheet(drift_table(moved))
        sheets.append(replace(table, title=f"{model}: {table.title}"))
    series = [["total variation", "moved"], ["by chance up to", "chance"]]
    about = {"axis": "layer", "names": None, "series": series, "unit": "%"}
    tables = (
        *sheets,
        *(sheet(profile_table(profile)) for profile in (*found.of.profiles, *found.of.later)),
    )
    models = Selector("model", found.of.models)
    chart = Chart("drift-chart", "bars", "Total variation by layer", (models,), frames, about, tables)
    return Section("drift", "Drift", text, (chart,))
