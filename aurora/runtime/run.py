"""Runs a plan: serves prompts on local ranks, or as one rank under torchrun."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from aurora.algorithms.check.fit import check_overlap
from aurora.algorithms.check.plans import check_plan
from aurora.errors import BadInput
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.runtime.distributed.launcher import launch, launch_threads
from aurora.runtime.result import RunResult, merge_results
from aurora.runtime.serving_rank import serve_rank
from aurora.runtime.transports.ordered import Memory
from aurora.runtime.transports.process_groups import rank_info_from_environment
from aurora.types import Plan, RunOptions
from aurora.types.arrays import FloatArray
from aurora.types.options import LONGEST_S

LOGIT_TOLERANCE = 1e-4  # of float32
ROUNDINGS = 16  # of a logit in a narrower dtype, each up to the dtype's precision of the largest logit


def run(
    plan: Plan,
    models: Sequence[str | Path],
    prompts: Sequence[Sequence[list[int]]],
    options: RunOptions = RunOptions(),
    *,
    arrivals: Sequence[Sequence[float]] = (),
) -> RunResult | None:
    """Serves prompts under a plan on real ranks, and returns the answers and the measured trace.

    It starts one local process per rank (one thread with the memory transport); under torchrun, this process is one rank.

    Args:
        plan: the plan, which sets the number of ranks.
        models: folders of the plan's models, in the plan's sequence.
        prompts: for each model its prompts, each a list of token ids.
        options: options of the run, such as number of new tokens, transport and interleaving.
        arrivals: for each model, the arrival times of its prompts, in seconds from the start of serving; empty: all arrive at
            the start. A model without requests uses neither GPUs nor ports.

    Returns:
        Answers, seconds and measured Trace. None under torchrun on ranks other than 0.

    Raises:
        BadInput: if plan, models, prompts and ranks do not fit each other.
        RankFailed: if a rank is lost.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> mixtral = shipped("models/mixtral-topics")
        >>> traffic = aurora.synthetic_profile("zipf:1", mixtral / "config.json", aurora.SyntheticOptions(sources=2))
        >>> gpus = tuple(aurora.Gpu(f"gpu-{rank}", "cpu", 0, 1e9, 1e9, 10**9) for rank in range(2))
        >>> plan = aurora.plan(aurora.Cluster("mine", gpus), traffic)
        >>> options = aurora.RunOptions(max_new_tokens=2, transport="memory")
        >>> result = aurora.run(plan, [mixtral], [[[76, 107, 104, 35]]], options)
        >>> len(result.answers_M[0].tokens[0])
        2
    """
    asked_s = time.perf_counter()
    check_run(plan, models, prompts, options)
    check_arrivals(prompts, arrivals)
    args = (plan, [str(model) for model in models], prompts, options)
    ranks, rank_info = len(plan.cluster), rank_info_from_environment(options.timeout_s)
    if options.transport == "memory":
        memories = [Memory(ranks, options.timeout_s) for _ in plan.served_names]
        results_R = launch_threads(serve_rank, ranks, *args, memories, arrivals, timeout_s=options.timeout_s)
    elif rank_info is None:
        results_R = launch(serve_rank, ranks, *args, (), arrivals, timeout_s=options.timeout_s)
    elif rank_info.ranks == ranks:
        results_R = [serve_rank(rank_info, *args, arrivals_M=arrivals)]
    else:
        raise BadInput(f"run: the plan is for {ranks} ranks, WORLD_SIZE is {rank_info.ranks}")
    if not (results := [result for of_rank in results_R for result in of_rank]):
        return None
    return replace(merge_results(results, plan.served_names), start_s=results[0].began_s - asked_s)


def check_run(plan: Plan, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions) -> None:
    """Raises BadInput unless plan, models, prompts and options fit each other."""
    if len(models) != len(plan.models) or len(prompts) != len(plan.models):
        raise BadInput(f"run: the plan has {len(plan.models)} models, found {len(models)} and {len(prompts)} lists of prompts")
    check_plan(plan)
    check_overlap(plan, options.overlap)
    _check_micro_batches(plan, prompts[0], options)
    if options.deduplicate is False and any(model.hierarchy is not None for model in plan.models):
        raise BadInput(
            "`deduplicate`: expected tokens to travel once to a server, because the plan's all-to-alls are hierarchical"
        )
    if options.transport == "shaped" and plan.cluster.servers is not None:
        raise BadInput("`transport` shaped: holds ports to their rates, but not the NICs of the plan's servers")
    if options.transport == "push" and (
        len(plan.models) > 1 or plan.options.micro_batches > 1 or plan.models[0].hierarchy is not None
    ):
        raise BadInput("`transport` push: expected a plan of one model, without micro-batches, whose all-to-alls are flat")
    for name, requests in zip(models, prompts, strict=True):
        if not requests or not all(requests):
            raise BadInput(f"run: expected at least one prompt for {name}, and no empty one")
        if any(not isinstance(token, int) or token < 0 for prompt in requests for token in prompt):
            raise BadInput(f"run: expected prompts for {name} as lists of token ids")


def _check_micro_batches(plan: Plan, prompts: Sequence[list[int]], options: RunOptions) -> None:
    if (parts := plan.options.micro_batches) < 2:
        return
    if options.batch < parts:
        raise BadInput(f"`batch`: expected a prompt for each of {parts} micro-batches at least, found {options.batch}")
    most = -(-len(prompts) // len(plan.cluster))
    if options.predictable and most < parts:
        raise BadInput(f"`compare`: expected {parts} prompts on a rank, one for each micro-batch, found {most}")


def check_arrivals(prompts: Sequence[Sequence[list[int]]], arrivals: Sequence[Sequence[float]]) -> None:
    """Raises BadInput unless every prompt has a valid time of arrival, or `arrivals` is empty."""
    if not arrivals:
        return
    if list(map(len, arrivals)) != list(map(len, prompts)):
        raise BadInput(f"`arrivals`: expected a time for each prompt, found {list(map(len, arrivals))}")
    if wrong := [at_s for times_s in arrivals for at_s in times_s if not 0 <= at_s <= LONGEST_S]:
        raise BadInput(f"`arrivals`: expected from 0 to {LONGEST_S:g} seconds, found {wrong[0]}")


def verify(
    result: RunResult, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions
) -> list[str]:
    """Compares a run's answers with greedy decoding by the unmodified models, in this process.

    Returns:
        One sentence per wrong answer; empty if all answers agree. Answers agree if their tokens are equal and their logits, if
        kept, differ by at most LOGIT_TOLERANCE (below float32: ROUNDINGS roundings). If logits were kept, different tokens also
        agree if their logits are at most twice that apart; the rest of such an answer is not compared.
    """
    differences = []
    for answers, path, requests in zip(result.answers_M, models, prompts, strict=True):
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        on_gpu = result.transport == "nccl" or (result.transport == "push" and torch.cuda.is_available())
        plain = load_model(path, "cuda:0" if on_gpu else "cpu", dtype)
        eos = plain.tokenizer.eos_token_id
        for index, prompt in enumerate(requests):
            if index not in answers.tokens:
                differences.append(f"{plain.name}, prompt {index}: no answer")
                continue
            tokens, logits = greedy_decode(plain.model, prompt, options.max_new_tokens, eos)
            expected_TV = logits.double().cpu().numpy()
            wrong = _difference(answers.tokens[index], answers.logits.get(index), tokens, expected_TV, plain.hidden_dtype)
            if wrong is not None:
                differences.append(f"{plain.name}, prompt {index}: {wrong}")
    return differences


def _difference(
    answer: Sequence[int], answer_TV: FloatArray | None, tokens: Sequence[int], expected_TV: FloatArray, dtype: torch.dtype
) -> str | None:
    """Returns in words how an answer differs from the plain model's, or None."""
    tolerance = LOGIT_TOLERANCE
    if dtype != torch.float32:
        tolerance = ROUNDINGS * torch.finfo(dtype).eps * float(np.abs(expected_TV).max())
    first = next((at for at, (ours, theirs) in enumerate(zip(answer, tokens, strict=False)) if ours != theirs), None)
    alike = first is not None and expected_TV[first, tokens[first]] - expected_TV[first, answer[first]] <= 2 * tolerance
    if list(answer) != list(tokens) and not (alike and answer_TV is not None):
        return f"tokens {answer}, expected {tokens}"
    if answer_TV is None:
        return None
    compared = slice(None if first is None else first + 1)
    apart = float(np.abs(answer_TV[compared] - expected_TV[compared]).max())
    return None if apart <= tolerance else f"logits {apart:.2e} apart"
