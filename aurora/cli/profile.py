"""aurora profile: a model and text -> a profile; or a model's shape and a GPU system -> its curves."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_model, check_output, need
from aurora.cli.subcommand import WORST, Json, Layers, chosen, option, refuse_given, show
from aurora.errors import BadInput
from aurora.io.prompts import check_corpus
from aurora.types import Profile, ProfileOptions

DEFAULTS = ProfileOptions()
TEXT, STOP, SYSTEM = "Text", "What is counted", "GPUs that are not here"
WITH_SYSTEM = ("shape", "system", "engine", "sources", "output", "as_json")  # options that go with --shape


def profile(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="folder of a transformers MoE model, or its name in the local hub cache")
    ] = None,
    more_text: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", show_default=False)] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="UTF-8 text, .jsonl chats or prompts, .npy token ids; repeat, or list several after", rich_help_panel=TEXT
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the profile to write; NAME.partial.npz if interrupted")
    ] = Path("profile.npz"),
    sources: Annotated[int, option(ProfileOptions, "sources", panel=TEXT)] = DEFAULTS.sources,
    prompt_tokens: Annotated[int, option(ProfileOptions, "prompt_tokens", panel=TEXT)] = DEFAULTS.prompt_tokens,
    batch: Annotated[int, option(ProfileOptions, "batch", panel=TEXT)] = DEFAULTS.batch,
    max_new_tokens: Annotated[int, option(ProfileOptions, "max_new_tokens", panel=TEXT)] = DEFAULTS.max_new_tokens,
    limit: Annotated[int | None, option(ProfileOptions, "limit", panel=TEXT)] = DEFAULTS.limit,
    share: Annotated[int, option(ProfileOptions, "share", panel=STOP)] = DEFAULTS.share,
    token_level: Annotated[bool, option(ProfileOptions, "token_level", "--tokens", panel=STOP)] = DEFAULTS.token_level,
    coactivation: Annotated[
        bool, option(ProfileOptions, "coactivation", "--co-activation", panel=STOP)
    ] = DEFAULTS.coactivation,
    window: Annotated[int | None, option(ProfileOptions, "window", panel=STOP)] = DEFAULTS.window,
    precision: Annotated[float | None, option(ProfileOptions, "precision", panel=STOP)] = DEFAULTS.precision,
    seed: Annotated[int, typer.Option(help="random seed, for --precision")] = DEFAULTS.seed,
    shape: Annotated[
        Path | None,
        typer.Option(
            help="instead of a model and text: a config.json, its folder or a shipped model, whose compute curves and "
            "all-to-alls --system has measured; no traffic",
            rich_help_panel=SYSTEM,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="with --shape: a GPU system of aiconfigurator-core, such as h200_sxm; an unknown name lists all",
            rich_help_panel=SYSTEM,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="with --shape: whose kernels: sglang, trtllm or vllm", rich_help_panel=SYSTEM)
    ] = "vllm",
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Count which experts a model's tokens choose, and time router, experts and weighted sum on this machine.

    Ctrl-C leaves a valid partial profile beside the output, and so does a crash, up to the last minute; the same command goes
    on from there.
    """
    if shape is not None or system is not None:
        _of_system(context, shape, system, as_json)
        return
    refuse_given(context, ("engine",), "with `shape`")
    if model is None:
        raise BadInput("profile: expected a model's folder, or --shape with --system, found neither")
    texts = [*(text or []), *(more_text or [])]
    if not texts:
        raise BadInput("profile: expected at least one text file, found none")
    options, partial = chosen(ProfileOptions, context), output.with_suffix(".partial.npz")
    check_output(output=output, partial=partial)
    check_corpus(texts)
    check_model(model)
    need("torch", "transformers")
    from aurora import api
    from aurora.cli.progress import shown
    from aurora.io import save

    try:
        with shown() as progress:
            made = api.profile(model, texts, options, partial=partial, progress=progress)
    except KeyboardInterrupt as stop:
        print(f"aurora: interrupted: {str(stop) or 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(130) from None
    save(made, output)
    partial.unlink(missing_ok=True)
    shown_profile(made, output, layers, as_json, seed)


def _of_system(context: typer.Context, shape: Path | None, system: str | None, as_json: bool) -> None:
    """Writes and shows the curves of a GPU system."""
    from aurora.cli.profile_system import profile_system

    given = context.params
    refuse_given(context, [name for name in given if name not in WITH_SYSTEM], "without `shape`")
    if shape is None or system is None:
        missing, other = ("shape", "system") if shape is None else ("system", "shape")
        raise BadInput(f"`{missing}`: expected with `{other}`, found none")
    sources = context.get_parameter_source("sources")
    gpus = given["sources"] if sources is not None and sources.name == "COMMANDLINE" else None
    profile_system(shape, system, given["engine"], gpus, given["output"], as_json)


def shown_profile(made: Profile, output: Path, layers: bool, as_json: bool, seed: int = 0) -> None:
    """Print a profile that was written to `output`."""
    from aurora.cli.as_json import profile_json
    from aurora.planner.workload.load_statistics import contiguous_load_intervals
    from aurora.reports.plan_tables import profile_table

    table = profile_table(made, contiguous_load_intervals(made, seed), None if layers else WORST)
    show(as_json, {"output": output, **profile_json(made)}, table, made.provenance.get("precision"), f"wrote {output}")
