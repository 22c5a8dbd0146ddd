"""aurora train: train a MoE model on text, on real processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import check_folder, check_model, need
from aurora.cli.subcommand import Json, chosen, option, refuse_given, show
from aurora.types import TrainOptions
from aurora.types.train_options import OF_EACH_HOST

if TYPE_CHECKING:
    from rich.table import Table

    from aurora.training.training_run import TrainResult

DEFAULTS = TrainOptions()
SHOWN = 10  # steps in the table
RANKS, LOSS, EXPERTS, CHECKPOINTS, ELASTIC, STRAGGLERS, HOSTS = (
    "Ranks and transport", "Optimizer", "Placement of experts", "Checkpoints", "Lost ranks", "Slow ranks", "Several hosts"
)  # fmt: skip


def train(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="model folder, or name in the local hub cache")],
    text: Annotated[list[Path], typer.Option(help="text to train on: .jsonl, .npy of token ids, any other as UTF-8 text")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder for the trained model (model), checkpoints and log.jsonl")
    ],
    steps: Annotated[int, option(TrainOptions, "steps")] = DEFAULTS.steps,
    batch: Annotated[int, option(TrainOptions, "batch")] = DEFAULTS.batch,
    length: Annotated[int, option(TrainOptions, "length")] = DEFAULTS.length,
    seed: Annotated[int, option(TrainOptions, "seed")] = DEFAULTS.seed,
    ranks: Annotated[int, option(TrainOptions, "ranks", panel=RANKS)] = DEFAULTS.ranks,
    transport: Annotated[
        str, option(TrainOptions, "transport", more=" ({train_transport})", panel=RANKS, choices=["train_transport"])
    ] = DEFAULTS.transport,
    dtype: Annotated[
        str, option(TrainOptions, "dtype", more=" ({train_dtype})", panel=RANKS, choices=["train_dtype"])
    ] = DEFAULTS.dtype,
    port: Annotated[int, option(TrainOptions, "port", panel=RANKS)] = DEFAULTS.port,
    timeout_s: Annotated[float, option(TrainOptions, "timeout_s", "--timeout", panel=RANKS)] = DEFAULTS.timeout_s,
    learning_rate: Annotated[float, option(TrainOptions, "learning_rate", panel=LOSS)] = DEFAULTS.learning_rate,
    weight_decay: Annotated[float, option(TrainOptions, "weight_decay", panel=LOSS)] = DEFAULTS.weight_decay,
    max_norm: Annotated[float | None, option(TrainOptions, "max_norm", panel=LOSS)] = DEFAULTS.max_norm,
    router_loss: Annotated[float | None, option(TrainOptions, "router_loss", panel=LOSS)] = DEFAULTS.router_loss,
    min_replicas: Annotated[int | None, option(TrainOptions, "min_replicas", panel=EXPERTS)] = DEFAULTS.min_replicas,
    slots_per_gpu: Annotated[int | None, option(TrainOptions, "slots_per_gpu", panel=EXPERTS)] = DEFAULTS.slots_per_gpu,
    rebalance_every: Annotated[int | None, option(TrainOptions, "rebalance_every", panel=EXPERTS)] = DEFAULTS.rebalance_every,
    checkpoint_every: Annotated[
        int | None, option(TrainOptions, "checkpoint_every", panel=CHECKPOINTS)
    ] = DEFAULTS.checkpoint_every,
    resume: Annotated[bool, option(TrainOptions, "resume", "--resume", panel=CHECKPOINTS)] = DEFAULTS.resume,
    elastic: Annotated[bool, option(TrainOptions, "elastic", "--elastic", panel=ELASTIC)] = DEFAULTS.elastic,
    respawn: Annotated[int, option(TrainOptions, "respawn", panel=ELASTIC)] = DEFAULTS.respawn,
    min_ranks: Annotated[int, option(TrainOptions, "min_ranks", panel=ELASTIC)] = DEFAULTS.min_ranks,
    redundancy: Annotated[int, option(TrainOptions, "redundancy", panel=STRAGGLERS)] = DEFAULTS.redundancy,
    scheme: Annotated[
        str, option(TrainOptions, "scheme", more=": {train_scheme}", panel=STRAGGLERS, choices=["train_scheme"])
    ] = DEFAULTS.scheme,
    lead: Annotated[str | None, option(TrainOptions, "lead", panel=HOSTS)] = DEFAULTS.lead,
    join: Annotated[str | None, option(TrainOptions, "join", panel=HOSTS)] = DEFAULTS.join,
    as_json: Json = False,
) -> None:
    """Train a model on text, one local process per rank (under torchrun this is one rank), with replicas of its experts."""
    if join is not None:
        refuse_given(
            context,
            (each.name for each in fields(TrainOptions) if each.name not in OF_EACH_HOST),
            "none with `join`: the leader says it",
        )
    options = chosen(TrainOptions, context)
    check_model(model)
    check_folder(output, "model")
    need("torch", "transformers")
    from aurora import api

    result = api.train(model, text, options, output=output)
    if result is None:
        return  # under torchrun rank 0 speaks
    tokens_per_s = result.tokens_per_s
    found = asdict(result) | {"tokens_per_s": tokens_per_s}
    show(
        as_json,
        found,
        _table(result),
        *result.lost,
        *result.remarks,
        *_paused(result),
        *_not_waited_for(result),
        f"{len(result.steps)} steps of {result.tokens} tokens on {result.ranks} ranks over {result.transport}, experts on "
        f"at least {result.min_replicas}: {tokens_per_s:.0f} tokens/s",
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
    from rich.table import Table

    from aurora.reports.formatting import right, seconds

    table = Table(*right("step", "loss", "router loss", "gradient norm", "time", "experts moved"))
    every = max(1, -(-len(result.steps) // SHOWN))
    for step in result.steps:
        if step.step % every == 0 or step is result.steps[-1] or step.moved:
            numbers = (f"{step.loss:.4f}", f"{step.router_loss:.4f}", f"{step.gradient_norm:.4f}")
            table.add_row(str(step.step), *numbers, seconds(step.seconds), str(step.moved))
    return table
