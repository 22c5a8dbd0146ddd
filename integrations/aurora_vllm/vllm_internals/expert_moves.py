"""Adapts the placement of vLLM's experts to traffic through its load balancer (EPLB).

EPLB's moves are timed; those of a few layers run at a time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aurora_vllm.vllm_internals.api_checks import find, lacks
from aurora_vllm.vllm_internals.patches import PatchedWorker, within
from aurora_vllm.vllm_internals.replaced import original, replace

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
    worker.balancer, live = (
        balancer,
        EplbMover(
            worker.integration.settings,
            facts,
            worker.integration.served.cluster,
            not balancer.is_async,
            _broadcast,
            ControlMetrics(served_name, facts.rank),
            lambda: balancer.async_worker is None or balancer.async_worker.is_alive(),
            profile=worker.integration.served.profile,
        ),
    )
    worker.integration.live = live  # and of the patches, once serving begins
    _decide_more_often(balancer)
    skips = find("vllm.platforms:current_platform").is_rocm()  # where vLLM leaves out rearrangements of little gain
    if not balancer.is_async and not skips and not any(lacks("pieces")):  # else at once, or by layer in the background
        worker.last_moves, live.in_pieces = [], True
    replace(REARRANGE, _timed(worker))
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


def _timed(worker: PatchedWorker) -> Callable[[Any], Any]:
    """Returns what times a function that moves experts of all layers while serving waits, and notes its arguments."""

    def decorate(rearrange: Any) -> Any:
        parameters = inspect.signature(rearrange)

        @functools.wraps(rearrange)
        def rearrange_and_note(*args: Any, **named: Any) -> None:
            if worker.last_moves is not None:
                worker.last_moves[:] = [parameters.bind(*args, **named)]
            with _moving(worker.live):
                rearrange(*args, **named)

        return rearrange_and_note

    return decorate


@contextmanager
def moving_on(worker: PatchedWorker) -> Iterator[None]:
    """Context manager around a pass of EPLB's: it goes on with the moves of a decision, before another window is counted.

    A piece repeats the last rearrangement with the layers that change, and puts their maps in force as vLLM does for a layer.
    """
    live = worker.live
    goes_on, last = live is not None and live.under_way, [] if worker.last_moves is None else list(worker.last_moves)
    yield
    if live is None or not goes_on or not last or worker.last_moves is None or worker.last_moves[0] is not last[0]:
        return  # nothing is left, or this pass had its moves
    call, balancer = last[0].arguments, worker.balancer
    held_LP, weights_L = call["old_global_expert_indices"], call["expert_weights"]
    (model,) = (candidate for candidate in balancer.model_states.values() if candidate.physical_to_logical_map is held_LP)
    next_LP = live.next_piece(held_LP)
    layers = (next_LP != held_LP.to("cpu", torch.int64)).any(dim=1).nonzero().flatten().tolist()
    if not layers:
        return  # it is not decided yet
    commit = find("vllm.distributed.eplb.eplb_state:_commit_eplb_maps_for_layer")
    with torch.inference_mode(), _moving(live):
        piece = {"old_global_expert_indices": held_LP[layers], "new_global_expert_indices": next_LP[layers]}
        original(REARRANGE)(**{**call, **piece, "expert_weights": [weights_L[layer] for layer in layers]})
        for layer in layers:
            commit(model, new_physical_to_logical_map=next_LP[layer], layer=layer)
    balancer.expert_rearrangement_step = 0  # loads that were counted before are other slots'
