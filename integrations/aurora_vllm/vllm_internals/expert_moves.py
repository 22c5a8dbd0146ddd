"""Adapts the placement of vLLM's experts to traffic through its load balancer (EPLB), whose moves are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora_vllm.vllm_internals.api_checks import find
from aurora_vllm.vllm_internals.patches import PatchedWorker, within
from aurora_vllm.vllm_internals.replaced import replace

if TYPE_CHECKING:
    from aurora_vllm.eplb_mover import EplbMover
    from aurora_vllm.traffic_recorder import EngineFacts

REARRANGE = "vllm.distributed.eplb.eplb_state:rearrange_expert_weights_inplace"
TRANSFER = "vllm.distributed.eplb.async_worker:transfer_layer"
DECISIONS, LEAST_PASSES = 8, 8  # decisions in EPLB's `step_interval`, and forward passes before each


def follow_traffic(worker: PatchedWorker, balancer: Any, facts: EngineFacts, served_name: str) -> None:
    """Adapts the placement to traffic through EPLB, from now on. Called on all ranks after loading.

    Args:
        worker: state that the patches share.
        balancer: vLLM's EplbState of the model.
        facts: facts about the model and this rank.
        served_name: the name under which vLLM serves the model.
    """
    from aurora_vllm.eplb_mover import EplbMover
    from aurora_vllm.plugin_status import ControlMetrics

    assert worker.integration is not None
    worker.integration.live = EplbMover(  # and of the patches, once serving begins
        worker.integration.settings,
        facts,
        worker.integration.served.cluster,
        not balancer.is_async,
        _broadcast,
        ControlMetrics(served_name, facts.rank),
        lambda: balancer.async_worker is None or balancer.async_worker.is_alive(),
        profile=worker.integration.served.profile,
    )
    _decide_more_often(balancer)
    replace(REARRANGE, within(lambda: _moving(worker.live)))
    # the back ends that vLLM has for the background wait by themselves
    replace(TRANSFER, within(lambda: nullcontext() if worker.live is None else worker.live.moving()))
    if balancer.is_async and hasattr(eplb := balancer.parallel_config.eplb_config, "enable_migration_batching"):
        eplb.enable_migration_batching = True


def _broadcast(tensor: torch.Tensor) -> None:
    """Gives a tensor rank 0's values, through the group that vLLM keeps for EPLB."""
    dist.broadcast(tensor, group=find("vllm.distributed.parallel_state:get_eplb_group")().cpu_group, group_src=0)


def _decide_more_often(balancer: Any) -> None:
    """Makes EPLB ask for DECISIONS decisions in each `step_interval`, but for none before LEAST_PASSES forward passes.

    A shorter window shows a change of traffic sooner. The controller takes into account what chance explains in it.
    """
    interval = balancer.expert_rearrangement_step_interval
    passes = min(interval, max(interval // DECISIONS, LEAST_PASSES))
    balancer.expert_rearrangement_step, balancer.expert_rearrangement_step_interval = 0, passes
    balancer.expert_load_window_size = min(balancer.expert_load_window_size, passes)
    for model in balancer.model_states.values():
        model.expert_load_window = model.expert_load_window[: balancer.expert_load_window_size]


@contextmanager
def _moving(live: EplbMover | None) -> Iterator[None]:
    """Context manager of moves while serving waits; it ends when they have been made, for which vLLM's rank 0 waits too."""
    with nullcontext() if live is None else live.moving():
        yield
        if live is not None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
