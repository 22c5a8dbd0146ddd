"""Wraps vLLM's engine in API servers, to choose the rank of a request, and in ranks, to choose the steps with prompts."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.prompt_steps import POLL_S, IntervalChanges, IntervalPlanner, RankSteps, Step
from aurora_vllm.request_ranks import chosen_rank
from aurora_vllm.settings import Settings, read_settings
from aurora_vllm.vllm_internals.api_checks import check_api, find

LOG = logging.getLogger("vllm.aurora")
API_ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
CORE = "vllm.v1.engine.core"


def check_requests(settings: Settings, config: Any) -> None:
    """Checks, before anything is loaded, that this server can do what `requests` says.

    Args:
        settings: the plugin's settings.
        config: vLLM's configuration.

    Raises:
        BadInput: if it cannot.
    """
    if (rule := settings.requests) == "stock":
        return
    check_api("requests")
    parallel, interval = config.parallel_config, config.scheduler_config.prefill_schedule_interval
    if parallel.data_parallel_size == 1:
        raise BadInput(f"requests: expected two data-parallel ranks or more for {rule!r}, found 1")
    if parallel.distributed_executor_backend == "external_launcher":
        raise BadInput(f"requests: expected `vllm serve` for {rule!r}, found torchrun, whose ranks have requests of their own")
    if rule == "cadence" and not config.model_config.is_moe:
        raise BadInput("requests: expected a mixture of experts for 'cadence', whose ranks step together, found a dense model")
    if rule == "cadence" and interval != 1:
        raise BadInput(f"requests: expected no --prefill-schedule-interval with 'cadence', which plans it, found {interval}")


def choose_ranks() -> None:
    """Patches vLLM's engine of an API server to give requests their rank. Idempotent."""
    engine = find(API_ENGINE)
    original = engine._add_request
    if getattr(original, "_aurora", False):
        return

    @functools.wraps(original)
    async def add_request(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        if request.data_parallel_rank is None and request.sampling_params is not None:
            request.data_parallel_rank = rank_of_next(self.engine_core, self.output_processor.request_states)
        return await original(self, request, *args, **named)

    add_request._aurora = True  # type: ignore[attr-defined]
    engine._add_request = add_request


def rank_of_next(client: Any, states: Mapping[str, Any]) -> int | None:
    """Returns the rank of the next request; None if the API server has one rank alone.

    Args:
        client: vLLM's client of the ranks' engines: `reqs_in_flight` has the engine of each request, also of those with a rank
            that the user gave.
        states: unfinished requests, by id.
    """
    if (ranks := len(client.core_engines)) == 1:
        return None
    number = {engine: rank for rank, engine in enumerate(client.core_engines)}
    engines = client.reqs_in_flight
    prompts = [
        (number[engines[name]], state.prompt_len) for name, state in states.items() if state.is_prefilling and name in engines
    ]
    sent = client.__dict__.setdefault("_aurora_sent", client.client_index * ranks // client.client_count)
    client._aurora_sent = sent + 1
    return chosen_rank(prompts, client.lb_engines, client.client_count, sent)


def watch_prompts() -> None:
    """Patches the engine of a data-parallel rank to watch its steps, and with `cadence` to keep to the planned interval.

    Idempotent. Engines without the setting are left as they are.
    """
    engine: Any = getattr(sys.modules.get(CORE), "DPEngineCoreProc", None)
    original = getattr(engine, "_should_throttle_prefills", None)
    if original is None or getattr(original, "_aurora", False):
        return

    @functools.wraps(original)
    def should_throttle_prefills(self: Any) -> bool:
        if "_aurora_prompts" not in self.__dict__:
            self._aurora_prompts = _started(self)
        if (changes := self._aurora_prompts) is None:
            return bool(original(self))
        now = Step(self.current_wave, self.step_counter)
        throttled = bool(original(self))
        if changes.plans:
            throttled = not changes.opens(now)
            self.scheduler.prefill_capacity_bound = False  # else a rank whose prompts did not all begin goes on alone
            if now == changes.plan[1]:
                LOG.debug("aurora: interval %d begins in %s", changes.plan[0], tuple(now))
        changes.steps.look(now, time.monotonic(), self.scheduler.requests, self.scheduler.running, not throttled)
        return throttled

    should_throttle_prefills._aurora = True  # type: ignore[attr-defined]
    engine._should_throttle_prefills = should_throttle_prefills


def _started(engine: Any) -> IntervalChanges | None:
    """Starts the thread that reports the steps of a rank's engine. Returns its state; None if the settings ask for none."""
    config = engine.vllm_config
    additional = config.additional_config if isinstance(config.additional_config, dict) else {}
    settings = read_settings(additional.get("aurora"), os.environ)
    if settings is None or settings.requests == "stock":
        return None
    most_tokens, most_requests = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    changes = IntervalChanges(
        engine.dp_rank, engine.dp_size, RankSteps(most_tokens, most_requests, engine.batch_queue_size - 1),
        IntervalPlanner(most_tokens, settings.ttft_s) if engine.dp_rank == 0 else None, settings.requests == "cadence",
    )  # fmt: skip
    threading.Thread(target=_exchange, args=(engine, changes), daemon=True, name="aurora-prompts").start()
    return changes


def _exchange(engine: Any, changes: IntervalChanges) -> None:
    """Exchanges reports and plans until the engine ends."""
    from aurora_vllm.served_metrics import PromptMetrics  # not earlier: vLLM first says where metrics are collected

    parallel = engine.vllm_config.parallel_config
    metrics = PromptMetrics(engine.vllm_config.model_config.served_model_name, engine.dp_rank * parallel.tensor_parallel_size)
    while True:
        now = Step(engine.current_wave, engine.step_counter)
        try:
            changes.exchange(engine.dp_store, now, engine.scheduler.has_requests, time.monotonic())
        except Exception as error:  # the rank that holds the store has ended
            LOG.info("aurora: the interval between steps with prompts stays %d: %s", changes.plan[0], error)
            return
        metrics.show(changes)
        time.sleep(POLL_S)
