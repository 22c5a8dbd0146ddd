"""The policy that vLLM's load balancer (EPLB) asks for expert maps: it follows the traffic, or keeps the plan's placement."""

from __future__ import annotations

import functools
from typing import Any

import torch

from aurora_vllm.vllm_internals.api_checks import find
from aurora_vllm.vllm_internals.patches import PatchedWorker


def patch_eplb(worker: PatchedWorker) -> None:
    """Patches vLLM's load balancer (EPLB) to start with the planned placement, and to keep it or adapt it to traffic.

    For other models, such as a draft model, EPLB works as without the plugin.
    """
    default = find("vllm.distributed.eplb.policy.default:DefaultEplbPolicy")
    state = find("vllm.distributed.eplb.eplb_state:EplbState")
    add_model = state.add_model

    class PlannedPolicy(default):  # type: ignore[misc, valid-type]
        """An EPLB policy that follows the traffic, or leaves every expert where it is if the plan put it there."""

        @classmethod
        def rebalance_experts(
            cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any:  # fmt: skip
            live = worker.live
            if live is not None and old_global_expert_indices is not None and len(weight) == live.layers:
                return live.next_map(weight, old_global_expert_indices)
            if old_global_expert_indices is None or worker.integration is None or worker.integration.served.physical_LP is None:
                return super().rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                )
            late_LP = worker.late_LP
            if late_LP is not None and late_LP.shape == old_global_expert_indices.shape:
                return late_LP.to(old_global_expert_indices)
            return old_global_expert_indices.clone()

    @functools.wraps(add_model)
    def add_planned_model(self: Any, model: Any, model_config: Any, *args: Any, **named: Any) -> None:
        add_model(self, model, model_config, *args, **named)
        experts_L = [getattr(layer, "routed_experts", None) for layer in model.moe_layers]
        planned_LP = [getattr(experts, "planned_physical_P", None) for experts in experts_L]
        served_LP = None if worker.integration is None else worker.integration.served.physical_LP
        apart = all(experts is None or getattr(experts, "aurora_fused", None) for experts in experts_L)  # as MegaMoE's are
        if served_LP is not None and apart and model_config is worker.config.model_config and len(served_LP) == len(experts_L):
            worker.late_LP = torch.from_numpy(served_LP)
        if all(physical_P is None for physical_P in planned_LP):
            return
        physical_LP = self.model_states[model_config.compute_hash()].physical_to_logical_map.clone()
        for layer, physical_P in enumerate(planned_LP):
            if physical_P is not None:
                physical_LP[layer] = torch.from_numpy(physical_P)
        self.update_mapping(model_config, physical_LP)

    find("vllm.distributed.eplb.policy:EPLB_POLICIES")["default"] = PlannedPolicy
    state.add_model = add_planned_model
