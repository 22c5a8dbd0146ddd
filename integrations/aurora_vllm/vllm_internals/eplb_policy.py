"""The policy that vLLM's load balancer (EPLB) asks for expert maps: it follows the traffic, or keeps the plan's placement."""

from __future__ import annotations

from typing import Any

import torch

from aurora_vllm.stuck_rank import PLANS, RESTS
from aurora_vllm.vllm_internals.patches import PatchedWorker
from aurora_vllm.vllm_internals.replaced import replace

POLICY = "vllm.distributed.eplb.policy:EPLB_POLICIES.default"


def register_policy(worker: PatchedWorker) -> None:
    """Registers the policy with vLLM's load balancer (EPLB), which keeps the planned placement or adapts it to traffic.

    For other models, such as a draft model, EPLB works as without the plugin.
    """
    replace(POLICY, lambda default: policy_class(default, worker))


def policy_class(default: Any, worker: PatchedWorker) -> Any:
    """Returns the policy, for state that the patches share; `default`: vLLM's."""

    class PlannedPolicy(default):  # type: ignore[misc]
        """An EPLB policy that follows the traffic, or leaves every expert where it is if the plan put it there."""

        @classmethod
        def rebalance_experts(
            cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any:  # fmt: skip
            worker.balancer_does = PLANS
            try:
                arguments = weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                return cls._aurora_map(super().rebalance_experts, *arguments)
            finally:
                worker.balancer_does = RESTS

        @staticmethod
        def _aurora_map(stock: Any, weight: Any, *sizes: Any) -> Any:
            live, old_global_expert_indices = worker.live, sizes[-1]
            if live is not None and old_global_expert_indices is not None and len(weight) == live.layers:
                return live.next_map(weight, old_global_expert_indices)
            if old_global_expert_indices is None or worker.integration is None or worker.integration.served.physical_LP is None:
                return stock(weight, *sizes)
            late_LP = worker.late_LP
            if late_LP is not None and late_LP.shape == old_global_expert_indices.shape:
                return late_LP.to(old_global_expert_indices)
            return old_global_expert_indices.clone()

    return PlannedPolicy


def place_experts(worker: PatchedWorker, balancer: Any) -> None:
    """Sets the first map of vLLM's load balancer, the EplbState `balancer`, to where a loaded model's experts are."""
    config = worker.config.model_config
    if balancer is None or (state := balancer.model_states.get(config.compute_hash())) is None:
        return
    experts_L = [getattr(layer, "routed_experts", None) for layer in state.model.moe_layers]
    planned_LP = [getattr(experts, "planned_physical_P", None) for experts in experts_L]
    served_LP = None if worker.integration is None else worker.integration.served.physical_LP
    apart = all(experts is None or getattr(experts, "aurora_fused", None) for experts in experts_L)  # as MegaMoE's are
    if served_LP is not None and apart and len(served_LP) == len(experts_L):
        worker.late_LP = torch.from_numpy(served_LP)
    if all(physical_P is None for physical_P in planned_LP):
        return
    physical_LP = state.physical_to_logical_map.clone()
    for layer, physical_P in enumerate(planned_LP):
        if physical_P is not None:
            physical_LP[layer] = torch.from_numpy(physical_P)
    balancer.update_mapping(config, physical_LP)
