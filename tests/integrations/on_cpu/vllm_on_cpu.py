"""Adds to vLLM on CPUs, on which it is tested here: expert parallelism, its load balancer (EPLB), and waits that end.

A plugin of vLLM's of its own, which no wheel contains: `export PYTHONPATH=tests/integrations/on_cpu` installs it.
"""

import functools
import inspect
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

POINT_TO_POINT = {int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)}  # their time-outs close connections
PART_S = 1.0  # of a wait for a collective, after which it may be given up
ASKED_EVERY_S = 2e-4  # whether a worker has answered


def register() -> None:
    """Adds what a process of vLLM's lacks on CPUs: its configuration here, what a worker needs when that starts. Idempotent."""
    import vllm.config.parallel as parallel
    from vllm.v1.worker.worker_base import WorkerWrapperBase as Wrapper

    if isinstance(parallel.current_platform, CpuWithEplb) or not parallel.current_platform.is_cpu():
        return
    parallel.current_platform = CpuWithEplb(parallel.current_platform)
    start = Wrapper.init_device

    @functools.wraps(start)
    def init_device(self: Any) -> None:
        config = self.vllm_config.parallel_config
        if config.enable_expert_parallel or config.data_parallel_size > 1:
            repair_cpu()
            if config.enable_eplb:
                repair_eplb()
        start(self)

    Wrapper.init_device = init_device
    end_waits()
    leave_cores_to_workers()


def repair_cpu() -> None:
    """Patches CPU kernels to skip experts of other ranks, and collectives to accept integers and unequal sizes. Idempotent."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator as communicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as experts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner as runner

    if "all_gatherv" in vars(communicator):
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

    experts.apply = apply
    communicator.all_gather, communicator.all_gatherv, communicator.reduce_scatterv = all_gather, all_gatherv, reduce_scatterv
    runner._select_forward = select_forward


class CpuWithEplb:
    """The CPU platform, as the validation of vLLM's parallel settings sees it: one that EPLB knows."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    aurora_tests = True  # by which the plugin knows that it may serve on CPUs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


class Nothing:
    """Stands in for streams and events of an accelerator: on a CPU, what was called before is done."""

    def __init__(self, *_args: Any, **_named: Any) -> None:
        self.elapsed_time = lambda _end: 0.0
        self.query = lambda: True
        self.record = self.synchronize = self.wait = lambda *_args: None


def repair_eplb() -> None:
    """Patches vLLM so that EPLB works on a CPU: routers map to physical experts and count loads, experts move. Idempotent."""
    import vllm.model_executor.layers.fused_moe.router.base_router as router
    from vllm.distributed.eplb.eplb_state import EplbState as state
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if torch.Event is Nothing:
        return
    create, load = state.__init__, CPUModelRunner.load_model

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

    @functools.wraps(load)
    def load_and_add(self: Any, *args: Any, **named: Any) -> None:
        """Adds the loaded model to EPLB, as vLLM's first model runner does on GPUs alone."""
        load(self, *args, **named)
        if self.eplb_state is None and (model := get_mixture_of_experts_model(self.model)) is not None:
            self._moe_model, self.eplb_state = model, state(self.vllm_config.parallel_config, self.device)
            self.eplb_state.add_model(model, self.vllm_config.model_config)
            self.eplb_state.start_async_loop()

    CPUModelRunner.load_model = load_and_add
    router.eplb_map_to_physical_and_record = map_and_record
    state.__init__ = create_with_index
    torch.Event = torch.Stream = torch.accelerator.current_stream = Nothing  # type: ignore[assignment, misc]
    torch.accelerator.current_device_index = lambda: 0
    for name in ("current_accelerator", "set_device_index", "set_stream", "synchronize"):
        setattr(torch.accelerator, name, lambda *_args: None)


def leave_cores_to_workers() -> None:
    """Has engines sleep between looks at their workers' answers, where they spin on cores that the workers need here."""
    import vllm.distributed.device_communicators.shm_broadcast as broadcast

    broadcast.sched_yield = functools.partial(time.sleep, ASKED_EVERY_S)


def end_waits() -> None:
    """Patches waits for collectives to end soon after the connections of their change of ranks are shut down.

    Gloo's thread, which sends once a peer is ready, drops a send that fails. Such waits raise RankLost, unless gloo's error says
    more. On GPUs NCCL's communicators are aborted.
    """
    from datetime import timedelta

    wait, part = dist.Work.wait, timedelta(seconds=PART_S)

    @functools.wraps(wait)
    def wait_in_parts(work: Any, *args: Any, **named: Any) -> Any:
        survives = sys.modules.get("aurora_vllm.vllm_internals.close_group_connections")
        if survives is None or args or named or work._get_op_type() in POINT_TO_POINT:
            return wait(work, *args, **named)
        connections = survives.GroupConnections.of_process
        while True:
            try:
                return wait(work, part)
            except RuntimeError as error:
                if work.is_completed():  # it failed, or ended just after the time-out
                    return wait(work)
                if connections is not None and connections.outdated:
                    survives.GroupConnections.gave_up = True
                    raise survives.RankLost("a collective does not end after a newer change of ranks") from error

    dist.Work.wait = wait_in_parts  # type: ignore[assignment, method-assign]
