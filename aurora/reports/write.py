"""Writes reports in one of two forms: a page, or traces for Perfetto."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from aurora.errors import BadInput, check_one_of, need
from aurora.io.files import write_bytes, write_text
from aurora.planner.layers_in_threads import Progress, untold
from aurora.reports.inputs import Baseline, ReportInputs
from aurora.types import Plan, Profile, Trace

FORMS = {"html": "report.html", "perfetto": "report.perfetto.json.gz"}  # and the file that the command line writes by default


def report(
    plan: Plan,
    traces: Mapping[str, Trace] | None = None,
    profiles: Sequence[Profile] = (),
    *,
    output: str | Path,
    format: str = "html",
    missing_profiles: str = "",
    baseline: Baseline = Baseline(),
    progress: Progress = untold,
) -> None:
    """Writes a report on a plan: its speed-up, its times, and advice on what to do next.

    Args:
        plan: the plan.
        traces: predicted and measured traces of the plan, by name; all are compared with the first.
        profiles: the traffic, one profile per model.
        output: the file to write.
        format: "html" (one page) or "perfetto" (for ui.perfetto.dev; compressed if `output` ends in .gz).
        missing_profiles: sentence to show if there are no profiles, on how to provide them.
        baseline: as in `ReportInputs`.
        progress: called with (name of the work, amount done, whole amount).

    Raises:
        BadInput: if a trace or profile does not belong to the plan, the format is unknown or needs a trace, or the output
            cannot be written.
        MissingDependency: if a module that the format needs is not installed.

    Example:
        >>> import aurora, tempfile, pathlib
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
        >>> aurora.report(plan, {"predicted": aurora.simulate(plan, traffic)}, [traffic], output=page)
        >>> page.read_text()[:15]
        '<!DOCTYPE html>'
    """
    if len(profiles) not in (0, many := len(plan.models)):
        raise BadInput(f"`profile`: expected {many}, found {len(profiles)}")
    inputs = ReportInputs(plan, tuple((traces or {}).items()), tuple(profiles), baseline=baseline)
    if missing_profiles:
        inputs = replace(inputs, without=f"{missing_profiles}. {inputs.without}")
    if format == "chakra":
        raise BadInput("`format` chakra is no more: perfetto has the same events, and `aurora.load` reads a trace as arrays")
    check_one_of("format", format, FORMS)
    target = Path(output)
    if format == "html":
        need("jinja2", extra="report")
        from aurora.reports.html import page

        write_text(target, page(inputs, progress))
    else:
        from aurora.reports.perfetto import perfetto

        write_bytes(target, perfetto(inputs, packed=target.suffix == ".gz"))
