"""aurora profile: a model and text -> a profile; or a model's shape and a GPU system -> its curves."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import aurora
from aurora.cli.inputs import check_model, check_output, need
from aurora.cli.options import RUNNING, WORST, Json, Layers, is_given, refuse_given
from aurora.cli.output import cluster_json, curves_json, profile_json, show
from aurora.errors import BadInput
from aurora.io.prompts import check_corpus
from aurora.types import Profile, ProfileOptions

SYSTEM = "GPUs that are not here"
WITH_SYSTEM = ("shape", "system", "engine", "sources", "output", "as_json")  # options that go with --shape


def profile(
    options: Callable[..., ProfileOptions],
    model: Annotated[
        str | None, typer.Argument(help="folder of a transformers MoE model, or its name in the local hub cache")
    ] = None,
    more_text: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", show_default=False)] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text, .jsonl chats or prompts, .npy token ids; repeat, or list several after"),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the profile to write; NAME.partial.npz if interrupted")
    ] = Path("profile.npz"),
    shape: Annotated[
        Path | None,
        typer.Option(
            help="instead of a model and text: a config.json, its folder or a shipped model, whose compute curves and "
            "all-to-alls --system has measured; no traffic"
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="with --shape: a GPU system of aiconfigurator-core, such as h200_sxm; an unknown name lists all"),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="with --shape: the serving engine whose kernels were measured: sglang, trtllm or vllm", rich_help_panel=SYSTEM
        ),
    ] = "vllm",
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Count which experts a model's tokens choose, and time router, experts and weighted sum on this machine.

    Ctrl-C leaves a valid partial profile beside the output, and so does a crash, up to the last minute; the same command goes
    on from there.
    """
    if shape is not None or system is not None:
        _profile_system(shape, system, engine, output, as_json)
        return
    refuse_given(("engine",), "with `shape`")
    if model is None:
        raise BadInput("profile: expected a model's folder, or --shape with --system, found neither")
    texts = [*(text or []), *(more_text or [])]
    if not texts:
        raise BadInput("profile: expected at least one text file, found none")
    check_output(output=output)
    chosen, partial = options(), output.with_suffix(".partial.npz")
    check_output(output=output, partial=partial)
    check_corpus(texts)
    check_model(model)
    need("torch", "transformers")
    from aurora.cli.progress import shown
    from aurora.io import save

    try:
        with shown() as progress:
            made = aurora.profile(model, texts, chosen, partial=partial, progress=progress)
    except KeyboardInterrupt as stop:
        print(f"aurora: interrupted: {str(stop) or 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(130) from None
    save(made, output)
    partial.unlink(missing_ok=True)
    shown_profile(made, output, layers, as_json, chosen.seed)


def _profile_system(shape: Path | None, system: str | None, engine: str, output: Path, as_json: bool) -> None:
    """Writes and shows a model's compute curves on a GPU system, and beside them, as OUTPUT.toml, its link curves."""
    given = RUNNING.get().params
    refuse_given([name for name in given if name not in WITH_SYSTEM], "without `shape`")
    if shape is None or system is None:
        missing, other = ("shape", "system") if shape is None else ("system", "shape")
        raise BadInput(f"`{missing}`: expected with `{other}`, found none")
    from aurora.io import load_model_config, save, save_cluster
    from aurora.io.silicon_systems import system_cluster, system_curves
    from aurora.reports.plan_tables import curves_table, link_curves_table
    from aurora.types import PHASES

    beside = output.with_suffix(".toml")
    check_output(output=output, cluster=beside)
    cluster = system_cluster(system, given["sources"] if is_given("sources") else None)
    curves = system_curves(load_model_config(shape), system, engine, len(cluster))
    save(curves, output)
    save_cluster(cluster, beside, [f"Link curves: nccl on {system}, from aiconfigurator-core (Apache-2.0)."])
    links = cluster_json(cluster)["link_curves"]
    tables = {kind: [phases[phase] for phase in PHASES] for kind, phases in curves.kinds.items()}
    show(
        as_json,
        {"output": output, "cluster": beside, **curves_json(curves), "link_curves": links},
        curves_table(curves.model, tables),
        link_curves_table(cluster),
        *(f"{what}: {said}" for what, said in curves.provenance.items()),
        f"wrote {output} and {beside}",
    )


def shown_profile(made: Profile, output: Path, layers: bool, as_json: bool, seed: int = 0) -> None:
    """Print a profile that was written to `output`."""
    from aurora.planner.workload.load_statistics import contiguous_load_intervals
    from aurora.reports.plan_tables import profile_table

    table = profile_table(made, contiguous_load_intervals(made, seed), None if layers else WORST)
    show(as_json, {"output": output, **profile_json(made)}, table, made.provenance.get("precision"), f"wrote {output}")
