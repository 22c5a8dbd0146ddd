"""aurora profile: a model and text -> a profile."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, need, terminal
from aurora.errors import BadInput
from aurora.types import ProfileOptions, SyntheticOptions

DEFAULTS, SYNTHETIC = ProfileOptions(), SyntheticOptions()


def profile(
    model: Annotated[str | None, typer.Argument(help="folder of a transformers MoE model")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text to route; repeat, or list several after it")] = None,
    more_text: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", show_default=False)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write")] = Path("profile.npz"),
    sources: Annotated[int, typer.Option(help="ranks that the prompts are dealt to")] = DEFAULTS.sources,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt")] = DEFAULTS.prompt_tokens,
    batch: Annotated[int, typer.Option(help="prompts that a rank decodes together")] = DEFAULTS.batch,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate; 1 profiles prefill alone")] = DEFAULTS.max_new_tokens,
    limit: Annotated[int | None, typer.Option(help="use at most this many prompts")] = DEFAULTS.limit,
    share: Annotated[int, typer.Option(help="processes that compute here at once while phases are timed")] = DEFAULTS.share,
    token_level: Annotated[
        bool, typer.Option("--tokens", help="keep every token's choices, for plan --affinity; larger files")
    ] = DEFAULTS.token_level,
    synthetic: Annotated[str | None, typer.Option(help="invent traffic: uniform or zipf:EXPONENT")] = None,
    shape: Annotated[Path | None, typer.Option(help="with --synthetic: a transformers config.json")] = None,
    window_tokens: Annotated[
        int, typer.Option(help="with --synthetic: tokens of a source in a window")
    ] = SYNTHETIC.window_tokens,
    windows: Annotated[int, typer.Option(help="with --synthetic: windows")] = SYNTHETIC.windows,
    seed: Annotated[int, typer.Option(help="with --synthetic: random seed")] = SYNTHETIC.seed,
    correlation: Annotated[
        float, typer.Option(help="with --synthetic: 0 to 1, how often the experts of a pair are chosen together")
    ] = SYNTHETIC.correlation,
) -> None:
    """Count where a model's tokens go and time its phases here; or invent a profile for planning before there is traffic."""
    from aurora.report.tables import profile_table
    from aurora.store import load_json, save

    texts = [*(text or []), *(more_text or [])]
    check_output(output, inputs=[*texts, *([shape] if shape else [])])
    if synthetic is not None:
        from aurora.plan.synthetic import synthetic_profile

        if shape is None or model is not None or texts:
            raise BadInput("profile --synthetic: expected --shape CONFIG.json, no model and no text")
        invented = SyntheticOptions(sources, window_tokens, windows, seed, token_level, correlation)
        made = synthetic_profile(synthetic, load_json(shape), invented)
    else:
        if model is None:
            raise BadInput("profile: expected a model folder, or --synthetic with --shape")
        need("torch", "transformers")
        from aurora.cli.progress import shown
        from aurora.profiler.profile import profile_model

        options = ProfileOptions(sources, prompt_tokens, batch, max_new_tokens, limit, share, token_level)
        with shown() as progress:
            made = profile_model(model, texts, options, progress)
    save(made, output)
    console = terminal()
    console.print(profile_table(made))
    console.print(f"wrote {output}", soft_wrap=True)
