"""Hook into vLLM where it reads its options: settings are checked in a server's first process, before anything is loaded."""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from aurora.algorithms.gpu_slots import redundant_experts
from aurora.errors import BadInput
from aurora.io import load_plan
from aurora_vllm.child_processes import end_with_command
from aurora_vllm.rank_progress import naming_lost_ranks, status_files
from aurora_vllm.settings import PREFIX, SECRET, Settings, check_files, misspelt, read_settings
from aurora_vllm.vllm_internals.api_checks import lacks
from aurora_vllm.vllm_internals.conditions import check_conditions, check_platform, expert_parallel_ranks
from aurora_vllm.vllm_internals.engine import ENGINE_TARGET, run_engine
from aurora_vllm.vllm_internals.local_stores import listen_on_loopback
from aurora_vllm.vllm_internals.patches import within
from aurora_vllm.vllm_internals.replaced import replace, replaced
from aurora_vllm.vllm_internals.requests import choose_ranks
from aurora_vllm.vllm_internals.worker import take_worker

LOG = logging.getLogger("vllm.aurora")
ENGINE_CONFIG = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
UNFINISHED = "vllm.config:ParallelConfig.has_unfinished_dp"
SERVER = "OPENAI_API_SERVER"  # vLLM's name for `vllm serve`


def settings_in_sight() -> bool:
    """Returns True if this process may be given settings: by a variable, the command line, or the caller's EngineArgs.

    vLLM calls the plugin before it reads its options, and in processes that read none. A call by anybody else counts as asking.
    """
    if any(name.startswith(PREFIX[:3]) for name in os.environ):
        return True
    frame, called_by_vllm = inspect.currentframe(), False
    while frame is not None:
        called_by_vllm = called_by_vllm or frame.f_code.co_name == "load_general_plugins"
        if getattr(frame.f_locals.get("self"), "additional_config", None):
            return True
        frame = frame.f_back
    return not called_by_vllm or _on_command_line(sys.argv[1:])


def _on_command_line(words: list[str]) -> bool:
    """Returns True if a command line, or the file that its --config names, has an --additional-config."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.replace("_", "-").partition("=")
        if name.startswith("--add"):
            return True
        if name == "--config":
            with suppress(OSError, UnicodeDecodeError):
                return "additional" in Path(word.partition("=")[2] if value else following).read_text()
    return False


def install_settings_check() -> None:
    """Patches vLLM to check the plugin's settings when it creates its configuration. Idempotent.

    Processes that do not read vLLM's options, and those without settings in sight, stay unchanged.
    """
    if "vllm.engine.arg_utils" in sys.modules and not replaced(ENGINE_CONFIG) and settings_in_sight():
        replace(ENGINE_CONFIG, _checked)


def _checked(original: Any) -> Any:
    """Returns vLLM's `create_engine_config`, which checks the plugin's settings and has vLLM make the plugin's worker."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **named: Any) -> Any:
        torchrun = getattr(self, "distributed_executor_backend", None) == "external_launcher"  # all its ranks come here
        reports = not torchrun or os.environ.get("RANK") == "0"
        with _as_one_sentence(*args, **named):
            settings = check_settings(getattr(self, "additional_config", None), reports)
            if settings is None:
                return original(self, *args, **named)
            check_platform(self)
            config = original(self, *args, **named)
            if settings.plan is not None:
                set_redundant_experts(config, settings.plan)
            check_conditions(settings, config)
            _install(settings, config, torchrun, reports)
        return config

    return create_engine_config


def _install(settings: Settings, config: Any, torchrun: bool, reports: bool) -> None:
    """Has vLLM make the plugin's worker and engine, and does what settings ask for in a server's first process."""
    if SECRET in os.environ:
        end_with_command()
    for lack in chain(lacks("server"), take_worker(config.parallel_config)):
        if settings.required:
            raise BadInput(lack)
        LOG.log(logging.WARNING if reports else logging.DEBUG, "aurora: %s; vLLM is left as it is", lack)
        return
    if not replaced(ENGINE_TARGET):
        replace(ENGINE_TARGET, lambda _: staticmethod(run_engine))
    if torchrun and not replaced(UNFINISHED):
        replace(UNFINISHED, lambda original: staticmethod(within(lambda: naming_lost_ranks(status_files()))(original)))
    listen_on_loopback()
    if settings.fault_store is not None:
        from aurora_vllm.vllm_internals.fault_tolerance import install_in_server

        install_in_server(settings.fault_store)
    if settings.requests != "stock":
        choose_ranks(settings.requests)
    # not earlier: vLLM first says where metrics are collected
    from aurora_vllm.served_metrics import open_status_folder

    open_status_folder()


def check_settings(additional: Any, reports: bool) -> Settings | None:
    """Checks the settings; warns of probably misspelt names.

    Returns the settings; None if the plugin is not configured.

    Args:
        additional: vLLM's additional_config.
        reports: True: this process logs the warnings.

    Raises:
        BadInput: if a setting is invalid, or the plan's file is not a plan.
    """
    additional = additional if isinstance(additional, dict) else {}
    for sentence in misspelt(additional, os.environ) if reports else ():
        LOG.warning("aurora: %s", sentence)
    if additional.get("aurora", {}) is None:
        raise BadInput('additional_config: expected "aurora" to be an object, found null')
    settings = read_settings(additional.get("aurora"), os.environ)
    if settings is not None:
        check_files(settings)
    return settings


@contextmanager
def _as_one_sentence(usage_context: Any = None, *_args: Any, **_named: Any) -> Iterator[None]:
    """Context manager in which bad input ends `vllm serve` with a sentence instead of a traceback."""
    try:
        yield
    except BadInput as error:
        if getattr(usage_context, "value", usage_context) == SERVER:
            raise SystemExit(f"aurora: {error}") from None
        raise


def set_redundant_experts(config: Any, plan: Path) -> None:
    """Sets EPLB's number of redundant experts to the number that the plan needs.

    Does nothing if the user has set the number, or if the plan does not fit.

    Args:
        config: vLLM's configuration, before it is handed to workers.
        plan: the plan's file.
    """
    parallel = config.parallel_config
    if not parallel.enable_eplb or parallel.eplb_config.num_redundant_experts:
        return
    placement = load_plan(plan).models[0].placement
    ranks, redundant = expert_parallel_ranks(parallel), redundant_experts(placement)
    if redundant and (placement.gpus, placement.experts) == (ranks, config.model_config.get_num_experts()):
        parallel.eplb_config.num_redundant_experts = redundant
        LOG.info("aurora: the plan needs --eplb-config.num_redundant_experts %d", redundant)
