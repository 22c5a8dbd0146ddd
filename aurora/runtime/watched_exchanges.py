"""Watched exchanges: one model's exchanges on one rank, in the orders that an OrderWatch chooses by what earlier ones took."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from aurora.moe.transport import Transport
from aurora.runtime.order_watch import OrderWatch
from aurora.types import Order
from aurora.types.arrays import IntArray


class Marks(Protocol):
    """The part of a Timer that is needed here; a PhaseRecorder has it too."""

    def mark(self) -> Any:
        """Marks the present end of the work; see `Timer.mark`."""

    def seconds(self, mark: Any) -> float:
        """Returns when the work reached the mark; see `Timer.seconds`."""


class WatchedExchanges:
    """Times exchanges between gathers of row counts, and tells an OrderWatch.

    All ranks make the same calls: a gather, then at most a dispatch and its combine.

    Args:
        watch: chooses the orders.
        marks: mark the work of the thread that exchanges.
    """

    def __init__(self, watch: OrderWatch, marks: Marks) -> None:
        self._watch, self._marks = watch, marks
        self._gathered: Any = None  # mark after the last gather
        self._exchanged: list[tuple[Any, Any, int, int]] = []  # since then: start and end marks, bytes sent and received

    def gather(self, transport: Transport, counts: torch.Tensor) -> torch.Tensor:
        """Gathers counts, (R, *counts.shape) on the CPU, and what the watch asks of all ranks. A collective call."""
        counts = counts.cpu()  # from here on no mark has to be waited for
        for start, end, out_bytes, in_bytes in self._exchanged:
            start_s, end_s, gathered_s = map(self._marks.seconds, (start, end, self._gathered))
            self._watch.took(start_s - gathered_s, end_s - gathered_s, out_bytes, in_bytes)
        self._exchanged.clear()
        rows = transport.gather(torch.cat([counts.flatten(), self._watch.report()]))
        self._gathered = self._marks.mark()
        self._watch.gathered(rows[:, counts.numel() :].numpy())
        return rows[:, : counts.numel()].reshape(-1, *counts.shape).contiguous()

    def over_servers(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns whether the next dispatch and combine go over servers, where they may, or are flat.

        Args:
            flat_RR: (R, R) rows from each rank (row) to each rank (column) if they are flat.
            row_bytes: size of a row in bytes.
        """
        return self._watch.over_servers(float(flat_RR.sum() - flat_RR.trace()) * row_bytes / len(flat_RR))

    @contextmanager
    def exchanging(self, planned: Order, phase: str, rank: int, bytes_RR: IntArray) -> Iterator[Order | None]:
        """Context manager of one all-to-all; it gives the order, None for torch's own collective.

        Args:
            planned: the plan's order.
            phase: "dispatch" or "combine".
            rank: this rank.
            bytes_RR: (R, R) bytes from each rank (row) to each rank (column), of all exchanges of the all-to-all together.
        """
        order = self._watch.order(planned, phase, bytes_RR.sum() / len(bytes_RR))
        start = self._marks.mark()
        yield order
        out_bytes, in_bytes = (int(each.sum() - each[rank]) for each in (bytes_RR[rank], bytes_RR[:, rank]))
        self._exchanged.append((start, self._marks.mark(), out_bytes, in_bytes))
