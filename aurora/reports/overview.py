"""Overview of a report: speed-ups and the gap to the bound at its beginning, the provenance of its inputs at its end."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from aurora.reports.charts import Chart, Frame, Sheet
from aurora.reports.numbers import ReportNumbers
from aurora.reports.summary import COMPUTE, EXCHANGES
from aurora.reports.tables import percent, seconds
from aurora.types import TRACE_PHASES
from aurora.types.arrays import gap

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Tile:
    """A number that answers a question.

    Attributes:
        title: the question.
        value: the number with its unit; a dash if it is unknown.
        note: what the number is compared with, or how to get it.
    """

    title: str
    value: str
    note: str


def tiles(found: ReportNumbers) -> list[Tile]:
    """Returns predicted and measured speed-up, the prediction's error, and the gap to the bound."""
    return [_predicted_speedup(found), *_traced_speedup(found), _prediction_error(found), _gap(found)]


def _predicted_speedup(found: ReportNumbers) -> Tile:
    title = "Speed-up by the plan, predicted"
    if not found.of.profiles:
        return Tile(title, DASH, found.of.without)
    before_s, after_s = found.objective_s
    against = (
        f"{seconds(after_s)} against {seconds(before_s)} with experts in the order of their numbers, both by the plan's own "
        f"objective ({found.of.plan.objective}) on the given traffic"
    )
    return Tile(title, f"{gap(before_s, after_s) + 1:.2f}\N{MULTIPLICATION SIGN}", against)


def _traced_speedup(found: ReportNumbers) -> list[Tile]:
    """The last measured trace over the first, else the same of predicted ones."""
    for kind in ("measured", "predicted"):
        shown = [(name, trace.seconds) for name, trace in found.of.traces if trace.kind == kind]
        if len(shown) > 1:
            (first, first_s), (last, last_s) = shown[0], shown[-1]
            value = f"{gap(first_s, last_s) + 1:.2f}\N{MULTIPLICATION SIGN}"
            return [
                Tile(f"Speed-up between runs, {kind}", value, f"{last}, {seconds(last_s)}, against {first}, {seconds(first_s)}")
            ]
    return []


def _prediction_error(found: ReportNumbers) -> Tile:
    title = "Measured against predicted"
    if not found.of.traces:
        return Tile(title, DASH, "No trace was given: aurora simulate writes a predicted one, aurora run a measured one")
    both = found.comparison
    if both is None or found.predicted is None or found.measured is None:
        name, trace = found.of.traces[0]
        lacking, verb = ("predicted", "simulate") if found.predicted is None else ("measured", "run")
        note = f"{name}, from start to end; no {lacking} trace was given: aurora {verb} writes one"
        return Tile(f"Time, {trace.kind}", seconds(trace.seconds), note)
    predicted_s, measured_s = both.predicted_s, both.measured_s
    names = [found.of.traces[i][0] for i in (found.predicted, found.measured)]
    note = f"{seconds(measured_s)} measured ({names[1]}), {seconds(predicted_s)} predicted ({names[0]})"
    return Tile(title, f"{gap(measured_s, predicted_s):+.1%}", note)


def _gap(found: ReportNumbers) -> Tile:
    plan = found.of.plan
    groups = f"no assignment of the same groups of experts below {seconds(plan.bound_s)}, "
    note = (
        f"{seconds(plan.objective_s)} by the plan's objective; {groups if plan.bound_s > plan.free_bound_s else ''}"
        f"no placement at all below {seconds(plan.free_bound_s)}"
    )
    return Tile("Gap to the bound", percent(plan.gap), note)


def phase_chart(found: ReportNumbers, tables: tuple[Sheet, ...]) -> Chart:
    """Returns a chart of a rank's seconds in each phase, one bar per trace.

    Args:
        found: the report's numbers.
        tables: tables of the chart's numbers.
    """
    columns = {
        f"s{i}": np.array([phases[phase] for phase in TRACE_PHASES], dtype=np.float32) for i, phases in enumerate(found.phases)
    }
    words = " ".join(
        f"{name}: exchanges {seconds(_sum(phases, EXCHANGES))}, computing {seconds(_sum(phases, COMPUTE))}, waiting for counts "
        f"{seconds(phases['counts'])} a rank."
        for (name, _), phases in zip(found.of.traces, found.phases, strict=True)
    )
    series = [[name, f"s{i}"] for i, (name, _) in enumerate(found.of.traces)]
    about = {"axis": "phase", "names": list(TRACE_PHASES), "series": series, "unit": "s"}
    return Chart("phases", "bars", "Where the time goes", (), Frame(words, columns), about, tables)


def _sum(phases: Mapping[str, float], which: tuple[int, ...]) -> float:
    return sum(phases[TRACE_PHASES[number]] for number in which)


def provenance(found: ReportNumbers) -> list[Sheet]:
    """Returns tables of hashes, seeds, methods, versions and dates of everything that the report was made from."""
    plan = found.of.plan
    rows = [
        ("scenario", plan.scenario),
        ("objective", plan.objective),
        ("seed", str(plan.options.seed)),
        ("epoch", str(plan.epoch)),
    ]
    rows += [(f"option: {what}", name) for what, name in plan.strategies.items()]
    rows += [("note", note) for note in plan.notes]
    rows.append(("aurora", version("aurora-moe")))
    made_from = [
        (name, model.profile_path or "from memory", model.profile_digest, model.fingerprint or "synthetic")
        for name, model in zip(found.of.models, plan.models, strict=True)
    ]
    sheets = [
        Sheet("Plan", ("what", "found"), tuple(rows)),
        Sheet("Planned from", ("model", "profile", "sha256", "router weights"), tuple(made_from)),
        _cluster(found),
    ]
    for given, age in ((found.of.profiles, ""), (found.of.later, "later, ")):
        for name, model, profile in zip(found.of.models, plan.models, given, strict=False):
            same = "the plan's own" if profile.digest == model.profile_digest else "other than the plan was made from"
            about = [("sha256", profile.digest), ("traffic", same), *profile.provenance.items()]
            sheets.append(
                Sheet(f"Profile of {name} ({age}as given)", ("what", "found"), tuple((str(k), str(v)) for k, v in about))
            )
    if found.of.traces:
        traced = tuple((name, trace.kind, str(len(trace)), seconds(trace.seconds)) for name, trace in found.of.traces)
        sheets.append(Sheet("Traces", ("file", "kind", "events", "from start to end"), traced))
    return sheets


def _cluster(found: ReportNumbers) -> Sheet:
    cluster = found.of.plan.cluster
    heads = ("rank", "name", "kind", "node", "out", "in", "memory", "speed")
    rows = tuple(
        (
            str(rank),
            gpu.name,
            gpu.kind,
            str(gpu.node),
            f"{gpu.out_Bps:g} B/s",
            f"{gpu.in_Bps:g} B/s",
            f"{gpu.memory_bytes / 1e9:g} GB",
            f"{gpu.speed:g}",
        )
        for rank, gpu in enumerate(cluster.gpus)
    )
    return Sheet(
        f"Cluster {cluster.name}",
        heads,
        rows,
        "" if cluster.fabric is None else f"a fabric of {len(cluster.fabric.links)} links",
    )
