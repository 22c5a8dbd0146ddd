"""Tables of plans and of their inputs: profiles, drift, clusters, links, compute curves, schedules, explained layers."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aurora.advisor.ceiling import TOKENS, map_seconds, planned_map
from aurora.algorithms.placement.explain import LayerExplanation
from aurora.algorithms.placement.objective import letters
from aurora.algorithms.workload.load_statistics import LEVEL
from aurora.errors import plural
from aurora.io.engine_placements import Export
from aurora.reports.formatting import DASH, distinct, percent, seconds, size
from aurora.reports.tables import Columns, Table, text
from aurora.types import PHASES, Cluster, Cut, Plan, Profile, ReplicaPlacement, ResilientPlacement, Schedule
from aurora.types.arrays import FloatArray, IntArray, gap
from aurora.types.placement import TINY
from aurora.types.profile import CurvesByKind

if TYPE_CHECKING:
    from aurora.algorithms.workload.load_statistics import Interval
    from aurora.planner.evaluate import Drift, Evaluation

LINKS = 6  # of a cut, by name
USELESS = 1.0  # a gap, above which the bound on replicas over servers tells nothing: each may save a token its way by NIC
ONCE = "without replicas"
PAYS = 1.005  # times the balance, from which replicas pay
LEAST_GAIN = 5e-4  # relative; smaller gains are shown as none


def gap_line(plan: Plan) -> str:
    """Returns a sentence with a plan's time, the most useful of its lower bounds, and the gap between them."""
    took = f"{plan.objective} objective {seconds(plan.objective_s)}{estimated(plan.estimated)}"
    bound_s, of = _headline(plan)
    if bound_s is None:
        return f"no gap: {took}, no useful bound on placements {of}"
    return f"gap {percent(gap(plan.objective_s, bound_s))}: {took}, no placement {of} below {seconds(bound_s)}"


def gap_text(plan: Plan) -> str:
    """Returns the gap of `gap_line` as text; a dash if there is no useful bound."""
    bound_s, of = _headline(plan)
    kind = " without replicas" if of == ONCE else ""
    return DASH if bound_s is None else percent(gap(plan.objective_s, bound_s)) + kind


def _headline(plan: Plan) -> tuple[float | None, str]:
    """A plan's bound in seconds, None if none is useful, and the placements that it is of."""
    if not hierarchical(plan) or plan.gap <= USELESS:
        slots = plan.options.slots_per_gpu
        return plan.bound_s, "within memory" if not slots else f"within {slots} slots per GPU"
    return plan.assignment_bound_s, "with replicas" if plan.assignment_bound_s is None else ONCE


def bound_lines(plan: Plan) -> Iterator[str]:
    """Yields lines on further bounds of a plan's objective, and on the windows and links that the objective includes."""
    counted = {"mean": "the mean of", "cvar": "the worse half of", "worst": "the worst of"}.get(plan.options.aim, "all")
    if not plan.colocated and not hierarchical(plan):
        yield f"the objective is over {counted} windows, or of domains with their windows added up"
    if plan.cluster.servers is not None and (narrowest := plan.cluster.servers.narrowest_cut):
        yield f"servers are derived from links; the narrowest cut, which plans leave out: {narrowest}"
    if (known_s := plan.assignment_bound_s) is not None and _headline(plan)[1] != ONCE:
        kind = f"placement {ONCE}" if hierarchical(plan) else "other assignment of these groups of experts"
        yield f"no {kind} below {seconds(known_s)}, gap {percent(gap(plan.objective_s, known_s))}"
    if (cut := worst_cut(plan)) is not None:
        yield cut


def estimated(from_counts: bool) -> str:
    """Returns a suffix for seconds that are estimated from counts of (token, expert) pairs; empty if they are not."""
    return " (estimated from counts)" if from_counts else ""


def hierarchical(plan: Plan) -> bool:
    """Returns True if the all-to-alls of any of the plan's models are hierarchical."""
    return any(model.hierarchy is not None for model in plan.models)


def expectation_lines(plan: Plan) -> Iterator[str]:
    """Yields lines on a plan's expected time on traffic other than its profile, and on the gain of one more slot per GPU."""
    if plan.unseen_s is not None and plan.unseen_loss is not None:
        longer = f"{percent(abs(plan.unseen_loss))} {'longer' if plan.unseen_loss >= 0 else 'shorter'}"
        yield f"on further traffic of the same kind: expected {seconds(plan.unseen_s)}, {longer} than on the recorded windows"
    if plan.slot_gain is not None:
        model = plan.models[0]
        slot = f"one more slot per GPU ({size(model.expert_bytes * len(model.dispatch_L))}, fits)"
        gain = percent(plan.slot_gain) if plan.slot_gain >= LEAST_GAIN else "nothing"
        chosen = any("`slots_per_gpu`: " in note for note in plan.notes)  # by aurora, in the simulator
        yield f"{slot} would save {gain} of {'a simulated step' if chosen else 'the time expected on further traffic'}"


def plan_table(plan: Plan, most: int | None = None, explain: bool = False) -> Table:
    """Returns a table with one row per model and layer: the predicted time of a dispatch that carries all windows at once.

    Args:
        plan: the plan to show.
        most: number of layers to show: the slowest, or with `explain` the ones with the largest gaps; None: all.
        explain: True: show the bounds of each dispatch, and the gaps to them.
    """
    strategies = ", ".join(f"{option.replace('_', ' ')} {name}" for option, name in plan.strategies.items())
    cuts = plan.cluster.servers is not None
    bounds = ("fluid bound", "one-to-one bound", "cut bound")[: 2 + cuts] if explain else ()
    columns: Columns = {"model": text, "layer": str, **dict.fromkeys(("dispatch of all windows", *bounds), seconds)}
    if explain:
        columns = {**columns, "gap": percent}
    rows = []
    for name, model in zip(_names(plan), plan.models, strict=True):
        for layer, took_s in enumerate(model.dispatch_s_L.tolist()):
            cut_s = model.cut_L[layer].bound_s if model.cut_L else None
            bounds_s = model.fluid_bound_s_L[layer], model.one_to_one_bound_s_L[layer], cut_s
            above = (gap(took_s, float(model.bound_s_L[layer])),) if explain else ()
            rows.append((name, layer, took_s, *bounds_s[: len(bounds)], *above))
    return Table(columns, rows, f"{plan.scenario}: {strategies}").worst(most, lambda row: row[-1])


def evaluation_table(plan: Plan, evaluation: "Evaluation", most: int | None = None) -> Table:
    """Returns a table of a plan's times on other traffic, beside the times of a plan made for that traffic.

    Args:
        plan: the plan.
        evaluation: the evaluation of `plan` on the other traffic.
        most: number of layers to show, the slowest; None: all.
    """
    replanned, served_s = evaluation.replanned, float(evaluation.served_s_L.sum())
    times = ("objective of the layer", "dispatch in the plan's order", "in its own plan")
    rows = [
        (name, layer, evaluation.served_s_L[layer], took, own_model.dispatch_s_L[layer])
        for name, own_model, dispatch_s_L in zip(_names(plan), replanned.models, evaluation.dispatch_s_ML, strict=True)
        for layer, took in enumerate(dispatch_s_L)
    ]
    title = (
        f"{plan.objective} objective {seconds(served_s)}{estimated(evaluation.estimated)}; a plan of its own takes "
        f"{seconds(replanned.objective_s)}{estimated(replanned.estimated)}: slowdown {percent(evaluation.slowdown)}"
    )
    table = Table({"model": text, "layer": str, **dict.fromkeys(times, seconds)}, rows, title)
    return table.worst(most, lambda row: row[2])


def order_table(schedules: Sequence[Schedule]) -> Table:
    """Returns a table of schedules: makespan, bounds, and the gap to the larger of fluid bound and cut bound."""
    bounds = ("fluid bound", "one-to-one bound", *(("cut bound",) if any(order.cut for order in schedules) else ()))
    times = dict.fromkeys(("makespan", *bounds), seconds)
    rows = []
    for order in schedules:
        bounds_s = (order.fluid_bound_s, order.one_to_one_bound_s, order.cut.bound_s if order.cut else None)[: len(bounds)]
        rows += [(order.method, order.makespan_s, *bounds_s, order.gap, len(order.src_X), "yes" if order.one_to_one else "no")]
    return Table({"method": text, **times, "gap": percent, "rows": str, "one to one": str}, rows)


def cut_line(cut: Cut) -> str:
    """Returns a line on the port or NIC that limits an all-to-all between servers."""
    links = ", ".join(cut.links[:LINKS]) + (f" and {len(cut.links) - LINKS} more" if len(cut.links) > LINKS else "")
    return f"bound by {links}: {cut.load_bytes} bytes must cross, {seconds(cut.bound_s)} at least"


def worst_cut(plan: Plan) -> str | None:
    """Returns a line on the port or NIC that limits the plan's slowest all-to-all; None without servers."""
    models = zip(_names(plan), plan.models, strict=True)
    cuts = [(cut, name, layer) for name, model in models for layer, cut in enumerate(model.cut_L)]
    if not cuts:
        return None
    worst, name, layer = max(cuts, key=lambda entry: entry[0].bound_s)
    return f"{name}, layer {layer}: {cut_line(worst)}"


def layout_table(layout: ReplicaPlacement) -> Table:
    """Returns a table of each layer's largest GPU load, beside mean, lower bound and gap."""
    columns: Columns = {
        "layer": str,
        **dict.fromkeys(("max load", "mean load"), "{:.6g}".format),
        "max/mean": "{:.4f}".format,
        "bound": "{:.6g}".format,
        "gap": percent,
        "replicas": str,
    }
    rows = [
        (layer, top, mean, top / mean if mean else 1.0, bound, above, sum(map(len, slots)))
        for layer, (top, mean, bound, above, slots) in enumerate(
            zip(layout.max_load_L, layout.mean_load_L, layout.bound_L, layout.gap_L, layout.placement.slots_LG, strict=True)
        )
    ]
    return Table(columns, rows, f"{layout.method}: {seconds(layout.seconds)} for all layers")


def survive_lines(
    made: ReplicaPlacement,
    alone: ReplicaPlacement,
    more: Iterator[ReplicaPlacement],
    target: float,
    experts: int,
    failures: int,
    fewest: int,
    nodes: int | None,
    fixed: int,
) -> Iterator[str]:
    """Yields lines on the fewest slots with which every expert survives any `failures` failures, and on the balance there.

    Args:
        made: the placement in the fewest slots, or in the slots that the user gave.
        alone: a placement of the same experts without replicas for failures.
        more: placements like `made` with one slot per GPU more than the fewest, with two more, and so on.
        target: mean load / largest load that is sufficient.
        experts: number of experts.
        failures: number of GPUs or nodes that may fail.
        fewest: the fewest slots per GPU.
        nodes: number of nodes, which fail as a whole; None: GPUs fail.
        fixed: a fixed number of redundant experts, for comparison.
    """
    gpus, units, copies = made.placement.gpus, "GPUs" if nodes is None else "nodes", failures + 1
    yield (
        f"any {failures} of {nodes or gpus} {units} may fail with {fewest} slots per GPU. Fewer are not enough: an expert on "
        f"{failures} of them alone is lost with them, so each of {experts} needs copies on {copies}: {experts * copies} slots"
    )
    yield f"max/mean load {_worst(made):.4f}; {_worst(alone):.4f} without copies, in {-(-experts // gpus)} slots per GPU"
    for spare, placement in enumerate(more, 1):
        if _worst(placement) <= 1 / target:
            yield f"with {fewest + spare} slots per GPU max/mean load is {_worst(placement):.4f}"
            break
    yield f"{fixed} redundant experts, a fixed count, would take {-(-(experts + fixed) // gpus)} slots per GPU"


def slots_line(layout: ReplicaPlacement, load_LE: FloatArray, slots: int) -> str | None:
    """Returns a line on replicas that do not pay, with what one more slot per GPU brings; None if they do, or there are none.

    Args:
        layout: the placement.
        load_LE: (L, E) the loads that it was made for.
        slots: slots of each GPU.
    """
    gpus, perfect_L = layout.placement.gpus, load_LE.sum(axis=1) / layout.placement.gpus

    def worst(at: int | None) -> float:
        seconds_DL = map_seconds(
            load_LE[None], planned_map(load_LE, gpus, at, "equal-split" if at is None else layout.method), TOKENS
        )
        return float((seconds_DL[0] / np.maximum(perfect_L, TINY)).max())

    replicas = slots * gpus - load_LE.shape[1]
    if replicas <= 0 or _worst(layout) * PAYS < (alone := worst(None)):
        return None
    more = f"with {slots + 1} slots per GPU it is {worst(slots + 1):.4f}"
    return f"the {replicas} replicas of a layer do not pay: max/mean is {alone:.4f} without any; {more}"


def _worst(placement: ReplicaPlacement) -> float:
    """The largest load of a GPU over the mean, of the worst layer."""
    return float((placement.max_load_L / np.maximum(placement.mean_load_L, TINY)).max())


def survival_table(placement: ResilientPlacement) -> Table:
    """Returns a table of each layer's survival probability after failures, beside its upper bound."""
    rows = [
        (layer, failures, f"{p:.6f}" + (f" ± {half:.6f}" if half else ""), most)
        for layer, survival in enumerate(placement.survival_L)
        for failures, (p, half, most) in enumerate(zip(survival.p_K, survival.half_width_K, survival.bound_K, strict=True), 1)
    ]
    title = f"{placement.method}: at least {placement.min_replicas} replicas each, placed in {seconds(placement.seconds)}"
    return Table({"layer": str, "failures": str, "survives": str, "at most": "{:.6f}".format}, rows, title)


def _names(plan: Plan) -> tuple[str, ...]:
    """The models' names, numbered if two have the same name."""
    return distinct([model.model for model in plan.models])


def profile_table(profile: Profile, fullest: "Interval", most: int | None = None) -> Table:
    """Returns a table of each layer's load and skew.

    Args:
        profile: the traffic.
        fullest: the fullest rank's load over the mean, if experts are placed by index.
        most: number of layers to show, the most skewed; None: all.
    """
    columns: Columns = {
        "MoE layer": str,
        "tokens to experts": str,
        "max/mean expert load": "{:.2f}".format,
        "hottest expert": str,
    }
    rows = [
        (layer, load_E.sum(), float(load_E.max() / load_E.mean()) if load_E.any() else 0.0, int(load_E.argmax()))
        for layer, load_E in enumerate(profile.load_LE)
    ]
    caption = (
        f"experts in order: the busiest of {profile.sources} ranks gets {fullest.low:.3f} to {fullest.high:.3f} times the "
        f"mean load ({LEVEL:.0%} confidence, by drawing {fullest.drawn} again)"
    )
    title = f"{profile.model}: {plural(profile.windows, 'window')}, {plural(profile.sources, 'source')}, top-{profile.top_k}"
    return Table(columns, rows, title, caption, ("", "pairs", "skew", "hottest")).worst(most, lambda row: row[2])


def drift_table(drift: "Drift", most: int | None = None) -> Table:
    """Returns a table of the drift in each layer, beside the drift that chance alone explains.

    Args:
        drift: the drift between two profiles.
        most: number of layers to show, with the largest drift; None: all.
    """
    parts = ("total variation", "by chance up to", f"overlap of the {drift.hot} hottest")
    layers = zip(drift.variation_L.tolist(), drift.noise_L.tolist(), drift.overlap_L.tolist(), strict=True)
    rows = [(layer, *row) for layer, row in enumerate(layers)]
    title = f"slowdown {percent(drift.slowdown)}; shares of experts differ by {percent(float(drift.variation_L.mean()))}"
    columns: Columns = {"MoE layer": str, **dict.fromkeys(parts, percent)}
    return Table(columns, rows, title, keys=("", "variation", "by_chance", "hot_overlap")).worst(most, lambda row: row[1])


def cluster_table(cluster: Cluster) -> Table:
    """Returns a table of each rank's GPU and port."""
    rates, memory = dict.fromkeys(("out", "in"), "{:.4g} GB/s".format), "{:.4g} GB".format
    columns: Columns = {"rank": text, "name": text, "kind": text, "node": str, **rates, "memory": memory}
    rows = [
        (
            *(str(rank), gpu.name, gpu.kind, gpu.node, gpu.out_Bps / 1e9, gpu.in_Bps / 1e9, gpu.memory_bytes / 1e9),
            *(gpu.speed, gpu.startup_s),
        )
        for rank, gpu in enumerate(cluster.gpus)
    ]
    title = f"{cluster.name}: {plural(len(cluster), 'GPU')}" + (f", incast {percent(cluster.incast)}" if cluster.incast else "")
    return Table({**columns, "speed": "{:.3g}".format, "start-up": seconds}, rows, title)


def links_table(rate_Bps_GG: FloatArray, startup_s_GG: FloatArray) -> Table:
    """Returns a table of each pair's rate and start-up time: one row per sender, one column per receiver.

    Args:
        rate_Bps_GG: (G, G) float64, bytes per second from each rank to each.
        startup_s_GG: (G, G) float64, start-up seconds of a message from each rank to each.
    """
    rows = []
    for rank, (rates, startups) in enumerate(zip(rate_Bps_GG.tolist(), startup_s_GG.tolist(), strict=True)):
        pairs = [f"{rate / 1e9:.3g}, {seconds(wait)}" for rate, wait in zip(rates, startups, strict=True)]
        rows.append((rank, *(pair if peer != rank else None for peer, pair in enumerate(pairs))))
    columns = dict.fromkeys(("rank", *map(str, range(len(rate_Bps_GG)))), str)
    return Table(columns, rows, "messages from row to column, one at a time: GB/s, start-up")


def curves_table(model: str, kinds: CurvesByKind) -> Table:
    """Returns a table of each phase's compute time at a few token counts.

    Args:
        model: the model's name, for the title.
        kinds: compute curves, by kind of GPU and phase.
    """
    rows = [
        (kind, 1 << power, *(float(phases[phase](1 << power)) for phase in PHASES))
        for kind, phases in kinds.items()
        for power in range(0, int(max(phases[phase].tokens_X[-1] for phase in PHASES)).bit_length(), 3)
    ]
    columns: Columns = {"kind": text, "tokens": str, **dict.fromkeys(PHASES, seconds)}
    return Table(columns, rows, f"{model}: compute times")


def explain_tables(plan: Plan, explained: Sequence[LayerExplanation]) -> list[Table]:
    """Returns two tables per layer: the terms of its time, and the slowest GPU of each term with its phases and experts.

    Args:
        plan: the plan.
        explained: the result of `explain` for the plan.
    """
    return [table for layer in explained for table in (_terms(plan, layer), _gpus(plan, layer))]


def _terms(plan: Plan, layer: LayerExplanation) -> Table:
    bound_s, caption = layer.assignment_bound_s, ""
    if bound_s is not None:
        above = percent(gap(layer.value_s, bound_s))
        caption = f"no assignment of these groups of experts below {seconds(bound_s)}, gap {above}"
        caption += f"; most of that bound is {layer.bound_term}"
    rows = [
        (name, value, ("no", "yes", "twice")[times], plan.cluster.gpus[gpu].name)
        for name, value, gpu, times in zip(layer.terms, layer.seconds_X, layer.gpu_X, layer.times_X, strict=True)
    ]
    title = f"layer {layer.layer}, {plan.objective}, all windows as one: {seconds(layer.value_s)}"
    return Table({"term": text, "slowest GPU takes": seconds, "on the longest path": str, "GPU": str}, rows, title, caption)


def _gpus(plan: Plan, layer: LayerExplanation) -> Table:
    named = list(zip(letters(len(plan.models)), plan.models, strict=True))
    columns: Columns = {"GPU": text, "model": text, **dict.fromkeys(("gate", "dispatch", "FFN", "combine", "aggr."), seconds)}
    rows = [
        (
            *(plan.cluster.gpus[gpu].name, letter, *phases_YG[:, gpu]),
            " ".join(map(str, model.placement.slots_LG[layer.layer % len(model.dispatch_L)][gpu])) or "none",
        )
        for gpu in sorted(set(layer.gpu_X.tolist()))
        for (letter, model), phases_YG in zip(named, layer.phases_MYG, strict=True)
    ]
    title = f"layer {layer.layer}: the GPUs that are slowest in a term"
    return Table({**columns, "experts": text}, rows, title, ", ".join(f"{letter}: {model.model}" for letter, model in named))


def padding_line(export: Export, added_bytes_G: IntArray | None) -> str:
    """Returns a line on the replicas, and their bytes, that an export added because the engine needs equal slots per GPU.

    Args:
        made: the export.
        added_bytes_G: (G,) bytes of added replicas on each GPU; None: unknown.
    """
    added_L = export.added_LG.sum(axis=1)
    if not added_L.any():
        return f"{export.redundant} redundant experts a layer, as in the plan"
    many = f"{added_L.min()} to {added_L.max()}" if added_L.min() < added_L.max() else str(added_L.max())
    said = f"{export.redundant} redundant experts a layer; {many} of them are not the plan's"
    said += ": the engine needs equally many on every GPU, and the hottest that keep GPUs balanced are repeated"
    if added_bytes_G is not None:
        gpu = int(added_bytes_G.argmax())
        mean, most = added_bytes_G.mean() / 1e9, added_bytes_G[gpu] / 1e9
        said += f"; they take {mean:.3g} GB of a GPU on average, {most:.3g} GB of GPU {gpu}"
    return said
