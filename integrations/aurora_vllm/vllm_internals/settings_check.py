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
from aurora_vllm.vllm_internals.api_checks import CREATE_CONFIG

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
        settings = check_settings(getattr(self, "additional_config", None), *args, **named)
        config = original(self, *args, **named)
        if settings is not None and settings.plan is not None:
            set_redundant_experts(config, settings.plan)
        return config

    create_engine_config._aurora = True  # type: ignore[attr-defined]
    setattr(engine_args, method, create_engine_config)


def check_settings(additional: Any, usage_context: Any = None, *_args: Any, **_named: Any) -> Settings | None:
    """Checks the settings, and warns of names that are probably misspelt. Returns them; None if the plugin is not configured.

    Args:
        additional: vLLM's additional_config.
        usage_context: what vLLM says that it is used for.

    Raises:
        BadInput: if a setting is wrong in itself, or the plan's file is no plan.
        SystemExit: the same, with a sentence instead of a traceback, in `vllm serve`.
    """
    additional = additional if isinstance(additional, dict) else {}
    for sentence in misspelt(additional, os.environ):
        LOG.warning("aurora: %s", sentence)
    try:
        settings = read_settings(additional.get("aurora"), os.environ)
        if settings is not None:
            check_files(settings)
    except BadInput as error:
        if getattr(usage_context, "value", usage_context) == SERVER:
            raise SystemExit(f"aurora: {error}") from None
        raise
    return settings


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
