"""aurora train: train a MoE model on text, on real processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from cyclopts import Parameter

import aurora
from aurora.algorithms.gradient_codes import SCHEMES
from aurora.cli.inputs import check_folder, check_model
from aurora.cli.options import verb
from aurora.cli.output import need_models, show, working
from aurora.errors import plural
from aurora.reports.formatting import seconds
from aurora.reports.tables import Table
from aurora.types import TrainOptions

if TYPE_CHECKING:
    from aurora.training.training_run import TrainResult

SHOWN = 10  # steps in the table


@verb(
    text=Parameter(consume_multiple=True), scheme=Parameter(choices=tuple(SCHEMES)), weight_decay=None, max_norm=None,
    seed=None,
)  # fmt: skip
def train(
    model: Path,
    /,
    *,
    text: list[Path],
    output: Path,
    options: TrainOptions = TrainOptions(),
    as_json: bool = False,
) -> None:
    """Train a model on text, with replicas of its experts. Each rank is a local process; under torchrun this is one rank.

    Args:
        model: model folder, or name in the local hub cache.
        text: text to train on: .jsonl, .npy of token ids, or any other file as UTF-8 text.
        output: folder for the trained model, checkpoints and log.jsonl.
    """
    check_model(model)
    check_folder(output, "model")
    need_models()
    with working("training"):
        result = aurora.train(model, text, options, output=output)
    if result is None:
        return  # under torchrun rank 0 speaks
    show(
        as_json,
        asdict(result) | {"tokens_per_s": result.tokens_per_s},
        _table(result),
        *result.lost,
        *result.remarks,
        *_paused(result),
        *_not_waited_for(result),
        f"{plural(len(result.steps), 'step')} of {result.tokens} tokens on {plural(result.ranks, 'rank')} "
        f"over {result.transport}, experts on "
        f"at least {result.min_replicas}: {result.tokens_per_s:.0f} tokens/s",
        f"wrote {result.model}",
    )


def _paused(result: TrainResult) -> list[str]:
    """A sentence on the pauses of a run, if there were any."""
    if not (pauses := result.pauses):
        return []
    longest = max(pauses, key=lambda pause: pause.seconds)
    return [f"{len(pauses)} pauses, {median(pause.seconds for pause in pauses):.2f} s in the median; the longest: {longest}"]


def _not_waited_for(result: TrainResult) -> list[str]:
    """A sentence on the ranks that steps did not wait for, if there were any."""
    times = Counter(rank for step in result.steps for rank in step.not_waited_for)
    if not times:
        return []
    return ["steps that did not wait for ranks: " + ", ".join(f"{times[rank]} for rank {rank}" for rank in sorted(times))]


def _table(result: TrainResult) -> Table:
    """A table of some steps, the first and the last among them."""
    every = max(1, -(-len(result.steps) // SHOWN))
    shown = [step for step in result.steps if step.step % every == 0 or step is result.steps[-1] or step.moved]
    numbers = dict.fromkeys(("loss", "router loss", "gradient norm"), "{:.4f}".format)
    rows = [(step.step, step.loss, step.router_loss, step.gradient_norm, step.seconds, step.moved) for step in shown]
    return Table({"step": str, **numbers, "time": seconds, "experts moved": str}, rows)
