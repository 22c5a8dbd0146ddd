"""Expert parallelism on CPUs, which vLLM lacks: experts of other ranks, and gathers and scatters of unequal sizes."""

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from aurora_vllm.vllm_internals.api_checks import MOE, find


def repair_cpu() -> None:
    """Makes CPU kernels skip experts of other ranks, and adds all_gatherv and reduce_scatterv. Idempotent."""
    experts = find(f"{MOE}.experts.cpu_moe:CPUUnquantizedExperts")
    communicator = find("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator")
    runner = find(f"{MOE}.runner.moe_runner:MoERunner")
    if getattr(experts.apply, "_aurora", False):
        return
    original = experts.apply
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **named: Any) -> None:
        call = parameters.bind(*args, **named)
        given = call.arguments
        if given["expert_map"] is None:
            original(*args, **named)
            return
        local_NK = given["expert_map"][given["topk_ids"].long()]
        is_local_NK = local_NK >= 0
        row_P = is_local_NK.nonzero()[:, 0]
        output, answers = given["output"], given["output"].new_empty(len(row_P), given["output"].shape[1])
        if len(row_P):  # each choice as a token of its own, so that only local experts compute
            call.arguments |= {
                "output": answers,
                "hidden_states": given["hidden_states"][row_P],
                "topk_weights": given["topk_weights"][is_local_NK][:, None].contiguous(),
                "topk_ids": local_NK[is_local_NK][:, None].to(given["topk_ids"].dtype).contiguous(),
                "expert_map": None,
            }
            original(*call.args, **call.kwargs)
        output.zero_().index_add_(0, row_P, answers)

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list | tuple):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        sizes = [len(input_)] * self.world_size if sizes is None else sizes
        gathered = input_.new_empty(sum(sizes), *input_.shape[1:])
        copies = input_.repeat(self.world_size, *[1] * (input_.dim() - 1))
        dist.all_to_all_single(gathered, copies, sizes, [len(input_)] * self.world_size, group=self.device_group)
        return gathered

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        sizes = [len(input_) // self.world_size] * self.world_size if sizes is None else sizes
        own = sizes[self.rank_in_group]
        parts = input_.new_empty(own * self.world_size, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [own] * self.world_size, sizes, group=self.device_group)
        return parts.view(self.world_size, own, *input_.shape[1:]).sum(dim=0)

    def select_forward(self: Any) -> Any:
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    apply._aurora = True  # type: ignore[attr-defined]
    experts.apply = apply
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
    runner._select_forward = select_forward
