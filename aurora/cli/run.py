"""aurora run: serve prompts under a plan, on real processes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aurora.cli.common import check_output, need, profiles_of, terminal
from aurora.errors import AuroraError, BadInput, RankFailed
from aurora.types import Plan, RunOptions

if TYPE_CHECKING:
    from aurora.runtime.result import MembershipChange, RunResult
    from aurora.types.arrays import FloatArray

DEFAULTS = RunOptions()


@contextmanager
def sampled(wanted: bool) -> Iterator[list[str]]:
    """After the block, a sentence for each GPU of this machine; none where it is not wanted."""
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


def run(
    plan: Annotated[Path, typer.Argument(help="plan JSON")],
    model: Annotated[list[Path], typer.Option(help="model folder; one for each model of the plan, in its order")],
    prompts: Annotated[
        list[Path], typer.Option(help="a prompt on each line, or .jsonl with a prompt field; one file, or one a model")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate for each prompt")] = DEFAULTS.max_new_tokens,
    ranks: Annotated[int | None, typer.Option(help="must be the plan's number; told for clarity")] = None,
    batch: Annotated[int, typer.Option(help="prompts that a rank decodes together")] = DEFAULTS.batch,
    transport: Annotated[
        str, typer.Option(help="auto, gloo, nccl, shaped: gloo at the cluster file's rates, or memory: threads")
    ] = DEFAULTS.transport,
    deduplicate: Annotated[
        bool | None, typer.Option(help="send a token once to a rank that holds several of its experts; default: as planned")
    ] = DEFAULTS.deduplicate,
    order: Annotated[
        str, typer.Option(help="plan: as planned; auto: the fastest of that, all at once and paced, measured before serving")
    ] = DEFAULTS.order,
    interleave: Annotated[
        str,
        typer.Option(help="several models: on, side by side in turns; off, one after the other; processes: see --colocate"),
    ] = DEFAULTS.interleave,
    colocate: Annotated[
        str | None,
        typer.Option(help="with --interleave processes: take turns with every process here that gives the same name"),
    ] = DEFAULTS.colocate,
    compare: Annotated[
        bool, typer.Option("--compare", help="lay a prediction over the measurement: of the same traffic, simulated")
    ] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="with --compare: whose compute times, one a model; default: what the plan was made from"),
    ] = None,
    predicted: Annotated[Path | None, typer.Option(help="with --compare: this predicted trace (npz) instead")] = None,
    local_first: Annotated[
        bool,
        typer.Option("--local-first", help="replicas share all ranks' tokens, each rank's own first; counts go round twice"),
    ] = DEFAULTS.local_first,
    survive: Annotated[
        bool, typer.Option("--survive", help="go on when ranks are lost: with those left, same answers")
    ] = False,
    respawn: Annotated[
        int, typer.Option(help="with --survive: how many times each lost rank is started anew")
    ] = DEFAULTS.respawn,
    hang: Annotated[
        float, typer.Option(help="with --survive: seconds after which a rank that says nothing is lost")
    ] = DEFAULTS.hang_s,
    verify: Annotated[bool, typer.Option("--verify", help="compare with the plain model in one process")] = False,
    trace: Annotated[Path | None, typer.Option(help="write the measured trace (npz); default: beside the plan")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the answers (JSON lines)")] = None,
    port: Annotated[int, typer.Option(help="port for the ranks' meeting point; 0 takes a free one")] = DEFAULTS.port,
    sample_utilisation: Annotated[
        bool, typer.Option("--sample-utilisation", help="watch by NVML how busy this machine's GPUs are during the run")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="seconds that a rank waits for a peer before the run is ended")
    ] = DEFAULTS.timeout_s,
) -> None:
    """Serve prompts with the plan's models on one local process a rank (or as one rank under torchrun), and measure."""
    need("torch", "transformers")
    from aurora.io import load_plan, load_trace, save, write_text
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.reports.compare import compare as compared
    from aurora.reports.summary import summarise
    from aurora.reports.tables import comparison_table, network_line, summary_table
    from aurora.runtime.run import run as execute
    from aurora.runtime.run import survive as execute_surviving
    from aurora.runtime.run import verify as differing
    from aurora.simulator.interpreter import simulate_plan

    loaded = load_plan(plan)
    if ranks is not None and ranks != len(loaded.cluster):
        raise BadInput(f"--ranks {ranks}: {plan} is for {len(loaded.cluster)} ranks")
    if len(model) != len(loaded.models):
        raise BadInput(f"{plan}: has {len(loaded.models)} models, expected as many --model, found {len(model)}")
    if len(prompts) not in (1, len(model)):
        raise BadInput(f"run: expected one --prompts file or one for each of {len(model)} models, found {len(prompts)}")
    target = trace or plan.with_suffix(".measured.npz")
    beside = target.parent / f"{target.stem}.predicted.npz"
    given = [*(profile or []), *([predicted] if predicted else [])]
    if given and not compare:
        raise BadInput(f"run: {'--profile' if profile else '--predicted'} goes with --compare")
    simulated = compare and predicted is None
    check_output(target, output, *([beside] if simulated else []), inputs=[plan, *prompts, *given])
    options = RunOptions(
        max_new_tokens,
        batch,
        transport,
        timeout,
        keep_logits=verify,
        port=port,
        deduplicate=deduplicate,
        order=order,
        predictable=simulated,
        interleave=interleave,
        colocate=colocate,
        local_first=local_first,
        survive=survive,
        respawn=respawn,
        hang_s=hang,
    )
    expected = load_trace(predicted) if predicted is not None else None
    profiles = profiles_of(loaded, plan, profile) if simulated else []
    if simulated and (order != DEFAULTS.order or deduplicate is not None or interleave == "processes"):
        raise BadInput("run --compare: simulates the plan alone and as planned, expected none of --order auto, --deduplicate, "
                       "--interleave processes")  # fmt: skip
    files = prompts * len(model) if len(prompts) == 1 else prompts
    tokenizers = [load_tokenizer(path) for path in model]
    requests = [read_prompts(tokenizer, file) for tokenizer, file in zip(tokenizers, files, strict=True)]

    with sampled(sample_utilisation) as busy:
        if survive:
            result: RunResult | None = execute_surviving(loaded, model, requests, options, _loads(loaded, plan))
        else:
            result = execute(loaded, model, requests, options)
    if result is None:
        return  # under torchrun rank 0 speaks
    save(result.trace, target)
    console = terminal()
    console.print(summary_table(summarise(result.trace, loaded.cluster), bounded=result.transport == "shaped"))
    if simulated:
        assert result.conditions is not None
        # Of the same traffic on the network as it was measured: an error is the model's own.
        seen = replace(loaded, cluster=result.conditions.cluster)
        expected = simulate_plan(seen, result.conditions.traffic(profiles), interleave=interleave == "on")
        save(expected, beside)
    if expected is not None:
        console.print(comparison_table(compared(expected, result.trace)))
    if result.conditions is not None:
        console.print(network_line(result.conditions.cluster), soft_wrap=True)
    if result.choice is not None:
        console.print(f"orders: {result.choice}", soft_wrap=True)
    for index, planned in enumerate(loaded.models):
        console.print(
            f"{planned.model}: {len(result.answers_M[index].tokens)} requests, "
            f"{result.tokens_per_second(index):.1f} tokens/s over {result.transport}"
        )
    for change in result.changes:
        console.print(_told(change), soft_wrap=True)
    for line in busy:
        console.print(line)
    if output is not None:
        lines = [
            {"model": planned.model, "prompt": index, "text": tokenizer.decode(tokens), "tokens": tokens}
            for planned, answers, tokenizer in zip(loaded.models, result.answers_M, tokenizers, strict=True)
            for index, tokens in sorted(answers.tokens.items())
        ]
        write_text(output, "".join(json.dumps(line) + "\n" for line in lines))
    console.print(f"wrote {target}" + (f" and {output}" if output else ""), soft_wrap=True)
    if result.failure is not None:
        raise RankFailed(f"{result.failure}; what was produced until then is kept")
    if verify:
        differences = differing(result, model, requests, options)
        if differences:
            raise AuroraError(f"outputs differ from the plain model's in {len(differences)} places, first: {differences[0]}")
        console.print("verified: same greedy tokens, logits within 1e-4 of the plain model's")


def _loads(plan: Plan, path: Path) -> "list[FloatArray] | None":
    """(L, E) of each model, the tokens of each expert in the profiles that the plan was made from; None where they are gone."""
    try:
        return [profile.tokens_TLSE.sum(axis=(0, 2)).astype(float) for profile in profiles_of(plan, path, None)]
    except AuroraError:
        return None


def _told(change: "MembershipChange") -> str:
    """A change of membership in a sentence."""
    parts = [f"lost rank {seat} ({how})" for seat, how in sorted(change.lost.items())]
    parts += [f"rank {seat} joined" for seat in change.joined]
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
