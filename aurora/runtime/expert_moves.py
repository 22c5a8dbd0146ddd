"""Experts' weights on their way between ranks: packed into one message for each peer, in pieces that a step may wait for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.planner.control.feedback import LENGTHENED
from aurora.types import Op, Placement
from aurora.types.arrays import IntArray
from aurora.types.placement import HeldML

Weights = Mapping[str, torch.Tensor]  # an expert's, by parameter name
MARGIN = 0.7  # of the time that a piece of work may take that it is meant to take
GROWTH = 2  # times the last piece of work that the next one is at most


@dataclass(frozen=True)
class ExpertTransfer:
    """One expert's weights that rank `to` must fetch from rank `source`, or from the checkpoint if that is None."""

    model: int
    layer: int
    expert: int
    source: int | None
    to: int


def expert_transfers(
    placements_M: Sequence[Placement], held_R: Sequence[HeldML], expert_bytes_M: Sequence[int]
) -> list[ExpertTransfer]:
    """Returns the transfers that bring each rank the weights it lacks of the experts that each model's placement gives it.

    If several ranks have the weights, the one that has sent the fewest bytes so far sends them. held_R: as of `program_among`.
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
    """Returns (R, R) int64: bytes of weights from each rank to each, without those from the checkpoint."""
    bytes_RR = np.zeros((ranks, ranks), dtype=np.int64)
    for move in transfers:
        if move.source is not None:
            bytes_RR[move.source, move.to] += expert_bytes_M[move.model]
    return bytes_RR


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


class WorkPieces:
    """Work between steps, in pieces as large as a step may wait for, by what pieces before took.

    Args:
        least: size of the first piece, and of the smallest.

    Example:
        >>> pieces = WorkPieces(least=1)
        >>> pieces.next(100, step_s=1.0)
        1
        >>> pieces.took(0.01)
        >>> pieces.next(99, step_s=1.0)
        2
    """

    def __init__(self, least: int) -> None:
        self._least, self._size, self._per_s = least, 0, 0.0
        self._piece, self._last = 0, False  # the last one, and whether it was what was left

    def next(self, left: int, step_s: float, other_s: float = 0.0) -> int:
        """Returns the size of the next piece of what is left.

        Args:
            left: the size of all that is left.
            step_s: what a step takes.
            other_s: what other work takes between the same two steps. If there is any, a piece may be too much: its size is 0.
        """
        if other_s and not self.fits(step_s, other_s):
            return 0
        size = max(min(int(self._per_s * _time_left(step_s, other_s)), GROWTH * self._size), self._least)
        self._last = left < size
        if not self._last:
            self._size = size
        self._piece = min(size, left)
        return self._piece

    def fits(self, step_s: float, other_s: float) -> bool:
        """Returns whether the smallest piece fits beside other work; arguments as of `next`."""
        return self.seconds(self._least) <= _time_left(step_s, other_s)

    def seconds(self, size: int) -> float:
        """Returns the seconds that a piece of a size is expected to take, no less than the smallest; at first infinity."""
        return max(size, self._least) / self._per_s if self._per_s else inf

    def took(self, seconds: float) -> None:
        """Takes into account what a piece took. What was left for a last one says little: the more of it is start-up."""
        if not self._last or not self._per_s:
            self._per_s = self._piece / seconds


def _time_left(step_s: float, other_s: float) -> float:
    """Seconds that a piece of work may take beside other work."""
    return max(step_s * LENGTHENED * MARGIN - other_s, 0.0)
