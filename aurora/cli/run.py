"""aurora run: serve prompts under a plan, on real processes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.common import check_output, need, terminal
from aurora.errors import AuroraError, BadInput
from aurora.types import RunOptions

DEFAULTS = RunOptions()


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
    verify: Annotated[bool, typer.Option("--verify", help="compare with the plain model in one process")] = False,
    trace: Annotated[Path | None, typer.Option(help="write the measured trace (npz); default: beside the plan")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the answers (JSON lines)")] = None,
    port: Annotated[int, typer.Option(help="port for the ranks' meeting point; 0 takes a free one")] = DEFAULTS.port,
    timeout: Annotated[
        float, typer.Option(help="seconds that a rank waits for a peer before the run is ended")
    ] = DEFAULTS.timeout_s,
) -> None:
    """Serve prompts with the plan's models on one local process a rank (or as one rank under torchrun), and measure."""
    need("torch", "transformers")
    from aurora.execute.run import run as execute
    from aurora.execute.run import verify as compare
    from aurora.models.loading import load_tokenizer
    from aurora.models.prompts import read_prompts
    from aurora.report.summary import summarise
    from aurora.report.tables import summary_table
    from aurora.store import load_plan, save, write_text

    loaded = load_plan(plan)
    if ranks is not None and ranks != len(loaded.cluster):
        raise BadInput(f"--ranks {ranks}: {plan} is for {len(loaded.cluster)} ranks")
    if len(model) != len(loaded.models):
        raise BadInput(f"{plan}: has {len(loaded.models)} models, expected as many --model, found {len(model)}")
    if len(prompts) not in (1, len(model)):
        raise BadInput(f"run: expected one --prompts file or one for each of {len(model)} models, found {len(prompts)}")
    target = trace or plan.with_suffix(".measured.npz")
    check_output(target, output, inputs=[plan, *prompts])
    options = RunOptions(
        max_new_tokens, batch, transport, timeout, keep_logits=verify, port=port, deduplicate=deduplicate, order=order
    )
    files = prompts * len(model) if len(prompts) == 1 else prompts
    tokenizers = [load_tokenizer(path) for path in model]
    requests = [read_prompts(tokenizer, file) for tokenizer, file in zip(tokenizers, files, strict=True)]

    result = execute(loaded, model, requests, options)
    if result is None:
        return  # under torchrun rank 0 speaks
    save(result.trace, target)
    console = terminal()
    console.print(summary_table(summarise(result.trace, loaded.cluster), bounded=result.transport == "shaped"))
    if result.choice is not None:
        console.print(f"orders: {result.choice}", soft_wrap=True)
    for index, planned in enumerate(loaded.models):
        console.print(
            f"{planned.model}: {len(result.answers_M[index].tokens)} requests, "
            f"{result.tokens_per_second(index):.1f} tokens/s over {result.transport}"
        )
    if output is not None:
        lines = [
            {"model": planned.model, "prompt": index, "text": tokenizer.decode(tokens), "tokens": tokens}
            for planned, answers, tokenizer in zip(loaded.models, result.answers_M, tokenizers, strict=True)
            for index, tokens in sorted(answers.tokens.items())
        ]
        write_text(output, "".join(json.dumps(line) + "\n" for line in lines))
    console.print(f"wrote {target}" + (f" and {output}" if output else ""), soft_wrap=True)
    if verify:
        differences = compare(result, model, requests, options)
        if differences:
            raise AuroraError(f"outputs differ from the plain model's in {len(differences)} places, first: {differences[0]}")
        console.print("verified: same greedy tokens, logits within 1e-4 of the plain model's")
