"""Patches of vLLM: classes that replace its experts, its all-to-all manager and its EPLB policy.

They do what vLLM's own do until there is a WorkerIntegration.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from aurora_vllm.vllm_internals.api_checks import ALL2ALL, LAYER_INDEX, MANAGER, MOE, find

if TYPE_CHECKING:
    from aurora_vllm.worker_integration import Slots, WorkerIntegration


class PatchedWorker:
    """What the patches of one worker process share.

    Attributes:
        integration: None until all ranks are connected.
        group: vLLM's expert-parallel group; None without expert parallelism.
        layers: the model's MoE layers, once it is loaded.
    """

    def __init__(self) -> None:
        self.integration: WorkerIntegration | None = None
        self.group: Any = None
        self.layers: list[Any] = []

    def slots(self, layer: int) -> Slots:
        """Returns the experts that each rank holds in a MoE layer, in the sequence of its weights. A collective call."""
        from aurora.runtime.distributed.gloo import GlooTransport

        experts = next(each for each in self.layers if each.aurora_layer == layer)
        local_E = experts.expert_map.to("cpu", torch.int64)
        local_GE = GlooTransport(self.group.cpu_group).gather(local_E).tolist()
        return tuple(
            tuple(expert for _, expert in sorted((local, expert) for expert, local in enumerate(local_E) if local >= 0))
            for local_E in local_GE
        )


def patch_routed_experts(worker: PatchedWorker) -> None:
    """Registers experts that load the plan's experts on each rank and report what the router chose."""
    vllm_experts = find(f"{MOE}.routed_experts:RoutedExperts")

    class PlannedExperts(vllm_experts):  # type: ignore[misc, valid-type]
        """A layer's experts, placed by the plan."""

        def __init__(self, layer_name: str, params_dtype: Any, moe_config: Any, *args: Any, **named: Any) -> None:
            number = None
            if (integration := worker.integration) is not None:
                manager = named.get("expert_map_manager", args[1] if len(args) > 1 else None)
                number = integration.served.moe_layer(find(LAYER_INDEX)(layer_name))
                experts = integration.served.local_experts(number)
                if manager is not None and experts is not None:
                    set_local_experts(manager, moe_config, experts)
            super().__init__(layer_name, params_dtype, moe_config, *args, **named)
            self.aurora_layer = number

        def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **named: Any) -> Any:
            if worker.integration is None or self.aurora_layer is None:
                return super().forward_modular(x, topk_weights, topk_ids, *args, **named)
            with worker.integration.moe_layer(self.aurora_layer, topk_ids, self.moe_config.is_sequence_parallel):
                return super().forward_modular(x, topk_weights, topk_ids, *args, **named)

    vllm_experts.register_oot(name="RoutedExperts")(PlannedExperts)


def set_local_experts(manager: Any, moe_config: Any, experts: tuple[int, ...]) -> None:
    """Overwrites this rank's expert map before a layer creates and loads its weights.

    Args:
        manager: vLLM's expert map manager of the layer.
        moe_config: vLLM's configuration of the layer.
        experts: this rank's experts; a rank without experts gets one slot.
    """
    expert_map = torch.full_like(manager._expert_map, -1)
    expert_map[list(experts)] = torch.arange(len(experts), dtype=expert_map.dtype)
    manager._expert_map = expert_map
    manager._local_num_experts = moe_config.num_local_experts = max(1, len(experts))


def patch_all2all_manager(worker: PatchedWorker) -> None:
    """Replaces vLLM's manager for `allgather_reducescatter` by one that uses aurora's all-to-all where it can."""
    vllm_manager = find(MANAGER)

    class OrderedAll2AllManager(vllm_manager):  # type: ignore[misc, valid-type]
        """Aurora's all-to-all if the layer's choices are known and all expert-parallel ranks take part; else vLLM's."""

        def dispatch(
            self, hidden_states: Any, topk_weights: Any, topk_ids: Any, is_sequence_parallel: bool = False,
            extra_tensors: Any = None,
        ) -> Any:  # fmt: skip
            integration = worker.integration
            all_ranks = self._get_comm_group(is_sequence_parallel).world_size == self.world_size
            if integration is None or not integration.orders_alltoall or extra_tensors is not None or not all_ranks:
                with nullcontext() if integration is None else integration.time_slices.released_gpu():
                    return super().dispatch(
                        hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors=extra_tensors
                    )
            return integration.dispatch(hidden_states, topk_weights, topk_ids, worker.slots)

        def combine(self, hidden_states: Any, is_sequence_parallel: bool = False) -> Any:
            integration = worker.integration
            if integration is None or not integration.dispatched:
                with nullcontext() if integration is None else integration.time_slices.released_gpu():
                    return super().combine(hidden_states, is_sequence_parallel)
            return integration.combine(hidden_states)

        def allocate_combine_input(self, *args: Any, **named: Any) -> Any:
            if worker.integration is None or not worker.integration.dispatched:
                return super().allocate_combine_input(*args, **named)
            return None

        def combine_into_output(self, hidden_states: Any, output: Any, is_sequence_parallel: bool = False) -> Any:
            if worker.integration is None or not worker.integration.dispatched:
                return super().combine_into_output(hidden_states, output, is_sequence_parallel)
            return output.copy_(worker.integration.combine(hidden_states))

    setattr(find(f"{ALL2ALL}:"), "AgRsAll2AllManager", OrderedAll2AllManager)  # noqa: B010


def disable_cuda_graphs(config: Any) -> None:
    """Turns CUDA graphs off, because they cannot capture sizes that only the host knows."""
    config.compilation_config.cudagraph_mode = find("vllm.config.compilation:CUDAGraphMode").NONE


def patch_eplb_policy(slots_LG: tuple[Slots, ...]) -> None:
    """Makes vLLM's load balancer (EPLB) return the plan's replicas."""
    find("vllm.distributed.eplb.policy:EPLB_POLICIES")["default"] = planned_eplb_policy(slots_LG)


def planned_eplb_policy(slots_LG: tuple[Slots, ...]) -> Any:
    """Returns an EPLB policy that always answers with the plan; physical expert p is the p-th slot, counted rank by rank."""
    default = find("vllm.distributed.eplb.policy.default:DefaultEplbPolicy")
    physical_LP = torch.tensor([[expert for held in layer for expert in held] for layer in slots_LG])

    class PlannedPolicy(default):  # type: ignore[misc, valid-type]
        @classmethod
        def rebalance_experts(cls, weight: Any, num_replicas: int, *_args: Any, **_named: Any) -> Any:
            assert physical_LP.shape == (len(weight), num_replicas)
            return physical_LP.clone()

    return PlannedPolicy
