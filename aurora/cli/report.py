"""aurora report: a plan, its traces and its traffic -> one page, or traces for Perfetto and Chakra."""

from pathlib import Path
from typing import Annotated

from aurora.cli.inputs import check_folder, check_output, profiles_of
from aurora.cli.output import progress_bars, show
from aurora.errors import BadInput
from aurora.reports.inputs import Baseline, named_traces
from aurora.reports.write import FORMS, check_form
from aurora.types.option_checks import OptionField


def report(
    plan: Path,
    trace: list[Path] | None = None,
    *,
    profile: list[Path] | None = None,
    output: Path | None = None,
    form: Annotated[str, OptionField(flag="--format", choices="report_format")] = "html",
    as_json: bool = False,
) -> None:
    """Report on a plan: its speed-up, prediction against measurement, what to do next, and figures.

    Args:
        plan: plan JSON.
        trace: predicted and measured traces of the plan (npz); all are compared with the first.
        profile: the traffic, one per model; twice as many: also later traffic, for drift; default: the plan's own profiles.
        output: default: {report_output}.
        form: {report_form}.
    """
    check_form(form)
    target = output or Path(FORMS[form].output)
    check_folder(target) if FORMS[form].folder else check_output(output=target)
    report_files(plan, trace or [], profile or [], target, form)
    show(as_json, {"output": target, "format": form}, f"wrote {target}")


def report_files(
    plan: Path, traces: list[Path], profiles: list[Path], output: Path, form: str, baseline: Baseline = Baseline()
) -> None:
    """Write the report on the plan and traces in these files; without `profiles` those that the plan names, if unchanged."""
    from aurora.io import load_plan, load_trace
    from aurora.planner.evaluate import repriced
    from aurora.reports.write import report as written

    loaded, missing = load_plan(plan), ""
    named = named_traces([str(path) for path in traces], [load_trace(path) for path in traces])
    try:
        traffic = profiles_of(loaded, plan, profiles)
    except BadInput as error:
        if profiles:
            raise
        traffic, missing = [], str(error)
    if not profiles and traffic:
        loaded = repriced(loaded, traffic)
    with progress_bars() as progress:
        written(
            loaded, named, traffic, output=output, format=form, missing_profiles=missing, baseline=baseline, progress=progress
        )
