"""aurora profile: a model and text -> a profile."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from aurora.cli.common import check_output, need
from aurora.errors import BadInput


def profile(
    model: Annotated[Optional[str], typer.Argument(help="folder of a transformers MoE model")] = None,
    text: Annotated[Optional[list[Path]], typer.Option(help="UTF-8 text to route; repeat, or list several after it")] = None,
    more_text: Annotated[Optional[list[Path]], typer.Argument(metavar="[FILE]...", show_default=False)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write")] = Path("profile.npz"),
    sources: Annotated[int, typer.Option(help="ranks that the prompts are dealt to")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    batch: Annotated[int, typer.Option(help="prompts that a rank decodes together")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate; 1 profiles prefill alone")] = 1,
    limit: Annotated[Optional[int], typer.Option(help="use at most this many prompts")] = None,
    share: Annotated[int, typer.Option(help="processes that compute here at once while phases are timed")] = 1,
    synthetic: Annotated[Optional[str], typer.Option(help="invent traffic: uniform or zipf:EXPONENT")] = None,
    shape: Annotated[Optional[Path], typer.Option(help="with --synthetic: a transformers config.json")] = None,
    tokens: Annotated[int, typer.Option(help="with --synthetic: tokens of a source in a window")] = 1024,
    windows: Annotated[int, typer.Option(help="with --synthetic: windows")] = 1,
    seed: Annotated[int, typer.Option(help="with --synthetic: random seed")] = 0,
) -> None:
    """Count where a model's tokens go and time its phases here; or invent a profile for planning before there is traffic."""
    from rich.console import Console

    from aurora.report.tables import profile_table
    from aurora.store import load_json, save

    check_output(output)
    if synthetic is not None:
        from aurora.plan.synthetic import synthetic_profile

        if shape is None or model is not None:
            raise BadInput("profile --synthetic: expected --shape CONFIG.json and no model")
        made = synthetic_profile(
            synthetic, load_json(shape), sources=sources, tokens=tokens, windows=windows, seed=seed
        )
    else:
        if model is None:
            raise BadInput("profile: expected a model folder, or --synthetic with --shape")
        need("torch", "transformers")
        from aurora.cli.progress import shown
        from aurora.profiler.profile import ProfileOptions, profile_model

        options = ProfileOptions(sources, prompt_tokens, batch, max_new_tokens, limit, share)
        with shown() as progress:
            made = profile_model(model, [*(text or []), *(more_text or [])], options, progress)
    save(made, output)
    console = Console()
    console.print(profile_table(made))
    console.print(f"wrote {output}", soft_wrap=True)
