"""Serving rank: loads the models and the experts that the plan gives this rank, and serves the requests assigned to it."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from aurora.algorithms.compile import compile_plan
from aurora.errors import BadInput
from aurora.models.decoding import check_padding
from aurora.models.loading import MoeModel, with_same_weights
from aurora.models.own_weights import load_without_experts
from aurora.models.prompts import deal
from aurora.moe.permutation import warm_up
from aurora.moe.transport import Transport, lost_others
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.model_worker import ModelWorker, Request, serve_interleaved
from aurora.runtime.order_calibration import calibrate, measured_network, planned_method
from aurora.runtime.order_choice import OrderChoice
from aurora.runtime.phase_recorder import PhaseRecorder, StreamTimer
from aurora.runtime.port_arbiter import PortArbiter, thread_port_arbiters
from aurora.runtime.process_port_arbiter import ProcessPortArbiter, colocation_folder
from aurora.runtime.push_serving import make_push, push_once
from aurora.runtime.result import MOST_EVENTS, RankResult, merge_answers
from aurora.runtime.transports.nccl import nccl_transport
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.runtime.transports.process_groups import Heartbeats, default_process_group, device_for, new_process_group
from aurora.runtime.transports.shaped import tcp_transports
from aurora.types import Cluster, ModelPlan, Plan, RunOptions, SlicePolicy, TraceRecorder


def load_models(
    plan: Plan, paths: Sequence[str], prompts_M: Sequence[Sequence[list[int]]], options: RunOptions, device: str
) -> list[MoeModel]:
    """Returns the models of a run, loaded without their experts; on GPUs it also loads the kernels of their layers.

    Raises BadInput if the plan was made for another model, or if a model cannot process its prompts.
    """
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    models = [load_without_experts(path, device, dtype) for path in paths]
    for planned, model, prompts in zip(plan.models, models, prompts_M, strict=True):
        model.identity.check_same(planned.identity, f"the plan of {planned.model!r} cannot serve model {model.name!r}")
        _check_prompts(model, prompts, options)
        warm_up(model.layers[0].router_weight.new_zeros(16, model.hidden, dtype=model.hidden_dtype), model.top_k)
    return models


def _check_prompts(model: MoeModel, prompts: Sequence[list[int]], options: RunOptions) -> None:
    """Raises BadInput if a token is outside the model's vocabulary, or prompts cannot be answered or batched."""
    new_tokens = options.max_new_tokens
    if options.batch > 1:
        check_padding(model.model, prompts)
    longest = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if max(prompt) >= model.vocabulary:
            raise BadInput(f"{model.name}, prompt {index}: token {max(prompt)}, its vocabulary has {model.vocabulary}")
        if longest is not None and len(prompt) + new_tokens > longest:
            raise BadInput(f"{model.name}, prompt {index}: {len(prompt)} tokens and {new_tokens} new ones, it takes {longest}")


def serve_rank(
    rank_info: RankInfo,
    plan: Plan,
    model_paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    memories: Sequence[Memory] = (),
    arrivals_M: Sequence[Sequence[float]] = (),
) -> list[RankResult]:
    """Serves, on one rank, its part of the prompts. Arguments that are not listed are as in `aurora.run`.

    Args:
        rank_info: this rank and its peers.
        memories: one Memory per model and micro-batch if ranks are threads of one process; else empty.
        arrivals_M: for each model, the arrival times of its prompts, in seconds from the start of serving; empty: all at 0.

    Returns:
        A list with this rank's result. Under torchrun: the results of all ranks on rank 0, an empty list on the others.
    """
    if options.colocate is not None and rank_info.local_ranks != rank_info.ranks:
        raise BadInput(
            f"`colocate`: shares one machine, expected all of {rank_info.ranks} ranks on it, found {rank_info.local_ranks}"
        )
    if options.transport == "push" and rank_info.local_ranks != rank_info.ranks:
        raise BadInput(f"`transport` push: expected {rank_info.ranks} ranks on this machine, found {rank_info.local_ranks}")
    device = device_for(rank_info, options.transport)
    models = load_models(plan, model_paths, prompts_M, options, device)
    if options.overlap > 1 and device != "cpu":
        raise BadInput(f"`overlap`: runs on CPUs, found {device}; `transport` gloo or shaped takes these")
    program = compile_plan(plan, overlap=options.overlap)
    own_prompts_M = [deal(prompts, rank_info.ranks)[rank_info.rank] for prompts in prompts_M]
    workers_MP = [
        _workers(plan, *args, options, rank_info.rank)
        for args in zip(models, plan.models, prompts_M, own_prompts_M, strict=True)
    ]
    workers = [worker for workers_P in workers_MP for worker in workers_P]
    with nullcontext() if memories else default_process_group(rank_info) as heartbeats:
        if heartbeats is None:
            transports: list[Transport] = [MemoryTransport(memory, rank_info.rank, plan.cluster) for memory in memories]
            name = "memory"
        else:
            transports, name = _transports(program.policies_M, plan.cluster, rank_info, device, options, heartbeats)
        push, name = None, "push" if options.transport == "push" else name
        if options.transport == "push":
            most_tokens = options.batch * max(map(len, prompts_M[0]))
            push = make_push(plan, models[0], most_tokens, options, rank_info, transports[0], device)
            push_once(push, plan.models[0].placement, models[0], workers[0].layers[0].local)
        calibration = None
        if options.order == "auto":
            calibration = calibrate(transports[0], plan.cluster, planned_method(plan), device)
        network = measured_network(transports[0], plan.cluster, device) if options.predictable else None
        most = None if options.predictable else MOST_EVENTS
        recorder = TraceRecorder("measured", program.names_M, rank_info.ranks, most)
        on_gpu = device != "cpu"
        arbiters = _arbiters(transports, program.policies_M, options, on_gpu)
        began_s = _began_s(transports[0], rank_info)
        recorders = [
            PhaseRecorder(
                recorder, rank_info.rank, index, began_s, StreamTimer(began_s) if on_gpu else None, options.predictable
            )
            for index in range(len(workers))
        ]
        choices = [None if calibration is None else OrderChoice(calibration) for _ in workers]
        shared = zip(transports, arbiters, recorders, choices, strict=True)
        contexts = [LayerContext(index, *args) for index, args in enumerate(shared)]
        contexts[0].push = push
        ports = None if options.interleave == "off" else plan.cluster.network
        for worker, context in zip(workers, contexts, strict=True):
            worker.set_program(program, context, ports)
        for index, workers_P in enumerate(workers_MP):
            for worker in workers_P:
                worker.begin(began_s, dict(enumerate(arrivals_M[index])) if arrivals_M else None)
        if options.interleave == "off":
            for worker in workers:
                worker.serve()
        else:
            serve_interleaved(workers, arbiters, device)
        seconds = time.perf_counter() - began_s
        pairs = zip(recorders, workers, strict=True) if options.predictable else ()
        routing_M = [phases.routing(len(worker.layers)) for phases, worker in pairs]
        answers_M = [merge_answers(worker.answers for worker in workers_P) for workers_P in workers_MP]
        orders_M = [choice.used for choice in choices if choice is not None]
        share = RankResult(answers_M, seconds, list(recorder.rows), name, calibration, orders_M, routing_M, network, began_s)
        if rank_info.launched:
            return [share]
        gathered: list[Any] | None = [None] * rank_info.ranks if rank_info.rank == 0 else None
        with lost_others(rank_info.rank):
            dist.gather_object(share, gathered)
        return gathered or []


def _workers(
    plan: Plan,
    model: MoeModel,
    planned: ModelPlan,
    prompts: Sequence[list[int]],
    indices: Sequence[int],
    options: RunOptions,
    rank: int,
) -> list[ModelWorker]:
    """The workers of one model's micro-batches on a rank, with the requests that each serves; they hold its weights once.

    Args:
        own: numbers of the prompts that the rank serves.
    """
    parts = plan.options.micro_batches
    batches = stream_batches(options.batch, parts)
    trees = [model, *(with_same_weights(model) for _ in range(1, parts))]
    workers = [ModelWorker(tree, replace(options, batch=batch)) for tree, batch in zip(trees, batches, strict=True)]
    workers[0].hold(planned.placement, rank)
    dealt = deal_to_streams([len(prompts[i]) + options.max_new_tokens for i in indices], options.batch, parts)
    for worker, stream in zip(workers, dealt, strict=True):
        worker.share_experts(workers[0])
        worker.waiting.extend(Request(indices[at], prompts[indices[at]]) for at in stream)
    return workers


def _began_s(transport: Transport, rank_info: RankInfo) -> float:
    """Returns when the run begins, by this rank's time.perf_counter, which ranks of one machine share."""
    # Transformers changes torch's default dtype while it loads the model of a rank that is another thread.
    transport.gather(torch.zeros(1, dtype=torch.uint8))
    last = transport.gather(torch.tensor([time.perf_counter()], dtype=torch.float64)).max()
    return float(last) if rank_info.local_ranks == rank_info.ranks else time.perf_counter()


def _transports(
    policies_M: Sequence[SlicePolicy],
    cluster: Cluster,
    rank_info: RankInfo,
    device: str,
    options: RunOptions,
    heartbeats: Heartbeats,
) -> tuple[list[Transport], str]:
    """Returns a transport per model and micro-batch, and the transports' name."""
    if device == "cpu":
        groups = [new_process_group("gloo", options.timeout_s, urgent=policy.interactive) for policy in policies_M]
        shaped = options.transport == "shaped"
        return tcp_transports(groups, cluster, rank_info.rank, shaped, heartbeats), "shaped" if shaped else "gloo"
    return [nccl_transport(device, options.timeout_s, heartbeats) for _ in policies_M], "nccl"


def submitted_work() -> torch.cuda.Event:
    """Returns a CUDA event recorded behind all work that this thread has submitted to its current stream."""
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event


def _arbiters(
    transports: Sequence[Transport], policies_M: Sequence[SlicePolicy], options: RunOptions, on_gpu: bool
) -> list[PortArbiter]:
    """Returns one port arbiter per model. Models that do not interleave share nothing."""
    if options.interleave == "on":
        return thread_port_arbiters(policies_M, submitted_work) if on_gpu else thread_port_arbiters(policies_M)
    if options.colocate is None:
        return [arbiter for _ in transports for arbiter in thread_port_arbiters(1)]
    arbiters: list[PortArbiter] = []
    for transport, policy in zip(transports, policies_M, strict=True):
        # Rank 0 takes a slot, and no rank begins before all have theirs.
        rank, folder = transport.rank, colocation_folder(options.colocate)
        finish = torch.cuda.synchronize if on_gpu else lambda: None
        first = ProcessPortArbiter(folder, 0, None, finish, policy=policy) if rank == 0 else None
        slot = int(transport.gather(torch.tensor([-1 if first is None else first.slot]))[0])
        arbiters.append(first or ProcessPortArbiter(folder, rank, slot, finish, policy=policy))
    transports[0].gather(torch.zeros(1))
    return arbiters


def stream_batches(batch: int, streams: int) -> list[int]:
    """Returns the number of requests of each stream when a rank's batch of `batch` requests is split over `streams` streams."""
    return [batch // streams + (stream < batch % streams) for stream in range(streams)]


def deal_to_streams(tokens: Sequence[int], batch: int, streams: int) -> list[list[int]]:
    """Assigns requests to streams that are served in parallel, so that their batches have about equally many tokens.

    Consecutive requests form groups of `batch`. Within a group, longest first, each request goes to the stream that has the
    fewest tokens of the group so far, among streams with room (`stream_batches`). So every stream gets a part of each batch.

    Args:
        tokens: number of tokens of each request, prompt plus answer.
        batch: number of requests that the rank decodes at the same time.
        streams: number of streams, at most `batch`.

    Returns:
        For each stream, the indices into `tokens` of its requests, in serving sequence.
    """
    dealt: list[list[int]] = [[] for _ in range(streams)]
    for first in range(0, len(tokens), batch):
        free, sums = stream_batches(batch, streams), [0] * streams
        together = range(first, min(first + batch, len(tokens)))
        for request in sorted(together, key=lambda index: -tokens[index]):
            stream = min((index for index in range(streams) if free[index]), key=sums.__getitem__)
            dealt[stream].append(request)
            free[stream] -= 1
            sums[stream] += tokens[request]
    return dealt
