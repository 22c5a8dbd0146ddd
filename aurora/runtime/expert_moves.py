"""Experts' weights on their way between ranks: packed into one message for each peer, whole or in slices."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.planner.migration.recovery import ExpertTransfer
from aurora.types import Op

Weights = Mapping[str, torch.Tensor]  # an expert's, by parameter name


class ReadableExperts(Protocol):
    """One rank's experts of a MoE layer, which can be sent to other ranks."""

    def empty_weights(self) -> Weights:
        """Returns memory for the weights of an expert, by parameter name."""

    def weights(self, expert: int) -> Weights:
        """Returns the weights of an expert that this rank holds, by parameter name."""


class MovableExperts(ReadableExperts, Protocol):
    """One rank's experts of a MoE layer, which may change between two forward passes: of `aurora run`, or of an engine."""

    ops: tuple[Op, ...]  # the layer's operations; others may take their place

    def place(self, expert_map: ExpertMap, wanted: Sequence[int], arrived: Mapping[int, Weights]) -> None:
        """Serves by an expert map from the next forward pass on.

        Args:
            expert_map: of all ranks.
            wanted: the experts that this rank holds from now on, by slot.
            arrived: the weights of those that it did not hold.
        """


class WeightMessages:
    """The weights that one rank sends and receives when experts move.

    What is sent is read slice by slice from the layers, which hold it meanwhile. What arrives waits in memory of its own until
    `arrived` is called.

    Args:
        layers_ML: the MoE layers of each model.
        transfers: all ranks' transfers, in the same sequence on all ranks; those without a source are left out.
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
        bytes_RR = [[0] * ranks for _ in range(ranks)]
        for move in transfers:
            if move.source is None:
                continue
            bytes_RR[move.source][move.to] += bytes_M[move.model]
            if move.source == rank:
                weights = layers_ML[move.model][move.layer].weights(move.expert)
                self._sent[move.to] += [weights[name].contiguous().view(-1).view(torch.uint8) for name in sorted(weights)]
            elif move.to == rank:
                self._incoming[move.source].append(move)
        self.bytes = max(map(max, bytes_RR))
        self._device = next(iter(self._likes_M[0].values())).device
        self._received = [torch.empty(row[rank], dtype=torch.uint8, device=self._device) for row in bytes_RR]

    def cut(self, begin: int, end: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns bytes `begin` to `end` of each message, (bytes,) uint8: those to send to each rank, and those to fill."""
        sends = [_cut(parts, begin, end, self._device) for parts in self._sent]
        return sends, [whole[begin:end] for whole in self._received]

    def arrived(self) -> Iterator[tuple[ExpertTransfer, Weights]]:
        """Yields the weights of each received transfer, as views of the messages."""
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
    found, start = [], 0
    for part in parts:
        first, last = max(begin - start, 0), min(end - start, len(part))
        if first < last:
            found.append(part[first:last])
        start += len(part)
    if not found:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return found[0] if len(found) == 1 else torch.cat(found)
