"""aurora synthetic: a skew and a model's config.json -> a synthetic profile."""

from pathlib import Path
from typing import Annotated

import typer

import aurora
from aurora.cli.choices import completed
from aurora.cli.inputs import check_output
from aurora.cli.options import Json, Layers, refuse_given
from aurora.cli.profile import shown_profile
from aurora.types import SyntheticOptions


def synthetic(
    skew: Annotated[str, typer.Argument(help="popularity of experts: uniform or zipf:EXPONENT")],
    shape: Annotated[Path, typer.Argument(help="the model's config.json or folder, or the name of a shipped model")],
    options: SyntheticOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write")] = Path("profile.npz"),
    gpu_kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu-kind",
            help="a GPU kind to add compute curves for, from its datasheet; repeat it: a .toml file of kinds, or {gpu_kind}",
            autocompletion=completed("gpu_kind"),
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="a GPU system of aiconfigurator-core, such as h200_sxm, whose measured compute curves are added; an unknown "
            "name lists all"
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="with --system: the serving engine whose kernels were measured: sglang, trtllm or vllm")
    ] = "vllm",
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Make a synthetic profile, for planning before there is traffic: random routing, compute times not measured here."""
    from aurora.io import load_gpus, save

    if system is None:
        refuse_given(("engine",), "with `system`")
    check_output(output=output)
    kinds = [kind for name in gpu_kinds or [] for kind in (load_gpus(name).values() if name.endswith(".toml") else [name])]
    made = aurora.synthetic_profile(skew, shape, options, gpu_kinds=kinds, system=system, engine=engine)
    save(made, output)
    shown_profile(made, output, layers, as_json, options.seed)
