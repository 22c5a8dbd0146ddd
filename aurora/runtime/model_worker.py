"""One model on one rank: its requests served batch by batch, its experts' layers performed with all other ranks."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from aurora.errors import RankFailed
from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel
from aurora.runtime.distributed.epoch_groups import STUCK_S
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.port_arbiter import PortArbiter
from aurora.runtime.result import Answers, Token
from aurora.types import Program, RunOptions


@dataclass(frozen=True)
class Request:
    """A prompt, by its number, and what was produced for it so far."""

    index: int
    prompt: list[int]
    produced: tuple[int, ...] = ()


class ModelWorker:
    """Serves what is in `waiting`, and keeps what it produced in `answers`.

    tell: also told of each step's tokens. `perform` comes before `serve`, and may come again after a `serve` that a lost peer
    broke off and a `rewind`.
    """

    def __init__(self, model: MoeModel, options: RunOptions, tell: Callable[[Sequence[Token]], None] | None = None) -> None:
        self.answers = Answers()
        self.waiting: deque[Request] = deque()
        self.layers = [DistributedExperts(layer.experts) for layer in model.layers]
        self._model, self._options, self._tell = model, options, tell
        self._batch: GreedyBatch | None = None
        self._current: list[Request] = []
        for layer, spread in zip(model.layers, self.layers, strict=True):
            setattr(layer.block, layer.name, spread)

    def perform(self, program: Program, session: LayerContext) -> None:
        """Take part in `program` over the session's transport; each layer must have the weights that it wants, or all."""
        self.session = session
        index, session.by_layer = session.model, program.by_layer
        deduplicated = program.deduplicated_M[index] if self._options.deduplicate is None else self._options.deduplicate
        for number, layer in enumerate(self.layers):
            layer.perform(
                program.placements_M[index],
                program.ops_ML[index][number],
                number,
                session,
                deduplicated,
                self._options.local_first,
            )

    @property
    def serving(self) -> list[int]:
        """The requests that are being decoded."""
        return [request.index for request in self._current]

    def serve(self) -> None:
        """Until no rank has requests left: a forward pass, or an idle step so that the others can go on."""
        began = time.perf_counter()
        while True:
            if self._batch is None and self.waiting:
                self._current = [self.waiting.popleft() for _ in range(min(self._options.batch, len(self.waiting)))]
                self._batch = self._begin(self._current)
            if not self.session.agree(self._batch is not None):
                break
            if self._batch is None:
                self._idle()
                continue
            fresh = self._forward(self._batch)
            self.answers.add(fresh)
            if self._tell is not None:
                self._tell(fresh)
            if self._batch.done:
                self._batch, self._current = None, []
        self.answers.seconds += time.perf_counter() - began
        self.session.leave()

    def rewind(self) -> None:
        """After a step that broke off: repeat it next, or give up the batch, whose requests are then in nobody's hands."""
        if self._batch is not None and not self._batch.rewind():
            self._batch, self._current = None, []
        self.waiting.clear()

    def _begin(self, requests: Sequence[Request]) -> GreedyBatch:
        tokenizer = self._model.tokenizer
        prompts = [[*request.prompt, *request.produced] for request in requests]
        new_tokens = [self._options.max_new_tokens - len(request.produced) for request in requests]
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id or 0
        return GreedyBatch(self._model.model, prompts, new_tokens, eos, pad)

    def _forward(self, batch: GreedyBatch) -> list[Token]:
        mask = batch.mask_BT.flatten()
        before = list(map(len, batch.tokens))
        self.session.next_step(None if bool(mask.all()) else mask)
        self.session.start_compute()
        logits_BV = batch.step()
        self.session.stop_compute("gate", len(self.layers) - 1)
        return [
            Token(
                request.index,
                batch.tokens[row][-1],
                not batch.running(row),
                logits_BV[row : row + 1].double().cpu().numpy() if self._options.keep_logits else None,
            )
            for row, request in enumerate(self._current)
            if len(batch.tokens[row]) > before[row]
        ]

    @torch.inference_mode()
    def _idle(self) -> None:
        self.session.next_step(None)
        like = self._model.layers[0].router_weight[:1].to(next(self.layers[0].parameters()).dtype)
        self.session.start_compute()
        for layer in self.layers:
            layer.idle(self._model.top_k, like)
        self.session.stop_compute("gate", len(self.layers) - 1)


def side_by_side(
    lanes: Sequence[ModelWorker],
    turnstiles: Sequence[PortArbiter],
    device: str,
    abort: Callable[[], None] | None = None,
    stopped: threading.Event | None = None,
) -> None:
    """All lanes serve, each in a thread and, on a GPU, on a stream of its own. When one fails the others are stopped and the
    first failure is raised.

    abort: frees those that wait for peers, called too when one fails, so that all have ended by then; stopped: set when it was
    called elsewhere. A thread that waits on for STUCK_S all the same is left behind: it cannot get past its exchange.
    """
    failures: list[BaseException] = []

    def run(lane: ModelWorker) -> None:
        try:
            with nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                lane.serve()
        except BaseException as error:
            failures.append(error)
            for turnstile in turnstiles:
                turnstile.abort(error)
            if abort is not None:
                abort()

    threads = [threading.Thread(target=run, args=(lane,), daemon=True) for lane in lanes]
    if device != "cpu":
        torch.cuda.synchronize(device)  # the weights were loaded on another stream
    for thread in threads:
        thread.start()
    over_s: float | None = None
    while serving := [lane for lane, thread in zip(lanes, threads, strict=True) if thread.is_alive()]:
        for thread in threads:
            thread.join(timeout=0.05)
        if failures and abort is None:
            break
        if over_s is None and (failures or (stopped is not None and stopped.is_set())):
            over_s = time.monotonic()
        if over_s is not None and all(_stuck(lane, over_s) for lane in serving):
            failures.append(RankFailed("gloo waits on although its connections are shut"))
            break
    if failures:
        raise failures[0]


def _stuck(lane: ModelWorker, since_s: float) -> bool:
    waiting_since = lane.session.waiting_since
    return waiting_since is not None and time.monotonic() - max(waiting_since, since_s) > STUCK_S
