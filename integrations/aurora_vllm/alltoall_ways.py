"""Times, before serving, the ways to perform an all-to-all in vLLM: vLLM's own, by ordered messages, and by ordered push."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from aurora.moe.permutation import MessageFormat
from aurora.moe.transport import Transport

if TYPE_CHECKING:
    from aurora.runtime.order_calibration import OrderCalibration

MESSAGES, STOCK = "ordered messages", "vLLM's own"
PUSHES = UNORDERED, ORDERED, GATED = "unordered push", "ordered push", "gated push"  # as in DELIVERY
TOKENS = (1, 8, 64, 512, 4096)  # of a rank, for which ways are timed, and the engine's most
REPEATED = 8  # exchanges that are timed in a row on a GPU, where one is short
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


def time_ways(transport: Transport, engine: EngineAllToAll, exchange_of: Mapping[str, Exchange]) -> OrderCalibration:
    """Times a dispatch plus combine in several ways, for batches of several sizes. Returns the seconds by size and way.

    A collective call with the same result on all ranks. The tokens choose experts evenly. If vLLM uses CUDA graphs, each way is
    captured and replayed.

    Args:
        transport: carries the measured seconds between the ranks.
        engine: vLLM's all-to-all, which determines batch sizes and row layout.
        exchange_of: {name of a way: function that performs a dispatch and its combine}. The last way is the default, which
            another must beat to be chosen.
    """
    from aurora.runtime.order_calibration import calibrate_calls

    slots_G, row, device = next(iter(engine.slots_LG.values())), engine.row, engine.device
    experts, rng = sum(map(len, slots_G)), torch.Generator().manual_seed(transport.rank)
    tokens_C = [*(tokens for tokens in TOKENS if tokens < engine.most_tokens), engine.most_tokens]

    def calls(size: int) -> list[Callable[[], None]]:
        tokens = size // row.row_bytes
        index = torch.rand(tokens, experts, generator=rng).topk(row.top_k).indices.to(device, torch.int32)
        hidden = torch.zeros(tokens, row.width, dtype=row.dtype, device=device)
        batch = hidden, torch.ones(tokens, row.top_k, device=device), index
        return [_timeable(partial(exchange, *batch), engine.graphs) for exchange in exchange_of.values()]

    return calibrate_calls(transport, (*exchange_of,), calls, [tokens * row.row_bytes for tokens in tokens_C])


def _timeable(call: Callable[[], None], graphs: bool) -> Callable[[], None]:
    """Returns a call that returns when its work is done; on a GPU it does the work REPEATED times."""
    if not torch.cuda.is_available():
        return call
    if graphs:
        call()  # compiles and connects, which no capture can
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay

    def performed() -> None:
        for _ in range(REPEATED):
            call()
        torch.cuda.synchronize()

    return performed
