"""Wraps vLLM's engine in API servers, to choose the rank of a request, and in ranks, to choose the steps with prompts."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from aurora_vllm.prompt_steps import POLL_S, IntervalChanges, IntervalPlanner, RankSteps, Step
from aurora_vllm.request_ranks import RankPrompts, chosen_rank
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals.replaced import replace, replaced

LOG = logging.getLogger("vllm.aurora")
ADD = "vllm.v1.engine.async_llm:AsyncLLM._add_request"
OUTPUTS = "vllm.v1.engine.core_client:DPLBAsyncMPClient.process_engine_outputs"


def choose_ranks(rule: str) -> None:
    """Patches vLLM's engine of an API server to give requests their rank, and its client to see steps end. Idempotent.

    Args:
        rule: "cadence": prompts count as a whole until they are computed, since most steps compute none.
    """
    if replaced(ADD):
        return
    replace(ADD, _ranked)
    if rule == "tokens":
        replace(OUTPUTS, _seen)


def _ranked(original: Any) -> Any:
    @functools.wraps(original)
    async def add_request(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        if request.sampling_params is not None and len(self.engine_core.core_engines) > 1:
            give_rank(self.engine_core, request, _Computing(self.output_processor.request_states))
        return await original(self, request, *args, **named)

    return add_request


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    async def process_engine_outputs(self: Any, outputs: Any) -> None:
        await original(self, outputs)
        if "_aurora_prompts" in self.__dict__ and (outputs.outputs or outputs.scheduler_stats is not None):
            step_ended(self, outputs.engine_index.to_bytes(2, "little"))

    return staticmethod(process_engine_outputs)


@dataclass
class _Computing:
    """Names of the prompts that are not computed as a whole, from vLLM's unfinished requests."""

    states: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        state = self.states.get(name)  # type: ignore[call-overload]
        return state is not None and state.is_prefilling


def give_rank(client: Any, request: Any, computing: Container[str]) -> None:
    """Gives a request its rank, unless the user did, and notes its prompt.

    Args:
        client: vLLM's client of the ranks' engines.
        request: the request, which is sent right after.
        computing: names of the prompts that are not computed as a whole.
    """
    ranks = len(client.core_engines)
    if "_aurora_prompts" not in client.__dict__:
        limits = client.vllm_config.scheduler_config
        client._aurora_computing, client._aurora_sent = computing, client.client_index * ranks // client.client_count
        client._aurora_prompts = [RankPrompts(limits.max_num_batched_tokens, limits.max_num_seqs) for _ in range(ranks)]
    prompts_R = client._aurora_prompts
    if request.data_parallel_rank is None:
        prompts = [(rank, left) for rank in range(ranks) for left in prompts_R[rank].left(computing)]
        request.data_parallel_rank = chosen_rank(prompts, client.lb_engines, client.client_count, client._aurora_sent)
        client._aurora_sent += 1
    prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
    prompts_R[request.data_parallel_rank].sent(request.request_id, len(prompt))


def step_ended(client: Any, engine: bytes) -> None:
    """Notes that a step of a rank's engine has ended, and the next one begun. Other API servers have as many requests there."""
    requests = client.client_count * client.engine_inflight[engine]
    client._aurora_prompts[client.core_engines.index(engine)].stepped(client._aurora_computing, requests)


class PromptSteps:
    """Watches the steps of a data-parallel rank's engine, and with `cadence` keeps to the planned interval between prompts.

    Args:
        engine: vLLM's engine, which is ready.
        settings: the plugin's.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        limits = engine.vllm_config.scheduler_config
        most_tokens = limits.max_num_batched_tokens
        self._engine, self._changes = engine, IntervalChanges(
            engine.dp_rank, engine.dp_size, RankSteps(most_tokens, limits.max_num_seqs, engine.batch_queue_size - 1),
            IntervalPlanner(most_tokens, settings.ttft_s) if engine.dp_rank == 0 else None, settings.requests == "cadence",
        )  # fmt: skip
        threading.Thread(target=_exchange, args=(engine, self._changes), daemon=True, name="aurora-prompts").start()

    def throttled(self, throttled: bool) -> bool:
        """Returns whether the step that begins computes no new prompts; `throttled`: whether vLLM would have it so."""
        engine, changes = self._engine, self._changes
        now = Step(engine.current_wave, engine.step_counter)
        if changes.plans:
            throttled = not changes.opens(now)
            engine.scheduler.prefill_capacity_bound = False  # else a rank whose prompts did not all begin goes on alone
            if now == changes.plan[1]:
                LOG.debug("aurora: interval %d begins in %s", changes.plan[0], tuple(now))
        changes.steps.look(now, time.time(), engine.scheduler.requests, engine.scheduler.running, not throttled)
        return throttled


def _exchange(engine: Any, changes: IntervalChanges) -> None:
    """Exchanges reports and plans until the engine ends."""
    from aurora_vllm.served_metrics import PromptMetrics  # not earlier: vLLM first says where metrics are collected

    parallel = engine.vllm_config.parallel_config
    metrics = PromptMetrics(engine.vllm_config.model_config.served_model_name, engine.dp_rank * parallel.tensor_parallel_size)
    while True:
        now = Step(engine.current_wave, engine.step_counter)
        try:
            changes.exchange(engine.dp_store, now, engine.scheduler.has_requests, time.time())
        except Exception as error:  # the rank that holds the store has ended
            LOG.info("aurora: the interval between steps with prompts stays %d: %s", changes.plan[0], error)
            return
        metrics.show(changes)
        time.sleep(POLL_S)
