"""Model worker: serves one model's requests on one rank, batch by batch, in step with the model's other ranks."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.port_arbiter import PortArbiter
from aurora.runtime.result import Answers, Token
from aurora.types import Network, Placement, Program, RunOptions


@dataclass(frozen=True)
class Request:
    """Prompt to be answered.

    Args:
        index: number of the prompt.
        prompt: token ids of the prompt.
        at_s: arrival time, by time.perf_counter; set by `ModelWorker.begin`.
    """

    index: int
    prompt: list[int]
    at_s: float = 0.0


class ModelWorker:
    """Serves one model's requests on one rank: takes them from `waiting`, and collects their `answers`.

    Call `set_program` before `serve`.

    Args:
        model: the model to serve; its experts modules are replaced by `layers`.
        options: options of the run, such as batch size and number of new tokens.

    Attributes:
        waiting: requests to be served, by arrival time.
        arriving: True if requests of any rank arrive while the run serves; the same on all ranks.
        answers: the answers so far.
        layers: the model's MoE layers.
    """

    def __init__(self, model: MoeModel, options: RunOptions) -> None:
        self.answers = Answers()
        self.waiting: deque[Request] = deque()
        self.arriving = False
        self.layers = [DistributedExperts(layer.experts) for layer in model.layers]
        self._model, self._options = model, options
        self._batch: GreedyBatch | None = None
        self._current: list[Request] = []
        self._has_points = False
        for layer, distributed in zip(model.layers, self.layers, strict=True):
            setattr(layer.block, layer.name, distributed)

    def set_program(self, program: Program, context: LayerContext, network: Network | None = None) -> None:
        """Sets the program of which this worker runs its model's part on this rank.

        Args:
            program: the program. Each layer must already hold the experts that the program gives this rank, or all experts.
            context: the LayerContext of all of the model's layers on this rank.
            network: see `LayerContext`.
        """
        self.context = context
        if program.policies_M[context.model].yields and not self._has_points:
            self._has_points = True
            self._add_preemption_points()
        index, context.program, context.network = context.model, program, network
        deduplicated = program.deduplicated_M[index] if self._options.deduplicate is None else self._options.deduplicate
        for number, layer in enumerate(self.layers):
            ops = program.ops_ML[index][number]
            layer.set_placement(program.placements_M[index], ops, number, context, deduplicated)

    def _add_preemption_points(self) -> None:
        """Adds a preemption point before each module that has no parts, such as a projection, outside of the experts."""
        experts = {part for layer in self.layers for part in layer.modules()}
        for module in self._model.model.modules():
            if module not in experts and next(module.children(), None) is None:
                module.register_forward_pre_hook(lambda *_: self.context.preemption_point())

    def hold(self, placement: Placement, rank: int) -> None:
        """Loads, in every layer, the experts that a placement gives to `rank`; reads missing ones from the model's files."""
        for layer, slots_G in zip(self.layers, placement.slots_LG, strict=True):
            layer.hold(slots_G[rank])

    def share_experts(self, other: "ModelWorker") -> None:
        """Shares the expert weights of `other`, a worker of the same model on this rank, to hold them in memory only once."""
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            layer.share(theirs)

    def begin(self, began_s: float, arrives_s: Mapping[int, float] | None = None) -> None:
        """Sets the arrival times of the waiting requests. All ranks call it, either all with `arrives_s` or all without.

        Args:
            began_s: start of serving, by time.perf_counter.
            arrives_s: arrival in seconds after `began_s`, by request number; None: all requests have arrived.
        """
        self.arriving, arrives_s = arrives_s is not None, arrives_s or {}
        arriving = (replace(request, at_s=began_s + arrives_s.get(request.index, 0.0)) for request in self.waiting)
        self.waiting = deque(sorted(arriving, key=attrgetter("at_s")))

    def serve(self) -> None:
        """Serves until no rank has requests left. A rank without requests makes idle steps, because steps are collective.

        Raises:
            RankFailed: if a peer is lost.
        """
        began = time.perf_counter()
        while True:
            if self._batch is None and (arrived := self._arrived()):
                self._current = [self.waiting.popleft() for _ in range(arrived)]
                self._batch = self._new_batch(self._current)
            self.context.own_tokens = 0 if self._batch is None else self._batch.next_tokens
            if not self.context.any_active(self._batch is not None):
                if self.arriving and self.context.sleep_until(self.waiting[0].at_s if self.waiting else float("inf")):
                    continue
                break
            if self._batch is None:
                self._idle_step()
                continue
            self._keep(self._step(self._batch))
            if self._batch.done:
                self._batch, self._current = None, []
        self.answers.seconds += time.perf_counter() - began
        self.context.leave()

    def _keep(self, tokens: Sequence[Token]) -> None:
        """Adds new tokens to `answers`."""
        arrived_s = {request.index: request.at_s for request in self._current}
        self.answers.add(tokens, self.context.transport.rank, time.perf_counter(), arrived_s)

    def _arrived(self) -> int:
        """Number of requests of the next batch: those that have arrived, at most as many as a rank decodes together."""
        most = min(self._options.batch, len(self.waiting))
        if not self.arriving:
            return most
        now = time.perf_counter()
        return sum(self.waiting[number].at_s <= now for number in range(most))

    def _new_batch(self, requests: Sequence[Request]) -> GreedyBatch:
        tokenizer = self._model.tokenizer
        prompts, new_tokens = [request.prompt for request in requests], [self._options.max_new_tokens] * len(requests)
        return GreedyBatch(self._model.model, prompts, new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id or 0)

    def _step(self, batch: GreedyBatch) -> list[Token]:
        mask_BT, before = batch.mask_BT, list(map(len, batch.tokens))
        self.context.next_step(None if mask_BT is None else mask_BT.flatten())
        self.context.start_compute()
        logits_BV = batch.step()
        self.context.finish_exchanges()  # if one was aborted, the step gives no token
        self.context.stop_compute("head", len(self.layers) - 1)
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
    def _idle_step(self) -> None:
        self.context.next_step(None)
        like = self._model.layers[0].router_weight.new_empty(1, self._model.hidden, dtype=self._model.hidden_dtype)
        self.context.start_compute()
        for layer in self.layers:
            layer.idle(self._model.top_k, like)
        self.context.stop_compute("head", len(self.layers) - 1)


def serve_interleaved(workers: Sequence[ModelWorker], arbiters: Sequence[PortArbiter], device: str) -> None:
    """Serves several models on one rank: each worker runs in its own thread and, on a GPU, on its own CUDA stream.

    When one worker fails, the others are stopped; threads that still wait for peers are abandoned.

    Args:
        workers: one per model.
        arbiters: one per model.
        device: "cpu" or a CUDA device.

    Raises:
        Exception: the first failure of a worker.
    """
    failures: list[BaseException] = []

    def run(worker: ModelWorker) -> None:
        try:
            with nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                worker.serve()
        except BaseException as error:
            failures.append(error)
            for arbiter in arbiters:
                arbiter.abort(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    if device != "cpu":
        torch.cuda.synchronize(device)  # the weights were loaded on another stream
    for thread in threads:
        thread.start()
    while not failures and any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(timeout=0.05)
    if failures:
        raise failures[0]
