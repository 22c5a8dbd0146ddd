"""aurora report: a plan, its traces and its traffic -> one page, or traces for Perfetto."""

from pathlib import Path
from typing import Annotated

from aurora.cli.inputs import check_output, profiles_of
from aurora.cli.options import refuse_given
from aurora.cli.output import progress_bars, show
from aurora.errors import BadInput
from aurora.reports.inputs import Baseline, named_traces
from aurora.reports.write import FORMS, check_form
from aurora.types.options import OptionField
from aurora.types.requests import RequestSimulation


def report(
    plan: Path,
    trace: list[Path] | None = None,
    *,
    profile: list[Path] | None = None,
    output: Path | None = None,
    form: Annotated[str, OptionField(flag="--format", choices="report_format")] = "html",
    as_json: bool = False,
) -> None:
    """Report on a plan: its speed-up, prediction against measurement, advice and charts. Or report on simulated requests.

    Args:
        plan: plan JSON; or a simulation of requests (npz), which `aurora simulate --rate` writes.
        trace: predicted and measured traces of the plan (npz); all are compared with the first. Or further
            simulations of the same requests.
        profile: the traffic, one per model; for drift give as many again, of later traffic; default: the plan's profiles.
        output: default: {report_output}.
        form: {report_form}.
    """
    check_form(form)
    target = output or Path(FORMS[form].output)
    check_output(output=target)
    if plan.suffix == ".npz":
        refuse_given(("profile", "form"), "without a simulation of requests, whose report is one page")
        requests_report([plan, *(trace or [])], target)
    else:
        report_files(plan, trace or [], profile or [], target, form)
    show(as_json, {"output": target, "format": form}, f"wrote {target}")


def requests_report(simulations: list[Path], output: Path) -> None:
    """Write the page on simulations of the same requests; with several files, file names are prefixed to simulation names."""
    from aurora.io import load_request_simulations, write_text
    from aurora.reports.html import request_page

    found: dict[str, RequestSimulation] = {}
    for path in simulations:
        several = len(simulations) > 1
        for name, each in load_request_simulations(path).items():
            if found and each.served.requests != next(iter(found.values())).served.requests:
                raise BadInput(f"{path}: expected the requests of {simulations[0]}, found others")
            found[f"{path.name.removesuffix('.requests.npz')}: {name}" if several else name] = each
    write_text(output, request_page(found))


def report_files(
    plan: Path, traces: list[Path], profiles: list[Path], output: Path, form: str, baseline: Baseline = Baseline()
) -> None:
    """Write the report on a plan's and traces' files; `profiles` empty: the profiles that the plan names, if unchanged."""
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
