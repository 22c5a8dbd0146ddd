"""Tensors between ranks in a planned order. A transport belongs to one process group and is used by one thread at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from aurora.errors import BadInput, RankFailed
from aurora.types import Order

Observe = Callable[[int, bool, int, float, float], None]  # peer, whether sent, bytes, start, end by time.perf_counter


Rows = list[tuple[int, int, torch.Tensor]]  # row of the order, peer, what travels


def parts(order: Order, rank: int, tensors: Sequence[torch.Tensor], sending: bool) -> Rows:
    """Each row that `rank` sends or receives, in order, with the slice of the peer's tensor along its first axis; none is
    empty. Raises BadInput for an order that leaves something out."""
    ends = order.ends[0 if sending else 1].get(rank, [])
    left = [tensor.shape[0] for tensor in tensors]
    found = [(row, peer, tensors[peer]) for row, peer in ends]
    if order.share_X2 is not None:
        lengths_X = np.array([left[peer] for _, peer in ends], dtype=np.int64)
        cuts_X2 = order.cuts(lengths_X, np.array([row for row, _ in ends], dtype=np.int64)).tolist()
        found = [(row, peer, tensor[begin:end]) for (row, peer, tensor), (begin, end) in zip(found, cuts_X2, strict=True)]
    for _, peer, part in found:
        left[peer] -= part.shape[0]
    left[rank] = 0
    if any(left):
        peer = next(peer for peer, missing in enumerate(left) if missing)
        way, whole = f"{rank} -> {peer}" if sending else f"{peer} -> {rank}", tensors[peer].shape[0]
        raise BadInput(f"order {order.method}: carries {whole - left[peer]} of the {whole} rows of {way}")
    return [part for part in found if part[2].numel()]


class Transport(Protocol):
    """What the backend needs of a network."""

    rank: int
    ranks: int

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """(ranks, *row.shape): every rank's row, on the CPU. Returns when all ranks have given theirs."""

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Send sends[r] to and fill recvs[r] from every rank r but this one, in `order`; empty tensors do not travel.

        Both ends must agree on sizes and order. Returns when this rank's transfers are done; raises RankFailed when a
        peer is lost. `observe` is told of every transfer: it starts when this end is ready for it.
        """


@contextmanager
def lost_peer(rank: int, peer: int | None) -> Iterator[None]:
    """Turns a backend's RuntimeError into a RankFailed that names who was lost to whom; None: any of the others."""
    try:
        yield
    except RuntimeError as error:
        raise lost(rank, peer, error) from None


def lost(rank: int, peer: int | None, error: RuntimeError) -> RankFailed:
    """What `lost_peer` raises."""
    reason = str(error).strip().splitlines()[0]
    whom = "the others" if peer is None else f"rank {peer}"
    return RankFailed(f"rank {rank} lost {whom}: {reason}")
