"""aurora export and aurora import: placements to and from serving engines' formats, and routing that engines recorded."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.choices import completed, names
from aurora.cli.common import check_output
from aurora.cli.profile import shown_profile
from aurora.cli.verb import Json, Layers, option, show
from aurora.errors import BadInput
from aurora.types import Profile, ProfileOptions

DEFAULTS = ProfileOptions()
RECORD = "vllm-record"
PLACEMENT, ROUTING = "For a placement", "For recorded routing"

Dense = Annotated[int, typer.Option(help="dense layers before the MoE layers, which the engine's file numbers too")]


def export(
    plan: Annotated[Path, typer.Argument(help="a plan, or a placement as aurora place and aurora import write it")],
    form: Annotated[str, typer.Option("--format", help="{placement_format}", autocompletion=completed("placement_format"))],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: print it")] = None,
    model: Annotated[str | None, typer.Option(help="for a plan of two models: which one")] = None,
    dense_layers: Dense = 0,
    as_json: Json = False,
) -> None:
    """Write a plan's placement in a serving engine's format."""
    from aurora.io import write_text
    from aurora.io.engine_placements import export_placement, off_by
    from aurora.io.placements import load_placement

    check_output(output, inputs=[plan])
    placement = load_placement(plan, model)
    text, off = export_placement(placement, form, dense_layers), off_by(placement, form)
    if off > 1e-9:
        print(f"aurora: the engine divides tokens evenly over replicas: shares are off by up to {off:.0%}", file=sys.stderr)
    if output is not None:
        write_text(output, text)
    found = {"output": output, "format": form, "shares_off": off, "text": None if output else text}
    show(as_json, found, f"wrote {output}" if output else text.removesuffix("\n"))


def import_(
    file: Annotated[list[Path], typer.Argument(help="an engine's placement; or recorded routing, each file a traffic domain")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="a placement: {placement_format}; recorded routing: {routing_files}; " + f"{RECORD} (a folder)",
            autocompletion=completed("placement_format", "routing_format"),
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="default: placement.json; for recorded routing profile.npz")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="number of GPUs, if the file does not say", rich_help_panel=PLACEMENT)
    ] = None,
    dense_layers: Dense = 0,
    shape: Annotated[Path | None, typer.Option(help="the model's config.json or folder", rich_help_panel=ROUTING)] = None,
    sources: Annotated[
        int, typer.Option(help="source ranks that the traffic is dealt to, evenly", rich_help_panel=ROUTING)
    ] = DEFAULTS.sources,
    window: Annotated[
        int | None,
        typer.Option(help="tokens of all sources in a window; default: each recorded step", rich_help_panel=ROUTING),
    ] = DEFAULTS.window,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="for csv: which rows to read; repeated, each is a traffic domain",
            metavar="COLUMN=VALUE,..",
            rich_help_panel=ROUTING,
        ),
    ] = None,
    coactivation: Annotated[
        bool, option(ProfileOptions, "coactivation", "--co-activation", panel=ROUTING)
    ] = DEFAULTS.coactivation,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Read a serving engine's placement (replicas share an expert's load evenly), or routing that an engine recorded."""
    known = (*names("placement_format"), *names("routing_format"), RECORD)
    if form not in known:
        raise BadInput(f"--format: expected one of {', '.join(known)}, found {form!r}")
    if form in names("placement_format"):
        for name, value in {"--shape": shape, "--where": where, "--window": window, "--co-activation": coactivation}.items():
            if value:
                raise BadInput(f"import --format {form}: expected no {name}, which is for recorded routing")
        _import_placement(file, form, output or Path("placement.json"), gpus, dense_layers, as_json)
        return
    if gpus is not None or dense_layers:
        raise BadInput(f"import --format {form}: expected neither --gpus nor --dense-layers, which are a placement's")
    target = output or Path("profile.npz")
    check_output(target, inputs=[*file, *([shape] if shape else [])])
    made = _recorded(file) if form == RECORD else _routing(file, form, shape, sources, window, where or [], coactivation)
    from aurora.io import save

    save(made, target)
    shown_profile(made, target, layers, as_json)


def _import_placement(files: list[Path], form: str, output: Path, gpus: int | None, dense_layers: int, as_json: bool) -> None:
    from aurora.io.engine_placements import import_placement
    from aurora.io.placements import save_placement

    if len(files) != 1:
        raise BadInput(f"import --format {form}: expected one file, found {len(files)}")
    check_output(output, inputs=files)
    placement = import_placement(files[0], form, gpus, dense_layers)
    save_placement(placement, f"imported from {form}", output)
    layers, slots = len(placement.slots_LG), sum(map(len, placement.slots_LG[0]))
    sizes = {"layers": layers, "experts": placement.experts, "slots": slots, "gpus": placement.gpus}
    where = f"{layers} layers, {placement.experts} experts in {slots} slots on {placement.gpus} GPUs"
    show(as_json, {"output": output, "format": form, **sizes}, f"wrote {output}: {where}")


def _recorded(folders: list[Path]) -> Profile:
    from aurora.io.engine_records import load_records

    if len(folders) != 1:
        raise BadInput(f"import --format {RECORD}: expected one folder, found {len(folders)}")
    return load_records(folders[0])


def _routing(
    files: list[Path],
    form: str,
    shape: Path | None,
    sources: int,
    window: int | None,
    wheres: list[str],
    coactivation: bool,
) -> Profile:
    from aurora.io import load_model_config
    from aurora.profiler.import_routing import import_profile

    if shape is None:
        raise BadInput(f"import --format {form}: expected --shape CONFIG.json, the model's sizes, which the file does not hold")
    return import_profile(
        files, form, load_model_config(shape), sources, window, [_where(each) for each in wheres], coactivation
    )


def _where(text: str) -> dict[str, str]:
    columns = [each.partition("=") for each in text.split(",")]
    if not all(column and equals for column, equals, _ in columns):
        raise BadInput(f"--where: expected COLUMN=VALUE, or several with commas between, found {text!r}")
    return {column.strip(): value.strip() for column, _, value in columns}
