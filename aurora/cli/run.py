"""aurora run: serve prompts with a plan, on real processes."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import INSTEAD, check_model, check_output, micro_batch_count, need, profiles_of
from aurora.cli.run_result import show_result, write_answers
from aurora.cli.subcommand import WORST, Json, Layers, Priorities, chosen, option, refuse_given, show
from aurora.errors import AuroraError, BadInput, RankFailed
from aurora.types import ControlOptions, Plan, PlanOptions, Profile, RunOptions, Trace

if TYPE_CHECKING:
    from aurora.runtime.result import RunResult

DEFAULTS = RunOptions()
CONTROL = ControlOptions()
RANKS, PORTS, COMPARE, SURVIVE = "Ranks and transport", "Orders and time slices", "Prediction and checks", "Lost ranks"
HOSTS, ADAPT = "Several hosts", "Traffic that changes"
CONTROLLED = ("loss", "bytes_per_s", "period_s")  # options that go with --adapt
JOINING = {"plan", "model", "survive", "join", "node", "timeout_s", "as_json"}  # all that goes with --join


def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    model: Annotated[
        list[Path],
        typer.Option(help="model folder, or name in the local hub cache; one for each model of the plan, in its order"),
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="prompts by line, or .jsonl with prompt and, if later, at_s; one file, or one per model; not with --join"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the answers (JSON lines)")] = None,
    trace: Annotated[Path | None, typer.Option(help="the measured trace to write (npz); default: beside the plan")] = None,
    max_new_tokens: Annotated[int, option(RunOptions, "max_new_tokens")] = DEFAULTS.max_new_tokens,
    batch: Annotated[int, option(RunOptions, "batch")] = DEFAULTS.batch,
    ranks: Annotated[int | None, typer.Option(help="checked against the plan's number of ranks", rich_help_panel=RANKS)] = None,
    transport: Annotated[
        str, option(RunOptions, "transport", more=" ({transport})", panel=RANKS, choices=["transport"])
    ] = DEFAULTS.transport,
    dtype: Annotated[str, option(RunOptions, "dtype", more=" ({dtype})", panel=RANKS, choices=["dtype"])] = DEFAULTS.dtype,
    port: Annotated[int, option(RunOptions, "port", panel=RANKS)] = DEFAULTS.port,
    timeout_s: Annotated[float, option(RunOptions, "timeout_s", "--timeout", panel=RANKS)] = DEFAULTS.timeout_s,
    order: Annotated[str, option(RunOptions, "order", panel=PORTS, choices=["run_order"])] = DEFAULTS.order,
    deduplicate: Annotated[bool | None, option(RunOptions, "deduplicate", panel=PORTS)] = DEFAULTS.deduplicate,
    local_first: Annotated[bool, option(RunOptions, "local_first", "--local-first", panel=PORTS)] = DEFAULTS.local_first,
    interleave: Annotated[
        str, option(RunOptions, "interleave", more=" ({interleave})", panel=PORTS, choices=["interleave"])
    ] = DEFAULTS.interleave,
    priorities: Priorities = None,
    colocate: Annotated[str | None, option(RunOptions, "colocate", panel=PORTS)] = DEFAULTS.colocate,
    micro_batches: Annotated[
        str | None, option(PlanOptions, "micro_batches", more=INSTEAD, panel=PORTS, choices=["micro_batches"])
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="compare with the plain model in one process", rich_help_panel=COMPARE)
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="compare each phase with a simulation of the same traffic", rich_help_panel=COMPARE),
    ] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="with --compare: compute times, one per model; default: the profiles that the plan was made from",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    predicted: Annotated[
        Path | None,
        typer.Option(help="with --compare: compare with this predicted trace (npz) instead", rich_help_panel=COMPARE),
    ] = None,
    sample_utilisation: Annotated[
        bool,
        typer.Option(
            "--sample-utilisation", help="read the utilisation of this machine's GPUs from NVML", rich_help_panel=COMPARE
        ),
    ] = False,
    survive: Annotated[bool, option(RunOptions, "survive", "--survive", panel=SURVIVE)] = DEFAULTS.survive,
    respawn: Annotated[int, option(RunOptions, "respawn", panel=SURVIVE)] = DEFAULTS.respawn,
    hang_s: Annotated[float, option(RunOptions, "hang_s", "--hang", panel=SURVIVE)] = DEFAULTS.hang_s,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="go on from the journal of an interrupted run with --survive", rich_help_panel=SURVIVE),
    ] = False,
    lead: Annotated[str | None, option(RunOptions, "lead", panel=HOSTS)] = DEFAULTS.lead,
    join: Annotated[str | None, option(RunOptions, "join", panel=HOSTS)] = DEFAULTS.join,
    node: Annotated[int | None, option(RunOptions, "node", panel=HOSTS)] = DEFAULTS.node,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="move experts to follow the traffic while serving", rich_help_panel=ADAPT)
    ] = False,
    loss: Annotated[float, option(ControlOptions, "loss", panel=ADAPT)] = CONTROL.loss,
    bytes_per_s: Annotated[float | None, option(ControlOptions, "bytes_per_s", panel=ADAPT)] = CONTROL.bytes_per_s,
    period_s: Annotated[float, option(ControlOptions, "period_s", panel=ADAPT)] = CONTROL.period_s,
    dry_run: Annotated[bool, option(RunOptions, "dry_run", "--dry-run", panel=ADAPT)] = DEFAULTS.dry_run,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Serve prompts with the plan's models, one local process per rank (under torchrun this is one rank), and measure."""
    if join is not None:
        _join(context, plan, model, as_json)
        return
    if not prompts:
        raise BadInput("`prompts`: expected a file, found none")
    from aurora.io import load_plan, load_trace, save
    from aurora.io.journals import load_journal
    from aurora.io.prompts import load_arriving
    from aurora.planner.resolve_options import with_priorities
    from aurora.planner.simulated_choice import with_preemption

    loaded = with_priorities(load_plan(plan), priorities or (), shared=colocate is not None)
    if priorities and (known := _profiles_left(loaded, plan)):
        loaded = with_preemption(loaded, known)
    if micro_batches is not None:
        loaded = _with_micro_batches(loaded, plan, profile, micro_batch_count(micro_batches))
    _check_counts(loaded, plan, model, prompts, ranks)
    if not adapt:
        refuse_given(context, CONTROLLED, "with `adapt`")
    if not survive:
        refuse_given(context, ("hang_s",), "with `survive`")
    given, simulated = [*(profile or []), *([predicted] if predicted else [])], compare and predicted is None
    if given and not compare:
        raise BadInput(f"run: {'--profile' if profile else '--predicted'} goes with --compare")
    if simulated and (order != DEFAULTS.order or deduplicate is not None or interleave == "processes"):
        raise BadInput("run --compare: simulates the plan alone and as planned, expected none of --order auto, --deduplicate, --interleave processes")  # fmt: skip # noqa: E501
    check_output(trace=trace, output=output)
    target = trace or plan.with_suffix(".measured.npz")
    beside = target.with_name(f"{target.stem}.predicted.npz")
    journal = output.with_suffix(".journal.jsonl") if survive and output is not None else None
    if resume and journal is None:
        raise BadInput("`resume`: goes on from a run with `survive` and `output`, expected both")
    check_output(trace=target, output=output, predicted_trace=beside if simulated else None, journal=journal)
    control = chosen(ControlOptions, context) if adapt else None
    options = chosen(RunOptions, context, keep_logits=verify, predictable=simulated, adapt=control)
    expected = load_trace(predicted) if predicted is not None else None
    profiles = profiles_of(loaded, plan, profile) if simulated else _profiles_left(loaded, plan) if survive or adapt else []
    files = prompts * len(model) if len(prompts) == 1 else prompts
    arrivals = [[at_s for _, at_s in load_arriving(file)] for file in files]
    arrivals = arrivals if any(map(any, arrivals)) else []
    for path in model:
        check_model(path)
    need("torch", "transformers")
    from aurora import api
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.runtime.placement_control import log_decisions
    from aurora.runtime.result import journalled_answers
    from aurora.runtime.run import verify as differing

    if adapt:
        log_decisions()
    tokenizers = [load_tokenizer(path) for path in model]
    requests = [read_prompts(tokenizer, file) for tokenizer, file in zip(tokenizers, files, strict=True)]
    try:
        with sampled(sample_utilisation) as busy, _terminable():
            result = api.run(
                loaded, model, requests, options, profiles=profiles, journal=journal, resume=resume, arrivals=arrivals
            )
    except KeyboardInterrupt:
        if output is None or journal is None or not journal.exists():
            raise
        answers_M = journalled_answers(load_journal(journal), len(model))
        write_answers(output, loaded, answers_M, tokenizers)
        counts = f"{sum(len(answers.finished) for answers in answers_M)} of {sum(map(len, requests))}"
        print(f"aurora: {counts} answers are finished; --resume goes on from {journal}", file=sys.stderr)
        raise typer.Exit(130) from None
    if result is None:
        return  # under torchrun rank 0 speaks
    if output is not None:
        write_answers(output, loaded, result.answers_M, tokenizers)
    if journal is not None and result.failure is None:
        journal.unlink(missing_ok=True)
    save(result.trace, target)
    if simulated:
        expected = _predicted(loaded, result, profiles, interleave)
        save(expected, beside)
    differences = differing(result, model, requests, options) if verify and result.failure is None else None
    wrote = {"trace": target, "answers": output}
    show_result(as_json, loaded, result, expected, busy, differences, wrote, None if layers else WORST)
    if result.failure is not None:
        kept = "what was produced until then is kept" if journal is None else f"--resume goes on from {journal}"
        raise RankFailed(f"{result.failure}; {kept}")
    if differences:
        raise AuroraError(f"outputs differ from the plain model's in {len(differences)} places, first: {differences[0]}")


def _join(context: typer.Context, path: Path, models: list[Path], as_json: bool) -> None:
    """Runs this host's ranks in a run that another host leads."""
    from aurora.io import load_plan

    refuse_given(context, sorted(context.params.keys() - JOINING), "none with `join`: the leader says it")
    options, plan = chosen(RunOptions, context, adapt=None), load_plan(path)
    _check_models(plan, path, models)
    for model in models:
        check_model(model)
    need("torch", "transformers")
    from aurora import api

    logging.basicConfig(format="aurora: %(message)s", level=logging.INFO)
    with _terminable():
        api.run(plan, models, [], options)
    show(as_json, {"leader": options.join, "node": options.node}, f"the run that {options.join} leads is complete")


def _check_counts(plan: Plan, path: Path, models: list[Path], prompts: list[Path], ranks: int | None) -> None:
    if ranks is not None and ranks != len(plan.cluster):
        raise BadInput(f"--ranks {ranks}: {path} is for {len(plan.cluster)} ranks")
    _check_models(plan, path, models)
    if len(prompts) not in (1, len(models)):
        raise BadInput(f"run: expected one --prompts file or one for each of {len(models)} models, found {len(prompts)}")


def _check_models(plan: Plan, path: Path, models: list[Path]) -> None:
    if len(models) != len(plan.models):
        raise BadInput(f"{path}: has {len(plan.models)} models, expected as many --model, found {len(models)}")


def _profiles_left(plan: Plan, path: Path) -> list[Profile]:
    """Returns the profiles that the plan was made from; none if they are gone or have changed."""
    try:
        return profiles_of(plan, path, None)
    except AuroraError:
        return []


def _with_micro_batches(plan: Plan, path: Path, given: list[Path] | None, parts: int) -> Plan:
    """The plan with as many micro-batches; without the profiles that it was made from its time slice is not chosen anew."""
    from aurora.planner.simulated_choice import RUNTIME_LAYER_S, with_micro_batches

    profiles = profiles_of(plan, path, given) if given or not parts else _profiles_left(plan, path)
    return with_micro_batches(plan, profiles, parts, RUNTIME_LAYER_S) if profiles else plan.with_micro_batches(parts)


def _predicted(plan: Plan, result: RunResult, profiles: Sequence[Profile], interleave: str) -> Trace:
    """Simulate the run's own traffic on the network measured just before it, so that only the simulator's error is left."""
    from aurora import api

    assert result.conditions is not None
    seen = replace(plan, cluster=result.conditions.cluster)
    return api.simulate(seen, result.conditions.traffic(profiles), interleave=interleave, staged=result.transport == "nccl")


@contextmanager
def _terminable() -> Iterator[None]:
    """Context manager in which SIGTERM is as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sampled(wanted: bool) -> Iterator[list[str]]:
    """Context manager that yields a list; after the block it holds a sentence per GPU of this machine, none unless `wanted`."""
    said: list[str] = []
    if not wanted:
        yield said
        return
    from aurora.profiler.devices import UtilizationSampler, inventory, open_nvml

    with open_nvml() as nvml:
        kinds = [device.kind for device in inventory(nvml).devices]
        with UtilizationSampler(nvml) as sampler:
            yield said
        for index, kind in enumerate(kinds):
            busy_X, memory_X = sampler.busy_XG[:, index], sampler.memory_XG[:, index]
            said.append(
                f"GPU {index} ({kind}): busy {busy_X.mean():.0%} of the run, {busy_X.max():.0%} at most, "
                f"{memory_X.max() / 1e9:.1f} GB in use at most"
            )
