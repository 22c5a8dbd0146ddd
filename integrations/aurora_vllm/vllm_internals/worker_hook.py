"""The hook that is installed in vLLM's workers before any configuration exists, and what it does once there is one."""

import functools
import os
from collections.abc import Callable
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.settings import Settings, read_settings
from aurora_vllm.vllm_internals.api_checks import (
    API_CHECKS,
    CPU_API_CHECKS,
    CPU_EPLB_API_CHECKS,
    HOOK_API_CHECKS,
    WORKER,
    check_api,
    find,
)
from aurora_vllm.vllm_internals.cpu import accept_eplb, refuse_eplb, repair_cpu, repair_eplb
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup, process_number


def install_worker_hook() -> None:
    """Wraps the initialization of vLLM's worker, once. A vLLM that has no such method is left as it is."""
    try:
        check_api(HOOK_API_CHECKS)
    except BadInput:  # `check_settings` says so, if the plugin is configured
        return
    wrapper = find(WORKER.rpartition(".")[0])
    if getattr(wrapper.init_device, "_aurora", False):
        return
    original = wrapper.init_device

    @functools.wraps(original)
    def init_device(self: Any) -> None:
        start = prepare_worker(self.vllm_config)
        original(self)
        if start is not None:
            start(self.worker)

    init_device._aurora = True  # type: ignore[attr-defined]
    wrapper.init_device = init_device
    if find("vllm.platforms:current_platform").is_cpu():
        accept_eplb()


def prepare_worker(config: Any) -> Callable[[Any], None] | None:
    """Installs the patches that the settings ask for.

    Without settings vLLM stays as it is. It also does if something is not as expected, which is logged once.

    Args:
        config: vLLM's configuration.

    Returns:
        A function to call with the worker once its ranks are connected; None if there is nothing to do then.

    Raises:
        RankFailed: if something is not as expected, and the settings say that the plugin is required.
    """
    given = config.additional_config.get("aurora") if isinstance(config.additional_config, dict) else None
    settings, refusal = Settings(), None
    try:
        configured = read_settings(given, os.environ)
        if configured is None:
            refuse_eplb(config)
            return None
        settings = configured
    except BadInput as error:
        settings, refusal = Settings(required=isinstance(given, dict) and given.get("required") is True), str(error)
    try:
        check_api(API_CHECKS)
        on_cpu = bool(find("vllm.platforms:current_platform").is_cpu())
        check_api(CPU_API_CHECKS if on_cpu else ())
        check_api(CPU_EPLB_API_CHECKS if on_cpu and config.parallel_config.enable_eplb else ())
    except BadInput as error:  # then ranks cannot be asked to agree either
        from aurora_vllm.plugin_status import PluginStatus  # not earlier: vLLM first says where metrics are collected

        number = process_number(config.parallel_config)
        PluginStatus(settings, config.model_config.served_model_name, number, number == 0).stands_aside(str(error))
        return None
    if (other := find("vllm.model_executor.custom_op:op_registry_oot").get("RoutedExperts")) is not None:
        refusal = refusal or f"another plugin has taken RoutedExperts, by {other}"
    elif on_cpu and (config.parallel_config.enable_expert_parallel or config.parallel_config.data_parallel_size > 1):
        repair_cpu()
        if config.parallel_config.enable_eplb:
            repair_eplb()
    startup = WorkerStartup(settings, config, refusal)
    startup.install_patches()
    return startup.start
