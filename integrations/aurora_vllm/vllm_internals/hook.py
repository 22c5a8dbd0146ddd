"""The one hook that is there before anything is asked for, and what it does when something is."""

import functools
import os
from collections.abc import Callable
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.settings import Settings, read_settings
from aurora_vllm.vllm_internals.api_checks import API_CHECKS, CPU_API_CHECKS, WORKER, check_api, find
from aurora_vllm.vllm_internals.cpu import repair_cpu
from aurora_vllm.vllm_internals.patches import AS_BEFORE, LOG, Patches


def hook() -> None:
    """Put the one inert hook in. Called again it does nothing; where there is no such seam it says so."""
    try:
        check_api(API_CHECKS[:1])
    except BadInput as error:
        LOG.warning("aurora: %s; vLLM is left as it is", error)
        return
    wrapper = find(WORKER.rpartition(".")[0])
    if getattr(wrapper.init_device, "_aurora", False):
        return
    original = wrapper.init_device

    @functools.wraps(original)
    def init_device(self: Any) -> None:
        begin = prepared(self.vllm_config)
        original(self)
        if begin is not None:
            begin(self.worker)

    init_device._aurora = True  # type: ignore[attr-defined]
    wrapper.init_device = init_device


def prepared(config: Any) -> Callable[[Any], None] | None:
    """Put everything in that the settings ask for; gives what is left to do when the worker's ranks have met.

    Without settings, or where something is not as expected, vLLM stays as it is; the latter is said once.
    """
    given = config.additional_config.get("aurora") if isinstance(config.additional_config, dict) else None
    settings, trouble = Settings(), None
    try:
        asked = read_settings(given, os.environ)
        if asked is None:
            return None
        settings = asked
    except BadInput as error:
        trouble = str(error)
    try:
        check_api(API_CHECKS)
        on_cpu = bool(find("vllm.platforms:current_platform").is_cpu())
        check_api(CPU_API_CHECKS if on_cpu else ())
    except BadInput as error:  # then ranks cannot be asked to agree either
        LOG.warning("aurora: %s; %s", error, AS_BEFORE)
        return None
    if (other := find("vllm.model_executor.custom_op:op_registry_oot").get("RoutedExperts")) is not None:
        trouble = trouble or f"another plugin has taken RoutedExperts, by {other}"
    elif on_cpu and (config.parallel_config.enable_expert_parallel or config.parallel_config.data_parallel_size > 1):
        repair_cpu()
    hands = Patches(settings, config, trouble)
    if trouble is None:
        hands.take()
    return hands.begin
