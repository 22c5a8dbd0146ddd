"""Launches and host time of a MoE layer, over ordered push and in stages, on GPUs that are not there.

Usage: python bench/launches.py [-o FILE]

One rank's step over ordered push runs on fake tensors of device "cuda" (`torch._subclasses.FakeTensorMode`), which have no
values: what reads one on the host raises, and is counted as a synchronisation. The layer on NCCL reads sizes, so it runs on
narrow tensors of the CPU that say they are on a GPU, with an order of one partner at a time. In both, Triton's launches are
counted in place of being made, and so are torch's operations that are neither views nor allocations. `host_us` is launches,
synchronisations, stages and gathers times COSTS_US, which are estimates, and Triton's launches times what one takes of a
processor here, without the driver's own call (`triton_us`). `python_us` is the median CPU time of the step's
thread here: fake tensors take many times as long as real ones, so it is no part of `host_us`, and compares no layers.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aurora.types import Order
from bench.machine import machine

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = (8, 32, 64), 128, 8, 256, 7168, 2048
COSTS_US = {  # estimates, by the sources of PyTorch and NCCL
    "launch": 5.0,  # of torch, from Python; for Triton's see `launcher_us`
    "synchronisation": 15.0,  # a copy of a few bytes to the host, behind which the host waits
    "stage": 31.0,  # a grouped call of NCCL by torch.distributed
    "counts": {8: 150.0, 32: 300.0, 64: 500.0},  # a gather over gloo, by ranks
}
REPEATED = 5
WAITS = ("bincount", "nonzero", "repeat_interleave", "item", "_local_scalar_dense")  # of the host, on a GPU
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "lift_fresh")


class Counted(TorchDispatchMode):
    """Mode that counts operations of torch and launches of Triton, by name, in sequence.

    Attributes:
        launches: names of what would be launched.
        before: those before `_lay_out`, the first launch of a dispatch.
        synchronisations: names of operations for which the host would wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.before: list[str] = []
        self.synchronisations: list[str] = []
        self.python_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if func.overloadpacket.__name__ in ALLOCATIONS or func.namespace == "prim" or _is_view(func, args, out):
            return out
        if _leaves_device(args, out) or func.overloadpacket.__name__ in WAITS:
            self.synchronisations.append(name)
        if "item" not in name and "scalar" not in name:
            self.launches.append(name)
        return out

    def launch(self, kernel: Any, *args: Any, **named: Any) -> None:
        """Counts a launch of Triton in place of making it."""
        if (name := kernel.fn.__name__) == "_lay_out":
            self.before, self.launches = self.launches, []
        self.launches.append(name)


class Indexed(TorchFunctionMode):
    """Mode that indexes tensors by torch's operations: torch's own way sets the device, which CPU builds cannot."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, axis, index = args[0], 0, []
        for key in args[1] if isinstance(args[1], tuple) else (args[1],):
            index.append(key if isinstance(key, torch.Tensor) else None)
            if isinstance(key, slice):
                tensor = torch.ops.aten.slice(tensor, axis, key.start, key.stop, key.step or 1)
            elif key is None:
                tensor = tensor.unsqueeze(axis)
            elif not isinstance(key, torch.Tensor):
                tensor, axis = tensor.select(axis, int(key)), axis - 1
            axis += 1
        return tensor if all(each is None for each in index) else torch.ops.aten.index(tensor, index)


def _is_view(func: Any, args: Any, out: Any) -> bool:
    """Returns whether an operation made a view, as `to` and `reshape` do where they change nothing."""
    return func.is_view and (
        not isinstance(out, torch.Tensor) or out.untyped_storage()._cdata == args[0].untyped_storage()._cdata
    )


def _leaves_device(args: Any, out: Any) -> bool:
    """Returns whether an operation has brought a tensor from the device to the host."""
    given = any(isinstance(each, torch.Tensor) and each.is_cuda for each in args)
    return given and isinstance(out, torch.Tensor) and not out.is_cuda


@contextmanager
def counting() -> Iterator[Counted]:
    """Context manager in which tensors are fake ones, and launches are counted."""
    from triton.runtime.jit import JITFunction

    run, counted = JITFunction.run, Counted()
    JITFunction.run = lambda self, *args, grid, warmup, **named: counted.launch(self)
    try:
        hopper = patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        with hopper, FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), Indexed():
            yield counted
    finally:
        JITFunction.run = run


class Experts(torch.nn.Module):
    """A gated experts module as transformers makes them, as far as the layer uses it."""

    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, torch.nn.SiLU()
        shapes = {"gate_up_proj": (experts, 2 * INNER, HIDDEN), "down_proj": (experts, HIDDEN, INNER)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=torch.bfloat16, device="cuda"))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    _apply_gate.__name__ = "_default_apply_gate"


def fake_step(ranks: int, tokens: int = TOKENS, experts: int = EXPERTS, replicas: int = 0, masked: bool = False) -> Counted:
    """Counts one rank's step over ordered push, from the choices of its tokens to its outputs.

    Args:
        ranks: number of ranks.
        tokens: of this rank, top TOP_K of `experts`, of HIDDEN elements in bfloat16.
        experts: number of experts, in equal parts on all ranks.
        replicas: experts that the last rank holds too.
        masked: whether some tokens need no experts.

    Returns:
        The launches, and what raised because the host would have waited.
    """
    from aurora.moe.expert_map import ExpertMap
    from aurora.moe.permutation import MessageFormat
    from aurora.runtime.pushed_batch import PushedBatch
    from aurora.runtime.transports.push import OrderedPush
    from aurora.runtime.transports.symmetric_memory import SymmetricMemory

    each = experts // ranks
    held = [tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    held[-1] += tuple(range(replicas))
    expert_map, row_bytes = ExpertMap(tuple(held), 0), MessageFormat(HIDDEN, TOP_K, torch.bfloat16).row_bytes

    def memory(size: int) -> SymmetricMemory:
        local = torch.empty(size, dtype=torch.uint8, device="cuda")
        return SymmetricMemory(0, ranks, local, torch.empty(ranks, dtype=torch.int64, device="cuda"), None)

    with counting() as counted:
        push = OrderedPush(memory, ranks, tokens, row_bytes, experts=each + replicas)
        for name, table in list(expert_map.named_buffers()):
            expert_map.register_buffer(name, torch.empty(table.shape, dtype=table.dtype, device="cuda"), persistent=False)
        module = Experts(each)
        hidden = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        index, weights = (torch.empty(tokens, TOP_K, dtype=dtype, device="cuda") for dtype in (torch.long, torch.bfloat16))
        mask = torch.empty(tokens, dtype=torch.bool, device="cuda") if masked else None
        with counted:
            began_s = time.thread_time()
            try:
                batch = PushedBatch(push, 0, expert_map, (hidden, index, weights), mask)
                batch.compute(module)
                batch.combined()
            except RuntimeError as error:  # of fake tensors, which have no values
                counted.synchronisations.append(str(error).splitlines()[0])
            counted.python_s = time.thread_time() - began_s
    return counted


class OnGpu(TorchFunctionMode):
    """Mode in which tensors of the CPU say that they are on a GPU, and take the way of those."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func is torch.Tensor.cpu:
            self._counted.synchronisations.append("cpu")
        return func(*args, **(kwargs or {}))


class StagedRank:
    """Transport of one rank on NCCL, as far as the counter needs it: peers have the same counts, and bytes stay."""

    rank = 0

    def __init__(self, ranks: int, counted: Counted) -> None:
        self.ranks, self._counted = ranks, counted
        self.gathers = self.stages = 0

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        self._counted.synchronisations.append("transfers of the layer before")
        return row.cpu().expand(self.ranks, *row.shape).contiguous()

    def exchange(self, order: Order, sends: Any, recvs: Any, observe: Any) -> None:
        self.stages += len(set(order.stage_X[(order.pairs_X2 == self.rank).any(axis=1)].tolist()))


def staged_step(ranks: int, tokens: int = TOKENS, experts: int = EXPERTS) -> tuple[Counted, StagedRank]:
    """Counts one rank's step of the layer on NCCL: its own code on narrow tensors of the CPU that say they are on a GPU.

    Returns the launches, and the transport, which has counted gathers over gloo and stages; one partner at a time.
    """
    from triton.runtime.jit import JITFunction

    from aurora.moe import layer
    from aurora.moe.expert_map import ExpertMap
    from aurora.moe.layouts import RowPerExpert

    each, width = experts // ranks, 16
    counted = Counted()
    rounds = [(source, (source + shift) % ranks) for shift in range(1, ranks) for source in range(ranks)]

    expert_map = ExpertMap(tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)), 0)
    alltoalls = layer.OrderedAllToAlls(StagedRank(ranks, counted), Order("rounds", np.array(rounds)))
    index = torch.rand(tokens, experts).topk(TOP_K).indices
    hidden, weights = torch.zeros(tokens, width), torch.ones(tokens, TOP_K)
    module, run, device = transformers_experts(each, width), JITFunction.run, torch.cuda.device
    JITFunction.run = lambda self, *args, grid, warmup, **named: counted.launch(self)
    torch.cuda.device = lambda device: nullcontext()
    try:
        with torch.inference_mode(), OnGpu(counted), counted:
            began_s = time.thread_time()
            layout, arrived = layer.dispatch(RowPerExpert(expert_map, hidden, index, weights, None), alltoalls)
            layout.aggregate(layer.combine(layout, layer.compute(layout, arrived, module), alltoalls))
            counted.python_s = time.thread_time() - began_s
    finally:
        JITFunction.run, torch.cuda.device = run, device
    counted.synchronisations.append("slots of the rows that arrive")  # copied from pageable memory
    return counted, alltoalls.transport


def transformers_experts(experts: int, width: int) -> Any:
    """Returns an experts module of transformers that computes by grouped products."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=width, intermediate_size=width, num_local_experts=experts)
    config._experts_implementation = "grouped_mm"
    module = MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter.data)
    return module


def launcher_us() -> float:
    """Returns the microseconds of a processor that a launch by Triton takes here: the median of those of ordered push."""
    from aurora.moe import push_layout_triton, push_triton
    from tests.compile_kernels import launching, push_calls

    calls, taken = push_calls(push_triton, push_layout_triton), []
    with launching(90):
        for call in calls:
            for repeated in range(30):
                began_s = time.thread_time()
                call()
                if repeated > 4:
                    taken.append(time.thread_time() - began_s)
    return 1e6 * statistics.median(taken)


def budget() -> dict[str, Any]:
    """Returns what a layer launches and takes of the host, by ranks, for both ways."""
    triton_us = round(launcher_us(), 1)
    layers = []
    for ranks in RANKS:
        for name in ("push", "staged"):
            pythons = []
            for _ in range(REPEATED):
                counted, transport = (fake_step(ranks), None) if name == "push" else staged_step(ranks)
                pythons.append(counted.python_s * 1e6)
            gathers, stages = (0, 0) if transport is None else (transport.gathers, transport.stages)
            before = counted.before if name == "push" else []
            launches, waits = len(before) + len(counted.launches), len(counted.synchronisations)
            by_triton = sum(name.startswith("_") for name in counted.launches)
            calls_us = by_triton * triton_us + (launches - by_triton) * COSTS_US["launch"] + waits * COSTS_US["synchronisation"]
            calls_us += stages * COSTS_US["stage"] + gathers * COSTS_US["counts"][ranks]
            layers.append(
                {
                    "ranks": ranks,
                    "layer": name,
                    "launches": launches,
                    "from_dispatch_to_combine": len(counted.launches) if name == "push" else launches,
                    "synchronisations": waits,
                    "gathers_over_gloo": gathers,
                    "stages": stages,
                    "host_us": round(calls_us, 1),
                    "python_us": round(statistics.median(pythons)),
                    "what": [*before, *counted.launches],
                    "waits": counted.synchronisations,
                }
            )
    return {
        "what": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "machine": machine(),
        "layer": f"{TOKENS} tokens a rank, top {TOP_K} of {EXPERTS} experts, hidden {HIDDEN}, inner {INNER}, bfloat16",
        "costs_us": COSTS_US,
        "triton_us": triton_us,
        "layers": layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    found = budget()
    if given.o is not None:
        given.o.write_text(json.dumps(found, indent=1) + "\n")
    print(f"A launch by Triton takes {found['triton_us']} us of a processor.")
    print("| ranks | layer | launches | synchronisations | gathers over gloo | stages | host us | Python us |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for each in found["layers"]:
        columns = ("launches", "synchronisations", "gathers_over_gloo", "stages", "host_us", "python_us")
        print(f"| {each['ranks']} | {each['layer']} | " + " | ".join(str(each[name]) for name in columns) + " |")


if __name__ == "__main__":
    main()
