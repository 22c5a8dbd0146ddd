"""Counts the experts that tokens chose in a forward pass, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aurora.types.arrays import IntArray


class ChoiceCounts:
    """Counts of one forward pass, which may still be on their way from the device.

    Args:
        counts_LE: (L, E) int64, in memory of the host.
        copied: the event after which the counts are there; None if they are.
    """

    def __init__(self, counts_LE: torch.Tensor, copied: Any = None) -> None:
        self._counts_LE, self._copied = counts_LE, copied

    @property
    def ready(self) -> bool:
        """Whether the counts can be read without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> IntArray:
        """Returns (L, E) int64: how often each expert was chosen in each MoE layer. Waits for the counts."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._counts_LE.numpy()


class ChoiceCounter:
    """Counts choices in a buffer that forward passes write, those that are replayed from CUDA graphs included.

    Args:
        chosen_NLK: (N, L, K) integers, the experts that each row's router chose in each decoder layer of the last pass. It
            stays in its place, so that captured passes write into it.
        decoder_layers: for each MoE layer of this process, by index, the number of its decoder layer.
        layers: number of MoE layers of the whole model.
        experts: number of experts of a layer.
    """

    def __init__(self, chosen_NLK: torch.Tensor, decoder_layers: Mapping[int, int], layers: int, experts: int) -> None:
        self._chosen_NLK, self._shape = chosen_NLK, (layers, experts)
        device = chosen_NLK.device
        self._decoder_layer_L = torch.tensor(list(decoder_layers.values()), device=device)
        self._first_L1 = (
            torch.tensor(list(decoder_layers), device=device)[:, None] * experts
        )  # of each layer in the flat counts

    def counted(self, rows: slice) -> torch.Tensor:
        """Returns (L, E) int64 on the device: how often each expert was chosen in some rows of the last pass.

        Called after the pass, on its stream; starts work and returns.

        Args:
            rows: the rows that are counted; others are padding, or another rank counts them.
        """
        layers, experts = self._shape
        chosen_NLK = self._chosen_NLK[rows].index_select(1, self._decoder_layer_L).long()
        flat = torch.where((chosen_NLK >= 0) & (chosen_NLK < experts), chosen_NLK + self._first_L1, layers * experts).flatten()
        counts = torch.zeros(layers * experts + 1, dtype=torch.int64, device=flat.device)  # the last for no expert of the model
        return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1].view(layers, experts)

    def count(self, rows: slice) -> ChoiceCounts:
        """Counts the choices of some rows of the last pass, as `counted` does, in memory of the host."""
        counts_LE = self.counted(rows)
        if not counts_LE.is_cuda:
            return ChoiceCounts(counts_LE)
        on_host = torch.empty(self._shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(counts_LE, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return ChoiceCounts(on_host, copied)
