"""aurora export and aurora import: placements to and from the formats of serving engines, and routing that they recorded."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, terminal
from aurora.errors import BadInput
from aurora.io.engine_placements import PLACEMENT_FORMATS
from aurora.io.routing_dumps import ROUTING_FORMATS
from aurora.types import ProfileOptions

DEFAULTS = ProfileOptions()
RECORD = "vllm-record"

Form = Annotated[str, typer.Option("--format", help=", ".join(PLACEMENT_FORMATS))]
Dense = Annotated[int, typer.Option(help="dense layers before the MoE ones: the engine's file counts or leaves room for them")]


def export(
    plan: Annotated[Path, typer.Argument(help="a plan, or a placement as aurora place and aurora import write it")],
    form: Form,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: print it")] = None,
    model: Annotated[str | None, typer.Option(help="of a plan for two: which model")] = None,
    dense_layers: Dense = 0,
) -> None:
    """Write a plan's placement as a serving engine reads it."""
    from aurora.io import write_text
    from aurora.io.engine_placements import export_placement, off_by
    from aurora.io.placements import load_placement

    check_output(output, inputs=[plan])
    placement = load_placement(plan, model)
    text = export_placement(placement, form, dense_layers)
    if (off := off_by(placement, form)) > 1e-9:
        print(f"aurora: the engine divides tokens evenly over replicas: shares are off by up to {off:.0%}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return
    write_text(output, text)
    terminal().print(f"wrote {output}", soft_wrap=True)


def import_(
    file: Annotated[list[Path], typer.Argument(help="an engine's placement; or what engines recorded, each file a domain")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"a placement: {', '.join(PLACEMENT_FORMATS)}; recorded routing: "
            + ", ".join(f"{name} ({form.files})" for name, form in ROUTING_FORMATS.items())
            + f"; {RECORD} (a folder)",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="default: placement.json, of recorded routing profile.npz")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="on how many GPUs a placement's slots lie, where it does not say")] = None,
    dense_layers: Dense = 0,
    shape: Annotated[Path | None, typer.Option(help="of recorded routing: the model's transformers config.json")] = None,
    sources: Annotated[int, typer.Option(help="of recorded routing: ranks that it is dealt to, evenly")] = DEFAULTS.sources,
    window: Annotated[
        int | None, typer.Option(help="of recorded routing: tokens of all sources in a window; default: each recorded step")
    ] = DEFAULTS.window,
    where: Annotated[
        list[str] | None,
        typer.Option(help="of csv: which rows; repeat it, and each is a domain", metavar="COLUMN=VALUE,.."),
    ] = None,
    coactivation: Annotated[
        bool, typer.Option("--co-activation", help="of tokens: count which experts are chosen together")
    ] = DEFAULTS.coactivation,
) -> None:
    """Read a serving engine's placement, whose replicas share an expert's load evenly; or the routing that one recorded."""
    if form not in (known := (*PLACEMENT_FORMATS, *ROUTING_FORMATS, RECORD)):
        raise BadInput(f"--format: expected one of {', '.join(known)}, found {form!r}")
    recorded = {"--shape": shape, "--where": where, "--window": window, "--co-activation": coactivation or None}
    if form not in PLACEMENT_FORMATS:
        if gpus is not None or dense_layers:
            raise BadInput(f"import --format {form}: expected neither --gpus nor --dense-layers, which are a placement's")
        if form == RECORD:
            return _import_record(file, output or Path("profile.npz"))
        return _import_routing(file, form, output or Path("profile.npz"), shape, sources, window, where or [], coactivation)
    for name, value in recorded.items():
        if value:
            raise BadInput(f"import --format {form}: expected no {name}, which is for recorded routing")
    return _import_placement(file, form, output or Path("placement.json"), gpus, dense_layers)


def _import_placement(files: list[Path], form: str, output: Path, gpus: int | None, dense_layers: int) -> None:
    from aurora.io.engine_placements import import_placement
    from aurora.io.placements import save_placement

    if len(files) != 1:
        raise BadInput(f"import --format {form}: expected one file, found {len(files)}")
    check_output(output, inputs=files)
    placement = import_placement(files[0], form, gpus, dense_layers)
    save_placement(placement, f"imported from {form}", output)
    layers, slots = len(placement.slots_LG), sum(map(len, placement.slots_LG[0]))
    terminal().print(
        f"wrote {output}: {layers} layers, {placement.experts} experts in {slots} slots on {placement.gpus} GPUs",
        soft_wrap=True,
    )


def _import_record(folders: list[Path], output: Path) -> None:
    from aurora.io import save
    from aurora.io.engine_records import load_records
    from aurora.reports.tables import profile_table

    if len(folders) != 1:
        raise BadInput(f"import --format {RECORD}: expected one folder, found {len(folders)}")
    check_output(output, inputs=folders)
    profile = load_records(folders[0])
    save(profile, output)
    terminal().print(profile_table(profile))
    terminal().print(f"wrote {output}", soft_wrap=True)


def _import_routing(
    files: list[Path],
    form: str,
    output: Path,
    shape: Path | None,
    sources: int,
    window: int | None,
    wheres: list[str],
    coactivation: bool,
) -> None:
    from aurora.io import load_json, save
    from aurora.planner.make_plan import contiguous_intervals
    from aurora.profiler.import_routing import import_profile
    from aurora.reports.tables import profile_table

    if shape is None:
        raise BadInput(f"import --format {form}: expected --shape CONFIG.json, the model's sizes, which the file does not hold")
    check_output(output, inputs=[*files, shape])
    made = import_profile(files, form, load_json(shape), sources, window, [_where(each) for each in wheres], coactivation)
    save(made, output)
    console = terminal()
    console.print(profile_table(made, contiguous_intervals(made)))
    console.print(f"wrote {output}", soft_wrap=True)


def _where(text: str) -> dict[str, str]:
    columns = [each.partition("=") for each in text.split(",")]
    if not all(column and equals for column, equals, _ in columns):
        raise BadInput(f"--where: expected COLUMN=VALUE, or several with commas between, found {text!r}")
    return {column.strip(): value.strip() for column, _, value in columns}
