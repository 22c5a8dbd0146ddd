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
    me, other = (0, 1) if sending else (1, 0)
    rows = np.flatnonzero(order.pairs_X2[:, me] == rank)
    peers_X = order.pairs_X2[:, other]
    lengths_X = np.array([len(tensors[peer]) for peer in peers_X.tolist()], dtype=np.int64)
    cuts_X2 = order.cuts(lengths_X)[rows]
    carried_R = np.bincount(peers_X[rows], weights=cuts_X2[:, 1] - cuts_X2[:, 0], minlength=len(tensors))
    for peer, tensor in enumerate(tensors):
        if peer != rank and carried_R[peer] != len(tensor):
            way = f"{rank} -> {peer}" if sending else f"{peer} -> {rank}"
            raise BadInput(f"order {order.method}: carries {carried_R[peer]:.0f} of the {len(tensor)} rows of {way}")
    found = zip(rows.tolist(), peers_X[rows].tolist(), cuts_X2.tolist(), strict=True)
    slices = [(row, peer, tensors[peer][begin:end]) for row, peer, (begin, end) in found]
    return [(row, peer, tensor) for row, peer, tensor in slices if tensor.numel()]


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
        reason = str(error).strip().splitlines()[0]
        whom = "the others" if peer is None else f"rank {peer}"
        raise RankFailed(f"rank {rank} lost {whom}: {reason}") from None
