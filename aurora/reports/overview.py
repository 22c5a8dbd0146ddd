"""Overview of a report: speed-ups and the gap to the bound at its beginning, the provenance of its inputs at its end."""

from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np

from aurora.reports.charts import Chart, Frame, Sheet, sheet
from aurora.reports.numbers import ReportNumbers
from aurora.reports.tables import bounds_line, cluster_table, percent, seconds, speedup
from aurora.reports.trace_times import COMPUTE, EXCHANGES, TIMED_PHASES

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
    """Returns the speed-up, the prediction's error or the time of the one trace, and the gap to the bound."""
    plan = found.of.plan
    return [_speedup(found), _prediction_error(found), Tile("Gap to the bound", percent(plan.gap), bounds_line(plan))]


def _speedup(found: ReportNumbers) -> Tile:
    its = found.speedup
    if its is None:
        return Tile("Speed-up", DASH, found.of.without)
    note = f"{its.after}, {seconds(its.after_s)}, against {its.before}, {seconds(its.before_s)}"
    return Tile(f"Speed-up, {its.by}", speedup(its.before_s, its.after_s), note)


def _prediction_error(found: ReportNumbers) -> Tile:
    title = "Prediction error"
    if not found.of.traces:
        return Tile(title, DASH, "No trace was given: aurora simulate writes a predicted one, aurora run a measured one")
    both = found.comparison
    if both is None or found.predicted is None or found.measured is None:
        name, trace = found.of.traces[0]
        lacking, verb = ("predicted", "simulate") if found.predicted is None else ("measured", "run")
        note = f"{name}, from start to end; no {lacking} trace was given: aurora {verb} writes one"
        return Tile(f"Time, {trace.kind}", seconds(trace.seconds), note)
    names = [found.of.traces[i][0] for i in (found.predicted, found.measured)]
    note = (
        f"{seconds(both.predicted_s)} predicted ({names[0]}) over {seconds(both.measured_s)} measured ({names[1]}), minus one"
    )
    return Tile(title, percent(both.error), note)


def phase_chart(found: ReportNumbers, tables: tuple[Sheet, ...]) -> Chart:
    """Returns a chart of a rank's seconds in each phase, one bar per trace.

    Args:
        found: the report's numbers.
        tables: tables of the chart's numbers.
    """
    shown = [
        (name, f"s{i}", one.phases) for i, ((name, _), one) in enumerate(zip(found.of.traces, found.summaries, strict=True))
    ]
    columns = {key: np.array([*phases.values()], dtype=np.float32) for _, key, phases in shown}
    words = " ".join(
        f"{name}: exchanges {seconds(sum(map(phases.__getitem__, EXCHANGES)))}, "
        f"computing {seconds(sum(map(phases.__getitem__, COMPUTE)))}, waiting "
        f"{seconds(phases['counts'] + phases['waiting'])} a rank."
        for name, _, phases in shown
    )
    series = [[name, key] for name, key, _ in shown]
    about = {"axis": "phase", "names": list(TIMED_PHASES), "series": series, "unit": "s"}
    return Chart("phases", "bars", "Where the time goes", (), Frame(words, columns), about, tables)


def provenance(found: ReportNumbers) -> list[Sheet]:
    """Returns tables of hashes, seeds, methods, versions and dates of everything that the report was made from."""
    plan, fabric = found.of.plan, found.of.plan.cluster.fabric
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
        replace(sheet(cluster_table(plan.cluster)), note="" if fabric is None else f"a fabric of {len(fabric.links)} links"),
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
