"""HTML reports on a plan, or on simulations of requests: one self-contained page, which needs no network.

The same inputs give the same bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from aurora.planner.layers_in_threads import Progress, untold
from aurora.reports.advice import advice
from aurora.reports.charts import Chart, Frame, Section, Selector, Sheet, sheet
from aurora.reports.formatting import DASH, percent, seconds, speedup
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.plan_tables import cluster_table, gap_line, gap_text
from aurora.reports.sections import (
    decisions_section,
    drift_section,
    experts_section,
    loads_section,
    phase_sheets,
    placement_section,
    schedule_section,
    timeline_section,
    traffic_section,
)
from aurora.reports.trace_tables import percentiles, request_lines, requests_table
from aurora.reports.trace_times import TIMED_PHASES
from aurora.types.arrays import FloatArray
from aurora.types.requests import RequestSimulation

STAGE_NAMES = {"prefill": "a prefill step (time to first token)", "decode": "a decode step (time per output token)"}


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


def tiles(found: ReportNumbers) -> list[Tile]:
    """Returns the tiles for tokens processed per second, seconds per step, speed-up, prediction error, and gap."""
    plan = found.of.plan
    return [*_worth(found), _prediction_error(found), Tile("Gap to the bound", gap_text(plan), gap_line(plan))]


def _worth(found: ReportNumbers) -> Iterator[Tile]:
    """Tokens processed per second, seconds per step, and the speed-up, each beside what it is compared with."""
    served, both = found.serving, found.speedup
    if served is not None:
        before = both[0] if both is not None and both[1].by == served.by else None
        part = "" if served.by == "measured" else "; MoE layers only"
        many = f"a step of {' and '.join(found.of.models)}" if len(found.of.models) > 1 else "a step"
        if served.tokens is None or served.tokens_per_s is None:
            yield Tile(f"Tokens processed per second, {served.by}", DASH, found.of.without)
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
        stages = "".join(f"; {STAGE_NAMES[stage]} {seconds(value)}" for stage, value in served.stage_s.items())
        yield Tile(f"Time per step, {served.by}", seconds(served.step_s), f"{against}{stages}{part}")
    if both is None:
        yield Tile("Speed-up", DASH, found.of.without)
    else:
        first, last = both
        note = f"{last.name}, {seconds(last.seconds)}, against {first.name}, {seconds(first.seconds)}"
        yield Tile(f"Speed-up, {last.by}", speedup(first.seconds, last.seconds), note)


def count(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _prediction_error(found: ReportNumbers) -> Tile:
    title = "Prediction error"
    if not found.of.traces:
        return Tile(title, DASH, "No trace was given: aurora simulate writes a predicted one, aurora run a measured one")
    both = found.comparison
    if both is None or found.predicted is None or found.measured is None:
        name, trace = found.of.traces[0]
        lacking, verb = ("predicted", "simulate") if found.predicted is None else ("measured", "run")
        note = f"{name}, from start to end; no {lacking} trace was given"
        if verb == "simulate" or len(found.of.models) <= 2:
            note += f": aurora {verb} writes one"
        return Tile(f"Time, {trace.kind}", seconds(trace.seconds), note)
    if found.other_traffic is not None:
        return Tile(title, DASH, f"Of other traffic: {found.other_traffic}")
    names = [found.of.traces[i][0] for i in (found.predicted, found.measured)]
    took = f"{seconds(both.predicted_s)} predicted ({names[0]}), {seconds(both.measured_s)} measured ({names[1]})"
    note = f"{took}; error = predicted / measured - 1"
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
    columns = {key: np.array([*phases.values()]) for _, key, phases in shown}
    words = " ".join(
        f"{name}: of {seconds(one.seconds)} a rank exchanges for {seconds(one.exchanging_s)}, computes for "
        f"{seconds(one.computing_s)} and waits for {seconds(one.phases['waiting'])}."
        for (name, _), one in zip(found.of.traces, found.summaries, strict=True)
    )
    series = [[name, key] for name, key, _ in shown]
    about = {"axis": "phase", "names": list(TIMED_PHASES), "series": series, "unit": "s"}
    return Chart("phases", "bars", "Where the time goes", (), Frame(words, columns), about, tables)


def provenance(found: ReportNumbers) -> list[Sheet]:
    """Returns tables of the report's origins: hashes, seeds, methods, versions and dates of its inputs."""
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
        (name, model.profile_path or "from memory", model.profile_digest, model.fingerprint.partition(".")[0] or "synthetic")
        for name, model in zip(found.of.models, plan.models, strict=True)
    ]
    sheets = [
        Sheet("Plan", ("what", "found"), tuple(rows)),
        Sheet("Planned from", ("model", "profile", "sha256", "router weights"), tuple(made_from)),
        replace(sheet(cluster_table(plan.cluster)), note="" if fabric is None else f"a fabric of {len(fabric.links)} links"),
    ]
    for given, age in ((found.of.profiles, ""), (found.of.later, "later, ")):
        for name, model, profile in zip(found.of.models, plan.models, given, strict=False):
            same = "the plan's own" if model.made_from(profile) else "other than the plan was made from"
            about = [("sha256", profile.digest), ("traffic", same), *profile.provenance.items()]
            sheets.append(
                Sheet(f"Profile of {name} ({age}as given)", ("what", "found"), tuple((str(k), str(v)) for k, v in about))
            )
    if found.of.traces:
        traced = tuple((name, trace.kind, str(len(trace)), seconds(trace.seconds)) for name, trace in found.of.traces)
        sheets.append(Sheet("Traces", ("file", "kind", "events", "from start to end"), traced))
    return sheets


SECTIONS = (
    experts_section,
    traffic_section,
    loads_section,
    schedule_section,
    timeline_section,
    placement_section,
    decisions_section,
    drift_section,
)
SCRIPTS = ("tools", "view", "heat", "bars", "lines", "spans", "start")
PARTS = Path(__file__).parent / "page"


def page(inputs: ReportInputs, progress: Progress = untold) -> str:
    """Returns the report as HTML. `progress` is called with (name of the work, amount done, whole amount)."""
    found, made = ReportNumbers(inputs, progress), []
    for number, make in enumerate(SECTIONS):
        progress("writing sections", number, len(SECTIONS))
        made.append(make(found))
    progress("writing sections", len(SECTIONS), len(SECTIONS))
    shown = [section for section in made if section is not None]
    phases = phase_chart(found, phase_sheets(found)) if inputs.traces else None
    plan, models = inputs.plan, " and ".join(inputs.models)
    lead = f"{plan.scenario[:1].upper()}{plan.scenario[1:]}: {len(plan.cluster)} ranks of {plan.cluster.name}."
    heads = {"title": f"{models} on {plan.cluster.name}", "heading": models, "lead": lead, "next": "What to do next"}
    return rendered(heads, tiles(found), advice(found), shown, provenance(found), phases)


def rendered(
    heads: Mapping[str, str],
    tiles: Sequence[Tile],
    sentences: Sequence[str],
    sections: Sequence[Section],
    provenance: Sequence[Sheet],
    chart: Chart | None = None,
) -> str:
    """Returns a page as HTML, from its parts.

    Args:
        heads: texts with the keys "title", "heading", "lead", and "next" (heading of `sentences`).
        tiles: the most important numbers.
        sentences: advice.
        sections: charts and tables with details.
        provenance: tables of the files, seeds and versions from which the page was made.
        chart: a chart below the sentences.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    charts = [*([chart] if chart else []), *(each for section in sections for each in section.charts)]
    templates = Environment(
        loader=FileSystemLoader(PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        heads=heads,
        tiles=tiles,
        advice=sentences,
        phases=chart,
        sections=sections,
        provenance=provenance,
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script="\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        packed=_json({each.name: each.packed() for each in charts}),
    )


def _json(value: object) -> str:
    """Returns JSON that cannot end the script element which holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


SHOWN = (1, 5, 10, 25, 50, 75, 90, 95, 99)  # percentiles of the chart
PARTS_OF_TIME = 40  # bars of the queue


def request_page(found: Mapping[str, RequestSimulation]) -> str:
    """Returns an HTML page on simulations of requests.

    Args:
        found: {name of the plan or engine default: its simulation of the same requests}, at least one; the first is compared
            with the last.
    """
    first = next(iter(found.values())).served
    requests = first.requests
    inputs, outputs = requests.input_tokens_Q.sum(), requests.output_tokens_Q.sum()
    arrive = seconds(float(requests.arrival_s_Q[-1]))
    lead = f"{len(requests)} requests arrive in {arrive}: {inputs:,} tokens in, {outputs:,} out."
    heads = {"title": "requests", "heading": "Requests, simulated", "lead": lead, "next": "What the figures rest on"}
    rows = [("aurora", version("aurora-moe"))]
    rows += [(f"{name}: steps", f"{each.served.steps}, between {each.points} simulated ones") for name, each in found.items()]
    provenance = [Sheet("Simulation", ("what", "found"), tuple(rows))]
    return rendered(heads, _tiles(found), request_lines(found), (_times(found), _queue(found)), provenance)


def _tiles(found: Mapping[str, RequestSimulation]) -> list[Tile]:
    """Output tokens per second and medians of TTFT and TPOT of the first, each beside the last."""
    (name, one), (other_name, other) = next(iter(found.items())), list(found.items())[-1]
    alone = len(found) == 1

    def note(value: str) -> str:
        return name if alone else f"{name}, against {value}: {other_name}"

    rates = [each.served.tokens_per_s for each in (one, other)]
    made = [Tile("Output tokens per second, predicted", count(rates[0]), note(count(rates[1])))]
    for what, of in _measures(one, other).items():
        p50, p99 = ([percentiles(seconds_X)[key] for seconds_X in of] for key in ("p50", "p99"))
        if p50[0] is not None:
            cells = [DASH if value is None else seconds(value) for value in (p50[0], p50[1], p99[0])]
            made.append(Tile(f"{what}, median", cells[0], f"{note(cells[1])}; p99 {cells[2]}"))
    if not alone:
        made.append(Tile("Speed-up", speedup(rates[0], rates[1]), f"output tokens per second of {name} over {other_name}"))
    return made


def _measures(*found: RequestSimulation) -> dict[str, list[FloatArray]]:
    """Times of each simulation by their names."""
    return {
        "Time to first token (TTFT)": [each.served.ttft_s_Q for each in found],
        "Time per output token (TPOT)": [each.served.tpot_s_X for each in found],
    }


def _times(found: Mapping[str, RequestSimulation]) -> Section:
    """The section on the distributions of TTFT and TPOT."""
    text = "A percentile is the time that so many of a hundred requests stay below. TTFT counts from a request's arrival."
    of = {what: times for what, times in _measures(*found.values()).items() if all(map(len, times))}
    frames = []
    for what, times in of.items():
        columns = {f"s{i}": np.percentile(seconds_X, SHOWN) for i, seconds_X in enumerate(times)}
        said = (f"{name}: median {seconds(float(np.median(seconds_X)))}" for name, seconds_X in zip(found, times, strict=True))
        frames.append(Frame(f"{what}. {'; '.join(said)}.", columns))
    names = [f"p{percentile}" for percentile in SHOWN]
    about = {"axis": "percentile of requests", "names": names, "series": _series(found), "unit": "s"}
    table = sheet(requests_table(found))
    choices = (Selector("time", tuple(of)),)
    chart = Chart("request-times", "bars", "TTFT and TPOT by percentile", choices, frames, about)
    return Section("times", "Times of requests", text, (chart,), (table,))


def _queue(found: Mapping[str, RequestSimulation]) -> Section:
    """The section on requests without a first token over time."""
    text = "Requests that have arrived and have no first token yet, the mean of each part of the time, over all ranks."
    served = [each.served for each in found.values()]
    arrival_s_Q = served[0].requests.arrival_s_Q
    begin, end = float(arrival_s_Q[0]), max(float(each.first_s_Q.max()) for each in served)
    edges = np.linspace(begin, end, PARTS_OF_TIME + 1)
    columns = {f"s{i}": _waiting(arrival_s_Q, each.first_s_Q, edges) for i, each in enumerate(served)}
    said = (f"{name}: at most {columns[f's{i}'].max():.3g} wait in the mean of a part" for i, name in enumerate(found))
    names = [seconds(float(at)) for at in edges[:-1]]
    about = {"axis": "from this time on", "names": names, "series": _series(found), "unit": "mean"}
    rows = tuple((at, *(f"{waiting_X[part]:.3g}" for waiting_X in columns.values())) for part, at in enumerate(names))
    table = Sheet("Waiting requests", ("from", *found), rows)
    chart = Chart("request-queue", "bars", "Queue over time", (), Frame(f"{'; '.join(said)}.", columns), about, (table,))
    return Section("queue", "Queue", text, (chart,))


def _waiting(arrival_s_Q: FloatArray, first_s_Q: FloatArray, edge_s_X: FloatArray) -> FloatArray:
    """(X - 1,) mean number of requests between arrival and first token, between two edges each."""
    # seconds that requests have waited until each edge: of each request none, a part or all
    until_X = [np.clip(edge - arrival_s_Q, 0, first_s_Q - arrival_s_Q).sum() for edge in edge_s_X]
    return np.asarray(np.diff(until_X) / np.diff(edge_s_X))


def _series(found: Mapping[str, RequestSimulation]) -> Sequence[Sequence[str]]:
    return [[name, f"s{i}"] for i, name in enumerate(found)]
