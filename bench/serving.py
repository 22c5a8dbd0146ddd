"""Ranks of benches in a network namespace, with experts that take as long as is said; and what plans know."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from net import enter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from aurora.models.loading import load_model
from aurora.profiler.profile_model import route_round
from aurora.runtime import serving_rank as serve
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.result import RankResult
from aurora.runtime.transports.process_groups import Heartbeats
from aurora.types import Curve, Plan, Profile

TOKEN_S = 200e-6
COMPUTE = {kind: kind.forward for kind in (MixtralExperts, Qwen3MoeExperts)}  # as it is before anything waits


def served_on_hosts(
    rank_info: RankInfo,
    hosts: Sequence[str],
    meeting: str,
    plan: Plan,
    *args: Any,
    token_s: float = TOKEN_S,
    weights_s: float = 0.0,
    computes: bool = True,
) -> list[RankResult]:
    """In the rank's namespace, with experts that take as long as a GPU's stand-in would: token_s a row at the speed 1, and
    weights_s for each expert that has rows.

    Where they do not compute but only wait, they answer zeros, and take no time of the cores.
    """
    row_s = token_s / plan.cluster.gpus[rank_info.rank].speed
    enter(hosts[rank_info.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    @contextmanager
    def joined(_: RankInfo) -> Iterator[Heartbeats]:
        store = dist.FileStore(meeting, rank_info.ranks)
        dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.ranks)
        heartbeats = Heartbeats(store, rank_info.rank, rank_info.ranks)
        try:
            yield heartbeats
        finally:
            heartbeats.stop()
            dist.destroy_process_group()

    def timed(compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def waits(experts: Any, rows: Any, index: Any, weights: Any) -> Any:
            until = time.perf_counter() + row_s * len(rows) + weights_s * len(index.unique() if weights_s else ())
            done = compute(experts, rows, index, weights) if computes else torch.zeros_like(rows)
            time.sleep(max(0.0, until - time.perf_counter()))
            return done

        return waits

    for kind, compute in COMPUTE.items():
        kind.forward = timed(compute)
    serve.default_process_group = joined
    return serve.serve_rank(rank_info, plan, *args)


def served_jobs(
    rank_info: RankInfo, hosts: Sequence[str], folder: str, jobs: Sequence[tuple[Any, ...]], token_s: float
) -> list[list[RankResult]]:
    """Runs one after the other in one process, each with the arguments of `served_on_hosts` from the plan on."""
    return [served_on_hosts(rank_info, hosts, f"{folder}/{n}", *job, token_s=token_s) for n, job in enumerate(jobs)]


def served_by_model(rank_info: RankInfo, of_model: Mapping[str, Mapping[str, Any]], *args: Any, **how: Any) -> list[RankResult]:
    """As `served_on_hosts`, where each model has some RunOptions of its own, such as its batch."""
    made = serve._workers

    def workers(plan: Plan, model: Any, planned: Any, prompts: Any, own: Any, options: Any, rank: int) -> Any:
        return made(plan, model, planned, prompts, own, replace(options, **of_model[planned.model]), rank)

    serve._workers = workers
    return served_on_hosts(rank_info, *args, **how)


def waiting_profile(model: Path, prompts: list[list[int]], new_tokens: int, ranks: int, token_s: float) -> Profile:
    """Of prompts and what a model answers to them, on each rank alike; experts take token_s a row, all else nearly nothing."""
    moe = load_model(model)
    counts_LE = sum(one.counts_LE for one in route_round(moe, [prompts], new_tokens, keep=False))
    tokens_TLSE = np.repeat(counts_LE[None, :, None], ranks, axis=2)
    rest = Curve(np.array([1.0]), np.array([1e-6]))
    curves = {"gate": rest, "expert": Curve(np.array([0.0, 1.0]), np.array([0.0, token_s])), "aggregate": rest}
    sizes = moe.top_k, moe.row_bytes, moe.row_bytes, moe.expert_bytes, 0
    return Profile(moe.name, moe.fingerprint(), tokens_TLSE, *sizes, {"cpu": curves})
