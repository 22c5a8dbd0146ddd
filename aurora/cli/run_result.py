"""What `aurora run` writes and prints of its result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aurora.cli.subcommand import show
from aurora.errors import AuroraError, BadInput
from aurora.types import Plan, Trace

if TYPE_CHECKING:
    from aurora.reports.trace_tables import ServedModel
    from aurora.runtime.order_choice import OrdersUsed
    from aurora.runtime.result import Answers, MembershipChange, RunResult

CHANGES = 10  # of a placement that are shown, the newest ones


def write_answers(output: Path, plan: Plan, answers_M: Sequence[Answers], tokenizers: Sequence[Any]) -> None:
    """Writes the answers; if the file can no longer be written, prints them, so that they are not lost.

    Args:
        output: the file (JSON lines).
        plan: the plan that was served.
        answers_M: the answers of each model.
        tokenizers: the tokenizer of each model.

    Raises:
        BadInput: if the file cannot be written.
    """
    from aurora.io import write_text

    lines = [
        {
            "model": planned.model,
            "prompt": index,
            "finished": index in answers.finished,
            "text": tokenizer.decode(tokens),
            "tokens": tokens,
        }
        for planned, answers, tokenizer in zip(plan.models, answers_M, tokenizers, strict=True)
        for index, tokens in sorted(answers.tokens.items())
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:
        write_text(output, text)
    except AuroraError as error:
        print(text, end="")
        raise BadInput(f"{error}; the answers are printed instead") from None


def show_result(
    as_json: bool,
    plan: Plan,
    result: RunResult,
    expected: Trace | None,
    busy: list[str],
    differences: list[str] | None,
    wrote: dict[str, Path | None],
    most: int | None,
) -> None:
    """Prints a run's result.

    Args:
        as_json: print one JSON object.
        plan: the plan that was served.
        result: the result.
        expected: a predicted trace to compare with.
        busy: a sentence for each GPU whose utilisation was sampled.
        differences: a sentence for each difference from the plain models; None: not compared.
        wrote: files that were written, by key of the JSON object.
        most: layers that are shown, the slowest; None: all.
    """
    from aurora.cli.as_json import comparison_json, summary_json
    from aurora.reports.trace_tables import (
        ServedModel,
        comparison_table,
        control_line,
        control_table,
        network_line,
        rank_lines,
        served_table,
        summary_table,
    )
    from aurora.reports.trace_times import compare, summarise

    summary = summarise(result.trace, plan.cluster)
    compared = None if expected is None else compare(expected, result.trace)
    served = [
        ServedModel(
            planned.model,
            len(answers.tokens),
            len(answers.finished),
            result.tokens_per_second(index),
            result.tokens_per_second(index, with_start=True),
            {rank: [*times.ttft_s.values()] for rank, times in sorted(answers.times_R.items())},
            {rank: times.tpot_s for rank, times in sorted(answers.times_R.items())},
        )
        for index, (planned, answers) in enumerate(zip(plan.models, result.answers_M, strict=True))
    ]
    found = {
        **wrote,
        **summary_json(summary),
        "transport": result.transport,
        "micro_batches": len(result.trace.names_M) // len(plan.models),
        "models": [_served_json(each) for each in served],
        "start_s": result.start_s,
        "trace_from_s": result.trace_from_s,
        "orders": None if result.calibration is None else str(result.calibration),
        "orders_used": [asdict(used) for used in result.orders_M],
        "comparison": comparison_json(compared),
        "changes": [asdict(change) for change in result.changes],
        "control": [asdict(report) for report in result.control_M],
        "gpus": busy,
        "differences": differences,
        "failure": result.failure,
    }
    show(
        as_json,
        found,
        summary_table(summary, bounded=result.transport == "shaped", most=most),
        None if compared is None else comparison_table(compared),
        None if result.conditions is None else network_line(result.conditions.cluster),
        None if result.calibration is None else f"orders before serving: {result.calibration}",
        *_orders_used(plan, result.orders_M),
        served_table(served, result.transport, result.start_s),
        *rank_lines(served),
        None if result.trace_from_s is None else f"the trace holds what began after {result.trace_from_s:.0f} s",
        *map(_told, result.changes),
        *(part for report in result.control_M for part in (control_line(report), control_table(report, CHANGES))),
        *busy,
        "wrote " + " and ".join(str(path) for path in wrote.values() if path is not None),
        None if differences is None or differences else "verified: same greedy tokens, logits within 1e-4 of the plain model's",
    )


def _served_json(served: ServedModel) -> dict[str, Any]:
    """What was served of a model, as JSON."""
    from aurora.reports.trace_tables import percentiles

    return {
        "model": served.model,
        "requests": served.requests,
        "finished": served.finished,
        "tokens_per_s": served.tokens_per_s,
        "tokens_per_s_with_start": served.tokens_per_s_with_start,
        "ttft_s": percentiles(served.ttft_s),
        "tpot_s": percentiles(served.tpot_s),
        "ranks": [
            {"rank": rank, "requests": len(ttft_s), "ttft_s": percentiles(ttft_s), "tpot_s": percentiles(served.tpot_s_R[rank])}
            for rank, ttft_s in served.ttft_s_R.items()
        ],
    }


def _orders_used(plan: Plan, orders_M: Sequence[OrdersUsed]) -> Iterator[str]:
    """For each model, or micro-batch, a line with its exchanges by order, and one for each change-over."""
    for index, used in enumerate(orders_M):
        counts = sorted(used.exchanges.items(), key=lambda each: -each[1])
        yield f"{plan.served_names[index]}: exchanges by {', '.join(f'{method} {count}' for method, count in counts)}"
        if used.servers:
            yield f"{plan.served_names[index]}, before serving: {used.servers}"
        yield from (f"order changed over: {change}" for change in used.changes)


def _told(change: MembershipChange) -> str:
    """Returns a change of membership as a sentence."""
    parts = [f"lost rank {rank} ({how})" for rank, how in sorted(change.lost.items())]
    parts += [f"rank {rank} joined" for rank in change.joined]
    weights = f"{change.moved} experts' weights from other ranks"
    if change.moved:
        weights += f" ({change.moved_bytes / 1e6:.2f} MB in {change.took_s:.3f} s, predicted {change.predicted_s:.3f} s)"
    weights += f", {change.from_checkpoint} from the model's files"
    pause = "nothing to resume"
    if change.stopped_s is None:
        pause = "before the first token"
    elif change.resumed_s is not None:
        pause = f"no token for {change.resumed_s - change.stopped_s:.3f} s"
    return f"epoch {change.epoch}: {', '.join(parts) or 'replicas restored'}; {weights}; {pause}"
