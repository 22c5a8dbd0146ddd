"""One rank of a run: load the models, hold the planned experts, serve the requests that were dealt to this rank."""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.execute.calibrate import calibrate
from aurora.execute.experts import DistributedExperts
from aurora.execute.result import Answers, Share
from aurora.execute.session import Session
from aurora.execute.turnstile import Turnstile
from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import deal
from aurora.plan.compile import compile_plan
from aurora.ranks.gloo import GlooTransport
from aurora.ranks.group import device_of, joined, model_group
from aurora.ranks.launcher import Seat
from aurora.ranks.memory import Memory, MemoryTransport
from aurora.ranks.nccl import NcclTransport
from aurora.ranks.shaped import Port, ShapedTransport
from aurora.ranks.transport import Transport
from aurora.types import Plan, Program, Recorder, RunOptions
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
    seat: Seat,
    plan: Plan,
    model_paths: Sequence[str],
    prompts_M: Sequence[Sequence[list[int]]],
    options: RunOptions,
    memories: Sequence[Memory] = (),
) -> list[Share]:
    """Serve as one rank; gives its share, or under torchrun everybody's on rank 0 and none on the others.

    memories: one a model, where ranks are threads. Raises BadInput before, RankFailed after the run has begun.
    """
    device = device_of(seat) if options.transport in ("auto", "nccl") else "cpu"
    if options.transport == "nccl" and device == "cpu":
        raise BadInput(f"--transport nccl: expected a CUDA device for each of {seat.ranks} ranks, found too few")
    with LOADING:
        models = [load_model(path, device) for path in model_paths]
    for index, (model, prompts) in enumerate(zip(models, prompts_M, strict=True)):
        check_model(plan, index, model)
        check_prompts(model, prompts, options.max_new_tokens)
    with nullcontext() if memories else joined(seat):
        if memories:
            transports: list[Transport] = [MemoryTransport(memory, seat.rank, plan.cluster) for memory in memories]
            name = "memory"
        else:
            transports, name = _transports(plan, len(models), seat, device, options)
        choice = None
        if options.order == "auto" and name != "nccl":  # which posts everything at once whatever the order
            method = plan.methods["order"]
            choice = calibrate(transports[0], plan.cluster, "openshop" if method == "auto" else method)
        program = compile_plan(plan)
        recorder = Recorder("measured", program.names_M, seat.ranks)
        turnstile = Turnstile(len(models))
        transports[0].gather(torch.zeros(1))
        began_s = time.perf_counter()
        lanes = [
            _Lane(index, model, Session(index, transports[index], turnstile, recorder, began_s, choice), program, options)
            for index, model in enumerate(models)
        ]
        mine = [[(i, prompts[i]) for i in deal(prompts, seat.ranks)[seat.rank]] for prompts in prompts_M]
        _side_by_side(lanes, mine, turnstile)
        share = Share([lane.answers for lane in lanes], recorder.rows, name, choice)
        if seat.launched:
            return [share]
        gathered: list[Any] | None = [None] * seat.ranks if seat.rank == 0 else None
        dist.gather_object(share, gathered)
        return gathered or []


def _transports(plan: Plan, models: int, seat: Seat, device: str, options: RunOptions) -> tuple[list[Transport], str]:
    backend = "gloo" if device == "cpu" else "nccl"
    groups = [model_group(backend, options.timeout_s) for _ in range(models)]
    if options.transport == "shaped":
        port = Port(plan.cluster, seat.rank)
        return [ShapedTransport(group, port) for group in groups], "shaped"
    if backend == "nccl":
        controls = [model_group("gloo", options.timeout_s) for _ in range(models)]
        return [NcclTransport(*pair, device) for pair in zip(groups, controls, strict=True)], "nccl"
    return [GlooTransport(group, plan.cluster) for group in groups], "gloo"


class _Lane:
    """One model on this rank: its layers' experts replaced, its requests served batch by batch."""

    def __init__(self, index: int, model: MoeModel, session: Session, program: Program, options: RunOptions) -> None:
        self.answers = Answers()
        self.session = session
        self._model, self._options = model, options
        self._layers: list[DistributedExperts] = []
        for number, layer in enumerate(model.layers):
            ops = program.ops_ML[index][number]
            placement = program.placements_M[index]
            once = program.once_M[index] if options.deduplicate is None else options.deduplicate
            spread = DistributedExperts(layer.experts, placement, ops, number, session, once)
            setattr(layer.block, layer.name, spread.to(next(model.model.parameters()).device))
            self._layers.append(spread)

    def serve(self, requests: Sequence[tuple[int, list[int]]]) -> None:
        """Until no rank has requests left: a forward pass, or an idle step so that the others can go on."""
        waiting = [requests[i : i + self._options.batch] for i in range(0, len(requests), self._options.batch)]
        began = time.perf_counter()
        batch: GreedyBatch | None = None
        current: Sequence[tuple[int, list[int]]] = []
        while True:
            if batch is None and waiting:
                current = waiting.pop(0)
                batch = self._batch(current)
            if not self.session.agree(batch is not None):
                break
            if batch is None:
                self._idle()
                continue
            logits_BV = self._forward(batch)
            for row, (index, _) in enumerate(current):
                done = self.answers.tokens.setdefault(index, [])
                if len(batch.tokens[row]) > len(done):
                    done.append(batch.tokens[row][-1])
                    if self._options.keep_logits:
                        fresh = logits_BV[row : row + 1].double().cpu().numpy()
                        kept = self.answers.logits.get(index, fresh[:0])
                        self.answers.logits[index] = np.concatenate([kept, fresh])
            if batch.done:
                batch = None
        self.answers.seconds = time.perf_counter() - began
        self.session.leave()

    def _batch(self, requests: Sequence[tuple[int, list[int]]]) -> GreedyBatch:
        tokenizer = self._model.tokenizer
        prompts = [ids for _, ids in requests]
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id or 0
        return GreedyBatch(self._model.model, prompts, self._options.max_new_tokens, eos, pad)

    def _forward(self, batch: GreedyBatch) -> torch.Tensor:
        mask = batch.mask_BT.flatten()
        self.session.next_step(None if bool(mask.all()) else mask)
        self.session.start_compute()
        logits_BV = batch.step()
        self.session.stop_compute("gate", len(self._layers) - 1)
        return logits_BV

    @torch.inference_mode()
    def _idle(self) -> None:
        self.session.next_step(None)
        like = self._model.layers[0].router_weight[:1].to(next(self._layers[0].parameters()).dtype)
        self.session.start_compute()
        for layer in self._layers:
            layer.idle(self._model.top_k, like)
        self.session.stop_compute("gate", len(self._layers) - 1)


def _side_by_side(lanes: Sequence[_Lane], requests_M: Sequence[Sequence[tuple[int, list[int]]]], turnstile: Turnstile) -> None:
    failures: list[BaseException] = []

    def run(lane: _Lane, requests: Sequence[tuple[int, list[int]]]) -> None:
        try:
            lane.serve(requests)
        except BaseException as error:
            failures.append(error)
            turnstile.abort(error)

    threads = [
        threading.Thread(target=run, args=(lane, requests), daemon=True)
        for lane, requests in zip(lanes, requests_M, strict=True)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        for thread in threads:
            thread.join(timeout=0.05)
    if failures:
        raise failures[0]
