"""Moves of experts' weights between ranks: packed into one message per peer, which can be sent in slices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aurora.types import Placement
from aurora.types.arrays import IntArray
from aurora.types.placement import HeldML

Weights = Mapping[str, torch.Tensor]  # an expert's, by parameter name


@dataclass(frozen=True)
class ExpertTransfer:
    """Transfer of one expert's weights from rank `source` (None: from the checkpoint) to rank `to`."""

    model: int
    layer: int
    expert: int
    source: int | None
    to: int


def expert_transfers(
    placements_M: Sequence[Placement], held_R: Sequence[HeldML], expert_bytes_M: Sequence[int]
) -> list[ExpertTransfer]:
    """Returns the weight transfers after which every rank holds the experts that the new placements give it.

    If several ranks hold an expert, the rank with the fewest bytes sent so far sends it.

    Args:
        placements_M: the new placement of each model.
        held_R: for each rank the experts that it holds now, by model and layer.
        expert_bytes_M: bytes of one expert's weights of each model.
    """
    transfers: list[ExpertTransfer] = []
    ranks = len(held_R)
    sent_R = [0] * ranks
    for model, placement in enumerate(placements_M):
        for layer, slots_R in enumerate(placement.slots_LG):
            for to, slots in enumerate(slots_R):
                for expert in sorted(set(slots) - set(held_R[to][model][layer])):
                    owners = [rank for rank in range(ranks) if expert in held_R[rank][model][layer]]
                    source = min(owners, key=lambda rank: (sent_R[rank], rank), default=None)
                    if source is not None:
                        sent_R[source] += expert_bytes_M[model]
                    transfers.append(ExpertTransfer(model, layer, expert, source, to))
    return transfers


def transfer_bytes(transfers: Sequence[ExpertTransfer], expert_bytes_M: Sequence[int], ranks: int) -> IntArray:
    """Returns (R, R) int64: bytes from each rank (row) to each rank (column); those from the checkpoint are not counted."""
    bytes_RR = np.zeros((ranks, ranks), dtype=np.int64)
    for move in transfers:
        if move.source is not None:
            bytes_RR[move.source, move.to] += expert_bytes_M[move.model]
    return bytes_RR


class ReadableExperts(Protocol):
    """Interface of one rank's experts of a MoE layer, whose weights can be sent to other ranks."""

    def empty_weights(self) -> Weights:
        """Returns uninitialised memory for the weights of one expert, by parameter name."""

    def weights(self, expert: int) -> Weights:
        """Returns the weights of an expert that this rank holds, by parameter name."""


class WeightMessages:
    """Messages in which one rank sends and receives expert weights, one message per peer and direction.

    Weights to send are read from the layers slice by slice, so the layers must keep them until everything is sent. Received
    weights are kept in separate buffers, and reach the layers only through the caller, by `arrived`.

    Args:
        layers_ML: the MoE layers of each model.
        transfers: all ranks' transfers, in the same sequence on all ranks; transfers without a source are ignored.
        rank: this rank.
        ranks: number of ranks.

    Attributes:
        bytes: size of the largest message between any two ranks.
    """

    def __init__(
        self,
        layers_ML: Sequence[Sequence[ReadableExperts]],
        transfers: Sequence[ExpertTransfer],
        rank: int,
        ranks: int,
    ) -> None:
        self._likes_M = [dict(sorted(layers[0].empty_weights().items())) for layers in layers_ML]
        bytes_M = [sum(like.nbytes for like in likes.values()) for likes in self._likes_M]
        self._sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]  # to each rank: parts of its message
        self._incoming: list[list[ExpertTransfer]] = [[] for _ in range(ranks)]
        for move in transfers:
            if move.source is None:
                continue
            if move.source == rank:
                weights = layers_ML[move.model][move.layer].weights(move.expert)
                self._sent[move.to] += [weights[name].contiguous().view(-1).view(torch.uint8) for name in sorted(weights)]
            elif move.to == rank:
                self._incoming[move.source].append(move)
        bytes_RR = transfer_bytes(transfers, bytes_M, ranks)
        self.bytes = int(bytes_RR.max())
        self._device = next(iter(self._likes_M[0].values())).device
        self._received = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in bytes_RR[:, rank].tolist()]

    def cut(self, begin: int, end: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns bytes `begin` to `end` of each message, (bytes,) uint8: slices to send and buffers to receive, by rank."""
        sends = [_cut(parts, begin, end, self._device) for parts in self._sent]
        return sends, [whole[begin:end] for whole in self._received]

    def arrived(self) -> Iterator[tuple[ExpertTransfer, Weights]]:
        """Yields each received transfer with its weights, which are views of the message buffers."""
        for message, transfers in zip(self._received, self._incoming, strict=True):
            start = 0
            for move in transfers:
                weights = {}
                for name, like in self._likes_M[move.model].items():
                    weights[name] = message[start : start + like.nbytes].view(like.dtype).view(like.shape)
                    start += like.nbytes
                yield move, weights


def _cut(parts: Sequence[torch.Tensor], begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Bytes `begin` to `end` of parts (bytes,) uint8 that follow each other on a device; a view if they lie in one part."""
    slices, start = [], 0
    for part in parts:
        first, last = max(begin - start, 0), min(end - start, len(part))
        if first < last:
            slices.append(part[first:last])
        start += len(part)
    if not slices:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return slices[0] if len(slices) == 1 else torch.cat(slices)
