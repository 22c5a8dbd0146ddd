"""Elastic rank: a serving rank of a run that survives lost ranks.

Between epochs a rank keeps its experts and its requests. At the start of an epoch it fetches the experts that it lacks.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aurora.algorithms.control.controller import begin_to_compile_decisions, compile_decisions
from aurora.elastic.control_channel import ControlChannel, EpochStart
from aurora.elastic.epoch_groups import EpochGroups
from aurora.elastic.epoch_nccl import EpochNcclTransport, gpu_of_rank
from aurora.elastic.member import keep_collections_short
from aurora.errors import RankFailed
from aurora.moe.transport import Transport
from aurora.runtime.distributed.connections import unless_stopped
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.live_placement import LivePlacement, compile_orders
from aurora.runtime.model_worker import ModelWorker, Request, serve_interleaved
from aurora.runtime.phase_recorder import PhaseRecorder, StreamTimer
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.runtime.result import MOST_EVENTS, RankResult, Token
from aurora.runtime.serving_rank import controlled, load_models, log_decisions, submitted_work
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.shaped import tcp_transports
from aurora.runtime.weight_messages import ExpertTransfer, WeightMessages, Weights
from aurora.types import Cluster, ControlReport, Order, Plan, Program, RunOptions, TraceRecorder
from aurora.types.arrays import FloatArray
from aurora.types.placement import HeldML

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldExperts:
    """State of a rank between epochs, from which the coordinator assigns work.

    Args:
        held_ML: the rank's experts, by model and layer.
        serving_M: numbers of the requests that the rank is decoding, by model.
        expert_bytes_M: bytes of one expert's weights in one layer, by model.
    """

    held_ML: HeldML
    serving_M: tuple[tuple[int, ...], ...]
    expert_bytes_M: tuple[int, ...]


@dataclass(frozen=True)
class EpochWork:
    """A member's assignment in an epoch.

    Args:
        program: the program that the epoch's members run.
        cluster: the GPUs of the epoch's members.
        moves: weight transfers of experts that members lack.
        order: the order of these transfers.
        requests_M: for each model, new requests for this rank: {request number: tokens of its answer so far}.
        cost_MG: as in `controlled`.
        arrives_s_M: for each model, {request number: arrival in seconds after the start of serving}; empty: all requests have
            arrived.
        served_s: seconds since the start of serving; None: no rank has begun to serve.
    """

    program: Program
    cluster: Cluster
    moves: tuple[ExpertTransfer, ...]
    order: Order
    requests_M: tuple[dict[int, tuple[int, ...]], ...]
    cost_MG: FloatArray | None = None
    arrives_s_M: tuple[dict[int, float], ...] = ()
    served_s: float | None = None


@dataclass(frozen=True)
class FetchedWeights:
    """Progress value: this rank has sent and received its expert weights for this epoch, which took `seconds`."""

    seconds: float


@dataclass(frozen=True)
class BeganServing:
    """Progress value: this rank begins to serve in this epoch."""


@dataclass(frozen=True)
class NewTokens:
    """Progress value: new tokens of one model, in the sequence in which they were produced."""

    model: int
    tokens: Sequence[Token]


@dataclass(frozen=True)
class Decided:
    """Progress value: report of one model's placement controller on its decisions so far in an epoch."""

    epoch: int
    model: int
    report: ControlReport


def serve_elastic_rank(
    rank_info: RankInfo,
    channel: ControlChannel,
    plan: Plan,
    paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    began_s: float,
) -> None:
    """Serves as one rank until all requests are answered, over all epochs; then sends its RankResult over `channel`."""
    if options.adapt is not None:
        begin_to_compile_decisions()
    gpu = channel.member.gpu = gpu_of_rank(options.transport, rank_info.local_rank, options.lead is not None)
    models = load_models(plan, paths, prompts_M, options, "cpu" if gpu is None else gpu.device)
    workers = [ModelWorker(model, options, partial(_send_tokens, channel, index)) for index, model in enumerate(models)]
    for worker, planned in zip(workers, plan.models, strict=True):
        worker.hold(planned.placement, rank_info.rank)
    names_M = tuple(model.model for model in plan.models)
    recorder = TraceRecorder("measured", names_M, rank_info.ranks, MOST_EVENTS)
    if options.adapt is not None:  # what is compiled before an epoch delays nobody
        compile_orders(plan)
        compile_decisions()
        log_decisions()
    keep_collections_short()
    lost: str | None = None
    while True:
        held_ML = tuple(tuple(layer.held for layer in worker.layers) for worker in workers)
        serving_M = tuple(tuple(worker.serving) for worker in workers)
        state = HeldExperts(held_ML, serving_M, tuple(worker.expert_bytes for worker in workers))
        if (message := channel.await_epoch(state, lost)) is None:
            break
        lost = None
        try:
            least = plan.options.min_replicas
            _serve_epoch(rank_info, channel, message, workers, prompts_M, options, recorder, began_s, least)
        except RankFailed as error:
            lost = None if channel.stopped.is_set() else str(error)
        for worker in workers:
            worker.rewind()
    seconds = time.perf_counter() - began_s
    answers_M = [worker.answers for worker in workers]
    channel.send_result(RankResult(answers_M, seconds, list(recorder.rows), options.transport, None, [], [], None))


def _send_tokens(channel: ControlChannel, model: int, tokens: Sequence[Token]) -> None:
    channel.send_progress(NewTokens(model, tokens))


def _serve_epoch(
    rank_info: RankInfo,
    channel: ControlChannel,
    epoch: EpochStart,
    workers: Sequence[ModelWorker],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    recorder: TraceRecorder,
    began_s: float,
    min_replicas: int | None,
) -> None:
    """Serves until no member has requests left.

    Raises RankFailed if a peer is lost or the epoch is over, RuntimeError if the GPU cannot be used any more.
    """
    work: EpochWork = epoch.assignment
    rank = epoch.members.index(rank_info.rank)
    device = "cpu" if channel.member.gpu is None else channel.member.gpu.device
    policies_M = work.program.policies_M
    urgent = [model for model, policy in enumerate(policies_M) if policy.interactive]
    channel.member.connect(channel.epoch, len(workers), urgent)
    groups = channel.member.groups
    arbiters = thread_port_arbiters(policies_M) if device == "cpu" else thread_port_arbiters(policies_M, submitted_work)

    def abort() -> None:
        groups.abort()
        for arbiter in arbiters:
            arbiter.abort(RankFailed("the epoch is over"))  # frees workers that wait for no peer, too

    def tell(model: int, report: ControlReport) -> None:
        channel.send_progress(Decided(epoch.number, model, report))

    assigned_s = time.perf_counter()
    channel.member.on_stop(abort)
    contexts: list[LayerContext] = []
    followed: list[LivePlacement] = []
    try:
        transports = _transports(groups, work.cluster, rank, options)
        _fetch_experts(workers, work, transports[0], channel, device)
        recorder.begin(epoch.number, epoch.members)
        timers = [None if device == "cpu" else StreamTimer(began_s) for _ in workers]
        recorders = [PhaseRecorder(recorder, rank, index, began_s, timer) for index, timer in enumerate(timers)]
        contexts += [
            LayerContext(index, *args, sleep=channel.stopped.wait)
            for index, args in enumerate(zip(transports, arbiters, recorders, strict=True))
        ]
        arrives_s_M = work.arrives_s_M or (None,) * len(workers)
        serving_s = time.perf_counter() if work.served_s is None else assigned_s - work.served_s
        shared = zip(workers, contexts, prompts_M, work.requests_M, arrives_s_M, strict=True)
        for worker, context, prompts, requests, arrives_s in shared:
            worker.set_program(work.program, context, work.cluster.network)
            worker.waiting.extend(Request(index, prompts[index], produced) for index, produced in requests.items())
            worker.begin(serving_s, arrives_s)
        rules = options, min_replicas, began_s, work.cost_MG, tell
        followed += controlled(workers, work.program, work.cluster, *rules)
        channel.send_progress(BeganServing())
        serve_interleaved(workers, arbiters, device, groups.abort, channel.stopped)
    finally:
        groups.abort()
        groups.drain()
        for context in contexts:
            context.leave()
        for live in followed:
            live.end()


def _transports(groups: EpochGroups, cluster: Cluster, rank: int, options: RunOptions) -> list[Transport]:
    """A transport for each model."""
    if groups.communicators is None:
        return tcp_transports(groups.groups, cluster, rank, options.transport == "shaped")
    controlled_by = zip(groups.communicators.calls, groups.groups, strict=True)
    return [EpochNcclTransport(calls, GlooTransport(group), options.timeout_s) for calls, group in controlled_by]


def _current(device: str) -> AbstractContextManager[Any]:
    """Context manager in which a device is this thread's: threads begin with the first GPU."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


def _fetch_experts(
    workers: Sequence[ModelWorker], work: EpochWork, transport: Transport, channel: ControlChannel, device: str
) -> None:
    """Makes every layer hold the experts that the program gives this rank.

    Missing weights come from the ranks that hold them, or from the model's files where no rank does.
    """
    arrived: dict[tuple[int, int], dict[int, Weights]] = {}
    if any(move.source is not None for move in work.moves):
        messages = WeightMessages([worker.layers for worker in workers], work.moves, transport.rank, transport.ranks)
        sends, recvs = messages.cut(0, messages.bytes)
        began_s = time.perf_counter()

        def exchange() -> None:
            with _current(device):
                transport.exchange(work.order, sends, recvs, lambda *_: None)
                transport.wait()

        unless_stopped(channel.stopped, exchange)
        channel.send_progress(FetchedWeights(time.perf_counter() - began_s))
        for move, weights in messages.arrived():
            arrived.setdefault((move.model, move.layer), {})[move.expert] = weights
    for model, (worker, placement) in enumerate(zip(workers, work.program.placements_M, strict=True)):
        for number, layer in enumerate(worker.layers):
            layer.hold(placement.slots_LG[number][transport.rank], arrived.get((model, number), {}))
