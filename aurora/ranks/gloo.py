"""gloo: TCP between processes, on any machine."""

from typing import Any

import torch.distributed as dist

from aurora.ranks.ordered import Message, OrderedTransport, Work
from aurora.types import Cluster


class GlooTransport(OrderedTransport):
    """A message waits at its sender until the receiver's notice has come, over the same connection.

    Its size is its tag: what both ends do not agree on never meets, and ends by the time-out.
    """

    def __init__(self, group: Any = None, cluster: Cluster | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), cluster)
        self._group = group

    def _send(self, message: Message) -> Work:
        return _posted(dist.isend(message.tensor, group=self._group, group_dst=message.peer, tag=_tag(message)))

    def _receive(self, message: Message) -> Work:
        return _posted(dist.irecv(message.tensor, group=self._group, group_src=message.peer, tag=_tag(message)))


def _tag(message: Message) -> int:
    return message.tensor.numel() % 2**31


def _posted(work: Work | None) -> Work:
    assert work is not None  # None is for ranks outside the group
    return work
