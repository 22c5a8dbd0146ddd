"""`aurora.run`: serve prompts with one or two MoE models under a plan, on local ranks or as one rank under torchrun."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aurora.errors import BadInput
from aurora.execute.serve import RunResult, serve_rank
from aurora.models.decoding import decode_alone
from aurora.models.loading import load_model
from aurora.plan.check import check_plan
from aurora.ranks.group import seat_from_environment
from aurora.ranks.launcher import launch
from aurora.types import Plan, RunOptions

LOGIT_TOLERANCE = 1e-4


def run(
    plan: Plan,
    models: Sequence[str | Path],
    prompts: Sequence[Sequence[list[int]]],
    options: RunOptions = RunOptions(),
) -> RunResult | None:
    """Serve prompts[m] (token ids) with models[m], the plan's m-th, and give the answers and a measured Trace.

    Starts one local process a planned rank; under torchrun's environment variables this process is one rank, and only rank 0
    gets a result. Raises BadInput when plan, models and ranks do not fit, RankFailed when a rank is lost.
    """
    if len(models) != len(plan.models) or len(prompts) != len(plan.models):
        raise BadInput(f"run: the plan has {len(plan.models)} models, found {len(models)} and {len(prompts)} lists of prompts")
    check_plan(plan)
    if any(model.placement.split_LG is not None for model in plan.models):
        raise BadInput("run: expected a plan that holds every expert once, found replicas, which no rank serves yet")
    if options.transport == "shaped" and plan.cluster.fabric is not None:
        raise BadInput("--transport shaped: holds ports to their rates, but not the links of the plan's fabric")
    for name, requests in zip(models, prompts, strict=True):
        if not requests or not all(requests):
            raise BadInput(f"run: expected at least one prompt for {name}, and no empty one")
        if any(not isinstance(token, int) or token < 0 for prompt in requests for token in prompt):
            raise BadInput(f"run: expected prompts for {name} as lists of token ids")
    paths = [str(model) for model in models]
    seat = seat_from_environment(options.timeout_s)
    if seat is not None:
        if seat.ranks != len(plan.cluster):
            raise BadInput(f"run: the plan is for {len(plan.cluster)} ranks, WORLD_SIZE is {seat.ranks}")
        return serve_rank(seat, plan, paths, prompts, options)
    results = launch(
        serve_rank, len(plan.cluster), plan, paths, prompts, options, timeout_s=options.timeout_s, port=options.port
    )
    assert isinstance(results[0], RunResult)
    return results[0]


def verify(
    result: RunResult, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions
) -> list[str]:
    """Decode every prompt with the plain model in this process; gives a sentence for each difference, none when equal.

    Equal: the same greedy tokens, and every logit within LOGIT_TOLERANCE.
    """
    differences = []
    for answers, path, requests in zip(result.answers_M, models, prompts, strict=True):
        plain = load_model(path, "cuda:0" if result.transport == "nccl" else "cpu")
        eos = plain.tokenizer.eos_token_id
        for index, prompt in enumerate(requests):
            tokens, logits = decode_alone(plain.model, prompt, options.max_new_tokens, eos)
            if answers.tokens[index] != tokens:
                differences.append(f"{plain.name}, prompt {index}: tokens {answers.tokens[index]}, expected {tokens}")
            elif index in answers.logits:
                apart = float(np.abs(answers.logits[index] - logits.double().cpu().numpy()).max())
                if not apart <= LOGIT_TOLERANCE:
                    differences.append(f"{plain.name}, prompt {index}: logits {apart:.2e} apart")
    return differences
