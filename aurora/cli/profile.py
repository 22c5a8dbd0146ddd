"""aurora profile: a model and text -> a profile."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_model, check_output, need
from aurora.cli.subcommand import WORST, Json, Layers, chosen, option, show
from aurora.errors import BadInput
from aurora.io.prompts import check_corpus
from aurora.types import CountingOptions, Profile, ProfileOptions

DEFAULTS = ProfileOptions()
TEXT, STOP, WORKERS = "Text", "What is counted", "Redundant workers"


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="folder of a transformers MoE model, or its name in the local hub cache")],
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
    workers: Annotated[int | None, option(CountingOptions, "workers", panel=WORKERS)] = None,
    redundancy: Annotated[int | None, option(CountingOptions, "redundancy", panel=WORKERS)] = None,
    scheme: Annotated[
        str, option(CountingOptions, "scheme", more=": {scheme}", panel=WORKERS, choices=["scheme"])
    ] = CountingOptions.scheme,
    timeout_s: Annotated[float, option(CountingOptions, "timeout_s", "--timeout", panel=WORKERS)] = CountingOptions.timeout_s,
    agreeing: Annotated[int, option(CountingOptions, "agreeing", panel=WORKERS)] = CountingOptions.agreeing,
    seed: Annotated[int, typer.Option(help="random seed, for --precision and --workers")] = DEFAULTS.seed,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Count which experts a model's tokens choose, and time router, experts and weighted sum on this machine.

    Ctrl-C leaves a valid partial profile beside the output, and so does a crash, up to the last minute; the same command goes
    on from there.
    """
    texts = [*(text or []), *(more_text or [])]
    unset = (None, CountingOptions.scheme, CountingOptions.timeout_s, CountingOptions.agreeing)
    if workers is None and (redundancy, scheme, timeout_s, agreeing) != unset:
        raise BadInput(
            "profile: --redundancy, --scheme, --timeout and --agreeing say how --workers share the work, expected their number"
        )
    if not texts:
        raise BadInput("profile: expected at least one text file, found none")
    check_output(output=output)
    options, partial = chosen(ProfileOptions, context), output.with_suffix(".partial.npz")
    fleet = None if workers is None else chosen(CountingOptions, context)
    check_output(output=output, partial=partial if fleet is None else None)
    check_corpus(texts)
    check_model(model)
    need("torch", "transformers")
    from aurora import api
    from aurora.cli.progress import shown, workers_shown
    from aurora.io import save

    try:
        if fleet is None:
            with shown() as progress:
                made = api.profile(model, texts, options, partial=partial, progress=progress)
        else:
            with workers_shown(printed=not as_json) as watch:
                made = api.profile(model, texts, options, workers=fleet, watch=watch)
    except KeyboardInterrupt as stop:
        print(f"aurora: interrupted: {str(stop) or 'nothing is kept'}", file=sys.stderr)
        raise typer.Exit(130) from None
    save(made, output)
    if fleet is None:
        partial.unlink(missing_ok=True)
    shown_profile(made, output, layers, as_json, seed)


def shown_profile(made: Profile, output: Path, layers: bool, as_json: bool, seed: int = 0) -> None:
    """Print a profile that was written to `output`."""
    from aurora.cli.as_json import profile_json
    from aurora.planner.workload.load_statistics import contiguous_load_intervals
    from aurora.reports.input_tables import profile_table

    table = profile_table(made, contiguous_load_intervals(made, seed), None if layers else WORST)
    show(as_json, {"output": output, **profile_json(made)}, table, made.provenance.get("precision"), f"wrote {output}")
