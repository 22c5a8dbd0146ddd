"""One rank of a run: load the models, hold the planned experts, serve the requests that were dealt to this rank."""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import deal
from aurora.planner.compile import compile_plan
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.distributed.memory import Memory, MemoryTransport
from aurora.runtime.distributed.nccl import NcclTransport
from aurora.runtime.distributed.process_groups import default_process_group, device_of, new_process_group
from aurora.runtime.distributed.shaped import Port, ShapedTransport
from aurora.runtime.distributed.transport import Transport, lost_peer
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.model_worker import ModelWorker, Request, side_by_side
from aurora.runtime.network_measurement import measured_network
from aurora.runtime.order_calibration import calibrate, planned_method
from aurora.runtime.port_arbiter import PortArbiter, in_threads
from aurora.runtime.process_port_arbiter import ProcessPortArbiter, folder_of
from aurora.runtime.result import RankResult
from aurora.types import Plan, RunOptions, TraceRecorder
from aurora.types.profile import same_model

LOADING = threading.Lock()  # transformers loads one model at a time in a process


def check_model(plan: Plan, index: int, model: MoeModel) -> None:
    """BadInput unless `model` is what the plan's model `index` was planned for."""
    planned = plan.models[index]
    expected = (len(planned.dispatch_L), planned.placement.experts)
    found = (len(model.layers), model.experts)
    if found != expected or not same_model(model.fingerprint(), planned.fingerprint):
        raise BadInput(
            f"model {model.name!r}: the plan was made for {planned.model!r} with {expected[0]} MoE layers of {expected[1]} "
            f"experts, found {found[0]} layers of {found[1]}" + (" and other router weights" if found == expected else "")
        )


def check_prompts(model: MoeModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """BadInput for a token that the model does not know, or a prompt with no room for its answer."""
    config = model.model.config
    for index, prompt in enumerate(prompts):
        if max(prompt) >= config.vocab_size:
            raise BadInput(f"{model.name}, prompt {index}: token {max(prompt)}, its vocabulary has {config.vocab_size}")
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and len(prompt) + new_tokens > longest:
            raise BadInput(f"{model.name}, prompt {index}: {len(prompt)} tokens and {new_tokens} new ones, it takes {longest}")


def serve_rank(
    seat: RankInfo,
    plan: Plan,
    model_paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    memories: Sequence[Memory] = (),
) -> list[RankResult]:
    """Serve as one rank; gives its share, or under torchrun everybody's on rank 0 and none on the others.

    memories: one a model, where ranks are threads. Raises BadInput before, RankFailed after the run has begun.
    """
    if options.colocate is not None and seat.local_ranks != seat.ranks:
        raise BadInput(f"`colocate`: shares one machine, expected all of {seat.ranks} ranks on it, found {seat.local_ranks}")
    device = device_of(seat) if options.transport in ("auto", "nccl") else "cpu"
    if options.transport == "nccl" and device == "cpu":
        raise BadInput(f"`transport` nccl: expected a CUDA device for each of {seat.ranks} ranks, found too few")
    if device != "cpu":
        torch.cuda.set_device(device)
    with LOADING:
        models = [load_model(path, device) for path in model_paths]
    for index, (model, prompts) in enumerate(zip(models, prompts_M, strict=True)):
        check_model(plan, index, model)
        check_prompts(model, prompts, options.max_new_tokens)
    with nullcontext() if memories else default_process_group(seat):
        if memories:
            transports: list[Transport] = [MemoryTransport(memory, seat.rank, plan.cluster) for memory in memories]
            name = "memory"
        else:
            transports, name = _transports(plan, len(models), seat, device, options)
        choice = None
        if options.order == "auto" and name != "nccl":  # which posts everything at once whatever the order
            choice = calibrate(transports[0], plan.cluster, planned_method(plan))
        network = measured_network(transports[0], plan.cluster, device) if options.predictable else None
        program = compile_plan(plan)
        recorder = TraceRecorder("measured", program.names_M, seat.ranks)
        on_gpu = device != "cpu"
        turnstiles = _turnstiles(transports, options, on_gpu)
        began_s = _began_s(transports[0], seat)
        sessions = [
            LayerContext(index, transports[index], turnstiles[index], recorder, began_s, choice, options.predictable, on_gpu)
            for index in range(len(models))
        ]
        lanes = [ModelWorker(model, options) for model in models]
        for lane, session, prompts in zip(lanes, sessions, prompts_M, strict=True):
            lane.perform(program, session)
            lane.waiting.extend(Request(i, prompts[i]) for i in deal(prompts, seat.ranks)[seat.rank])
        if options.interleave == "off":
            for lane in lanes:
                lane.serve()
        else:
            side_by_side(lanes, turnstiles, device)
        seconds = time.perf_counter() - began_s
        kept = zip(sessions, models, strict=True) if options.predictable else ()
        routing_M = [session.routing(len(model.layers)) for session, model in kept]
        share = RankResult([lane.answers for lane in lanes], seconds, recorder.rows, name, choice, routing_M, network)
        if seat.launched:
            return [share]
        gathered: list[Any] | None = [None] * seat.ranks if seat.rank == 0 else None
        with lost_peer(seat.rank, None):
            dist.gather_object(share, gathered)
        return gathered or []


def _began_s(transport: Transport, seat: RankInfo) -> float:
    """When the run begins, by this rank's time.perf_counter, which ranks of one machine share."""
    transport.gather(torch.zeros(1))
    last = transport.gather(torch.tensor([time.perf_counter()], dtype=torch.float64)).max()
    return float(last) if seat.local_ranks == seat.ranks else time.perf_counter()


def _transports(plan: Plan, models: int, seat: RankInfo, device: str, options: RunOptions) -> tuple[list[Transport], str]:
    backend = "gloo" if device == "cpu" else "nccl"
    groups = [new_process_group(backend, options.timeout_s) for _ in range(models)]
    if options.transport == "shaped":
        port = Port(plan.cluster, seat.rank)
        return [ShapedTransport(group, port) for group in groups], "shaped"
    if backend == "nccl":
        controls = [new_process_group("gloo", options.timeout_s) for _ in range(models)]
        return [NcclTransport(*pair, device) for pair in zip(groups, controls, strict=True)], "nccl"
    return [GlooTransport(group, plan.cluster) for group in groups], "gloo"


def _handed() -> torch.cuda.Event:
    """After all that this thread has handed to its stream."""
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event


def _turnstiles(transports: Sequence[Transport], options: RunOptions, on_gpu: bool) -> list[PortArbiter]:
    """One a model; "off" has nothing to share."""
    if options.interleave == "on":
        return in_threads(len(transports), _handed) if on_gpu else in_threads(len(transports))
    if options.colocate is None:
        return [alone for _ in transports for alone in in_threads(1)]
    made: list[PortArbiter] = []
    for transport in transports:
        # Rank 0 takes a slot, and no rank begins before all have theirs.
        rank, folder = transport.rank, folder_of(options.colocate)
        finish = torch.cuda.synchronize if on_gpu else lambda: None
        first = ProcessPortArbiter(folder, 0, options.timeout_s, None, finish) if rank == 0 else None
        slot = int(transport.gather(torch.tensor([-1 if first is None else first.slot]))[0])
        made.append(first or ProcessPortArbiter(folder, rank, options.timeout_s, slot, finish))
    transports[0].gather(torch.zeros(1))
    return made
