"""aurora measure: hardware without traffic: links between ranks, compute curves of a GPU kind, GPUs here or of a system."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.choices import completed
from aurora.cli.inputs import check_model, check_output, need
from aurora.cli.options import Json, Only, Subcommand, with_options
from aurora.cli.output import cluster_json, curves_json, show
from aurora.errors import BadInput
from aurora.types import PHASES, Cluster, ComputeCurves, Profile, ProfileOptions
from aurora.types.option_checks import MOST_PROCESSES
from aurora.types.options import LINK_TRANSPORTS

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "Measure hardware without traffic: links, compute, devices; or take the measurements of a GPU system."
app = typer.Typer(help=HELP, no_args_is_help=True)

ClusterOutput = Annotated[Path, typer.Option("--output", "-o", help="the cluster TOML to write")]


@app.command("links", cls=Subcommand)
def links(
    output: ClusterOutput = Path("cluster.toml"),
    ranks: Annotated[int | None, typer.Option(help="local ranks; under torchrun as many as it started")] = None,
    transport: Annotated[str, typer.Option(help="{link_transport}", autocompletion=completed("link_transport"))] = "auto",
    as_json: Json = False,
) -> None:
    """Measure the links between ranks, one pair at a time and several at once, and write a cluster file."""
    check_output(output=output)
    if transport not in LINK_TRANSPORTS:
        raise BadInput(f"`transport`: expected one of {', '.join(LINK_TRANSPORTS)}, found {transport!r}")
    if ranks is not None and not 2 <= ranks <= MOST_PROCESSES:
        raise BadInput(f"`ranks`: expected from 2 to {MOST_PROCESSES}, found {ranks}")
    need("torch")
    from aurora.profiler.link_timing import measure_links
    from aurora.reports.plan_tables import links_table

    measured = measure_links(ranks, transport)
    if measured is None:
        return  # under torchrun rank 0 speaks
    rate_Bps_GG, startup_s_GG = measured.links.rate_Bps_GG, measured.links.startup_s_GG
    pairs = {"rate_Bps": rate_Bps_GG, "startup_s": startup_s_GG}
    _write(as_json, measured.cluster, output, measured.remarks, pairs, links_table(rate_Bps_GG, startup_s_GG))


@app.command("compute", cls=Subcommand)
@with_options
def compute(
    options: Annotated[ProfileOptions, Only(("prompt_tokens", "batch", "share"))],
    model: Annotated[str | None, typer.Argument(help="folder of a transformers MoE model; without it only --add")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the profile or curves file to add this GPU kind to; created if missing")
    ] = Path("curves.npz"),
    add: Annotated[list[Path] | None, typer.Option(help="a curves file that this command wrote elsewhere, to add too")] = None,
    as_json: Json = False,
) -> None:
    """Time a model's router, experts and weighted sum on this machine, for profiles that were counted elsewhere."""
    from aurora.io import load, load_curves, save
    from aurora.reports.plan_tables import curves_table

    joined = add or []
    if model is None and not joined:
        raise BadInput("measure compute: expected a model folder, or --add")
    check_output(output=output)
    if model is not None:
        check_model(model)
    given, made = [load_curves(path) for path in joined], load(output) if output.exists() else None
    if made is not None and not isinstance(made, Profile | ComputeCurves):
        raise BadInput(f"{output}: expected a profile or curves to add to, found a {type(made).__name__.lower()}")
    found = [*([] if model is None else [_measured(model, options)]), *given]
    for one in found:
        made = one if made is None else one.into(made)
    assert made is not None
    save(made, output)
    kinds = made.curves if isinstance(made, Profile) else made.kinds
    table = curves_table(made.model, {kind: [phases[phase] for phase in PHASES] for kind, phases in kinds.items()})
    said = [f"{what}: {each}" for one in found for what, each in one.provenance.items()]
    show(as_json, {"output": output, **curves_json(made)}, table, *said, f"wrote {output}")


@app.command("devices", cls=Subcommand)
def devices(output: ClusterOutput = Path("cluster.toml"), as_json: Json = False) -> None:
    """Write a cluster file of this machine's GPUs, as NVML names them, with datasheet rates."""
    from aurora.profiler.devices import find_devices

    check_output(output=output)
    found = find_devices()
    _write(as_json, found.cluster, output, found.remarks, {})


@app.command("system", cls=Subcommand)
def system(
    name: Annotated[str, typer.Argument(help="a system of aiconfigurator-core, such as h200_sxm; an unknown name lists all")],
    output: ClusterOutput = Path("cluster.toml"),
    gpus: Annotated[int | None, typer.Option(help="how many GPUs, all of one node; default: all that it has")] = None,
    exchange: Annotated[
        str,
        typer.Option(help="what performs all-to-alls: {exchange}", autocompletion=completed("exchange")),
    ] = "nccl",
    as_json: Json = False,
) -> None:
    """Write a cluster file of a GPU system as aiconfigurator-core has measured it, with link curves; needs that package."""
    from aurora.io.silicon_systems import system_cluster

    check_output(output=output)
    source = f"Link curves: {exchange} on {name}, from aiconfigurator-core (Apache-2.0); other figures: its datasheet."
    _write(as_json, system_cluster(name, gpus, exchange), output, [source], {})


def _measured(model: str, options: ProfileOptions) -> ComputeCurves:
    need("torch", "transformers")
    from aurora.profiler.compute_timing import measure_curves

    most = 2 * options.batch * options.prompt_tokens
    return measure_curves(model, max_tokens=most, sequence_tokens=options.prompt_tokens, processes=options.share)


def _write(
    as_json: bool, made: Cluster, output: Path, remarks: Sequence[str], more: Mapping[str, object], *tables: "RenderableType"
) -> None:
    """Write a cluster file with remarks on top, and print both."""
    from aurora.io import save_cluster
    from aurora.reports.plan_tables import cluster_table

    save_cluster(made, output, remarks)
    found = {"output": output, **cluster_json(made), "remarks": list(remarks), **more}
    show(as_json, found, cluster_table(made), *remarks, f"wrote {output}", *tables)
