"""gloo: TCP between processes, on any machine."""

from typing import Any

import torch
import torch.distributed as dist

from aurora.ranks.ordered import Message, OrderedTransport, Work
from aurora.ranks.transport import lost_peer
from aurora.types import Cluster


class GlooTransport(OrderedTransport):
    """A message waits at its sender until the receiver's notice has come, over the same connection.

    Its size is its tag: what both ends do not agree on never meets, and ends by the time-out.
    """

    def __init__(self, group: Any = None, cluster: Cluster | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), cluster)
        self._group = group

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        # One collective in which everybody sends everybody the same: a sixth of posting every pair, at 2 and 4 ranks.
        told = row.expand(self.ranks, *row.shape).contiguous()
        rows = torch.empty_like(told)
        with lost_peer(self.rank, 1 - self.rank if self.ranks == 2 else None):
            dist.all_to_all_single(rows, told, group=self._group)
        return rows

    def _send(self, message: Message) -> Work:
        return _posted(dist.isend(message.tensor, group=self._group, group_dst=message.peer, tag=_tag(message)))

    def _receive(self, message: Message) -> Work:
        return _posted(dist.irecv(message.tensor, group=self._group, group_src=message.peer, tag=_tag(message)))


def _tag(message: Message) -> int:
    return message.tensor.numel() % 2**31


def _posted(work: Work | None) -> Work:
    assert work is not None  # None is for ranks outside the group
    return work
