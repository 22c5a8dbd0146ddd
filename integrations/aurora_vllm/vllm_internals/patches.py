"""Patches of vLLM: classes that replace its experts and its all-to-all manager.

Until there is a WorkerIntegration, they behave as vLLM's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aurora.errors import BadInput
from aurora.types.arrays import IntArray
from aurora_vllm.stuck_rank import COMBINE, DISPATCH, PHASES, RESTS
from aurora_vllm.vllm_internals.api_checks import LAYER_INDEX, MOE, find
from aurora_vllm.vllm_internals.replaced import replace

if TYPE_CHECKING:
    from aurora_vllm.eplb_mover import EplbMover
    from aurora_vllm.layer_alltoall import Slots
    from aurora_vllm.pushed_alltoall import EngineLayers
    from aurora_vllm.worker_integration import WorkerIntegration


EXPERT_MAP_KERNELS = frozenset(  # they honour an expert map in any sequence; on CPUs, what tests add to vLLM
    {
        "ArmCPUUnquantizedExperts",
        "CPUUnquantizedExperts",
        "PowerCPUUnquantizedExperts",
        "TritonExperts",
        "X86CPUUnquantizedExperts",
    }
)


_DISPATCH, _COMBINE = PHASES.index(DISPATCH), PHASES.index(COMBINE)
MANAGER = "vllm.distributed.device_communicators.all2all:AgRsAll2AllManager"
DRAFT = "draft_model."  # how layers of a separate draft model begin


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that runs each call of a function inside a new context manager from `context`."""

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **named: Any) -> Any:
            with context():
                return original(*args, **named)

        return wrapped

    return decorate


class PatchedWorker:
    """State that the patches of one worker process share.

    Args:
        config: vLLM's configuration.

    Attributes:
        integration: the plugin's part in this worker; None until all ranks are connected.
        group: vLLM's expert-parallel group; None without expert parallelism.
        capturer: vLLM's object with the buffer to which routers write their choices; None: choices are not counted.
        layers: the model's MoE layers; empty until it is loaded.
        live: adapts EPLB's physical experts to traffic; None: no adaptation, or not before serving begins.
        balancer_does: what EPLB's background thread does, one of BALANCERS.
        late_LP: (L, P) planned expert of each physical expert, if weights could not be loaded directly into them: EPLB moves
            them at its first rearrangement; None: all are in place.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.integration: WorkerIntegration | None = None
        self.group: Any = None
        self.capturer: Any = None
        self.layers: list[Any] = []
        self.live: EplbMover | None = None
        self.balancer_does = RESTS
        self.late_LP: torch.Tensor | None = None

    def exchange(self, phase: str) -> AbstractContextManager[None]:
        """Context manager inside which the watchdog sees this rank as waiting for the others; `phase` is one of EXCHANGES."""
        return nullcontext() if self.integration is None else self.integration.progress.exchange[phase]

    def slots(self, layer: int) -> Slots:
        """Returns the experts of each rank in a MoE layer, in the sequence of its weights. A collective call.

        With EPLB these are physical experts, like the router's choices.
        """
        from aurora.runtime.transports.gloo import GlooTransport

        experts = next(candidate for candidate in self.layers if candidate.aurora_layer == layer)
        local_E = experts.expert_map.to("cpu", torch.int64)
        local_GE = GlooTransport(self.group.cpu_group).gather(local_E).tolist()
        return tuple(
            tuple(expert for _, expert in sorted((local, expert) for expert, local in enumerate(local_E) if local >= 0))
            for local_E in local_GE
        )


def patch_routed_experts(worker: PatchedWorker) -> None:
    """Replaces vLLM's experts class by one that loads the planned experts of this rank and reports the router's choices."""
    routed_experts = find(f"{MOE}.routed_experts:RoutedExperts")
    find("vllm.model_executor.model_loader.utils:get_model_architecture")(worker.config.model_config)
    for kind in (routed_experts, *routed_experts.__subclasses__()):  # of the model's module too, as GPT-OSS's
        _register_experts(kind, worker)


def _register_experts(vllm_experts: Any, worker: PatchedWorker) -> None:
    """Registers planned experts in place of a class of vLLM's, or of a model's that inherits from it."""
    registry = find("vllm.model_executor.custom_op:op_registry_oot")
    if hasattr(vllm_experts, "planned_physical_P") or vllm_experts.__name__ in registry:
        return  # it is planned itself, or another plugin has taken it

    class PlannedExperts(vllm_experts):  # type: ignore[misc]
        """A layer's experts, placed by the plan: as EPLB's physical experts, or by the expert map without EPLB.

        Attributes:
            aurora_layer: the MoE layer's index; None if the plan does not know the layer.
            aurora_physical_P: (P,) the expert in each of EPLB's physical experts; None if the plan does not set them.
            aurora_fused: whether weights of several experts come together, whose loader takes a block by vLLM's own map; None:
                none has come.
        """

        def __init__(self, layer_name: str, params_dtype: Any, moe_config: Any, *args: Any, **named: Any) -> None:
            number, physical_P, experts = None, None, None
            if (integration := worker.integration) is not None and not layer_name.startswith(DRAFT):
                manager = named.get("expert_map_manager", args[1] if len(args) > 1 else None)
                number = integration.served.moe_layer(find(LAYER_INDEX)(layer_name))
                physical_P = integration.served.physical_experts(number)
                experts = integration.served.local_experts(number)
                if manager is not None and experts is not None and manager.expert_map is not None:
                    set_local_experts(manager, moe_config, experts)
            super().__init__(layer_name, params_dtype, moe_config, *args, **named)
            if experts is not None:
                check_kernel(self.quant_method)
            self.aurora_layer, self.aurora_physical_P, self.aurora_fused = number, physical_P, None

        def weight_loader(
            self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
        ) -> bool | None:
            load = functools.partial(super().weight_loader, param, loaded_weight, weight_name, shard_id)
            if self.balanced_physical_P is not None:
                check_all_fused(loaded_weight, self.aurora_fused, self.layer_name)
                self.aurora_fused = loaded_weight.ndim > 2
            if self.planned_physical_P is None:
                return load(expert_id, return_success=return_success)  # type: ignore[no-any-return]
            # vLLM's initial map has expert e in physical expert e, and its own replicas after those, which find no slot here
            loaded = [load(slot, return_success=True) for slot in np.flatnonzero(self.planned_physical_P == expert_id).tolist()]
            return any(loaded) if return_success else None

        @property
        def balanced_physical_P(self) -> IntArray | None:
            """(P,) the planned physical experts, if this layer's router maps experts to them; else None."""
            if self.aurora_physical_P is None:
                return None
            runner = worker.config.compilation_config.static_forward_context[self.layer_name]
            return None if runner.router.eplb_state is None else self.aurora_physical_P

        @property
        def planned_physical_P(self) -> IntArray | None:
            """(P,) the same, if weights are loaded there; else None."""
            return None if self.aurora_fused else self.balanced_physical_P

        def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **named: Any) -> Any:
            integration, layer = worker.integration, self.aurora_layer
            if integration is None or layer is None:
                return super().forward_modular(x, topk_weights, topk_ids, *args, **named)
            if integration.passes_by:
                integration.progress.layer(layer)
                return super().forward_modular(x, topk_weights, topk_ids, *args, **named)
            if integration.stock:
                began = integration.enter_layer(layer)
                answers = super().forward_modular(x, topk_weights, topk_ids, *args, **named)
                integration.leave_layer(layer, topk_ids, True, began)
                return answers
            with integration.moe_layer(layer, topk_ids, self.moe_config.is_sequence_parallel):
                return super().forward_modular(x, topk_weights, topk_ids, *args, **named)

    vllm_experts.register_oot(name=vllm_experts.__name__)(PlannedExperts)


def check_all_fused(loaded_weight: torch.Tensor, fused: bool | None, layer_name: str) -> None:
    """Checks that a layer's weights in the checkpoint are either all per expert, or all fused over the experts.

    Args:
        loaded_weight: the next weight; it is fused if it has more than two axes.
        fused: True: the weights before it were fused; None: it is the first weight.
        layer_name: the layer, for the message.

    Raises:
        BadInput: if the next weight is of the other kind.
    """
    if fused is not None and fused != (loaded_weight.ndim > 2):
        raise BadInput(
            f"{layer_name}: a plan through --enable-eplb needs a weight for each expert in the model's files, or all experts' "
            "together, found both; serve without the plan"
        )


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


def check_kernel(quant_method: Any) -> None:
    """Checks that a layer's kernel supports any expert map, including ones with non-consecutive experts on a rank.

    Raises:
        BadInput: if the kernel is not in EXPERT_MAP_KERNELS; other kernels would compute with wrong experts.
    """
    kernel = getattr(quant_method, "experts_cls", None) or type(quant_method)
    if kernel.__name__ not in EXPERT_MAP_KERNELS:
        raise BadInput(f"experts placed by aurora need vLLM's Triton kernel or --enable-eplb, found {kernel.__name__}")


def patch_all2all_manager(worker: PatchedWorker) -> None:
    """Replaces vLLM's all2all manager `allgather_reducescatter` by one that uses aurora's all-to-all where possible."""
    replace(MANAGER, lambda vllm_manager: _ordered(vllm_manager, worker))


def _ordered(vllm_manager: Any, worker: PatchedWorker) -> Any:
    class OrderedAll2AllManager(vllm_manager):  # type: ignore[misc]
        """Aurora's all-to-all if the layer's choices are known and all expert-parallel ranks take part; else vLLM's."""

        @within(lambda: worker.exchange(DISPATCH))
        def dispatch_router_logits(self, *args: Any, **named: Any) -> Any:
            return super().dispatch_router_logits(*args, **named)

        def dispatch(
            self, hidden_states: Any, topk_weights: Any, topk_ids: Any, is_sequence_parallel: bool = False,
            extra_tensors: Any = None,
        ) -> Any:  # fmt: skip
            arguments = hidden_states, topk_weights, topk_ids, is_sequence_parallel
            if (integration := worker.integration) is None:
                return super().dispatch(*arguments, extra_tensors=extra_tensors)
            integration.progress.arrive(_DISPATCH)
            if not integration.stock and self._aurora_takes(
                integration, hidden_states, topk_ids, is_sequence_parallel, extra_tensors
            ):
                received = integration.dispatch(hidden_states, topk_weights, topk_ids, worker.slots, extra_tensors)
            else:
                received = super().dispatch(*arguments, extra_tensors=extra_tensors)
            integration.progress.leave()
            return received

        def _aurora_takes(
            self, integration: WorkerIntegration, hidden_states: Any, topk_ids: Any, is_sequence_parallel: bool, extra: Any
        ) -> bool:
            group = self._get_comm_group(is_sequence_parallel)
            if group.world_size != self.world_size:
                return False
            row_bytes = None
            if extra is not None:
                from aurora_vllm.pushed_alltoall import bytes_of_row

                row_bytes = bytes_of_row(hidden_states, topk_ids, extra)
            return integration.takes(functools.partial(self._get_sizes, len(hidden_states), group), row_bytes)

        def combine(self, hidden_states: Any, is_sequence_parallel: bool = False) -> Any:
            if (integration := worker.integration) is None:
                return super().combine(hidden_states, is_sequence_parallel)
            integration.progress.arrive(_COMBINE)
            if not integration.stock and integration.dispatched:
                summed = integration.combine(hidden_states)
            else:
                summed = super().combine(hidden_states, is_sequence_parallel)
            integration.progress.leave()
            return summed

        def allocate_combine_input(self, *args: Any, **named: Any) -> Any:
            if worker.integration is None or not worker.integration.dispatched:
                return super().allocate_combine_input(*args, **named)
            return None

        @within(lambda: worker.exchange(COMBINE))
        def combine_into_output(self, hidden_states: Any, output: Any, is_sequence_parallel: bool = False) -> Any:
            if worker.integration is None or not worker.integration.dispatched:
                return super().combine_into_output(hidden_states, output, is_sequence_parallel)
            return output.copy_(worker.integration.combine(hidden_states))

    return OrderedAll2AllManager


def engine_layers(worker: PatchedWorker) -> EngineLayers | None:
    """Returns the model's known MoE layers; None if there are none, or not all ranks take part in them. A collective call."""
    from aurora.moe.permutation import MessageFormat
    from aurora_vllm.pushed_alltoall import EngineLayers

    if not worker.layers:
        return None
    first, manager = worker.layers[0], worker.group.device_communicator.all2all_manager
    shape = first.moe_config
    if manager._get_comm_group(shape.is_sequence_parallel).world_size != manager.world_size:
        return None
    slots_LG = {experts.aurora_layer: worker.slots(experts.aurora_layer) for experts in worker.layers}
    row = MessageFormat(shape.hidden_dim, first.top_k, worker.config.model_config.dtype)
    most_tokens = worker.config.scheduler_config.max_num_batched_tokens
    return EngineLayers(slots_LG, row, most_tokens, next(first.parameters()).device)


def cuda_graphs(config: Any) -> bool:
    """Returns True if vLLM captures CUDA graphs."""
    return bool(config.compilation_config.cudagraph_mode.name != "NONE")


def disable_cuda_graphs(config: Any) -> None:
    """Turns CUDA graphs off, because they cannot capture exchanges whose sizes are read on the host."""
    config.compilation_config.cudagraph_mode = find("vllm.config.compilation:CUDAGraphMode").NONE
