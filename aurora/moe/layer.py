"""The expert-parallel MoE layer of one rank, in three steps: dispatch, compute, combine.

    layout = RowPerExpert(expert_map, hidden, index, weights, mask, all_loads(expert_map, index, mask, transport.gather))
    layout, arrived = dispatch(layout, transport)       # tokens to the ranks of their experts
    answers = compute(layout, arrived, experts)         # this rank's experts
    outputs = layout.aggregate(combine(layout, answers, transport))  # and back; (N, H), summed by token

A caller that shares or records compute does so around these calls; its LayerTransport does so around the collectives. All ranks
make the same calls in the same sequence.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import DispatchLayout
from aurora.moe.transport import ExchangeStep, Transport
from aurora.types import Order
from aurora.types.arrays import IntArray

Gather = Callable[[torch.Tensor], torch.Tensor]  # Transport.gather, or what does it and more
IsHierarchical = Callable[[IntArray, int], bool]  # rows of a flat all-to-all (R, R), bytes of a row


class LayerTransport(Protocol):
    """The collectives of one layer on one rank, in the layer's orders."""

    def gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Allgathers the `counts` of a layout; returns (R, *counts.shape) int64 on the CPU."""

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager around one all-to-all; its value is a function (sends, recvs) to call for each of its exchanges.

        Args:
            phase: "dispatch" or "combine".
            rows_SRR: (S, R, R) rows from each rank (row) to each rank (column) in each of the S exchanges.
            row_bytes: size of a row in bytes.
        """


@dataclass(frozen=True)
class OrderedAllToAlls:
    """LayerTransport of a layer that shares nothing: a Transport and an order.

    Args:
        transport: carries tensors between the ranks.
        order: the order of the dispatch; the combine has the reversed one.
    """

    transport: Transport
    order: Order

    def gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Allgathers `counts`; see LayerTransport."""
        return self.transport.gather(counts)

    def exchanging(self, phase: str, rows_SRR: IntArray, row_bytes: int) -> AbstractContextManager[ExchangeStep]:
        """Context manager around one all-to-all in the layer's order; see LayerTransport."""
        order = self.order if phase == "dispatch" else self.order.reversed
        return nullcontext(lambda sends, recvs: self.transport.exchange(order, sends, recvs, lambda *_: None))


def all_loads(expert_map: ExpertMap, index: torch.Tensor, mask: torch.Tensor | None, gather: Gather) -> torch.Tensor | None:
    """Returns (R, E) int64, how often each rank's tokens chose each expert, if the map needs it to lay out tokens; else None.

    Args:
        expert_map: the layer's map.
        index, mask: as in `ExpertMap.physical_experts`.
        gather: allgathers a tensor.
    """
    return gather(expert_map.count(index, mask)) if expert_map.needs_all_counts else None


def dispatch(
    layout: DispatchLayout, transport: LayerTransport, is_hierarchical: IsHierarchical | None = None
) -> tuple[DispatchLayout, torch.Tensor]:
    """Sends this rank's tokens to the ranks of their experts.

    Args:
        layout: this rank's tokens, laid out.
        transport: the layer's collectives.
        is_hierarchical: with a layout over servers: whether this batch goes over them; if not, a token travels once to each
            rank. The same on all ranks. None: always.

    Returns:
        (layout, rows): the layout in which the tokens went, for `compute` and `combine`, and the rows that arrived.
    """
    counts = transport.gather(layout.counts)
    flat_RR = None if is_hierarchical is None else layout.flat_counts(counts)
    if is_hierarchical is not None and flat_RR is not None and not is_hierarchical(flat_RR.numpy(), _row_bytes(layout.rows)):
        layout, counts = layout.flat(), flat_RR
    layout.gathered(counts)
    with transport.exchanging("dispatch", layout.sizes_SRR, _row_bytes(layout.rows)) as exchange:
        return layout, layout.dispatch(exchange)


def compute(layout: DispatchLayout, rows: torch.Tensor, experts: Any) -> torch.Tensor:
    """Returns (X, H), the outputs of this rank's experts for the rows that `dispatch` returned.

    Args:
        layout: the layout, from `dispatch`.
        rows: the rows that arrived.
        experts: module with the experts in this rank's slots, with the call signature of transformers' experts modules.
    """
    return layout.compute(rows, experts)


def combine(layout: DispatchLayout, answers: torch.Tensor, transport: LayerTransport) -> torch.Tensor:
    """Sends experts' outputs back to their tokens' ranks.

    Args:
        layout: the layout, from `dispatch`.
        answers: (X, H), the output for each row that `dispatch` returned, in the same sequence.
        transport: the layer's collectives.

    Returns:
        The outputs for this rank's own rows; `layout.aggregate` sums them to (N, H) by token.
    """
    with transport.exchanging("combine", layout.sizes_SRR.swapaxes(1, 2), _row_bytes(answers)) as exchange:
        return layout.combine(answers, exchange)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()
