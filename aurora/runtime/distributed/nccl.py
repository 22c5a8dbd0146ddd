"""NCCL transport: one GPU per rank."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.transport import Observe, lost_peer, row_slices
from aurora.types import Order


class NcclTransport:
    """A transport that posts each exchange as one grouped call of NCCL sends and receives, on the current stream.

    Within such a call NCCL runs transfers side by side: the order decides which are posted first, not which wait for others.

    Args:
        group: an NCCL process group.
        control: a gloo group for `gather`, so that several models' NCCL calls come in the port arbiter's sequence on every
            rank; None: `gather` cannot be called.
        device: this rank's CUDA device.
    """

    def __init__(self, group: Any, control: Any, device: str) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group, self._device = group, device
        self._control = GlooTransport(control) if control is not None else None

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor over gloo; see `Transport.gather`."""
        assert self._control is not None
        return self._control.gather(row.cpu())

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`."""
        # A pair's parts go in one message here: within a group no rank waits between them.
        ends = [(peer, True, tensor) for _, peer, tensor in row_slices(order.unsplit, self.rank, sends, sending=True)]
        ends += [(peer, False, tensor) for _, peer, tensor in row_slices(order.unsplit, self.rank, recvs, sending=False)]
        posts = [
            dist.P2POp(dist.isend if sent else dist.irecv, tensor, group=self._group, group_peer=peer)
            for peer, sent, tensor in ends
        ]
        if not posts:
            return
        began = time.perf_counter()
        with lost_peer(self.rank, None):
            for work in dist.batch_isend_irecv(posts):
                work.wait()
            torch.cuda.current_stream(self._device).synchronize()
        for peer, sent, tensor in ends:
            observe(peer, sent, tensor.numel() * tensor.element_size(), began, time.perf_counter())
