"""Reads experts that no rank holds any more from the checkpoint, into slots of the remaining ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import IntArray
from aurora_vllm.vllm_internals.api_checks import LAYER_INDEX, check_api, find

EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.((\d+)\..+|.+)")  # decoder layer, rest of the name, expert


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
        BadInput: if this vLLM cannot reload weights, or the checkpoint does not have a weight for each expert.
    """
    if not held_NP:
        return
    check_api("reload")
    reload, config = find("vllm.model_executor.model_loader.reload.layerwise:"), worker.vllm_config
    loader = find("vllm.model_executor.model_loader:get_model_loader")(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise BadInput(f"--load-format {config.load_config.load_format} cannot read single experts")
    of_layer = {find(LAYER_INDEX)(layers[index].layer_name): index for index in held_NP}
    loader.local_expert_ids = {int(expert) for held_P in held_NP.values() for expert in held_P[own]}  # others it need not read
    weights_N = defaultdict[int, list[tuple[str, Any]]](list)
    for name, weight in loader.get_all_weights(config.model_config, worker.model_runner.get_model()):
        if (found := EXPERT.search(name)) is None or (index := of_layer.get(int(found[1]))) is None:
            continue
        if found[3] is None:
            raise BadInput(f"expected a weight for each expert in the checkpoint, found {name}")
        if int(found[3]) in held_NP[index][own]:
            weights_N[index].append((found[2], weight))
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
