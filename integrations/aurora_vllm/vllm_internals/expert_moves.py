"""Adapts the placement of vLLM's experts to traffic through its load balancer (EPLB).

EPLB's moves are timed and cut into rounds; those of a few layers run at a time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.types.arrays import IntArray
from aurora_vllm.vllm_internals.api_checks import EPLB_STATE, find, lacks
from aurora_vllm.vllm_internals.patches import PatchedWorker, within

if TYPE_CHECKING:
    from aurora_vllm.eplb_mover import EplbMover
    from aurora_vllm.traffic_recorder import EngineFacts

EPLB_ASYNC = "vllm.distributed.eplb.async_worker:"
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
    worker.live = worker.integration.live = EplbMover(
        worker.integration.settings,
        facts,
        worker.integration.served.cluster,
        not balancer.is_async,
        _broadcast,
        ControlMetrics(served_name, facts.rank),
        lambda: balancer.async_worker is None or balancer.async_worker.is_alive(),
        profile=worker.integration.served.profile,
    )
    _leave_out_rehearsals(worker)
    _decide_more_often(balancer)
    skips = find("vllm.platforms:current_platform").is_rocm()  # where vLLM leaves out rearrangements of little gain
    if not balancer.is_async and not skips and not any(lacks("pieces")):  # else at once, or by layer in the background
        _move_in_pieces(worker)
        worker.live.in_pieces = True
    _time_moves(worker)
    if not any(lacks("rounds")):  # else they come in vLLM's sequence
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


def _time_moves(worker: PatchedWorker) -> None:
    """Times what moves experts: those of all layers while serving waits, and those of a layer in the background."""
    serving, background = find("vllm.distributed.eplb.eplb_state:"), find(EPLB_ASYNC)
    rearrange, transfer = serving.rearrange_expert_weights_inplace, background.transfer_layer
    serving.rearrange_expert_weights_inplace = within(lambda: _moving(worker.live))(rearrange)
    # the back ends that vLLM has for the background wait by themselves
    background.transfer_layer = within(lambda: nullcontext() if worker.live is None else worker.live.moving())(transfer)


@contextmanager
def _moving(live: EplbMover | None) -> Iterator[None]:
    """Context manager of moves while serving waits; it ends when they have been made, for which vLLM's rank 0 waits too."""
    with nullcontext() if live is None else live.moving():
        yield
        if live is not None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _move_in_pieces(worker: PatchedWorker) -> None:
    """Makes EPLB go on with the moves of a decision in the forward passes after it, before it counts another window.

    A piece repeats the last rearrangement with the layers that change, and puts their maps in force as vLLM does for a layer.
    """
    serving, state = find("vllm.distributed.eplb.eplb_state:"), find(EPLB_STATE)
    rearrange, step = serving.rearrange_expert_weights_inplace, state.step
    parameters = inspect.signature(rearrange)
    calls: list[inspect.BoundArguments] = []  # the last one

    @functools.wraps(rearrange)
    def rearrange_and_note(*args: Any, **named: Any) -> None:
        calls[:] = [parameters.bind(*args, **named)]
        rearrange(*args, **named)

    @functools.wraps(step)
    def step_and_move(self: Any, is_dummy: bool = False, is_profile: bool = False, *args: Any, **named: Any) -> None:
        goes_on, last = worker.live is not None and worker.live.under_way, list(calls)
        step(self, is_dummy, is_profile, *args, **named)
        if worker.live is None or not goes_on or is_profile or not last or calls[0] is not last[0]:
            return  # nothing is left, or this pass had its moves
        call = last[0].arguments
        held_LP, weights_L = call["old_global_expert_indices"], call["expert_weights"]
        (model,) = (candidate for candidate in self.model_states.values() if candidate.physical_to_logical_map is held_LP)
        next_LP = worker.live.next_piece(held_LP)
        layers = (next_LP != held_LP.to("cpu", torch.int64)).any(dim=1).nonzero().flatten().tolist()
        if not layers:
            return  # it is not decided yet
        with _moving(worker.live):
            piece = {"old_global_expert_indices": held_LP[layers], "new_global_expert_indices": next_LP[layers]}
            rearrange(**{**call, **piece, "expert_weights": [weights_L[layer] for layer in layers]})
            for layer in layers:
                serving._commit_eplb_maps_for_layer(model, new_physical_to_logical_map=next_LP[layer], layer=layer)
        self.expert_rearrangement_step = 0  # loads that were counted before are other slots'

    serving.rearrange_expert_weights_inplace, state.step = rearrange_and_note, step_and_move


def move_in_rounds() -> None:
    """Replaces EPLB's schedule of moves by aurora's rounds, in which each rank sends to one rank and receives from one."""
    from aurora.algorithms.control.move_rounds import buffered_rounds

    execute, background = find("vllm.distributed.eplb.rebalance_execute:"), find(EPLB_ASYNC)
    flow = find("vllm.distributed.eplb.migration_scheduler:MigrationFlow")

    def schedule(num_local_experts: int, old_indices: IntArray, new_indices: IntArray) -> list[list[Any]]:
        held_RP, wanted_RP = (np.asarray(indices).reshape(-1, num_local_experts) for indices in (old_indices, new_indices))
        return [[flow(*move) for move in moves] for moves in buffered_rounds(held_RP, wanted_RP)]

    def schedule_layers(num_local_experts: int, old_indices: IntArray, new_indices: IntArray) -> list[list[list[Any]]]:
        return [schedule(num_local_experts, *layer) for layer in zip(old_indices, new_indices, strict=True)]

    execute.schedule_migration_batches, background.schedule_migration_batches_for_layers = schedule, schedule_layers
    execute.move_to_buffer = _once_for_unchanged(functools.partial(execute.move_to_buffer, enable_migration_batching=True))


def _once_for_unchanged(move_to_buffer: Callable[..., Any]) -> Callable[..., Any]:
    """Computes once what is the same for all layers that stay as they are."""
    parameters, known = inspect.signature(move_to_buffer), {}

    def move(*args: Any, **named: Any) -> Any:
        arguments = parameters.bind(*args, **named).arguments
        if not np.array_equal(arguments["old_indices"], arguments["new_indices"]):
            return move_to_buffer(*args, **named)
        width = arguments["num_local_experts"]
        if width not in known:
            known[width] = move_to_buffer(*args, **named)
        return known[width]

    return move
