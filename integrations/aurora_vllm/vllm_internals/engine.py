"""The engine of a data-parallel rank: vLLM's, which serves on when ranks are lost, keeps to a cadence, and names lost ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aurora_vllm.rank_progress import naming_lost_ranks, status_files
from aurora_vllm.settings import Settings, settings_of
from aurora_vllm.vllm_internals.api_checks import find, lacks
from aurora_vllm.vllm_internals.joining_rank import joins
from aurora_vllm.vllm_internals.replaced import original, replace
from aurora_vllm.vllm_internals.requests import PromptSteps

LOG = logging.getLogger("vllm.aurora")
ENGINE_TARGET = "vllm.v1.engine.core:EngineCoreProc.run_engine_core"
ENGINE = "vllm.v1.engine.core:DPEngineCoreProc"


def run_engine(*args: Any, **named: Any) -> None:
    """Runs vLLM's engine, whose arguments it takes, in the process that vLLM has started for it."""
    if (settings := settings_of(named["vllm_config"])) is not None:
        if lack := next(lacks("engines"), None):
            LOG.warning("aurora: errors of engines name no lost rank: %s", lack)
        else:
            replace(ENGINE, lambda engine: engine_class(engine, settings))
    if joins():  # without a handshake with rank 0's server
        named["handshake_address"] = named.pop("client_handshake_address", None) or named["handshake_address"]
    original(ENGINE_TARGET)(*args, **named)


def engine_class(vllm_engine: Any, settings: Settings) -> Any:
    """Returns the subclass of vLLM's engine that does what the settings ask for."""

    class PluginEngine(vllm_engine):  # type: ignore[misc]
        """vLLM's engine of a data-parallel rank.

        Attributes:
            aurora_prompts: watches the steps, and opens some for prompts; None: vLLM does.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            self.aurora_prompts: PromptSteps | None = None
            if settings.fault_store is None:
                super().__init__(*args, **named)
            else:
                from aurora_vllm.vllm_internals.fault_tolerance import engine_sentinel, watch_connections

                connections = watch_connections(settings.fault_store)
                super().__init__(*args, **named)
                self.ft_sentinel = engine_sentinel(self, connections, settings.fault_store)
            if settings.requests != "stock":
                self.aurora_prompts = PromptSteps(self, settings)

        def _init_data_parallel(self, vllm_config: Any) -> None:
            if not joins():
                super()._init_data_parallel(vllm_config)
                return
            parallel, store = vllm_config.parallel_config, HashStore()
            make, within = find("vllm.distributed.utils:init_gloo_process_group"), parallel.cpu_distributed_timeout
            self.dp_rank, self.dp_size, self.dp_store = parallel.data_parallel_rank, parallel.data_parallel_size, store
            self.dp_group = make(store, 0, 1, within or dist.distributed_c10d.default_pg_timeout)

        def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
            with naming_lost_ranks(status_files()):
                return bool(super()._has_global_unfinished_reqs(local_unfinished))

        def _should_throttle_prefills(self) -> bool:
            throttled = bool(super()._should_throttle_prefills())
            return throttled if self.aurora_prompts is None else self.aurora_prompts.throttled(throttled)

        def _handle_client_request(self, request_type: Any, request: Any) -> None:
            stops = getattr(self.__dict__.get("ft_sentinel"), "stops", None)
            if stops is None or not stops(request):
                super()._handle_client_request(request_type, request)

    return PluginEngine
