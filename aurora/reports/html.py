"""HTML report on a plan: one self-contained page, which needs no network.

The same inputs give the same bytes.
"""

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from aurora.advisor.recommend import SERVED
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.reports.formatting import DASH, percent, seconds, speedup
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.plan_tables import cluster_table, gap_line, gap_text
from aurora.reports.sections import (
    experts_section,
    loads_section,
    phases_figure,
    placement_section,
    schedule_section,
    timeline_section,
    traffic_section,
)
from aurora.reports.tables import Columns, Table, text


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
    return [
        *first,
        *worth,
        *_prediction_error(report),
        Tile("Gap to the bound", gap_text(plan), f"At most so far from the best plan: {gap_line(plan)}"),
    ]


def _worth(report: ReportNumbers) -> Iterator[Tile]:
    """Tokens processed per second, seconds per step, and the speed-up, as far as known, beside what they are compared with."""
    served, compared = report.serving, report.speedup
    if served is not None:
        before = compared[0] if compared is not None and compared[1] is served else None
        part = "" if served.by == "measured" else "; MoE layers only"
        if served.tokens is not None:
            against = f"against {count(served.tokens / before.seconds)}: {before.name}; " if before else ""
            note = f"{against}{served.tokens / served.steps:,.0f} tokens a step, prompts included{part}"
            yield Tile(f"Tokens processed per second, {served.by}", count(served.tokens / served.seconds), note)
        against = f"against {seconds(before.step_s)}: {before.name}" if before else served.name
        yield Tile(f"Time per step, {served.by}", seconds(served.step_s), f"{against}; a step is one forward pass{part}")
    if compared is not None:
        first, last = compared
        by = "; the objective is the time that the planner minimises" if last.by not in report.first else ""
        note = f"{last.name}, {seconds(last.seconds)}, against {first.name}, {seconds(first.seconds)}{by}"
        yield Tile(f"Speed-up, {last.by}", speedup(first.seconds, last.seconds), note)


def count(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _prediction_error(report: ReportNumbers) -> Iterator[Tile]:
    """The error of a prediction beside a measurement, if there are both."""
    if (found := report.comparison) is not None:
        took = f"{seconds(found.predicted_s)} predicted, {seconds(found.measured_s)} measured; error = predicted / measured - 1"
        why = report.why_incomparable
        yield Tile("Prediction error", DASH if why else percent(found.error), f"Of other traffic: {why}" if why else took)


def provenance(report: ReportNumbers) -> list[Table]:
    """Returns tables of the report's origins: hashes, seeds, methods, versions and dates of its inputs."""
    plan, servers, about = report.of.plan, report.of.plan.cluster.servers, {"what": text, "found": text}
    rows = [("scenario", plan.scenario), ("objective", plan.objective), ("seed", str(plan.options.seed))]
    rows += [(f"option: {option}", name) for option, name in plan.strategies.items()]
    rows += [("note", note) for note in plan.notes]
    rows.append(("aurora", version("aurora-moe")))
    made_from = [
        (name, model.profile_path or "from memory", model.profile_digest, model.fingerprint.partition(".")[0] or "synthetic")
        for name, model in zip(report.of.models, plan.models, strict=True)
    ]
    connected = "" if servers is None else f"{len(set(servers.server_G))} servers, {len(set(servers.nic_G))} NICs"
    tables = [
        Table(about, rows, "Plan"),
        Table(dict.fromkeys(("model", "profile", "sha256", "router weights"), text), made_from, "Planned from"),
        replace(cluster_table(plan.cluster), caption=connected),
    ]
    for name, model, profile in zip(report.of.models, plan.models, report.of.profiles, strict=False):
        same = "the plan's own" if model.made_from(profile) else "other than the plan was made from"
        rows = [("sha256", profile.digest), ("traffic", same), *((str(k), str(v)) for k, v in profile.provenance.items())]
        tables.append(Table(about, rows, f"Profile of {name} (as given)"))
    if report.of.traces:
        traced = [(name, trace.kind, len(trace), trace.seconds) for name, trace in report.of.traces]
        columns: Columns = {"file": text, "kind": text, "events": str, "from start to end": seconds}
        tables.append(Table(columns, traced, "Traces"))
    return tables


VEGA_LITE = "6.4"  # the version of the bundle, which draws the figures
PARTS = Path(__file__).parent / "page"


def page(inputs: ReportInputs, progress: Progress = no_progress) -> str:
    """Returns the report as HTML. `progress` is called with (name of the work, amount done, whole amount)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from vl_convert import javascript_bundle

    numbers, sections = ReportNumbers(inputs, progress), []
    makers = [experts_section, traffic_section, loads_section] if inputs.profiles else []
    makers += [schedule_section, *([timeline_section] if inputs.traces else []), placement_section]
    for number, make in enumerate(makers):
        progress("writing sections", number, len(makers))
        sections.append(make(numbers))
    progress("writing sections", len(makers), len(makers))
    phases = phases_figure(numbers) if inputs.traces else None
    figures = [*([phases] if phases else []), *(figure for section in sections for figure in section.figures)]
    templates = Environment(
        loader=FileSystemLoader(PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        inputs=inputs,
        tiles=tiles(numbers),
        phases=phases,
        sections=sections,
        provenance=provenance(numbers),
        library=_packed(javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)) if figures else "",
        numbers=_packed(json.dumps({figure.name: figure.as_json() for figure in figures}, separators=(",", ":"))),
    )


def _packed(value: str) -> str:
    """Returns text deflated and in base64: smaller, and nothing in it ends the script element that holds it."""
    return base64.b64encode(zlib.compress(value.encode(), 9)).decode()
