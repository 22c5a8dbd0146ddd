"""aurora report: a plan, its traces and its traffic -> one page, figures, or a trace for Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import check_output, make_folder, need, profiles_of, terminal
from aurora.errors import BadInput

if TYPE_CHECKING:
    from aurora.reports.inputs import ReportInputs

NEEDS: dict[str, tuple[str, ...]] = {"html": ("jinja2",), "svg": ("matplotlib",), "perfetto": ()}
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
        typer.Option("--format", help="html: one page; svg: figures for papers; perfetto: for ui.perfetto.dev, .gz packs it"),
    ] = "html",
) -> None:
    """Show a plan: what it is worth, what it took, what to do next, and pictures of everything."""
    if form not in OUTPUTS:
        raise BadInput(f"--format: expected one of {', '.join(OUTPUTS)}, found {form!r}")
    need(*NEEDS[form], extra="report")
    target = output or Path(OUTPUTS[form])
    traces, profiles = trace or [], profile or []
    if form != "svg":
        check_output(target, inputs=[plan, *traces, *profiles])
    evidence = gather(plan, traces, profiles)
    if form == "svg":
        make_folder(target)
    write(evidence, form, target)
    terminal().print(f"wrote {target}", soft_wrap=True)


def gather(plan: Path, traces: list[Path], profiles: list[Path]) -> "ReportInputs":
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


def write(evidence: "ReportInputs", form: str, target: Path) -> None:
    """The report in one of OUTPUTS' forms, to exactly `target`."""
    from aurora.io.files import write_bytes, write_text

    if form == "html":
        from aurora.reports.html import page

        write_text(target, page(evidence))
    elif form == "svg":
        from aurora.reports.figures import draw

        draw(evidence, target)
    else:
        from aurora.reports.perfetto import perfetto

        write_bytes(target, perfetto(evidence, packed=target.suffix == ".gz"))
