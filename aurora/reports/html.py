"""HTML report: one page that holds everything, needs no network, and has the same bytes for the same inputs."""

import json
from pathlib import Path

from aurora.reports.advice import advice
from aurora.reports.decision_charts import decisions_section
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.overview import phase_chart, provenance, tiles
from aurora.reports.placement_charts import placement_section
from aurora.reports.time_charts import phase_sheets, schedule_section, timeline_section
from aurora.reports.traffic_charts import drift_section, experts_section, loads_section, traffic_section

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


def page(inputs: ReportInputs) -> str:
    """Returns the report as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = ReportNumbers(inputs)
    shown = [section for make in SECTIONS if (section := make(found)) is not None]
    phases = phase_chart(found, phase_sheets(found)) if inputs.traces else None
    charts = [*([phases] if phases else []), *(chart for section in shown for chart in section.charts)]
    templates = Environment(
        loader=FileSystemLoader(PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("page.html").render(
        plan=inputs.plan,
        models=inputs.models,
        tiles=tiles(found),
        advice=advice(found),
        phases=phases,
        sections=shown,
        provenance=provenance(found),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script="\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        packed=_json({chart.name: chart.packed() for chart in charts}),
    )


def _json(value: object) -> str:
    """Returns JSON that cannot end the script element which holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
