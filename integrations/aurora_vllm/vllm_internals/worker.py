"""The worker that vLLM makes in place of its own where there are settings, by its option `worker_cls`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from aurora.errors import BadInput
from aurora_vllm.peer_ranks import end_with_parent
from aurora_vllm.rank_progress import naming_lost_ranks
from aurora_vllm.settings import Settings, settings_of
from aurora_vllm.vllm_internals.api_checks import find, lacks
from aurora_vllm.vllm_internals.eplb_policy import place_experts
from aurora_vllm.vllm_internals.joining_rank import begin_alone, joins
from aurora_vllm.vllm_internals.local_stores import listen_on_loopback
from aurora_vllm.vllm_internals.model_runner import begin_serving
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup, process_number

WORKERS = {  # of vLLM, by the name in this module of what takes their place
    "GpuWorker": "vllm.v1.worker.gpu_worker.Worker",
    "CpuWorker": "vllm.v1.worker.cpu_worker.CPUWorker",
}


def take_worker(parallel: Any) -> Iterator[str]:
    """Has vLLM make the plugin's worker, in vLLM's ParallelConfig `parallel`. Yields a sentence if vLLM is to make another."""
    ours = {theirs: f"{__name__}.{name}" for name, theirs in WORKERS.items()}
    if parallel.worker_cls in ours:
        parallel.worker_cls = ours[parallel.worker_cls]
    elif parallel.worker_cls not in ours.values():
        yield f"worker_cls: expected vLLM's own worker for GPUs or CPUs, found {parallel.worker_cls}"


def __getattr__(name: str) -> Any:
    """Returns a class of WORKERS, as vLLM asks for it by its name; a process imports one of them alone."""
    if name not in WORKERS:
        raise AttributeError(name)
    module, _, vllm_worker = WORKERS[name].rpartition(".")
    globals()[name] = worker_class(find(f"{module}:{vllm_worker}"))
    return globals()[name]


def worker_class(vllm_worker: Any) -> Any:
    """Returns the worker that does what settings ask for, a subclass of one of vLLM's."""

    class ServingWorker(vllm_worker):  # type: ignore[misc]
        """vLLM's worker, with the plugin where it starts, loads, warms up, computes and ends.

        Without settings, or if this vLLM fails an API check, it is vLLM's own.
        """

        def __init__(self, vllm_config: Any, *args: Any, **named: Any) -> None:
            self._aurora: WorkerStartup | None = None
            self._aurora_settings, self._aurora_warm, parallel = settings_of(vllm_config), False, vllm_config.parallel_config
            address = None if self._aurora_settings is None else self._aurora_settings.fault_store
            if address is None:
                super().__init__(vllm_config, *args, **named)
                return
            from aurora_vllm.vllm_internals.fault_tolerance import watch_connections, worker_sentinel

            connections = watch_connections(address)
            parallel.enable_fault_tolerance = False  # vLLM's sentinel refuses the stock all-to-all
            super().__init__(vllm_config, *args, **named)
            parallel.enable_fault_tolerance = True
            self.worker_sentinel = worker_sentinel(self, connections, address)

        def init_device(self) -> None:
            """Installs the patches that settings ask for, and agrees with the other ranks once they are connected."""
            config: Any = self.vllm_config
            self._aurora = None if self._aurora_settings is None else prepare_worker(self._aurora_settings, config)
            if joins():
                begin_alone(process_number(config.parallel_config), config.parallel_config.world_size_across_dp)
            super().init_device()
            if self._aurora is not None and not self._aurora.start():
                self._aurora = None

        def load_model(self, *args: Any, **named: Any) -> None:
            """Loads the model, and begins to serve it."""
            super().load_model(*args, **named)
            if self._aurora is not None:
                runner, config = self.model_runner, self.vllm_config
                balancer = getattr(runner, "eplb_state", None)
                place_experts(self._aurora.patched, balancer)
                begin_serving(runner.model, self._aurora.patched, config, balancer)

        def compile_or_warm_up_model(self) -> Any:
            """Warms up, by passes whose tokens are nobody's; nothing waits for the GPU while CUDA graphs are captured."""
            if self._aurora is None:
                return super().compile_or_warm_up_model()
            integration, self._aurora_warm = self._aurora.integration, False
            with naming_lost_ranks(integration.files), integration.records.between_passes:
                warmed_up = super().compile_or_warm_up_model()
            self._aurora_warm, self._aurora.patched.live = True, integration.live
            integration.progress.idle()
            integration.progress.serve()
            return warmed_up

        def execute_model(self, scheduler_output: Any) -> Any:
            """Computes a batch, in a pass that is recorded and watched."""
            if self._aurora is None:
                return super().execute_model(scheduler_output)
            integration = self._aurora.integration
            tokens = scheduler_output.total_num_scheduled_tokens if self._aurora_warm else 0
            with naming_lost_ranks(integration.files):
                in_pass = tokens > 0 or (self._aurora_warm and self._aurora.keeps_company)
                with integration.forward_pass(tokens) if in_pass else nullcontext():
                    return super().execute_model(scheduler_output)

        def sample_tokens(self, *args: Any, **named: Any) -> Any:
            """Samples tokens of the last pass, after which EPLB moves experts."""
            if self._aurora is None:
                return super().sample_tokens(*args, **named)
            integration = self._aurora.integration
            with naming_lost_ranks(integration.files):
                integration.progress.leave()
                sampled = super().sample_tokens(*args, **named)
                integration.progress.idle()
            return sampled

        def execute_dummy_batch(self) -> None:
            """Computes a pass without tokens beside other ranks' passes."""
            if self._aurora is None:
                super().execute_dummy_batch()
                return
            integration = self._aurora.integration
            with naming_lost_ranks(integration.files), integration.forward_pass(0):
                super().execute_dummy_batch()

        def shutdown(self) -> None:
            """Writes the records before the worker shuts down, as it does on Ctrl-C and SIGTERM."""
            if self._aurora is not None:
                if self._aurora.integration.watchdog is not None:
                    self._aurora.integration.watchdog.end()
                self._aurora.integration.records.end()
            super().shutdown()

        def aurora(self, *words: str) -> Any:
            """Obeys a command to the plugin: `collective_rpc("aurora", args=...)`.

            Raises:
                BadInput: if the plugin does nothing in this worker.
            """
            if self._aurora is None:
                raise BadInput("aurora: expected a server that the plugin serves, found vLLM without it")
            return self._aurora.integration.records.command(*words)

        def ranks_changed(self, ranks_before: Sequence[int | None], numbers: Sequence[int]) -> None:
            """Goes on with the ranks of vLLM's new groups, by their numbers until now (None: it joins) and at the start."""
            if self._aurora is not None:
                with self._aurora.integration.records.between_passes:
                    self._aurora.change_ranks(ranks_before, numbers)

    return ServingWorker


def prepare_worker(settings: Settings, config: Any) -> WorkerStartup | None:
    """Installs the patches that the settings require.

    If this vLLM fails an API check, vLLM stays unchanged; a failed check is logged once.

    Args:
        settings: the plugin's settings.
        config: vLLM's configuration.

    Returns:
        The start, to be gone on with once ranks are connected; None if vLLM serves without the plugin.

    Raises:
        RankFailed: if an API check fails, and the settings say that the plugin is required.
    """
    refusal = None
    for lack in lacks("workers", "V2" if getattr(config, "use_v2_model_runner", False) else "V1"):
        from aurora_vllm.plugin_status import PluginStatus  # not earlier: vLLM first says where metrics are collected

        number = process_number(config.parallel_config)  # ranks cannot be asked to agree
        PluginStatus(settings, config.model_config.served_model_name, number, number == 0).report_disabled(lack)
        return None
    if (other := find("vllm.model_executor.custom_op:op_registry_oot").get("RoutedExperts")) is not None:
        refusal = f"another plugin has taken RoutedExperts, by {other}"
    listen_on_loopback()
    end_with_parent()  # vLLM's workers outlive an engine that is killed while they wait for another rank
    startup = WorkerStartup(settings, config, refusal)
    startup.install_patches()
    return startup
