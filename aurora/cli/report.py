"""aurora report: a plan, its traces and its traffic -> one page, or traces for Perfetto."""

import sys
from pathlib import Path

from cyclopts import Parameter

import aurora
from aurora.cli.inputs import check_output, profiles_of
from aurora.cli.options import verb
from aurora.cli.output import progress_bars, show
from aurora.errors import BadInput
from aurora.io import load_plan, load_trace
from aurora.reports.inputs import FORMS, named_traces


@verb(form=Parameter(choices=tuple(FORMS)))
def report(
    plan: Path,
    trace: list[Path] | None = None,
    /,
    *,
    profile: list[Path] | None = None,
    output: Path | None = None,
    form: str = "html",
    as_json: bool = False,
) -> None:
    """Report on a plan: its speed-up, prediction against measurement, and charts.

    Args:
        plan: plan JSON.
        trace: predicted and measured traces of the plan (npz); all are compared with the first.
        profile: the traffic, one per model; default: the plan's profiles.
        output: default: report.html, or report.perfetto.json.gz.
        form: one page, or traces for ui.perfetto.dev (.gz: compressed).
    """
    from aurora.planner.evaluate import repriced

    target, traces = output or Path(FORMS[form]), trace or []
    check_output(output=target)
    loaded, missing = load_plan(plan), ""
    named = named_traces([str(path) for path in traces], [load_trace(path) for path in traces])
    try:
        traffic = profiles_of(loaded, plan, profile)
    except BadInput as error:
        if profile:
            raise
        traffic, missing = [], str(error)
        print(f"aurora: {missing}", file=sys.stderr)
    if not profile and traffic:
        loaded = repriced(loaded, traffic)
    with progress_bars() as progress:
        aurora.report(loaded, named, traffic, output=target, format=form, missing_profiles=missing, progress=progress)
    show(as_json, {"output": target, "format": form}, f"wrote {target}")
