"""Experts in the slots of the ranks that are left after a change: who holds which, and those read again that nobody holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.types.arrays import IntArray
from aurora_vllm.vllm_internals.api_checks import LAYER_INDEX, MOE, find

EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.((\d+)\..+|.+)")  # decoder layer, rest of the name, expert


def gather_slots(worker: Any, rank: int, torn: bool) -> dict[str, tuple[torch.Tensor, list[set[int]]]]:
    """Gathers, for each model, the experts in the slots of the remaining ranks. A collective call.

    An expert that is in no slot any more gets a slot of an expert that has several; its weights must then be read.

    Args:
        worker: vLLM's worker, with the new process groups.
        rank: its expert-parallel rank before the change.
        torn: True: the loss interrupted a rearrangement of experts on this rank.

    Returns:
        {model key: ((L, P) the expert in each slot, and for each layer the slots whose weights must be read)}.

    Raises:
        BadInput: if there are fewer slots than experts, or a loss has interrupted a rearrangement.
    """
    if torn:
        raise BadInput("change_ranks: the loss has interrupted a rearrangement of experts")
    ranks, slots = find("vllm.distributed.parallel_state:get_ep_group")(), {}
    for key, model in worker.model_runner.eplb_state.model_states.items():
        local = model.model.num_local_physical_experts
        own_LP = model.physical_to_logical_map.cpu().long().unflatten(1, (-1, local))[:, rank].contiguous()
        held_GLP = [torch.empty_like(own_LP) for _ in range(ranks.world_size)]
        dist.all_gather(held_GLP, own_LP, group=ranks.cpu_group)
        held_LP = torch.cat(held_GLP, dim=1)
        slots[key] = held_LP, [fill_slots(held_P, model.logical_replica_count.shape[1]) for held_P in held_LP.numpy()]
    return slots


def hold_slots(worker: Any, held: Mapping[str, tuple[torch.Tensor, list[set[int]]]]) -> None:
    """Sets EPLB's maps and the layers' expert maps to `held`, the result of `gather_slots`; reads missing experts' weights."""
    parallel, balancer = worker.vllm_config.parallel_config, worker.model_runner.eplb_state
    groups, is_moe_layer = find("vllm.distributed.parallel_state:"), find("vllm.utils:is_moe_layer")
    sizes = groups.get_tp_group().world_size, groups.get_pcp_group().world_size, groups.get_dp_group().world_size
    sequence = sizes[0] if parallel.use_sequence_parallel_moe else 1
    shape = find(f"{MOE}.config:FusedMoEParallelConfig").make(*sizes, sequence, parallel)
    rank = groups.get_ep_group().rank_in_group
    for key, (held_LP, filled_L) in held.items():
        model = balancer.model_states[key]
        layers = [module for module in model.model.modules() if is_moe_layer(module)]
        local, experts = model.model.num_local_physical_experts, model.logical_replica_count.shape[1]
        for layer in layers:
            manager = layer.expert_map_manager
            if manager.expert_map is None:  # of a rank that served alone
                manager._expert_map = torch.zeros(1, dtype=torch.int32, device=model.physical_to_logical_map.device)
            layer._set_moe_config(replace(layer.moe_config, num_experts=held_LP.shape[1], moe_parallel_config=shape))
        parallel.eplb_config.num_redundant_experts = held_LP.shape[1] - experts
        slots, window = slice(0, held_LP.shape[1]), model.expert_load_window
        model.physical_to_logical_map = model.physical_to_logical_map_buffer[:, slots]
        model.expert_load_pass = model.expert_load_pass_buffer[:, slots]
        model.expert_load_window = window.new_zeros(*window.shape[:2], held_LP.shape[1])
        model.model.update_physical_experts_metadata(held_LP.shape[1], local)
        find("vllm.distributed.eplb.eplb_state:_commit_eplb_maps")(model, new_physical_to_logical_map=held_LP)
        span = range(rank * local, (rank + 1) * local)
        held_NP = {layer: held_LP[layer].numpy() for layer, filled in enumerate(filled_L) if not filled.isdisjoint(span)}
        read_experts(worker, held_NP, slice(span.start, span.stop), layers)
        model.rebalanced, model.pending_result = False, None
    balancer.expert_rearrangement_step = balancer.expert_load_window_step = 0  # equal on all ranks


def fill_slots(held_P: IntArray, experts: int) -> set[int]:
    """Assigns each expert without a slot to the last slot of the expert that has the most slots.

    Args:
        held_P: (P,) the expert in each slot; changed in place.
        experts: number of experts.

    Returns:
        The slots that were reassigned.

    Raises:
        BadInput: if there are fewer slots than experts.
    """
    if len(held_P) < experts:
        raise BadInput(f"the ranks that are left have slots for {len(held_P)} of {experts} experts in a layer")
    filled = set[int]()
    for expert in sorted({*range(experts)} - {*held_P.tolist()}):
        slot = int(np.flatnonzero(held_P == np.bincount(held_P).argmax())[-1])
        held_P[slot] = expert
        filled.add(slot)
    return filled


def read_experts(worker: Any, held_NP: Mapping[int, IntArray], own: slice, layers: list[Any]) -> None:
    """Reads this rank's experts of some MoE layers from the checkpoint, with vLLM's functions for reloading weights.

    Args:
        worker: vLLM's worker.
        held_NP: {MoE layer to read: (P,) the expert in each slot of all ranks}.
        own: this rank's slots.
        layers: vLLM's MoE layers of the model.

    Raises:
        BadInput: if vLLM's loader cannot read single experts, or the checkpoint does not have a weight for each expert.
    """
    if not held_NP:
        return
    reload, config = find("vllm.model_executor.model_loader.reload.layerwise:"), worker.vllm_config
    loader = find("vllm.model_executor.model_loader:get_model_loader")(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise BadInput(f"--load-format {config.load_config.load_format} cannot read single experts")
    of_layer = {find(LAYER_INDEX)(layers[index].layer_name): index for index in held_NP}
    loader.local_expert_ids = {int(expert) for held_P in held_NP.values() for expert in held_P[own]}  # others it need not read
    weights_N = defaultdict[int, list[tuple[str, Any]]](list)
    for name, weight in loader.get_all_weights(config.model_config, worker.model_runner.get_model()):
        if (match := EXPERT.search(name)) is None or (index := of_layer.get(int(match[1]))) is None:
            continue
        if match[3] is None:
            raise BadInput(f"expected a weight for each expert in the checkpoint, found {name}")
        if int(match[3]) in held_NP[index][own]:
            weights_N[index].append((match[2], weight))
    on_cpu = find("vllm.platforms:current_platform").is_cpu()
    for index, held_P in held_NP.items():
        experts = layers[index].routed_experts
        experts.aurora_physical_P = held_P  # where its loader puts them
        kernel = experts.quant_method.moe_kernel
        experts.quant_method.moe_kernel = None if on_cpu else kernel  # with one, vLLM does not pack a CPU's weights again
        reload.initialize_layerwise_reload(experts)
        loaded = [*experts.load_weights(weights_N[index])]
        reload.finalize_layerwise_processing(experts, config.model_config)
        experts.quant_method.moe_kernel = kernel
        if not loaded:
            raise BadInput(f"the checkpoint has no experts that {experts.layer_name} could load")
