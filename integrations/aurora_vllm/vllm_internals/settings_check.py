"""Checks the plugin's settings where vLLM reads its options: in the first process of a server, before anything is loaded."""

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io import load_plan
from aurora.io.engine_placements import redundant_experts
from aurora_vllm.settings import Settings, check_files, misspelt, read_settings
from aurora_vllm.vllm_internals.api_checks import CREATE_CONFIG, HOOK_API_CHECKS, check_api

LOG = logging.getLogger("vllm.aurora")
SERVER = "OPENAI_API_SERVER"  # vLLM's name for `vllm serve`


def install_settings_check() -> None:
    """Wraps the creation of vLLM's configuration, once, in processes that read vLLM's options. Others stay as they are."""
    module, _, names = CREATE_CONFIG.partition(":")
    kind, method = names.split(".")
    engine_args = getattr(sys.modules.get(module), kind, None)
    original = getattr(engine_args, method, None)
    if original is None or getattr(original, "_aurora", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **named: Any) -> Any:
        torchrun = getattr(self, "distributed_executor_backend", None) == "external_launcher"  # all its ranks come here
        reports = not torchrun or os.environ.get("RANK") == "0"
        settings = check_settings(getattr(self, "additional_config", None), reports, *args, **named)
        config = original(self, *args, **named)
        if settings is not None and settings.plan is not None:
            set_redundant_experts(config, settings.plan)
        return config

    create_engine_config._aurora = True  # type: ignore[attr-defined]
    setattr(engine_args, method, create_engine_config)


def check_settings(
    additional: Any, reports: bool, usage_context: Any = None, *_args: Any, **_named: Any
) -> Settings | None:  # fmt: skip
    """Checks the settings, and warns of names that are probably misspelt and of a vLLM whose workers cannot be reached.

    Returns the settings; None if the plugin is not configured.

    Args:
        additional: vLLM's additional_config.
        reports: whether this process is the one that logs the warnings.
        usage_context: what vLLM says that it is used for.

    Raises:
        BadInput: if a setting is wrong in itself, or the plan's file is no plan; or the plugin is required, and this vLLM's
            workers cannot be reached.
        SystemExit: the same, with a sentence instead of a traceback, in `vllm serve`.
    """
    additional = additional if isinstance(additional, dict) else {}
    for sentence in misspelt(additional, os.environ) if reports else ():
        LOG.warning("aurora: %s", sentence)
    try:
        settings = read_settings(additional.get("aurora"), os.environ)
        if settings is not None:
            check_files(settings)
            _check_hook(settings, reports)
    except BadInput as error:
        if getattr(usage_context, "value", usage_context) == SERVER:
            raise SystemExit(f"aurora: {error}") from None
        raise
    return settings


def _check_hook(settings: Settings, reports: bool) -> None:
    """Warns if the plugin could not wrap this vLLM's workers. Raises BadInput instead if the plugin is required."""
    try:
        check_api(HOOK_API_CHECKS)
    except BadInput as error:
        if settings.required:
            raise
        if reports:
            LOG.warning("aurora: %s; vLLM is left as it is", error)


def set_redundant_experts(config: Any, plan: Path) -> None:
    """Sets how many redundant experts EPLB holds to what the plan needs, unless they are given or the plan does not fit.

    Args:
        config: vLLM's configuration, before it is handed to workers.
        plan: the plan's file.
    """
    parallel = config.parallel_config
    if not parallel.enable_eplb or parallel.eplb_config.num_redundant_experts:
        return
    placement = load_plan(plan, checked=False).models[0].placement
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    redundant = redundant_experts(placement)
    if redundant and (placement.gpus, placement.experts) == (ranks, config.model_config.get_num_experts()):
        parallel.eplb_config.num_redundant_experts = redundant
        LOG.info("aurora: the plan needs --eplb-config.num_redundant_experts %d", redundant)
