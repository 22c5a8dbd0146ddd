"""vLLM's own all-to-all of a model's MoE layers, and its time before serving beside that of aurora's ordered messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from aurora.moe.permutation import MessageFormat
from aurora.moe.transport import Transport

if TYPE_CHECKING:
    from aurora.runtime.order_calibration import OrderCalibration

MESSAGES, PUSH, STOCK = "ordered messages", "ordered push", "vLLM's own"
TOKENS = (1, 8, 64, 512, 4096)  # of a rank, for which both are timed, and the engine's most
Slots = tuple[tuple[int, ...], ...]
Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # of hidden states (N, H), weights and experts (N, K)


class EngineAllToAll(NamedTuple):
    """vLLM's own all-to-all of the model's MoE layers, and the sizes of the batches that it carries.

    Attributes:
        exchange: performs a dispatch and its combine as vLLM does.
        slots_LG: for each MoE layer, the experts of each rank, in the sequence of its weights.
        row: layout of a token's row.
        most_tokens: largest number of tokens that a rank has in one batch.
        graphs: True: vLLM captures CUDA graphs.
        device: device of the tokens.
    """

    exchange: Exchange
    slots_LG: Mapping[int, Slots]
    row: MessageFormat
    most_tokens: int
    graphs: bool
    device: torch.device


def time_beside_engine(transport: Transport, engine: EngineAllToAll, messages: Exchange) -> OrderCalibration:
    """Times a dispatch plus combine by messages and by vLLM, the default, for batches of several sizes.

    A collective call with the same result on all ranks. The tokens choose experts evenly.

    Args:
        transport: carries the measured seconds between the ranks.
        engine: vLLM's all-to-all, which determines batch sizes and row layout.
        messages: performs a dispatch and its combine by messages.
    """
    from aurora.runtime.order_calibration import calibrate_calls

    slots_G, row, device = next(iter(engine.slots_LG.values())), engine.row, engine.device
    experts, rng = sum(map(len, slots_G)), torch.Generator().manual_seed(transport.rank)
    tokens_C = [*(tokens for tokens in TOKENS if tokens < engine.most_tokens), engine.most_tokens]

    def calls(size: int) -> list[Callable[[], None]]:
        tokens = size // row.row_bytes
        index = torch.rand(tokens, experts, generator=rng).topk(row.top_k).indices.to(device, torch.int32)
        hidden = torch.zeros(tokens, row.width, dtype=row.dtype, device=device)
        weights = torch.ones(tokens, row.top_k, device=device)

        def performed(exchange: Exchange) -> None:
            exchange(hidden, weights, index)
            if hidden.is_cuda:
                torch.cuda.synchronize()

        return [lambda: performed(messages), lambda: performed(engine.exchange)]

    return calibrate_calls(transport, (MESSAGES, STOCK), calls, [tokens * row.row_bytes for tokens in tokens_C])
