"""aurora train: train a MoE model on text, on real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    show(as_json, asdict(result) | {"tokens_per_s": result.tokens_per_s}, *_lines(result), f"wrote {result.model}")


def _lines(result: TrainResult) -> Iterator[Table | str]:
    """Yields a table of some steps, the first and the last among them, and sentences on lost ranks, pauses and speed."""
    every = max(1, -(-len(result.steps) // SHOWN))
    shown = [step for step in result.steps if step.step % every == 0 or step is result.steps[-1] or step.moved]
    numbers = dict.fromkeys(("loss", "router loss", "gradient norm"), "{:.4f}".format)
    rows = [(step.step, step.loss, step.router_loss, step.gradient_norm, step.seconds, step.moved) for step in shown]
    yield Table({"step": str, **numbers, "time": seconds, "experts moved": str}, rows)
    yield from (*result.lost, *result.remarks)
    if pauses := result.pauses:
        longest = max(pauses, key=lambda pause: pause.seconds)
        middle_s = median(pause.seconds for pause in pauses)
        yield f"{len(pauses)} pauses, {middle_s:.2f} s in the median; the longest: {longest}"
    if times := Counter(rank for step in result.steps for rank in step.not_waited_for):
        each = ", ".join(f"{times[rank]} for rank {rank}" for rank in sorted(times))
        yield f"steps that did not wait for ranks: {each}"
    steps, ranks = plural(len(result.steps), "step"), plural(result.ranks, "rank")
    held = f"over {result.transport}, experts on at least {result.min_replicas}"
    yield f"{steps} of {result.tokens} tokens on {ranks} {held}: {result.tokens_per_s:.0f} tokens/s"
