"""HTML report on a plan: one self-contained page, which needs no network.

The same inputs give the same bytes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from aurora.advisor.recommend import SERVED
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.reports.chart_data import Chart, Frame, Sheet, sheet
from aurora.reports.formatting import DASH, percent, seconds, speedup
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.plan_tables import cluster_table, gap_line, gap_text
from aurora.reports.sections import (
    experts_section,
    loads_section,
    phase_sheets,
    placement_section,
    schedule_section,
    timeline_section,
    traffic_section,
)
from aurora.reports.trace_times import TIMED_PHASES


@dataclass(frozen=True)
class Tile:
    """Box at the top of the page: a question, and a number that answers it.

    Attributes:
        title: the question.
        value: the number with its unit; a dash if it is unknown.
        note: text below: the number with which it is compared, or how to obtain it.
    """

    title: str
    value: str
    note: str


def tiles(report: ReportNumbers) -> list[Tile]:
    """Returns the tiles for tokens processed per second, seconds per step, speed-up, prediction error, and gap."""
    plan = report.of.plan
    told = "".join(note.removeprefix(SERVED) for note in plan.notes if note.startswith(SERVED))
    first = [Tile("Tokens generated per second, by recommend", told.split()[0], told)] if told else []
    worth = [tile for tile in _worth(report) if not (told and tile.title.startswith("Tokens processed"))]  # of MoE layers
    return [*first, *worth, _prediction_error(report), Tile("Gap to the bound", gap_text(plan), gap_line(plan))]


def _worth(numbers: ReportNumbers) -> Iterator[Tile]:
    """Tokens processed per second, seconds per step, and the speed-up, each beside what it is compared with."""
    served, both = numbers.serving, numbers.speedup
    if served is not None:
        before = both[0] if both is not None and both[1].by == served.by else None
        part = "" if served.by == "measured" else "; MoE layers only"
        many = f"a step of {' and '.join(numbers.of.models)}" if len(numbers.of.models) > 1 else "a step"
        if served.tokens is None or served.tokens_per_s is None:
            yield Tile(f"Tokens processed per second, {served.by}", DASH, numbers.of.without)
        else:
            about = "" if served.exact else "about "
            against = f"against {about}{count(before.tokens_per_s)}: {before.name}; " if before and before.tokens_per_s else ""
            note = f"{against}{about}{served.tokens / served.steps:,.0f} tokens {many}, prompts included{part}"
            yield Tile(f"Tokens processed per second, {served.by}", f"{about}{count(served.tokens_per_s)}", note)
        against = (
            f"against {seconds(before.step_s)}: {before.name}"
            if before
            else f"{served.name}, {served.steps} {'step' if served.steps == 1 else 'steps'}"
        )
        yield Tile(f"Time per step, {served.by}", seconds(served.step_s), f"{against}{part}")
    if both is None:
        yield Tile("Speed-up", DASH, numbers.of.without)
    else:
        first, last = both
        note = f"{last.name}, {seconds(last.seconds)}, against {first.name}, {seconds(first.seconds)}"
        yield Tile(f"Speed-up, {last.by}", speedup(first.seconds, last.seconds), note)


def count(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _prediction_error(numbers: ReportNumbers) -> Tile:
    title = "Prediction error"
    if not numbers.of.traces:
        return Tile(title, DASH, "No trace was given: aurora simulate writes a predicted one, aurora run a measured one")
    both = numbers.comparison
    if both is None or numbers.predicted is None or numbers.measured is None:
        name, trace = numbers.of.traces[0]
        lacking, verb = ("predicted", "simulate") if numbers.predicted is None else ("measured", "run")
        note = f"{name}, from start to end; no {lacking} trace was given"
        if verb == "simulate" or len(numbers.of.models) <= 2:
            note += f": aurora {verb} writes one"
        return Tile(f"Time, {trace.kind}", seconds(trace.seconds), note)
    if numbers.why_incomparable is not None:
        return Tile(title, DASH, f"Of other traffic: {numbers.why_incomparable}")
    names = [numbers.of.traces[i][0] for i in (numbers.predicted, numbers.measured)]
    took = f"{seconds(both.predicted_s)} predicted ({names[0]}), {seconds(both.measured_s)} measured ({names[1]})"
    note = f"{took}; error = predicted / measured - 1"
    return Tile(title, percent(both.error), note)


def phase_chart(report: ReportNumbers, tables: tuple[Sheet, ...]) -> Chart:
    """Returns a chart of a rank's seconds in each phase, one bar per trace.

    Args:
        found: the report's numbers.
        tables: tables of the chart's numbers.
    """
    shown = [
        (name, f"s{i}", run.phases) for i, ((name, _), run) in enumerate(zip(report.of.traces, report.summaries, strict=True))
    ]
    columns = {key: np.array([*phases.values()]) for _, key, phases in shown}
    words = " ".join(
        f"{name}: of {seconds(run.seconds)} a rank exchanges tokens for {seconds(run.exchanging_s)}, their counts for "
        f"{seconds(run.phases['counts'])}, computes for {seconds(run.computing_s)} and waits for "
        f"{seconds(run.phases['waiting'])}."
        for (name, _), run in zip(report.of.traces, report.summaries, strict=True)
    )
    series = [[name, key] for name, key, _ in shown]
    about = {"axis": "phase", "names": list(TIMED_PHASES), "series": series, "unit": "s"}
    return Chart("phases", "bars", "Where the time goes", (), Frame(words, columns), about, tables)


def provenance(report: ReportNumbers) -> list[Sheet]:
    """Returns tables of the report's origins: hashes, seeds, methods, versions and dates of its inputs."""
    plan, servers = report.of.plan, report.of.plan.cluster.servers
    rows = [
        ("scenario", plan.scenario),
        ("objective", plan.objective),
        ("seed", str(plan.options.seed)),
    ]
    rows += [(f"option: {option}", name) for option, name in plan.strategies.items()]
    rows += [("note", note) for note in plan.notes]
    rows.append(("aurora", version("aurora-moe")))
    made_from = [
        (name, model.profile_path or "from memory", model.profile_digest, model.fingerprint.partition(".")[0] or "synthetic")
        for name, model in zip(report.of.models, plan.models, strict=True)
    ]
    sheets = [
        Sheet("Plan", ("what", "found"), tuple(rows)),
        Sheet("Planned from", ("model", "profile", "sha256", "router weights"), tuple(made_from)),
        replace(
            sheet(cluster_table(plan.cluster)),
            note="" if servers is None else f"{len(set(servers.server_G))} servers, {len(set(servers.nic_G))} NICs",
        ),
    ]
    for name, model, profile in zip(report.of.models, plan.models, report.of.profiles, strict=False):
        same = "the plan's own" if model.made_from(profile) else "other than the plan was made from"
        about = [("sha256", profile.digest), ("traffic", same), *profile.provenance.items()]
        sheets.append(Sheet(f"Profile of {name} (as given)", ("what", "found"), tuple((str(k), str(v)) for k, v in about)))
    if report.of.traces:
        traced = tuple((name, trace.kind, str(len(trace)), seconds(trace.seconds)) for name, trace in report.of.traces)
        sheets.append(Sheet("Traces", ("file", "kind", "events", "from start to end"), traced))
    return sheets


SECTIONS = (
    experts_section,
    traffic_section,
    loads_section,
    schedule_section,
    timeline_section,
    placement_section,
)
SCRIPTS = ("tools", "view", "heat", "bars", "spans", "start")
PARTS = Path(__file__).parent / "page"


def page(inputs: ReportInputs, progress: Progress = no_progress) -> str:
    """Returns the report as HTML. `progress` is called with (name of the work, amount done, whole amount)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    numbers, sections = ReportNumbers(inputs, progress), []
    for number, make in enumerate(SECTIONS):
        progress("writing sections", number, len(SECTIONS))
        sections.append(make(numbers))
    progress("writing sections", len(SECTIONS), len(SECTIONS))
    shown = [section for section in sections if section is not None]
    phases = phase_chart(numbers, phase_sheets(numbers)) if inputs.traces else None
    charts = [*([phases] if phases else []), *(chart for section in shown for chart in section.charts)]
    plan, models = inputs.plan, " and ".join(inputs.models)
    templates = Environment(
        loader=FileSystemLoader(PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        title=f"{models} on {plan.cluster.name}",
        heading=models,
        lead=f"{plan.scenario[:1].upper()}{plan.scenario[1:]}: {len(plan.cluster)} ranks of {plan.cluster.name}.",
        tiles=tiles(numbers),
        phases=phases,
        sections=shown,
        provenance=provenance(numbers),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script="\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        packed=_json({chart.name: chart.packed() for chart in charts}),
    )


def _json(value: object) -> str:
    """Returns JSON that cannot end the script element which holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
