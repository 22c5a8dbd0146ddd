"""aurora report: a plan, its traces and its traffic -> one page, figures, or a trace for Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.common import check_output, make_folder, need, profiles_of
from aurora.cli.verb import Json, show
from aurora.errors import BadInput

if TYPE_CHECKING:
    from aurora.reports.inputs import ReportInputs

NEEDS: dict[str, tuple[str, ...]] = {"html": ("jinja2",), "svg": ("matplotlib",)}
OUTPUTS = {"html": "report.html", "svg": "report", "perfetto": "report.perfetto.json.gz"}


def report(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    trace: Annotated[
        list[Path] | None,
        typer.Argument(help="predicted and measured traces of the plan (npz); all are compared with the first"),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="the traffic, one a model; as many again: later traffic, for drift; default: what the plan was made from"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"default: {', '.join(OUTPUTS.values())} (svg: a folder)")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="{report_format}: html is one page, svg figures for papers, perfetto for ui.perfetto.dev (.gz packs it)",
            autocompletion=completed("report_format"),
        ),
    ] = "html",
    as_json: Json = False,
) -> None:
    """Show a plan: what it is worth, what it took, what to do next, and pictures of everything."""
    from aurora.reports.write import FORMS, write

    if form not in FORMS:
        raise BadInput(f"--format: expected one of {', '.join(FORMS)}, found {form!r}")
    need(*NEEDS.get(form, ()), extra="report")
    target = output or Path(OUTPUTS.get(form, f"report.{form}"))
    traces, profiles = trace or [], profile or []
    if form != "svg":
        check_output(target, inputs=[plan, *traces, *profiles])
    inputs = read_inputs(plan, traces, profiles)
    if form == "svg":
        make_folder(target)
    write(inputs, form, target)
    show(as_json, {"output": target, "format": form}, f"wrote {target}")


def read_inputs(plan: Path, traces: list[Path], profiles: list[Path]) -> "ReportInputs":
    """What a report on these files is made from; profiles that the plan names are taken where they are found unchanged."""
    from aurora.io import load_plan, load_profile, load_trace
    from aurora.reports.inputs import ReportInputs, named_traces

    loaded = load_plan(plan)
    named = named_traces([str(path) for path in traces], [load_trace(path) for path in traces])
    many = len(loaded.models)
    if profiles:
        if len(profiles) not in (many, 2 * many):
            raise BadInput(f"--profile: expected {many}, or {2 * many} to show drift, found {len(profiles)}")
        given = [load_profile(path) for path in profiles]
        return ReportInputs(loaded, named, tuple(given[:many]), tuple(given[many:]))
    try:
        return ReportInputs(loaded, named, tuple(profiles_of(loaded, plan, None)))
    except BadInput as error:
        return ReportInputs(loaded, named, without=f"{error}. Give the traffic that the plan serves: --profile, once a model.")
