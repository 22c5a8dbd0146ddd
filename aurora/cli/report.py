"""aurora report: a plan, its traces and its traffic -> one page, or traces for Perfetto and Chakra."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.inputs import check_folder, check_output, need, profiles_of
from aurora.cli.options import Json
from aurora.cli.output import show
from aurora.errors import BadInput
from aurora.reports.inputs import Baseline, named_traces
from aurora.reports.write import FORMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aurora.types import Plan, Profile

TARGETS = dict.fromkeys(f"{form.output}/" if form.folder else form.output for form in FORMS.values())


def report(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="predicted and measured traces of the plan (npz); all are compared with the first"),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="the traffic, one per model; twice as many: also later traffic, for drift; default: the plan's own profiles"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"default: {', '.join(TARGETS)}"),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="; ".join(f"{name}: {each.about}" for name, each in FORMS.items()),
            autocompletion=completed("report_format"),
        ),
    ] = "html",
    as_json: Json = False,
) -> None:
    """Report on a plan: its speed-up, prediction against measurement, what to do next, and figures."""
    if form not in FORMS:
        raise BadInput(f"--format: expected one of {', '.join(FORMS)}, found {form!r}")
    need(*FORMS[form].needs, extra="report")
    target = output or Path(FORMS[form].output)
    traces, profiles = trace or [], profile or []
    check_folder(target) if FORMS[form].folder else check_output(output=target)
    report_files(plan, traces, profiles, target, form)
    show(as_json, {"output": target, "format": form}, f"wrote {target}")


def report_files(
    plan: Path, traces: list[Path], profiles: list[Path], output: Path, form: str, baseline: Baseline = Baseline()
) -> None:
    """Write the report on the plan and traces in these files; without `profiles` those that the plan names, if unchanged."""
    from aurora.io import load_plan, load_trace
    from aurora.reports.write import report as written

    loaded = load_plan(plan)
    named = named_traces([str(path) for path in traces], [load_trace(path) for path in traces])
    traffic, missing = _traffic(loaded, plan, profiles)
    written(loaded, named, traffic, output=output, format=form, missing_profiles=missing, baseline=baseline)


def _traffic(plan: "Plan", path: Path, given: list[Path]) -> tuple["Sequence[Profile]", str]:
    """The profiles that were given, else those that the plan names, unchanged; or why there are none."""
    from aurora.io import load_profile

    if given:
        return [load_profile(each) for each in given], ""
    try:
        return profiles_of(plan, path, None), ""
    except BadInput as error:
        return (), str(error)
