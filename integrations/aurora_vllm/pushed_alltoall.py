"""All-to-alls of MoE layers by ordered push: kernels write rows straight into peers' memory, and the host knows only shapes.

Orders and expert maps are tensors on the device. When they are overwritten, captured CUDA graphs use the new ones from the next
replay on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat
from aurora.moe.transport import Transport
from aurora.runtime.transports.symmetric_memory import SymmetricMemory, device_memory, processes_memory
from aurora.types import Order, Plan
from aurora_vllm.engine_alltoall import EngineAllToAll, Slots

if TYPE_CHECKING:
    from aurora.runtime.transports.push import Dispatched, OrderedPush

BUFFER_BYTES = 1 << 29  # of a rank's buffer; larger batches take several rounds
NAME_BYTES = 256  # of a name that ranks tell each other
MakeMemory = Callable[[int], SymmetricMemory]


class PushedRounds(NamedTuple):
    """State of one batch of a layer between dispatch and combine by push.

    A batch with more tokens than the buffers hold is pushed in several rounds.

    Attributes:
        rounds: the dispatched rows of each round.
        received: number of row slots of all rounds, including empty ones.
    """

    rounds: list[Dispatched]
    received: int


class PushedLayer:
    """Performs dispatch and combine of one MoE layer on one rank by ordered push.

    Args:
        push: the buffers, shared by all layers, with an order table for each layer.
        table: the number of the layer's order table.
        slots_G: for each rank, its experts.
        order: the order of the dispatch; the combine uses its reverse.

    Attributes:
        push: as given.
        rank_E: (E + 1,) the rank of each expert; the last entry, equal to the number of ranks, means "no expert".
    """

    def __init__(self, push: OrderedPush, table: int, slots_G: Slots, order: Order) -> None:
        device = push.memory.local.device
        self.push, self._table = push, table
        self.rank_E = torch.full((sum(map(len, slots_G)) + 1,), push.ranks, device=device)
        placed = ExpertMap(slots_G, push.rank)
        self.rank_E[:-1] = placed.rank_P[placed.physical_EM[:, 0]].to(device)
        self._elsewhere = (self.rank_E[:-1] != push.rank).int().argmax()  # an expert of another rank
        push.set_order(table, order)

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, most_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PushedRounds]:
        """Sends this rank's tokens to the ranks of their experts. A collective call in which the host never waits.

        Args:
            hidden: (N, H), hidden states of this rank's tokens.
            weights, index: (N, K), the weights and the experts that the router chose for each token.
            most_tokens: largest number of tokens of any rank in this batch; the same on all ranks.

        Returns:
            (rows, weights, index, batch): rows (P, H), one for each token of any rank, zero if it was not sent here; the rows'
            weights (P, K) and experts (P, K); and the PushedRounds for `combine`. Choices of experts on other ranks have
            weight zero, and an index of an expert that is not on this rank.
        """
        push, packing = self.push, MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        rank_NK, tail = self.rank_E[index.long()], packing.tail(weights, index)
        rounds, parts = [], []
        for first in range(0, max(most_tokens, 1), push.round_tokens):
            tokens = slice(first, first + push.round_tokens)
            slots = min(max(most_tokens, 1) - first, push.round_tokens)
            came = push.dispatch(self._table, hidden[tokens], rank_NK[tokens], packing, tail[tokens], slots)
            rows, weights_PK, index_PK = packing.parts(came.rows)
            filled = came.filled_X[:, None]
            here_PK = self.rank_E[torch.where(filled, index_PK.long(), -1)] == push.rank
            experts_PK = torch.where(here_PK, index_PK, self._elsewhere).to(index.dtype)
            parts.append((torch.where(filled, rows, 0), torch.where(here_PK, weights_PK, 0).to(weights.dtype), experts_PK))
            rounds.append(came)
        joined = parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return joined[0], joined[1], joined[2], PushedRounds(rounds, len(joined[0]))

    def combine(self, answers: torch.Tensor, batch: PushedRounds) -> torch.Tensor:
        """Sends expert outputs (P, H) back to the tokens' ranks. Returns (N, H), their sums by token. A collective call."""
        rows = [len(came.rows) for came in batch.rounds]
        of_rounds = zip(batch.rounds, answers.contiguous().split_with_sizes(rows), strict=True)
        sums = [self.push.combine(self._table, came, part) for came, part in of_rounds]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def pushed_layers(
    transport: Transport, make_memory: MakeMemory, engine: EngineAllToAll, plan: Plan | None
) -> tuple[OrderedPush, dict[int, PushedLayer]] | str:
    """Creates the push buffers, and a PushedLayer for each MoE layer. A collective call.

    Args:
        transport: carries messages on success or failure between the ranks.
        make_memory: see `OrderedPush`.
        engine: vLLM's all-to-all, which determines layers and batch sizes.
        plan: its orders are used if they are for flat all-to-alls. None: ranks send to all others at once.

    Returns:
        (buffers, {MoE layer: PushedLayer}); or, if a rank failed, a sentence with the reason, the same on all ranks.
    """
    from aurora.runtime.transports.push import LANES, OrderedPush

    lanes = LANES if engine.device.type == "cuda" else 1  # which Triton's interpreter would run one after the other
    ranks, row_bytes, tables, failed = transport.ranks, engine.row.row_bytes, len(engine.slots_LG), ""
    orders = dict.fromkeys(engine.slots_LG, Order.all_at_once(ranks))
    if plan is not None and plan.models[0].hierarchy is None:
        orders = {layer: plan.models[0].dispatch_L[layer] for layer in orders}
    needed = [np.bincount(order.pairs_X2[:, 0]).max() + 1 for order in orders.values()]
    round_tokens, stages = max(BUFFER_BYTES // (2 * ranks * row_bytes), 1), int(max(2 * ranks, *needed))
    try:
        push = OrderedPush(make_memory, ranks, engine.most_tokens, row_bytes, round_tokens, tables, lanes, stages)
        numbered = enumerate(orders.items())
        layers = {layer: PushedLayer(push, at, engine.slots_LG[layer], order) for at, (layer, order) in numbered}
        check_answers(next(iter(layers.values())), engine)
    except RuntimeError as error:  # of torch, whose symmetric memory a machine may not have
        failed = str(error)
    failures = [failure for failure in told(transport, failed) if failure]
    return failures[0] if failures else (push, layers)


def check_answers(layer: PushedLayer, engine: EngineAllToAll) -> None:
    """Checks with a few tokens, and experts that return their input, that push works. A collective call.

    Raises:
        RuntimeError: if a combine returns wrong values.
    """
    token_N1, row = torch.arange(min(engine.most_tokens, 16), device=engine.device)[:, None], engine.row
    columns = torch.arange(row.width, device=engine.device)
    index = (3 * token_N1 + columns[: row.top_k]) % (len(layer.rank_E) - 1)
    hidden = ((token_N1 + columns) % 8).to(row.dtype)
    ranks_N = torch.zeros(len(hidden), layer.push.ranks + 1, device=engine.device).scatter_(1, layer.rank_E[index], 1.0).sum(1)
    rows, _, _, batch = layer.dispatch(hidden, torch.ones_like(index, dtype=torch.float32), index.int(), len(hidden))
    if not torch.equal(layer.combine(rows, batch), hidden * ranks_N[:, None].to(row.dtype)):
        raise RuntimeError("expected ordered push to bring back what was sent, found other values")


def memory_of_peers(group: Any, transport: Transport, on_one_host: bool) -> MakeMemory | str:
    """Returns a function that, called with a size in bytes, allocates memory into which all ranks can write.

    Returns a sentence with the reason instead if these ranks cannot have such memory. A collective call with the same kind of
    result on all ranks.

    Args:
        group: the ranks' process group on GPUs; unused on CPUs.
        transport: carries the GPUs' ids between the ranks.
        on_one_host: True: all ranks run on this machine.
    """
    from aurora.profiler.devices import linked_by_nvlink

    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        gpus_R = told(transport, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        linked_R = told(transport, str(on_one_host and linked_by_nvlink(gpus_R)))
        if set(linked_R) == {"True"}:
            return lambda size: device_memory(group, size, f"cuda:{device}")
    elif on_one_host and os.environ.get("TRITON_INTERPRET") == "1":
        return partial(processes_memory, transport.gather, transport.rank, transport.ranks)
    return "expected GPUs of one machine that NVLink connects, each to each, found others"


def told(transport: Transport, text: str) -> list[str]:
    """All-gathers a short text, cut to NAME_BYTES. Returns the ranks' texts, by rank. A collective call."""
    text_RX = transport.gather(torch.tensor([*text.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")], dtype=torch.uint8))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in text_RX.tolist()]
