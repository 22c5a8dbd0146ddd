"""aurora export and aurora import: placements to and from serving engines' formats, and routing that engines recorded."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.choices import completed, names
from aurora.cli.inputs import check_output
from aurora.cli.options import Json, Layers, Only
from aurora.cli.output import show
from aurora.cli.profile import shown_profile
from aurora.errors import BadInput
from aurora.types import Profile, ProfileOptions
from aurora.types.arrays import MOST_LAYERS

if TYPE_CHECKING:
    from aurora.io.engine_placements import Export
    from aurora.types.arrays import IntArray

RECORD = "vllm-record"
PLACEMENT, ROUTING = "For a placement", "For recorded routing"

GB = 1e9


def export(
    plan: Annotated[Path, typer.Argument(help="a plan, or a placement as aurora place and aurora import write it")],
    form: Annotated[str, typer.Option("--format", help="{placement_format}", autocompletion=completed("placement_format"))],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: print it")] = None,
    model: Annotated[str | None, typer.Option(help="for a plan of several models: which one, by name or number from 0")] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(help="the model's first layers without experts, which the engine numbers too; default: as the plan says"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan's placement in a serving engine's format, and say what it costs and how to start the engine with it."""
    from aurora.io import load_json, write_text
    from aurora.io.engine_placements import export_placement
    from aurora.io.plans import PLAN_FORMAT, load_placement, load_plan

    check_output(output=output)
    layers, path = _first(dense_layers), output and output.resolve()
    expert_bytes = None
    if load_json(plan).get("format") == PLAN_FORMAT:
        whole = load_plan(plan)
        planned = whole.named(model)
        expert_bytes = planned.expert_bytes
        numbers = planned.dense_layers if layers is None else layers
        made = export_placement(planned.placement, form, numbers, planned.load_LE, whole.cluster.equal, path)
    else:
        if model is not None:
            raise BadInput(f"{plan}: expected no --model, which is for a plan of several models, found a placement")
        made = export_placement(load_placement(plan), form, layers or (), path=path)
    if made.off_by > 1e-9:
        off = f"{made.off_by:.0%}"
        print(f"aurora: the engine divides tokens evenly over replicas: shares are off by up to {off}", file=sys.stderr)
    if output is not None:
        write_text(output, made.text)
    added_bytes_G = None if expert_bytes is None else made.added_LG.sum(axis=0) * expert_bytes
    found = {
        "output": output,
        "format": form,
        "redundant_experts": made.redundant,
        "added_experts": made.added_LG.sum(axis=1),
        "added_bytes": added_bytes_G,
        "shares_off": made.off_by,
        "launch": made.launch,
        "text": None if output else made.text,
    }
    notes = (_padding(made, added_bytes_G), f"to use it: {made.launch}")
    if output is None and not as_json:
        print(*notes, sep="\n", file=sys.stderr)
    show(as_json, found, *((f"wrote {output}", *notes) if output else (made.text.removesuffix("\n"),)))


def _padding(made: "Export", added_bytes_G: "IntArray | None") -> str:
    """Returns a sentence on what the engine's equal slots add to the plan."""
    added_L = made.added_LG.sum(axis=1)
    if not added_L.any():
        return f"{made.redundant} redundant experts a layer, as in the plan"
    many = f"{added_L.min()} to {added_L.max()}" if added_L.min() < added_L.max() else str(added_L.max())
    said = f"{made.redundant} redundant experts a layer; {many} of them are not the plan's"
    said += ": the engine needs equally many on every GPU, and the hottest that keep GPUs balanced are repeated"
    if added_bytes_G is not None:
        gpu = int(added_bytes_G.argmax())
        mean, most = added_bytes_G.mean() / GB, added_bytes_G[gpu] / GB
        said += f"; they take {mean:.3g} GB of a GPU on average, {most:.3g} GB of GPU {gpu}"
    return said


def _first(layers: int | None) -> tuple[int, ...] | None:
    """The numbers of the first layers."""
    if layers is not None and not 0 <= layers < MOST_LAYERS:
        raise BadInput(f"--dense-layers: expected 0 to {MOST_LAYERS - 1}, found {layers}")
    return None if layers is None else tuple(range(layers))


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
    counted: Annotated[ProfileOptions, Only(("window", "coactivation"), ROUTING)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="default: placement.json; for recorded routing profile.npz")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="number of GPUs, if the file does not say", rich_help_panel=PLACEMENT)
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(
            help="the model's first layers without experts, which the file numbers too; default: as --shape says",
            rich_help_panel=PLACEMENT,
        ),
    ] = None,
    shape: Annotated[Path | None, typer.Option(help="the model's config.json or folder")] = None,
    sources: Annotated[
        int | None,
        typer.Option(
            help=f"source ranks that the traffic is dealt to, evenly; default: those of the files, or {ProfileOptions.sources}",
            rich_help_panel=ROUTING,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="for csv: which rows to read; repeated, each is a traffic domain",
            metavar="COLUMN=VALUE,..",
            rich_help_panel=ROUTING,
        ),
    ] = None,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Read a serving engine's placement (replicas share an expert's load evenly), or routing that an engine recorded."""
    known = (*names("placement_format"), *names("routing_format"), RECORD)
    if form not in known:
        raise BadInput(f"--format: expected one of {', '.join(known)}, found {form!r}")
    if form in names("placement_format"):
        for name, value in (
            ("sources", sources),
            ("where", where),
            ("window", counted.window),
            ("co-activation", counted.coactivation),
        ):
            if value:
                raise BadInput(f"import --format {form}: expected no --{name}, which is for recorded routing")
        _import_placement(file, form, output or Path("placement.json"), gpus, _first(dense_layers), shape, as_json)
        return
    if gpus is not None or dense_layers is not None:
        raise BadInput(f"import --format {form}: expected neither --gpus nor --dense-layers, which are a placement's")
    target = output or Path("profile.npz")
    check_output(output=target)
    made = _recorded(file) if form == RECORD else _routing(file, form, shape, sources, where or [], counted)
    from aurora.io import save

    save(made, target)
    shown_profile(made, target, layers, as_json)


def _import_placement(
    files: list[Path],
    form: str,
    output: Path,
    gpus: int | None,
    dense_layers: tuple[int, ...] | None,
    shape: Path | None,
    as_json: bool,
) -> None:
    from aurora.io import load_model_config
    from aurora.io.engine_placements import import_placement
    from aurora.io.plans import save_placement
    from aurora.planner.workload.model_config import dense_layers as dense_layers_of

    if len(files) != 1:
        raise BadInput(f"import --format {form}: expected one file, found {len(files)}")
    check_output(output=output)
    if dense_layers is None:
        dense_layers = dense_layers_of(load_model_config(shape)) if shape else ()
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
    sources: int | None,
    wheres: list[str],
    counted: ProfileOptions,
) -> Profile:
    from aurora.io import load_model_config
    from aurora.profiler.import_routing import import_profile

    if shape is None:
        raise BadInput(f"import --format {form}: expected --shape CONFIG.json, the model's sizes, which the file does not hold")
    return import_profile(
        files, form, load_model_config(shape), sources, counted.window, [_where(each) for each in wheres], counted.coactivation
    )


def _where(text: str) -> dict[str, str]:
    columns = [each.partition("=") for each in text.split(",")]
    if not all(column and equals for column, equals, _ in columns):
        raise BadInput(f"--where: expected COLUMN=VALUE, or several with commas between, found {text!r}")
    return {column.strip(): value.strip() for column, _, value in columns}
