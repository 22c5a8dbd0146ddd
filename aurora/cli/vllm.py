"""aurora vllm: starts vLLM with our plugin, records, says what a plan would bring, and serves by it."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.output import show
from aurora.errors import need
from aurora.types.options import LONGEST_S, OptionField

LOST = 1  # exit code of a server that a lost rank ended


def vllm(
    model: str,
    arguments: Annotated[list[str] | None, OptionField(metavar="[VLLM'S ARGUMENTS]...")] = None,
    *,
    apply: bool = False,
    survive: bool = False,
    hang_s: Annotated[float, OptionField(flag="--hang", above=0, most=LONGEST_S)] = 5.0,
    after_s: Annotated[float | None, OptionField(flag="--after", above=0, most=LONGEST_S)] = None,
    cluster: Path | None = None,
    state: Path | None = None,
    as_json: bool = False,
) -> None:
    """Serve a model in vLLM with our plugin. It records routing and says what a plan would bring, as `aurora recommend` does.
    Ctrl-C ends it. The exit code is 1 if a lost rank ended it.

    Args:
        model: the model, as vLLM takes it, or a shipped model's name.
        arguments: those of `vllm serve`; without a parallel size there is one data-parallel rank on each GPU, or two on CPUs.
        apply: serve by the plan: experts follow the traffic at once, and the next start begins with the plan.
        survive: serve on without lost ranks; two ranks hold each expert.
        hang_s: seconds without an answer after which a rank is lost.
        after_s: seconds of serving after which to say what a plan would bring; default: after 50,000 tokens, or at the end.
        cluster: cluster TOML, or a shipped cluster's name; default: GPUs as NVML knows them, or CPU ranks.
        state: folder for logs, record and plan; default: one for the model and its ranks in ~/.local/state.
    """
    need("aiohttp", extra="vllm")
    from aurora_vllm.serve_command import prepare, serve

    def say(sentence: str) -> None:
        print(f"aurora: {sentence}", file=sys.stderr, flush=True)

    command = prepare(model, list(arguments or []), cluster, state, apply, survive, say)
    lost, found = asyncio.run(serve(command, hang_s, after_s, as_json, say))
    kept = command.state / "recommended/plan.json"
    told = f"vLLM ended: {lost}" if lost else None
    show(
        as_json, {"state": command.state, "plan": kept if kept.exists() else None, "lost": lost, "recommendation": found}, told
    )
    raise typer.Exit(LOST if lost else 0)
