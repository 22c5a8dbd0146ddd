"""The MoE layer with virtual ranks on one device: outputs against those of all experts, synchronisations, launches, time.

Usage: python -m bench.gpu.layer. First in each layout, with ranks that are threads; then over ordered push, in lock step on one
stream, eager and as a CUDA graph.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from aurora.models.loading import hold_experts
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layer import OrderedAllToAlls, combine, compute, dispatch
from aurora.moe.layouts import RowPerExpert, RowPerRank
from aurora.moe.server_layout import RowPerServer
from aurora.runtime.distributed.launcher import RankInfo, launch_threads
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Hierarchy, Order
from bench.gpu.device import Cuda, chosen, report
from bench.gpu.experts import made_experts

RANKS, EXPERTS, TOP_K = 4, 16, 4
SLOTS_G = tuple((*range(4 * rank, 4 * rank + 4), (4 * rank + 4) % EXPERTS) for rank in range(RANKS))  # a replica each
NORM = 1e-2  # of a difference over the norm of what is expected, in bfloat16: single elements differ by more
KINDS = (RowPerExpert, RowPerRank, RowPerServer)
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(device: Cuda, tokens: int, hidden: int, dtype: torch.dtype) -> list[Tokens]:
    """Returns each rank's hidden states, experts and weights."""
    torch.manual_seed(1)
    return [
        (
            torch.randn(tokens, hidden, device=device.name).to(dtype),
            torch.rand(tokens, EXPERTS, device=device.name).topk(TOP_K).indices,
            torch.rand(tokens, TOP_K, device=device.name).to(dtype),
        )
        for _ in range(RANKS)
    ]


def held_by(whole: Any, slots: Sequence[int]) -> Any:
    """Returns a copy of an experts module with the experts of some slots."""
    own = copy.deepcopy(whole)
    hold_experts(own, slots)
    return own


def outputs(rank_info: RankInfo, memory: Memory, kind: type, whole: Any, tokens_R: list[Tokens], device: str) -> torch.Tensor:
    """One rank's outputs, in a thread."""
    rank, hierarchy = rank_info.rank, Hierarchy(np.array([0, 0, 1, 1])) if kind is RowPerServer else None
    with torch.inference_mode():
        expert_map = ExpertMap(SLOTS_G, rank, None, False, hierarchy).to(device)
        alltoalls = OrderedAllToAlls(MemoryTransport(memory, rank), Order.all_at_once(RANKS))
        layout, arrived = dispatch(kind(expert_map, *tokens_R[rank], None), alltoalls)
        answers = compute(layout, arrived, held_by(whole, SLOTS_G[rank]))
        return layout.aggregate(combine(layout, answers, alltoalls))


def compare_layouts(device: Cuda) -> float:
    """Returns the largest difference of any layout's outputs from those of all experts in one module."""
    tokens, hidden, inner = (6, 32, 16) if device.dry else (256, 1024, 512)
    whole, tokens_R = made_experts(device, hidden, inner, EXPERTS, torch.float32), drawn(device, tokens, hidden, torch.float32)
    worst = 0.0
    for kind in KINDS:
        found_R = launch_threads(outputs, RANKS, Memory(RANKS, 60.0), kind, whole, tokens_R, device.name)
        for found, own in zip(found_R, tokens_R, strict=True):
            with torch.inference_mode():
                wanted = whole(*own)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
            worst = max(worst, float((found - wanted).abs().max()))
    return worst


def pushed(device: Cuda) -> dict[str, float]:
    """Checks the layer over ordered push. Returns its launches on a rank, and microseconds of a step of all ranks."""
    from bench.local_layer import LocalLayer

    tokens, hidden, inner = (5, 32, 16) if device.dry else (128, 4096, 2048)
    whole, tokens_R = made_experts(device, hidden, inner, EXPERTS), drawn(device, tokens, hidden, torch.bfloat16)
    maps = [ExpertMap(SLOTS_G, rank, None, False, None).to(device.name) for rank in range(RANKS)]
    experts_R = [held_by(whole, slots) for slots in SLOTS_G]
    layer = LocalLayer(maps, experts_R, tokens, tokens_R[0][0], TOP_K, **({"lanes": 2} if device.dry else {}))
    out_R: list[torch.Tensor] = []

    def step() -> None:
        out_R[:] = layer.step(tokens_R)

    def check(way: str) -> None:
        for found, own in zip(out_R, tokens_R, strict=True):
            wanted = whole(*own).float()
            apart = float((found.float() - wanted).norm() / wanted.norm())
            assert apart <= NORM, f"{way}: outputs differ from those of all experts by {apart:.2g} of their norm"

    with torch.inference_mode():
        step()
        check("eager")
        launches = device.launches(step) / RANKS
        if device.dry:  # torch's experts wait on a CPU
            step()
        else:
            with device.no_syncs():
                step()
        eager_us = 1e3 * device.milliseconds(step)
        replay = device.capture(step)
        replay()
        device.synchronize()
        check("replayed")
        return {"launches": launches, "eager_us": eager_us, "replayed_us": 1e3 * device.milliseconds(replay)}


if __name__ == "__main__":
    found = chosen()
    report(largest_difference=compare_layouts(found), **pushed(found))
