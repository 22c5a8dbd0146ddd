"""aurora run: serve prompts with a plan, on real processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import aurora
from aurora.cli.inputs import check_model, check_output, profiles_of
from aurora.cli.options import verb
from aurora.cli.output import WORST, need_models, show, working
from aurora.errors import AuroraError, BadInput, plural
from aurora.io import load_plan, save, write_text
from aurora.io.prompts import load_arriving
from aurora.reports.formatting import distinct, seconds
from aurora.reports.tables import Columns, Table, text
from aurora.types import PRIORITIES, Plan, Profile, RunOptions, Trace
from aurora.types.options import Limits

if TYPE_CHECKING:
    from aurora.runtime.result import Answers, RunResult


@verb(
    order=Parameter(name="--orders"), colocate=Parameter(name="--gpu-group"),
    dtype=None, keep_logits=None, predictable=None,
)  # fmt: skip
def run(
    plan: Path,
    /,
    *,
    model: list[Path],
    prompts: list[Path],
    output: Path | None = None,
    trace: Path | None = None,
    options: RunOptions = RunOptions(),
    priorities: Annotated[tuple[str, ...], Limits(one_of=PRIORITIES)] = (),
    verify: bool = False,
    compare: bool = False,
    as_json: bool = False,
) -> None:
    """Serve prompts with the plan's models and measure every phase. Each rank is a local process; under torchrun this is one.

    Args:
        plan: plan JSON.
        model: model folder, or name in the local hub cache; repeat it for each model of the plan, in the plan's order.
        prompts: a prompt per line, or .jsonl with prompt and arrival time at_s; one file, or one per model.
        output: the answers to write (JSON lines).
        trace: the measured trace to write (npz); default: beside the plan.
        priorities: one per model, interactive or batch; default: the plan's.
        verify: compare the answers with those of the unmodified model in one process.
        compare: compare each phase with a simulation of the same traffic.
    """
    from aurora.planner.options import with_preemption, with_priorities

    loaded = with_priorities(load_plan(plan), priorities, shared=options.colocate is not None)
    if priorities and (known := _profiles_left(loaded, plan)):
        loaded = with_preemption(loaded, known)
    _check_counts(loaded, plan, model, prompts)
    if compare and (options.order == "auto" or options.deduplicate or options.interleave == "processes"):
        raise BadInput(
            "run --compare: simulates the plan alone and as planned, expected none of --orders auto, --deduplicate, "
            "--interleave processes"
        )
    check_output(trace=trace, output=output)
    target = trace or plan.with_suffix(".measured.npz")
    beside = target.with_name(f"{target.stem}.predicted.npz")
    check_output(output=output, trace=target, predicted_trace=beside if compare else None)
    chosen = replace(options, keep_logits=verify, predictable=compare)
    profiles = profiles_of(loaded, plan, None) if compare else []
    files = prompts * len(model) if len(prompts) == 1 else prompts
    arrivals = [[at_s for _, at_s in load_arriving(file)] for file in files]
    for path in model:
        check_model(path)
    need_models()
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.runtime.run import verify as differing

    tokenizers = [load_tokenizer(path) for path in model]
    requests = [read_prompts(tokenizer, file) for tokenizer, file in zip(tokenizers, files, strict=True)]
    arrivals = arrivals if any(map(any, arrivals)) else []
    with working("serving"):
        result = aurora.run(loaded, model, requests, chosen, arrivals=arrivals)
    if result is None:
        return  # under torchrun rank 0 speaks
    if output is not None:
        _write_answers(output, loaded, result.answers_M, tokenizers)
    save(result.trace, target)
    expected = None
    if compare:
        expected = _predicted(loaded, result, profiles, options)
        save(expected, beside)
    with working("comparing answers"):
        differences = differing(result, model, requests, chosen) if verify else None
    _show(as_json, loaded, result, expected, differences, {"trace": target, "answers": output})
    if differences:
        raise AuroraError(f"outputs differ from the plain model's in {len(differences)} places, first: {differences[0]}")


def _check_counts(plan: Plan, path: Path, models: list[Path], prompts: Sequence[Path]) -> None:
    """Raises BadInput unless there are as many models, and files of prompts (or one), as the plan is for."""
    if len(models) != len(plan.models):
        raise BadInput(f"{path}: has {plural(len(plan.models), 'model')}, expected as many --model, found {len(models)}")
    if len(prompts) not in (1, len(models)):
        raise BadInput(f"run: expected one --prompts file or one for each of {len(models)} models, found {len(prompts)}")


def _profiles_left(plan: Plan, path: Path) -> list[Profile]:
    """Returns the profiles that the plan was made from; none if they are gone or have changed."""
    try:
        return profiles_of(plan, path, None)
    except AuroraError:
        return []


def _predicted(plan: Plan, result: RunResult, profiles: Sequence[Profile], options: RunOptions) -> Trace:
    """Simulate the run's own traffic on the network measured just before it, so that only the simulator's error is left."""
    assert result.conditions is not None
    seen = replace(plan, cluster=result.conditions.cluster)
    traffic, staged = result.conditions.traffic(profiles), result.transport == "nccl"
    return aurora.simulate(seen, traffic, interleave=options.interleave, staged=staged, overlap=options.overlap)


def _write_answers(output: Path, plan: Plan, answers_M: Sequence[Answers], tokenizers: Sequence[Any]) -> None:
    """Writes the answers (JSON lines); if the file can no longer be written, prints them, so that they are not lost."""
    lines = [
        {"model": planned.model, "prompt": index, "text": tokenizer.decode(tokens), "tokens": tokens}
        for planned, answers, tokenizer in zip(plan.models, answers_M, tokenizers, strict=True)
        for index, tokens in sorted(answers.tokens.items())
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:
        write_text(output, text)
    except AuroraError as error:
        print(text, end="")
        raise BadInput(f"{error}; the answers are printed instead") from None


def _show(
    as_json: bool,
    plan: Plan,
    result: RunResult,
    expected: Trace | None,
    differences: list[str] | None,
    wrote: dict[str, Path | None],
) -> None:
    """Prints a run's result: tables, and what `wrote` names by key of the JSON object."""
    import aurora.reports.trace_tables as tables
    from aurora.reports.json_objects import fields_json, json_of
    from aurora.reports.trace_times import compare, summarise

    summary = summarise(result.trace, plan.cluster)
    compared = None if expected is None else compare(expected, result.trace)
    names = [model.model for model in plan.models]
    show(
        as_json,
        {
            **wrote,
            **json_of(summary),
            **fields_json(result, "transport start_s trace_from_s"),
            "micro_batches": len(result.trace.names_M) // len(plan.models),
            "models": [served_json(name, result, model) for model, name in enumerate(names)],
            "orders": None if result.calibration is None else str(result.calibration),
            "orders_used": [asdict(used) for used in result.orders_M],
            "comparison": json_of(compared),
            "differences": differences,
        },
        tables.summary_table(summary, most=WORST),
        None if compared is None else tables.comparison_table(compared),
        None if result.conditions is None else tables.network_line(result.conditions.cluster),
        None if result.calibration is None else f"orders before serving: {result.calibration}",
        *(f"{name}: {used}" for name, used in zip(plan.served_names, result.orders_M, strict=False)),
        served_table(distinct(names), result),
        None if result.trace_from_s is None else f"the trace holds what began after {result.trace_from_s:.0f} s",
        "wrote " + " and ".join(str(path) for path in wrote.values() if path is not None),
        None if differences is None or differences else "verified: same greedy tokens, logits within 1e-4 of the plain model's",
    )


def served_json(name: str, result: RunResult, model: int) -> dict[str, Any]:
    """Returns the requests, tokens and times of a model, given by its name and its number, as JSON."""
    from aurora.reports.trace_tables import percentiles

    answers = result.answers_M[model]
    return {
        "model": name,
        "requests": len(answers.tokens),
        "tokens_per_s": result.tokens_per_second(model),
        "tokens_per_s_with_start": result.tokens_per_second(model, with_start=True),
        "ttft_s": percentiles(answers.ttft_s),
        "tpot_s": percentiles(answers.tpot_s),
    }


def served_table(names: Sequence[str], result: RunResult) -> Table:
    """Returns a table of a run's models: requests with a token, generated tokens per second of serving, TTFT and TPOT.

    Args:
        names: the models' names.
        result: the run's result.
    """
    from aurora.reports.trace_tables import p50_p99

    with_start = ", ".join(f"{result.tokens_per_second(model, with_start=True):.1f}" for model in range(len(names)))
    rows = []
    for model, (name, answers) in enumerate(zip(names, result.answers_M, strict=True)):
        rows.append((name, len(answers.tokens), result.tokens_per_second(model), *p50_p99(answers.ttft_s, answers.tpot_s)))
    columns: Columns = {"model": text, "requests": str, "output\ntokens\n/s": "{:.1f}".format}
    return Table(
        {**columns, **dict.fromkeys(("TTFT\np50", "TTFT\np99", "TPOT\np50", "TPOT\np99"), seconds)},
        rows,
        f"served over {result.transport}",
        f"{with_start} output tokens/s including {result.start_s:.1f} s start-up; TTFT: from a request's arrival to "
        "its first token; TPOT: from one token of an answer to the next; percentiles of requests and of tokens",
    )
