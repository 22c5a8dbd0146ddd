"""Start-up of a vLLM worker with the plugin: installs patches, lets all ranks agree on the plan, and connects them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora_vllm.peer_ranks import AGREE_S, Verdict, agree, folders_here, publish_folder
from aurora_vllm.rank_progress import FOLDER, RankFiles, RankProgress, file_of
from aurora_vllm.settings import SHARED_FOLDER, Settings
from aurora_vllm.vllm_internals.api_checks import find
from aurora_vllm.vllm_internals.conditions import EPLB, PART, PLUGIN, Asked, effective_settings, unmet
from aurora_vllm.vllm_internals.eplb_policy import register_policy
from aurora_vllm.vllm_internals.joining_rank import joins
from aurora_vllm.vllm_internals.model_runner import watch_steps
from aurora_vllm.vllm_internals.patches import (
    PatchedWorker,
    cuda_graphs,
    disable_cuda_graphs,
    patch_all2all_manager,
    patch_routed_experts,
)

if TYPE_CHECKING:
    from aurora.moe.transport import Transport
    from aurora.types import Cluster
    from aurora_vllm.worker_integration import WorkerIntegration

LOG = logging.getLogger("vllm.aurora")


class WorkerStartup:
    """Starts the plugin in one worker process: `install_patches` before ranks are connected, `start` afterwards.

    Attributes:
        patched: state that the patches share.

    Args:
        settings: the plugin's settings.
        config: vLLM's configuration.
        refusal: reason, known before ranks are connected, why the plugin cannot be used; None: no such reason.
    """

    def __init__(self, settings: Settings, config: Any, refusal: str | None) -> None:
        self._config, self._refusal = config, refusal
        self._asked = Asked(settings, config)
        self._settings = effective_settings(self._asked)
        self.patched = PatchedWorker(config)

    def install_patches(self) -> None:
        """Patches the classes that build experts and all-to-alls, unless there is already a refusal."""
        if self._refusal is not None:
            return
        patch_routed_experts(self.patched)
        patch_all2all_manager(self.patched)
        if self._config.parallel_config.enable_eplb and not any(unmet(self._asked, *EPLB)):
            register_policy(self.patched)
        if self._settings.order in ("plan", "online") and cuda_graphs(self._config):
            if self._reports:
                LOG.warning("aurora: CUDA graphs are off: the sizes of ordered messages are known on the host alone")
            disable_cuda_graphs(self._config)

    @property
    def integration(self) -> WorkerIntegration:
        """The plugin's part in this worker, which has started."""
        assert self.patched.integration is not None
        return self.patched.integration

    @property
    def keeps_company(self) -> bool:
        """True if a rank without requests is asked for a batch, and then passes without tokens beside the others."""
        parallel = self._config.parallel_config
        by_torchrun = parallel.distributed_executor_backend == "external_launcher" and parallel.data_parallel_size > 1
        return by_torchrun and self._asked.runner == "V1"

    def start(self) -> bool:
        """Agrees with the other ranks on the plan, and connects to them. Returns whether the plugin has a part in this worker.

        Raises:
            RankFailed: if the ranks refuse the plan, and the setting `required` is True.
        """
        from aurora_vllm.plugin_status import PluginStatus

        group = None
        if self._config.parallel_config.enable_expert_parallel:
            group = find("vllm.distributed.parallel_state:get_ep_group")()
        integration = self._create_integration(group)
        verdict, folders = self._agree(integration, group)
        name = self._config.model_config.served_model_name
        integration.status = PluginStatus(self._settings, name, integration.rank, self._reports)
        if verdict.refusal is not None:
            integration.served.disable()
            integration.status.report_disabled(verdict.refusal, verdict.report_here)
        else:
            for sentence in unmet(self._asked, *PART):
                integration.status.report_degraded(sentence)
        if self._refusal is not None:  # nothing was patched
            return False
        if group is not None:
            cluster = integration.served.cluster
            integration.connect(lambda: _transport(group, cluster))
            if integration.served.order == "push":
                from aurora.runtime.transports.symmetric_memory import memory_of_peers

                device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
                of_ranks = integration.transport().gather, integration.rank, integration.ranks
                integration.peers_memory = memory_of_peers(*of_ranks, device, group.device_group)
        if folders:
            first = next(iter(folders.values()))  # the folder of the first of these ranks, for all of them
            self._watch(integration, integration.rank, list(folders), os.environ.get(SHARED_FOLDER, first))
        self.patched.integration, self.patched.group = integration, group
        watch_steps(integration)
        return True

    def change_ranks(self, ranks_before: Sequence[int | None], numbers: Sequence[int]) -> None:
        """Continues in vLLM's new groups.

        Args:
            ranks_before: the ranks of these groups by their numbers until now; None: one that joins.
            numbers: the same ranks by their numbers at the start.
        """
        integration = self.integration
        number = numbers[ranks_before.index(integration.rank)]
        self.patched.group = group = find("vllm.distributed.parallel_state:get_ep_group")()
        integration.change_ranks(ranks_before, lambda: _transport(group, None))
        if self.patched.capturer is not None:
            self.patched.capturer.dp_rank = self._config.parallel_config.data_parallel_rank
        if integration.watchdog is not None:
            integration.watchdog.keep(list(numbers))
        elif joins():
            self._watch(integration, number, list(numbers), os.environ.get(SHARED_FOLDER, ""))
            integration.progress.serve()

    def _watch(self, integration: WorkerIntegration, number: int, ranks: list[int], folder: str) -> None:
        """Begins to watch the ranks of this host.

        Args:
            integration: the plugin of this worker.
            number: this rank's number at the start.
            ranks: those of the watched ranks.
            folder: the folder of their files; "": nobody has created one, as the configuration was made without the plugin.
        """
        from aurora_vllm.watchdog import Watchdog

        os.environ[FOLDER] = folder
        if not folder:
            return
        try:
            integration.progress = RankProgress(file_of(Path(folder), number))
        except OSError as error:
            LOG.warning("aurora: no watchdog: %s", error)
            return
        integration.watchdog = Watchdog(
            number, integration.progress, RankFiles(Path(folder), ranks), len(ranks) == integration.ranks,
            self._config.model_config.served_model_name,
        )  # fmt: skip

    @property
    def _reports(self) -> bool:
        """True if this process logs what holds for all processes of the server."""
        return process_number(self._config.parallel_config) == 0

    def _create_integration(self, group: Any) -> WorkerIntegration:
        from aurora_vllm.served_plan import read_model
        from aurora_vllm.worker_integration import WorkerIntegration

        rank, ranks = (0, 1) if group is None else (group.rank_in_group, group.world_size)
        model = self._config.model_config
        checkpoint, experts = read_model(model.model, model.revision)
        tensor_parallel = find("vllm.distributed.parallel_state:get_tp_group")()
        row_share = (tensor_parallel.rank_in_group, tensor_parallel.world_size)
        return WorkerIntegration(self._settings, rank, ranks, checkpoint, experts, row_share)

    def _agree(self, integration: WorkerIntegration, group: Any) -> tuple[Verdict, dict[int, str] | None]:
        """All ranks' verdict, and the status folders of this host's, if every rank has published its own."""
        asked = replace(self._asked, served=integration.served)
        refusal = self._refusal or next(unmet(asked, *PLUGIN), None)
        if group is None or integration.ranks == 1 or joins():
            return Verdict(refusal, self._reports), None
        rank, ranks = integration.rank, integration.ranks
        store = dist.distributed_c10d._get_default_store()
        key = f"aurora/{'-'.join(map(str, group.ranks))}"
        publish_folder(store, key, rank, os.environ.get(FOLDER, ""))
        verdict = agree(store, key, rank, ranks, integration.served.fingerprint, refusal, AGREE_S)
        return verdict, folders_here(store, key, ranks)


def process_number(parallel: Any) -> int:
    """Returns this worker's global rank, counted through all data-parallel replicas, from vLLM's ParallelConfig."""
    if parallel.distributed_executor_backend == "external_launcher":  # one engine for each of torchrun's ranks
        return int(parallel.rank)
    return int(parallel.data_parallel_rank * parallel.world_size + parallel.rank)


def _transport(group: Any, cluster: Cluster | None) -> Transport:
    """The transport between the ranks of vLLM's expert-parallel group: NCCL on GPUs, gloo on CPUs."""
    from aurora.runtime.transports.gloo import GlooTransport
    from aurora.runtime.transports.nccl import NcclCalls, NcclTransport

    if torch.cuda.is_available():
        return NcclTransport(
            NcclCalls(group.device_group, f"cuda:{torch.cuda.current_device()}"), GlooTransport(group.cpu_group)
        )
    return GlooTransport(group.cpu_group, cluster)
