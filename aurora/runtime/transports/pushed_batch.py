"""Pushed batch: one batch of a MoE layer over ordered push, from tokens to their sums, in eight launches and without the host.

1. lay out the choices; 2. push the tokens, and wait for the peers'; 3. sort what has come by expert; 4. to 6. projections of
the experts and the gate between them; 7. push the answers, weighted and summed by row, and wait for peers'; 8. sum by token.

A token travels once to each rank, with its weights and experts. Senders tell how often they have chosen each expert, and which
of these a choice is, so that every row knows its place among the rows of its expert.
"""

from collections.abc import Sequence
from typing import Any

import torch

from aurora.errors import BadInput
from aurora.moe.expert_map import ExpertMap
from aurora.moe.grouped_experts import compute_experts
from aurora.moe.permutation import MessageFormat
from aurora.moe.permutation_triton import weighted_sum
from aurora.moe.push_triton import Choices, Rows, arrange, lay_out
from aurora.runtime.transports.push import LANES, OrderedPush
from aurora.runtime.transports.symmetric_memory import local_memory
from aurora.types import Order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of hidden states: sums are taken in float32


class PushedBatch:
    """One batch of a layer over ordered push; making it queues the dispatch. Then come `compute` and `combined`.

    Args:
        push: the ranks' buffers, made for as many experts as a rank has, and for rows of `packing`.
        layer: the layer, whose order is used.
        expert_map: the layer's map; its replicas do not share all ranks' tokens (`ExpertMap.needs_all_counts`).
        hidden, index, weights, mask: as of `ExpertParallelLayer.dispatch`.

    Raises:
        BadInput: if the buffers are too small, or hidden states have a dtype in which rows cannot be summed.
    """

    def __init__(
        self,
        push: OrderedPush,
        layer: int,
        expert_map: ExpertMap,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        if hidden.dtype not in DTYPES:
            raise BadInput(f"ordered push: expected hidden states of {', '.join(map(str, DTYPES))}, found {hidden.dtype}")
        self._push, self._layer, self._map = push, layer, expert_map
        self._packing = packing = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        push.check_size(len(hidden), packing.row_bytes)
        physical_NK = expert_map.physical_experts(index, mask)
        tail = torch.empty(len(hidden), (packing.row_bytes - packing.weights_at) // 4, dtype=torch.int32, device=hidden.device)
        codes_at = (packing.physical_at - packing.weights_at) // 4
        table_P = expert_map.rank_P, expert_map.slot_P
        choices = Choices(*table_P, weights, push.peers.told, tail, codes_at)
        row_of_RX, count_RT, self._place_NK = lay_out(physical_NK, push.ranks, push.slots, True, choices)
        top_k = index.shape[1]
        rows = Rows(hidden, top_k, tail, top_k, packing.weights_at, packing.row_bytes)
        self._arrived, self._count_RT = push.exchange("dispatch", push.table_L2[layer, 0], rows, row_of_RX, count_RT)

    def compute(self, experts: Any) -> None:
        """Computes this rank's experts on what has arrived, and queues the combine."""
        push, packing = self._push, self._packing
        push.receive()
        tail_at = packing.weights_at, packing.physical_at
        shape = packing.width, packing.dtype, tail_at, packing.top_k, self._map.local, self._map.num_physical
        arranged = arrange(push.peers, self._arrived, self._count_RT, *shape, push.round_length)
        answers = compute_experts(experts, arranged.rows, arranged.ends_E)
        rows = Rows(answers, 1, None, 1, 0, packing.weights_at, None, arranged.place_XK, arranged.weight_XK)
        table = push.table_L2[self._layer, 1]
        self._arrived, _ = push.exchange("combine", table, rows, push.same_RX, self._count_RT[:, :1])

    def combined(self) -> torch.Tensor:
        """Returns (N, H), sums of the answers by this rank's tokens, in float32 and in the order of choices, rounded once."""
        self._push.receive()
        packing = self._packing
        returned = self._arrived[:, : packing.width * packing.dtype.itemsize].view(packing.dtype)
        return weighted_sum(returned, self._place_NK, None)


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
        most = max(len(each.arrival_slots) // ranks for each in expert_maps)
        makes = local_memory(ranks, str(like.device))
        self._maps, self._experts_R = expert_maps, experts_R
        self.pushes = [OrderedPush(make, ranks, tokens, row_bytes, lanes=lanes, experts=most, lock_step=True) for make in makes]
        for push in self.pushes:
            push.set_order(0, Order.all_at_once(ranks))

    def step(self, tokens_R: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Returns each rank's outputs (N, H) of its hidden states (N, H), experts (N, K) and weights (N, K)."""
        sent = zip(self.pushes, self._maps, tokens_R, strict=True)
        batches = [PushedBatch(push, 0, expert_map, *tokens) for push, expert_map, tokens in sent]
        for batch, experts in zip(batches, self._experts_R, strict=True):
            batch.compute(experts)
        return [batch.combined() for batch in batches]

    def capture(self, tokens_R: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[Any, list[torch.Tensor]]:
        """Captures a step as a CUDA graph. Returns it, and what replays fill; tokens may be overwritten between replays."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(tokens_R)  # compiles and loads what is captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.step(tokens_R)
        return graph, outputs
