"""One rank of a run that goes on when ranks are lost: what it holds stays, what it lacks it fetches, its requests go on."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from aurora.errors import RankFailed
from aurora.models.loading import MoeModel, expert_parameters, load_model
from aurora.planner.migration.survivors import ExpertTransfer, HeldML
from aurora.runtime.distributed.control_channel import ControlChannel, EpochStart
from aurora.runtime.distributed.epoch_groups import EpochGroups, join_epoch, unless_stopped
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.distributed.shaped import Port, ShapedTransport
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.model_worker import ModelWorker, Request, side_by_side
from aurora.runtime.port_arbiter import in_threads
from aurora.runtime.result import RankResult, Token
from aurora.runtime.serving_rank import check_model, check_prompts
from aurora.types import Cluster, Order, Plan, Program, RunOptions, TraceRecorder


@dataclass(frozen=True)
class HeldExperts:
    """What a rank has between epochs. held_ML: experts by model and layer; serving_M: requests that it is decoding;
    expert_bytes_M: weights of an expert in a layer, of each model."""

    held_ML: HeldML
    serving_M: tuple[tuple[int, ...], ...]
    expert_bytes_M: tuple[int, ...]


@dataclass(frozen=True)
class EpochWork:
    """A rank's part of an epoch. program, cluster: of its members; moves: the weights that somebody lacks, order: in which they
    travel; requests_M: of each model, to be served after those that it is decoding: the tokens produced so far by number."""

    program: Program
    cluster: Cluster
    moves: tuple[ExpertTransfer, ...]
    order: Order
    requests_M: tuple[dict[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class FetchedWeights:
    """This rank has sent and received the weights that travel in this epoch."""

    seconds: float


@dataclass(frozen=True)
class NewTokens:
    """New tokens of one model, for the journal."""

    model: int
    tokens: Sequence[Token]


def survive_rank(
    seat: RankInfo,
    link: ControlChannel,
    plan: Plan,
    paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    began_s: float,
) -> None:
    """Serve as one rank, epoch after epoch, and bring its share home. began_s: by time.perf_counter, of the whole run.

    Raises BadInput for a model or a prompt that does not fit.
    """
    models = [load_model(path) for path in paths]
    for index, model in enumerate(models):
        check_model(plan, index, model)
        check_prompts(model, prompts_M[index], options.max_new_tokens)
    lanes = [ModelWorker(model, options, partial(_tell, link, index)) for index, model in enumerate(models)]
    recorder = TraceRecorder("measured", tuple(model.model for model in plan.models), seat.ranks)
    expert_bytes_M = tuple(model.expert_bytes for model in models)
    lost: str | None = None
    while True:
        held_ML = tuple(tuple(layer.held for layer in lane.layers) for lane in lanes)
        serving_M = tuple(tuple(lane.serving) for lane in lanes)
        message = link.await_epoch(HeldExperts(held_ML, serving_M, expert_bytes_M), lost)
        if not isinstance(message, EpochStart):
            break
        lost = None
        try:
            _serve(seat, link, message, lanes, paths, prompts_M, options, recorder, began_s)
        except RankFailed as error:
            lost = None if link.stopped.is_set() else str(error)
        for lane in lanes:
            lane.rewind()
    seconds = time.perf_counter() - began_s
    name = "shaped" if options.transport == "shaped" else "gloo"
    link.send_result(RankResult([lane.answers for lane in lanes], seconds, recorder.rows, name, None, [], None))


def _tell(link: ControlChannel, model: int, tokens: Sequence[Token]) -> None:
    link.send_progress(NewTokens(model, tokens))


def _serve(
    seat: RankInfo,
    link: ControlChannel,
    epoch: EpochStart,
    lanes: Sequence[ModelWorker],
    paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    recorder: TraceRecorder,
    began_s: float,
) -> None:
    """Until no member has requests left. Raises RankFailed when a peer is lost or the supervisor ends the epoch."""
    part: EpochWork = epoch.assignment
    rank = epoch.members.index(seat.rank)
    store = (seat.host, seat.port)
    meeting = join_epoch(store, epoch.number, rank, len(epoch.members), len(lanes), options.timeout_s, link.stopped)
    turnstiles = in_threads(len(lanes))

    def abort() -> None:
        meeting.abort()
        for turnstile in turnstiles:
            turnstile.abort(RankFailed("the epoch is over"))  # also for who waits for no peer, because there is none

    link.on_stop(abort)
    sessions: list[LayerContext] = []
    try:
        transports = _transports(meeting, part.cluster, rank, options)
        _fetch(lanes, part, rank, transports[0], paths, link)
        recorder.begin(epoch.number, epoch.members)
        sessions += [
            LayerContext(index, transport, turnstiles[index], recorder, began_s) for index, transport in enumerate(transports)
        ]
        link.set_busy_since(lambda: min((since for s in sessions if (since := s.busy_since) is not None), default=None))
        for lane, session, prompts, requests in zip(lanes, sessions, prompts_M, part.requests_M, strict=True):
            lane.perform(part.program, session)
            lane.waiting.extend(Request(index, prompts[index], produced) for index, produced in requests.items())
        side_by_side(lanes, turnstiles, "cpu", meeting.abort, link.stopped)
    finally:
        link.set_busy_since(lambda: None)
        meeting.abort()
        for session in sessions:
            session.leave()


def _transports(meeting: EpochGroups, cluster: Cluster, rank: int, options: RunOptions) -> list[Transport]:
    if options.transport == "shaped":
        port = Port(cluster, rank)
        return [ShapedTransport(group, port) for group in meeting.groups]
    return [GlooTransport(group, cluster) for group in meeting.groups]


def _fetch(
    lanes: Sequence[ModelWorker], part: EpochWork, rank: int, transport: Transport, paths: Sequence[str], link: ControlChannel
) -> None:
    """Bring every layer to hold what the program gives this rank: from owners, or from the checkpoint where none is left."""
    ranks = transport.ranks
    layers = [lane.layers for lane in lanes]
    sends: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    due: list[list[ExpertTransfer]] = [[] for _ in range(ranks)]
    for move in part.moves:
        if move.source == rank:
            weights = layers[move.model][move.layer].weights(move.expert)
            sends[move.to] += [weights[name].contiguous().view(-1).view(torch.uint8) for name in sorted(weights)]
        elif move.to == rank and move.source is not None:
            due[move.source].append(move)
    like_M = [
        {name: whole.detach().new_empty(whole.shape[1:]) for name, whole in expert_parameters(own[0].local)} for own in layers
    ]
    size_M = [sum(part.numel() * part.element_size() for part in like.values()) for like in like_M]
    packed = [torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8) for parts in sends]
    arrived = [torch.empty(sum(size_M[move.model] for move in moves), dtype=torch.uint8) for moves in due]
    if any(move.source is not None for move in part.moves):
        began_s = time.perf_counter()
        unless_stopped(link.stopped, lambda: transport.exchange(part.order, packed, arrived, lambda *_: None))
        link.send_progress(FetchedWeights(time.perf_counter() - began_s))
    found: dict[tuple[int, int], dict[int, Mapping[str, torch.Tensor]]] = {}
    for moves, blob in zip(due, arrived, strict=True):
        at = 0
        for move in moves:
            weights = {}
            for name, like in sorted(like_M[move.model].items()):
                size = like.numel() * like.element_size()
                weights[name] = blob[at : at + size].view(like.dtype).view(like.shape)
                at += size
            found.setdefault((move.model, move.layer), {})[move.expert] = weights
    for move, weights in _from_checkpoint(part, rank, paths):
        found.setdefault((move.model, move.layer), {})[move.expert] = weights
    for model, (own, placement) in enumerate(zip(layers, part.program.placements_M, strict=True)):
        for number, layer in enumerate(own):
            layer.hold(placement.slots_LG[number][rank], found.get((model, number), {}))


def _from_checkpoint(part: EpochWork, rank: int, paths: Sequence[str]) -> list[tuple[ExpertTransfer, dict[str, torch.Tensor]]]:
    """The weights that nobody holds any more. Raises BadInput where the checkpoint cannot be read any more either."""
    wanted = [move for move in part.moves if move.to == rank and move.source is None]
    models: dict[int, MoeModel] = {index: load_model(paths[index]) for index in sorted({move.model for move in wanted})}
    return [
        (
            move,
            {
                name: whole.detach()[move.expert]
                for name, whole in expert_parameters(models[move.model].layers[move.layer].experts)
            },
        )
        for move in wanted
    ]
