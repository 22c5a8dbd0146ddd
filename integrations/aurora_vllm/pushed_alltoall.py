"""All-to-alls of MoE layers by ordered push: kernels write rows straight into peers' memory, and the host knows only shapes.

Orders and expert maps are tensors on the device. When they are overwritten, captured CUDA graphs use the new ones from the next
replay on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat, aligned
from aurora.moe.transport import Transport
from aurora.runtime.transports.symmetric_memory import MakeMemory, told
from aurora.types import Order, Plan
from aurora_vllm.layer_alltoall import Slots

if TYPE_CHECKING:
    from aurora.runtime.transports.push import Dispatched, OrderedPush

BUFFER_BYTES, BUFFER_SHARE = 1 << 29, 1 / 40  # of a rank's buffer, or of its GPU's memory; larger batches take several rounds


class EngineLayers(NamedTuple):
    """The model's MoE layers as vLLM has loaded them, and the batches that they get.

    Attributes:
        slots_LG: for each MoE layer, the experts of each rank.
        row: layout of a token's row.
        most_tokens: largest number of tokens that a rank has in one batch.
        device: device of the tokens.
    """

    slots_LG: Mapping[int, Slots]
    row: MessageFormat
    most_tokens: int
    device: torch.device


class PushedRounds(NamedTuple):
    """State of one batch of a layer between dispatch and combine by push.

    A batch with more tokens than the buffers hold is pushed in several rounds.

    Attributes:
        rounds: the dispatched rows of each round.
        received: number of row slots of all rounds, including empty ones.
        extra: received rows of the tensors that travelled along, zero in empty slots.
    """

    rounds: list[Dispatched]
    received: int
    extra: list[torch.Tensor]


class PushedLayer:
    """Performs dispatch and combine of one MoE layer on one rank by ordered push.

    Args:
        push: the buffers, shared by all layers, with an order table for each layer.
        table: the number of the layer's order table.
        slots_G: the experts of each rank.
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
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, most_tokens: int,
        extra: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PushedRounds]:  # fmt: skip
        """Sends this rank's tokens to the ranks of their experts. A collective call in which the host never waits.

        A round takes four launches: the choices are laid out, rows are pushed, their counts kept, and what arrived unpacked.

        Args:
            hidden: (N, H), hidden states of this rank's tokens, also quantized ones.
            weights, index: (N, K), the weights and the experts that the router chose for each token.
            most_tokens: largest number of tokens of any rank in this batch; the same on all ranks.
            extra: tensors (N, ...) whose rows travel along, such as the scales of quantized hidden states.

        Returns:
            (rows, weights, index, batch): rows (P, H), one for each token of any rank, zero if it was not sent here; the rows'
            weights (P, K) and experts (P, K); and the PushedRounds for `combine`. Choices of experts on other ranks have
            weight zero, and an index of an expert that is not on this rank.
        """
        from aurora.moe.push_layout_triton import PushedChoices, Unpacked, unpack

        push, packing = self.push, MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
        extra_at, words = (packing.row_bytes - packing.weights_at) // 4, sum(map(row_words, extra))
        tail = hidden.new_empty(len(hidden), extra_at + aligned(4 * words) // 4, dtype=torch.int32)
        pack_words(extra, tail[:, extra_at:])
        codes_at, most, rounds = (packing.physical_at - packing.weights_at) // 4, max(most_tokens, 1), []
        like = (packing.width, hidden.dtype), (packing.top_k, weights.dtype), (packing.top_k, index.dtype), (words, torch.int32)
        into = Unpacked(*(hidden.new_empty(push.ranks * most, width, dtype=dtype) for width, dtype in like))
        for first in range(0, most, push.round_tokens):
            tokens, slots = slice(first, first + push.round_tokens), min(most - first, push.round_tokens)
            choices = PushedChoices(self.rank_E, None, weights[tokens], 1, tail[tokens], codes_at)
            came = push.dispatch(self._table, hidden[tokens], index[tokens], packing, choices, slots)
            part = Unpacked(*(each[push.ranks * first : push.ranks * (first + slots)] for each in into))
            unpack(came.rows, came.count_R, packing, self.rank_E, push.rank, self._elsewhere, part)
            rounds.append(came)
        return into.rows, into.weights, into.experts, PushedRounds(rounds, len(into.rows), unpack_words(into.extra, extra))

    def combine(self, answers: torch.Tensor, batch: PushedRounds) -> torch.Tensor:
        """Sends expert outputs (P, H) back to the tokens' ranks. Returns (N, H), their sums by token. A collective call."""
        rows = [len(came.rows) for came in batch.rounds]
        of_rounds = zip(batch.rounds, answers.contiguous().split_with_sizes(rows), strict=True)
        sums = [self.push.combine(self._table, came, part) for came, part in of_rounds]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def bytes_of_row(hidden: torch.Tensor, index: torch.Tensor, extra: Sequence[torch.Tensor]) -> int:
    """Returns the size of a row of `PushedLayer.dispatch` with these arguments."""
    packing = MessageFormat(hidden.shape[1], index.shape[1], hidden.dtype)
    return packing.row_bytes + aligned(4 * sum(map(row_words, extra)))


def row_words(tensor: torch.Tensor) -> int:
    """Returns how many int32 words a row of a tensor takes."""
    return -(-math.prod(tensor.shape[1:]) * tensor.element_size() // 4)


def pack_words(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Copies the rows of tensors (N, ...) of any dtypes beside each other into (N, words) int32."""
    for tensor in tensors:
        rows = tensor.contiguous().reshape(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
        into.view(torch.uint8)[:, : rows.shape[1]].copy_(rows)
        into = into[:, row_words(tensor) :]


def unpack_words(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors of the dtypes and row shapes of `like`, of rows (X, words) int32 as `pack_words` makes them."""
    found = []
    for tensor in like:
        size = math.prod(tensor.shape[1:]) * tensor.element_size()
        rows = packed[:, : row_words(tensor)].contiguous().view(torch.uint8)[:, :size].contiguous()
        found.append(rows.view(tensor.dtype).reshape(len(packed), *tensor.shape[1:]))
        packed = packed[:, row_words(tensor) :]
    return found


def pushed_layers(
    transport: Transport, make_memory: MakeMemory, engine: EngineLayers, plan: Plan | None
) -> tuple[OrderedPush, dict[int, PushedLayer]] | str:
    """Creates the push buffers, and a PushedLayer for each MoE layer. A collective call.

    Args:
        transport: carries messages on success or failure between the ranks.
        make_memory: see `OrderedPush`.
        engine: the model's MoE layers and batch sizes.
        plan: its orders are used if they are for flat all-to-alls. None: ranks send to all others at once.

    Returns:
        (buffers, {MoE layer: PushedLayer}); or, if a rank failed, a sentence with the reason, the same on all ranks.
    """
    from aurora.runtime.transports.push import LANES, OrderedPush

    lanes = LANES if engine.device.type == "cuda" else 1  # which Triton's interpreter would run one after the other
    ranks, row_bytes = transport.ranks, engine.row.row_bytes + aligned(4)  # beside a whole row: which LoRA a token has
    tables, failed = len(engine.slots_LG), ""
    orders = dict.fromkeys(engine.slots_LG, Order.all_at_once(ranks))
    if plan is not None and plan.models[0].hierarchy is None:
        orders = {layer: plan.models[0].dispatch_L[layer] for layer in orders}
    needed = [np.bincount(order.pairs_X2[:, 0]).max() + 1 for order in orders.values()]
    buffer_bytes = min(map(int, told(transport.gather, str(_buffer_bytes(engine.device)))))
    round_tokens, stages = max(buffer_bytes // (2 * ranks * row_bytes), 1), int(max(2 * ranks, *needed))
    try:
        push = OrderedPush(make_memory, ranks, engine.most_tokens, row_bytes, round_tokens, tables, lanes, stages)
        numbered = enumerate(orders.items())
        layers = {layer: PushedLayer(push, at, engine.slots_LG[layer], order) for at, (layer, order) in numbered}
        check_answers(next(iter(layers.values())), engine)
    except RuntimeError as error:  # of torch, whose symmetric memory a machine may not have
        failed = str(error)
    failures = [failure for failure in told(transport.gather, failed) if failure]
    return failures[0] if failures else (push, layers)


def _buffer_bytes(device: torch.device) -> int:
    """Returns how many bytes a rank's buffer may have. vLLM's memory profile, which follows, counts them."""
    if device.type != "cuda":
        return BUFFER_BYTES
    return max(BUFFER_BYTES, int(BUFFER_SHARE * torch.cuda.get_device_properties(device).total_memory))


def check_answers(layer: PushedLayer, engine: EngineLayers) -> None:
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
