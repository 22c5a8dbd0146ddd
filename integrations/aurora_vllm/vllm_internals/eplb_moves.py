"""Patches of vLLM's load balancer (EPLB) for a placement that follows its traffic: moves are timed, and come in rounds."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.types.arrays import IntArray
from aurora_vllm.vllm_internals.api_checks import (
    EPLB_ASYNC,
    EPLB_EXECUTE,
    EPLB_STATE,
    MIGRATION_FLOW,
    MOVE_API_CHECKS,
    check_api,
    find,
)
from aurora_vllm.vllm_internals.patches import PatchedWorker

if TYPE_CHECKING:
    from aurora_vllm.traffic_recorder import EngineFacts


def follow_traffic(worker: PatchedWorker, balancer: Any, facts: EngineFacts, served_name: str) -> None:
    """Makes EPLB's physical experts follow the traffic from now on. Called on all ranks once the model is loaded.

    Args:
        worker: what the patches share.
        balancer: vLLM's EplbState of the model.
        facts: facts about the model and this rank.
        served_name: the name under which vLLM serves the model.
    """
    from aurora_vllm.control_metrics import ControlMetrics
    from aurora_vllm.eplb_placement import EplbPlacement

    assert worker.integration is not None
    worker.live = worker.integration.live = EplbPlacement(
        worker.integration.settings,
        facts,
        worker.integration.served.cluster,
        not balancer.is_async,
        _broadcast,
        ControlMetrics(served_name, facts.rank),
        lambda: balancer.async_worker is None or balancer.async_worker.is_alive(),
    )
    _leave_out_rehearsals(worker)
    _time_moves(worker)
    try:
        check_api(MOVE_API_CHECKS)
    except BadInput:  # then they come in vLLM's sequence
        return
    move_in_rounds()
    balancer.parallel_config.eplb_config.enable_migration_batching = balancer.is_async


def _broadcast(tensor: torch.Tensor) -> None:
    """Gives a tensor rank 0's values, through the group that vLLM keeps for EPLB."""
    dist.broadcast(tensor, group=find("vllm.distributed.parallel_state:get_eplb_group")().cpu_group, group_src=0)


def _leave_out_rehearsals(worker: PatchedWorker) -> None:
    """Keeps rearrangements that only reserve memory from the placement: they have no traffic, and nothing moves."""
    state = find(EPLB_STATE)
    original = state.rearrange

    @functools.wraps(original)
    def rearrange(self: Any, is_profile: bool = False, *args: Any, **named: Any) -> Any:
        live = worker.live
        if is_profile:
            worker.live = None
        try:
            return original(self, is_profile, *args, **named)
        finally:
            worker.live = live

    state.rearrange = rearrange


def _time_moves(worker: PatchedWorker) -> None:
    """Times what moves experts: those of all layers while serving waits, and those of a layer in the background."""
    serving, background = find("vllm.distributed.eplb.eplb_state:"), find(f"{EPLB_ASYNC}:")
    rearrange, transfer = serving.rearrange_expert_weights_inplace, background.transfer_layer

    @functools.wraps(rearrange)
    def rearrange_timed(*args: Any, **named: Any) -> None:
        with nullcontext() if worker.live is None else worker.live.moving():
            rearrange(*args, **named)
            if torch.cuda.is_available():  # vLLM's rank 0 waits for the moves too
                torch.cuda.current_stream().synchronize()

    @functools.wraps(transfer)
    def transfer_timed(*args: Any, **named: Any) -> Any:  # the back ends that vLLM has for the background wait by themselves
        with nullcontext() if worker.live is None else worker.live.moving():
            return transfer(*args, **named)

    serving.rearrange_expert_weights_inplace, background.transfer_layer = rearrange_timed, transfer_timed


def move_in_rounds() -> None:
    """Makes EPLB send experts in rounds of ours, in which each rank sends to one rank and receives from one at a time."""
    from aurora_vllm.move_rounds import move_rounds

    execute, background = find(f"{EPLB_EXECUTE}:"), find(f"{EPLB_ASYNC}:")
    flow = find(MIGRATION_FLOW)

    def schedule(num_local_experts: int, old_indices: IntArray, new_indices: IntArray) -> list[list[Any]]:
        held_RP, wanted_RP = (np.asarray(each).reshape(-1, num_local_experts) for each in (old_indices, new_indices))
        return [[flow(*each) for each in moves] for moves in move_rounds(held_RP, wanted_RP)]

    def schedule_layers(num_local_experts: int, old_indices: IntArray, new_indices: IntArray) -> list[list[list[Any]]]:
        return [schedule(num_local_experts, *layer) for layer in zip(old_indices, new_indices, strict=True)]

    schedule(1, np.array([0, 1]), np.array([1, 0]))  # compiles what it needs now rather than while serving
    execute.schedule_migration_batches, background.schedule_migration_batches_for_layers = schedule, schedule_layers
    execute.move_to_buffer = functools.partial(execute.move_to_buffer, enable_migration_batching=True)
