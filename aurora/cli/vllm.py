"""aurora vllm: starts vLLM with the plugin, records traffic, reports the gain of a plan, and serves with it."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aurora.cli.options import verb
from aurora.cli.output import show
from aurora.errors import need
from aurora.types.options import Seconds

LOST = 1  # exit code of a server that a lost rank ended


@verb()
def vllm(
    model: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    apply: bool = False,
    survive: bool = False,
    hang_s: Seconds = 5.0,
    after_s: Seconds | None = None,
    cluster: Path | None = None,
    state: Path | None = None,
    as_json: bool = False,
) -> int:
    """Serve a model in vLLM with the plugin. It records routing and reports the gain of a plan, like `aurora recommend`.
    Ctrl-C ends it, and a second one at once. The exit code is 1 if a lost rank ended it.

    Args:
        model: the model's folder or name, as for vLLM, or a shipped model's name.
        arguments: those of `vllm serve`; without a parallel size there is one data-parallel rank on each GPU, or two on CPUs.
        apply: use the plan: experts adapt to the traffic immediately, and the next start begins with the plan.
        survive: continue serving without lost ranks; each expert is on two ranks.
        hang_s: seconds without an answer after which a rank counts as lost; half of them if it is stopped.
        after_s: seconds of serving after which to report the gain of a plan; default: after 50,000 tokens, or at the end.
        cluster: cluster TOML, or a shipped cluster's name; default: the GPUs that NVML reports, or CPU ranks.
        state: folder for logs, record and plan; default: a folder for the model and its ranks in ~/.local/state.
    """
    need("aiohttp", extra="vllm")
    from aurora_vllm.serve_command import prepare, serve

    command = prepare(model, list(arguments), cluster, state, apply, survive, _say)
    lost, advice = asyncio.run(serve(command, hang_s, after_s, as_json, _say))
    plan = command.state / "recommended/plan.json"
    note = f"vLLM ended: {lost}" if lost else None
    show(
        as_json, {"state": command.state, "plan": plan if plan.exists() else None, "lost": lost, "recommendation": advice}, note
    )
    return LOST if lost else 0


def _say(sentence: str) -> None:
    """Prints a sentence for the user; servers serve on when nobody reads what is printed any more."""
    with suppress(OSError):
        print(f"aurora: {sentence}", file=sys.stderr, flush=True)
