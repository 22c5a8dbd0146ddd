"""Transport: the interface of back ends that carry tensors between ranks in a planned order, and helpers that they share."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from aurora.errors import BadInput, RankFailed, first_line
from aurora.types import Order

# Performs one exchange: a contiguous tensor of bytes to send to each rank, and one to fill with what each rank sends.
ExchangeStep = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
Observe = Callable[[int, bool, int, float, float], None]  # peer, whether sent, bytes, start and end by time.perf_counter


def row_slices(order: Order, rank: int, tensors: Sequence[torch.Tensor], sending: bool) -> list[tuple[int, int, torch.Tensor]]:
    """Returns the transfers of an order that `rank` sends, or those that it receives, in the sequence of the order.

    Each is (row of the order, peer, slice of the peer's tensor along its first axis).

    Args:
        order: the order; each of its rows is a pair of ranks and a share of the pair's tensor.
        rank: the rank.
        tensors: for each peer, the tensor that is sent to it or received from it.
        sending: True for the rows that `rank` sends, False for the rows that it receives.

    Raises:
        BadInput: if the order leaves out a part of a tensor.
    """
    rows_X, peers_X = order.rows_of(rank, sending)
    rows_left = [tensor.shape[0] for tensor in tensors]
    if order.share_X2 is None:
        transfers = [(row, peer, tensors[peer]) for row, peer in zip(rows_X.tolist(), peers_X.tolist(), strict=True)]
    else:
        cuts_X2 = order.cuts(np.array(rows_left, dtype=np.int64)[peers_X], rows_X)
        some_X = cuts_X2[:, 0] < cuts_X2[:, 1]
        cut = zip(rows_X[some_X].tolist(), peers_X[some_X].tolist(), cuts_X2[some_X].tolist(), strict=True)
        transfers = [  # a slice takes longer than all else
            (row, peer, tensors[peer] if end - begin == rows_left[peer] else tensors[peer][begin:end])
            for row, peer, (begin, end) in cut
        ]
    for _, peer, part in transfers:
        rows_left[peer] -= part.shape[0]
    rows_left[rank] = 0
    if any(rows_left):
        peer = next(peer for peer, missing in enumerate(rows_left) if missing)
        way, whole = f"{rank} -> {peer}" if sending else f"{peer} -> {rank}", tensors[peer].shape[0]
        raise BadInput(f"order {order.method}: carries {whole - rows_left[peer]} of the {whole} rows of {way}")
    return [transfer for transfer in transfers if transfer[2].numel()]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of contiguous tensors as one tensor: a view if they are adjacent in memory, else a copy."""
    flats = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    if not flats:
        return torch.empty(0, dtype=torch.uint8)
    storage = flats[0].untyped_storage().data_ptr()
    for before, after in pairwise(flats):
        if before.data_ptr() + before.nbytes != after.data_ptr() or after.untyped_storage().data_ptr() != storage:
            return torch.cat(flats)
    return flats[0].as_strided((sum(flat.nbytes for flat in flats),), (1,))


class ThreadWork:
    """Handle of work that runs in another thread; has the methods of torch's Work."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> bool:
        """Waits until the work is done and returns True. Raises the error that the work raised."""
        self._future.result()
        return True

    def is_completed(self) -> bool:
        """Returns whether the work is done."""
        return self._future.done()


class StreamWork:
    """Handle of work that is queued on a CUDA stream, like the Work of torch's NCCL collectives.

    Args:
        event: CUDA event that is recorded after the work.
        tensors: tensors that the work reads and writes; they are kept alive until the handle has waited.
    """

    def __init__(self, event: Any, *tensors: torch.Tensor) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> bool:
        """Makes the current CUDA stream, not this thread, wait for the work, and returns True."""
        self._event.wait()
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Returns whether the work is done."""
        return bool(self._event.query())


class Transport(Protocol):
    """Interface of a back end that sends tensors between the `ranks` ranks of a process group; this process is `rank`.

    One thread uses a transport at a time, and all ranks make the same calls in the same sequence. A lost peer ends a call by
    RankFailed, at the latest after the group's time-out.
    """

    rank: int
    ranks: int
    has_collective: bool  # whether `exchange` can use the back end's own all-to-all
    in_stages: bool  # whether orders run in stages (`Order.stage_X`)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Allgathers a small tensor `row` of the same shape and dtype on all ranks. Returns (ranks, *row.shape) on the CPU."""

    def exchange(
        self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe
    ) -> None:
        """Performs one all-to-all in `order`.

        Returns when this rank's transfers are done; on a GPU when they are queued on the current stream, see `wait`.

        Both ends of a pair must give tensors of the same size, and all ranks the same order. Empty tensors are not sent. The
        back end's own all-to-all also copies a rank's tensor to itself; with an order, that copy is left to the caller.

        Args:
            order: the sequence of transfers; a transport keeps to it as well as its network allows. None: the back end's own
                all-to-all, only if `has_collective`.
            sends: for each rank, the contiguous tensor to send to it.
            recvs: for each rank, the contiguous tensor to receive from it into.
            observe: called for each transfer of this rank, see `Observe`. The calls may come from any thread, and come at the
                latest in `wait` or the next `gather`. A transfer counts as started when this end is ready for it.

        Raises:
            RankFailed: if a peer is lost.
            BadInput: if the order leaves out a part of a tensor, or this transport cannot keep to it.
        """

    def wait(self) -> None:
        """Waits until this rank's transfers are done. Raises RankFailed if a peer is lost."""


@contextmanager
def lost_others(rank: int) -> Iterator[None]:
    """Context manager that converts a back end's RuntimeError, which names no peer, to a RankFailed."""
    try:
        yield
    except RuntimeError as error:
        raise peer_lost(rank, (), error) from None


def peer_lost(rank: int, peers: Sequence[int], error: RuntimeError) -> RankFailed:
    """Returns a RankFailed for a back end's error; it names `peers`, of which at least one is lost (empty: unknown)."""
    whom = " or ".join(f"rank {peer}" for peer in peers) or "the others"
    return RankFailed(f"rank {rank} lost {whom}: {first_line(error)}")
