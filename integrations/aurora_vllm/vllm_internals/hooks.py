"""Hooks into vLLM where it reads its options and where a worker starts, installed before any configuration exists.

Settings are checked in the first process of a server, before anything is loaded.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aurora.algorithms.gpu_slots import redundant_experts
from aurora.errors import BadInput
from aurora.io import load_plan
from aurora_vllm.peer_ranks import end_with_parent
from aurora_vllm.rank_progress import FOLDER, RankFiles, naming_lost_ranks
from aurora_vllm.settings import SHARED_FOLDER, Settings, check_files, misspelt, read_settings
from aurora_vllm.vllm_internals.api_checks import find, lacks, needed
from aurora_vllm.vllm_internals.conditions import check_conditions, expert_parallel_ranks
from aurora_vllm.vllm_internals.cpu import accept_eplb, repair_cpu, repair_eplb
from aurora_vllm.vllm_internals.local_stores import listen_on_loopback
from aurora_vllm.vllm_internals.patches import within
from aurora_vllm.vllm_internals.requests import choose_ranks
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup, process_number

LOG = logging.getLogger("vllm.aurora")
WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
SERVER = "OPENAI_API_SERVER"  # vLLM's name for `vllm serve`


def install_settings_check() -> None:
    """Patches vLLM to check the plugin's settings when it creates its configuration. Idempotent.

    Processes that do not read vLLM's options stay unchanged.
    """
    engine_args: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    original = getattr(engine_args, "create_engine_config", None)
    if original is None or getattr(original, "_aurora", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **named: Any) -> Any:
        torchrun = getattr(self, "distributed_executor_backend", None) == "external_launcher"  # all its ranks come here
        reports = not torchrun or os.environ.get("RANK") == "0"
        with _as_one_sentence(*args, **named):
            settings = check_settings(getattr(self, "additional_config", None), reports)
            if settings is not None and find("vllm.platforms:current_platform").is_cpu():
                accept_eplb()
            config = original(self, *args, **named)
            if settings is None:
                return config
            if settings.plan is not None:
                set_redundant_experts(config, settings.plan)
            check_conditions(settings, config)
            listen_on_loopback()
            if settings.fault_store is not None:
                from aurora_vllm.vllm_internals.fault_tolerance import install_in_server

                install_in_server(settings.fault_store)
            if settings.requests != "stock":
                choose_ranks(settings.requests)
            # not earlier: vLLM first says where metrics are collected
            from aurora_vllm.served_metrics import open_status_folder

            open_status_folder()
        return config

    create_engine_config._aurora = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def check_settings(additional: Any, reports: bool) -> Settings | None:
    """Checks the settings; warns of probably misspelt names, and of a vLLM whose workers the plugin cannot wrap.

    Returns the settings; None if the plugin is not configured.

    Args:
        additional: vLLM's additional_config.
        reports: True: this process logs the warnings.

    Raises:
        BadInput: if a setting is invalid, or the plan's file is not a plan; or if the plugin is required, and cannot wrap this
            vLLM's workers.
    """
    additional = additional if isinstance(additional, dict) else {}
    for sentence in misspelt(additional, os.environ) if reports else ():
        LOG.warning("aurora: %s", sentence)
    if additional.get("aurora", {}) is None:
        raise BadInput('additional_config: expected "aurora" to be an object, found null')
    settings = read_settings(additional.get("aurora"), os.environ)
    if settings is not None:
        check_files(settings)
        for lack in lacks("hook"):
            if settings.required:
                raise BadInput(lack)
            LOG.log(logging.WARNING if reports else logging.DEBUG, "aurora: %s; vLLM is left as it is", lack)
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


def install_worker_hook() -> None:
    """Patches vLLM's worker to call `prepare_worker` in `init_device`. Idempotent; no-op if vLLM lacks that method."""
    if any(lacks("hook")):  # `check_settings` says so, if the plugin is configured
        return
    wrapper = find(WORKER)
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


def install_dp_hook() -> None:
    """Patches the waits of data-parallel engines between passes, so that their errors name the lost ranks. Idempotent.

    Lost ranks are found by the server's status files, which exist only if the plugin is configured.
    """
    for check in needed("engines"):
        with suppress(ImportError, AttributeError):  # a vLLM without it names no lost rank there
            parallel, original = find(check.where.rpartition(".")[0]), find(check.where)
            if not getattr(original, "_aurora", False):
                wrapped = within(lambda: naming_lost_ranks(_files()))(original)
                wrapped._aurora = True  # type: ignore[attr-defined]
                setattr(parallel, check.name, staticmethod(wrapped))


def _files() -> RankFiles | None:
    """The status files of the server's ranks; None if there are none."""
    files = RankFiles(Path(folder)) if (folder := os.environ.get(SHARED_FOLDER, os.environ.get(FOLDER))) else None
    return files if files is not None and files.ranks else None


def prepare_worker(config: Any) -> Callable[[Any], None] | None:
    """Installs the patches that the settings require.

    Without settings, or if this vLLM fails an API check, vLLM stays unchanged; a failed check is logged once.

    Args:
        config: vLLM's configuration.

    Returns:
        A function to call with the worker once its ranks are connected; None if nothing must be called.

    Raises:
        BadInput: if the settings are none, on a host with other variables than the one that checked them first.
        RankFailed: if an API check fails, and the settings say that the plugin is required.
    """
    section = config.additional_config.get("aurora") if isinstance(config.additional_config, dict) else None
    if (settings := read_settings(section, os.environ)) is None:
        return None
    refusal, on_cpu = None, bool(find("vllm.platforms:current_platform").is_cpu())
    on_cpus = ("CPU", *(("EPLB-accepted-on-CPU", "EPLB-on-CPU") if config.parallel_config.enable_eplb else ()))
    for lack in lacks("workers", "V2" if getattr(config, "use_v2_model_runner", False) else "V1", *(on_cpus if on_cpu else ())):
        from aurora_vllm.plugin_status import PluginStatus  # not earlier: vLLM first says where metrics are collected

        number = process_number(config.parallel_config)  # ranks cannot be asked to agree
        PluginStatus(settings, config.model_config.served_model_name, number, number == 0).report_disabled(lack)
        return None
    if (other := find("vllm.model_executor.custom_op:op_registry_oot").get("RoutedExperts")) is not None:
        refusal = f"another plugin has taken RoutedExperts, by {other}"
    elif on_cpu and (config.parallel_config.enable_expert_parallel or config.parallel_config.data_parallel_size > 1):
        repair_cpu()
        if config.parallel_config.enable_eplb:
            repair_eplb()
    listen_on_loopback()
    end_with_parent()  # vLLM's workers outlive an engine that is killed while they wait for another rank
    startup = WorkerStartup(settings, config, refusal)
    startup.install_patches()
    return startup.start
