"""A MoE layer over ordered push whose ranks are all on one device: what each GPU executes of a step, on one GPU or CPU.

On a GPU the step is captured as a CUDA graph. On a CPU Triton interprets the kernels (TRITON_INTERPRET=1).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat
from aurora.runtime.pushed_batch import PushedBatch, Tokens
from aurora.runtime.transports.push import LANES, OrderedPush
from aurora.runtime.transports.symmetric_memory import SymmetricMemory
from aurora.types import Order


def local_memory(ranks: int, device: str = "cpu") -> list[Callable[[int], SymmetricMemory]]:
    """Returns for each rank what makes its buffer of so many bytes; all are in the memory of one device and of this process."""
    wholes: dict[int, torch.Tensor] = {}

    def make(rank: int, size: int) -> SymmetricMemory:
        if size not in wholes:
            wholes[size] = torch.zeros(ranks, size, dtype=torch.uint8, device=device)
        whole = wholes[size]
        addresses = torch.tensor([whole.data_ptr() + peer * size for peer in range(ranks)], dtype=torch.int64, device=device)
        return SymmetricMemory(rank, ranks, whole[rank], addresses, whole)

    return [partial(make, rank) for rank in range(ranks)]


class LocalLayer:
    """A MoE layer whose ranks are all on one device and one stream: what each GPU executes of a step, on one GPU or CPU.

    Args:
        expert_maps: each rank's map, on the device.
        experts_R: each rank's experts module, with the experts of its slots.
        tokens: most tokens of a rank.
        like: any tensor of the hidden states' dtype, width and device, (N, H).
        top_k: experts of a token.
        lanes: programs of a launch.
    """

    def __init__(
        self,
        expert_maps: Sequence[ExpertMap],
        experts_R: Sequence[Any],
        tokens: int,
        like: torch.Tensor,
        top_k: int,
        lanes: int = LANES,
    ) -> None:
        ranks, row_bytes = len(expert_maps), MessageFormat(like.shape[1], top_k, like.dtype).row_bytes
        sizes = partial(OrderedPush, ranks=ranks, tokens=tokens, row_bytes=row_bytes, lanes=lanes, lock_step=True)
        most = max(len(each.arrival_slots) // ranks for each in expert_maps)
        self._maps, self._experts_R = expert_maps, experts_R
        self.pushes = [sizes(make, experts=most) for make in local_memory(ranks, str(like.device))]
        for push in self.pushes:
            push.set_order(0, Order.all_at_once(ranks))

    def step(self, tokens_R: Sequence[Tokens]) -> list[torch.Tensor]:
        """Returns each rank's outputs (N, H) of its hidden states (N, H), experts (N, K) and weights (N, K)."""
        sent = zip(self.pushes, self._maps, tokens_R, strict=True)
        batches = [PushedBatch(push, 0, expert_map, tokens) for push, expert_map, tokens in sent]
        for batch, experts in zip(batches, self._experts_R, strict=True):
            batch.compute(experts)
        return [batch.combined() for batch in batches]

    def capture(self, tokens_R: Sequence[Tokens]) -> tuple[Any, list[torch.Tensor]]:
        """Captures a step as a CUDA graph. Returns it, and what replays fill; tokens may be overwritten between replays."""
        self.step(tokens_R)  # compiles and loads what is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.step(tokens_R)
        return graph, outputs
