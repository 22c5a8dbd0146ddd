"""Adds to vLLM on CPUs: expert parallelism in its kernels, collectives with unequal sizes, and its load balancer (EPLB)."""

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from aurora_vllm.vllm_internals.api_checks import EPLB_STATE, MOE, find, lacks


def repair_cpu() -> None:
    """Patches CPU kernels to skip experts of other ranks, and collectives to accept integers and unequal sizes. Idempotent."""
    experts = find(f"{MOE}.experts.cpu_moe:CPUUnquantizedExperts")
    communicator = find("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator")
    runner = find(f"{MOE}.runner.moe_runner:MoERunner")
    if getattr(experts.apply, "_aurora", False):
        return
    original, gather = experts.apply, communicator.all_gather
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **named: Any) -> None:
        call = parameters.bind(*args, **named)
        arguments = call.arguments
        if arguments["expert_map"] is None:
            original(*args, **named)
            return
        local_NK = arguments["expert_map"][arguments["topk_ids"].long()]
        is_local_NK = local_NK >= 0
        row_P = is_local_NK.nonzero()[:, 0]
        output, answers = arguments["output"], arguments["output"].new_empty(len(row_P), arguments["output"].shape[1])
        if len(row_P):  # each choice as a token of its own, so that only local experts compute
            call.arguments |= {
                "output": answers,
                "hidden_states": arguments["hidden_states"][row_P],
                "topk_weights": arguments["topk_weights"][is_local_NK][:, None].contiguous(),
                "topk_ids": local_NK[is_local_NK][:, None].to(arguments["topk_ids"].dtype).contiguous(),
                "expert_map": None,
            }
            original(*call.args, **call.kwargs)
        output.zero_().index_add_(0, row_P, answers)

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list | tuple):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
        sizes = [len(input_)] * self.world_size if sizes is None else sizes
        gathered = input_.new_empty(sum(sizes), *input_.shape[1:])
        copies = input_.repeat(self.world_size, *[1] * (input_.dim() - 1))
        dist.all_to_all_single(gathered, copies, sizes, [len(input_)] * self.world_size, group=self.device_group)
        return gathered

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        sizes = [len(input_) // self.world_size] * self.world_size if sizes is None else sizes
        rows = sizes[self.rank_in_group]
        parts = input_.new_empty(rows * self.world_size, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [rows] * self.world_size, sizes, group=self.device_group)
        return parts.view(self.world_size, rows, *input_.shape[1:]).sum(dim=0)

    @functools.wraps(gather)
    def all_gather(self: Any, input_: torch.Tensor, dim: int = -1) -> Any:
        if input_.dtype not in (torch.int32, torch.int64):
            return gather(self, input_, dim)
        return gather(self, input_.contiguous().view(torch.float32), dim).view(input_.dtype)  # it only copies, but not integers

    def select_forward(self: Any) -> Any:
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    apply._aurora = True  # type: ignore[attr-defined]
    experts.apply = apply
    communicator.all_gather, communicator.all_gatherv, communicator.reduce_scatterv = all_gather, all_gatherv, reduce_scatterv
    runner._select_forward = select_forward


class _CpuWithEplb:
    """The CPU platform, as the validation of vLLM's parallel settings sees it: one that EPLB knows."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


class _Nothing:
    """Stands in for streams and events of an accelerator: on a CPU, what was called before is done."""

    def __init__(self, *_args: Any, **_named: Any) -> None:
        self.elapsed_time = lambda _end: 0.0
        self.query = lambda: True
        self.record = self.synchronize = self.wait = lambda *_args: None


def accept_eplb() -> None:
    """Patches vLLM to accept --enable-eplb on a CPU. Called before its configuration is made. Idempotent."""
    if any(lacks("EPLB-accepted-on-CPU")):
        return
    parallel = find("vllm.config.parallel:")
    if not isinstance(parallel.current_platform, _CpuWithEplb):
        parallel.current_platform = _CpuWithEplb(parallel.current_platform)


def repair_eplb() -> None:
    """Patches vLLM so that EPLB works on a CPU: routers map to physical experts and count loads, experts move. Idempotent."""
    router, state = find(f"{MOE}.router.base_router:"), find(EPLB_STATE)
    if getattr(state, "_aurora", False):
        return
    create = state.__init__

    def map_and_record(
        topk_ids: torch.Tensor,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
        record_enabled: torch.Tensor,
        num_unpadded_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        expert_NK = topk_ids.long()
        position_N1 = torch.arange(len(expert_NK))[:, None]
        physical_NK = logical_to_physical_map[expert_NK, position_N1 % logical_replica_count[expert_NK]]
        if record_enabled:
            counted = physical_NK if num_unpadded_tokens is None else physical_NK[: int(num_unpadded_tokens)]
            expert_load_view += torch.bincount(counted.flatten(), minlength=len(expert_load_view))[: len(expert_load_view)]
        return physical_NK.to(topk_ids.dtype)

    @functools.wraps(create)
    def create_with_index(self: Any, *args: Any, **named: Any) -> None:
        create(self, *args, **named)
        self.device_index = 0  # its thread expects the index of an accelerator

    router.eplb_map_to_physical_and_record = map_and_record
    state.__init__, state._aurora = create_with_index, True
    torch.Event = torch.Stream = torch.accelerator.current_stream = _Nothing  # type: ignore[assignment, misc]
    torch.accelerator.current_device_index = lambda: 0
    for name in ("current_accelerator", "set_device_index", "set_stream", "synchronize"):
        setattr(torch.accelerator, name, lambda *_args: None)


def register_with_eplb(runner: Any, config: Any) -> None:
    """Registers a loaded model with EPLB, because vLLM's first (V1) model runner does not do so on CPUs."""
    if runner.eplb_state is not None:
        return
    model = find("vllm.model_executor.models.interfaces:get_mixture_of_experts_model")(runner.model)
    if model is None:
        return
    runner._moe_model, runner.eplb_state = model, find(EPLB_STATE)(config.parallel_config, runner.device)
    runner.eplb_state.add_model(model, config.model_config)
    runner.eplb_state.start_async_loop()
