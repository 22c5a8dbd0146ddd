"""`aurora.all_to_all`: torch's all_to_all_single with an order."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import BadInput
from aurora.plan.check import check_order
from aurora.plan.order import ORDER
from aurora.ranks.gloo import GlooTransport
from aurora.ranks.nccl import NcclTransport
from aurora.ranks.transport import Transport
from aurora.types import Order


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    order: Order | None = None,
) -> None:
    """Like torch.distributed.all_to_all_single: the i-th slice of `input` (rows) goes to rank i, `output` collects by rank.

    order: an aurora Order, the same on all ranks; None posts everything at once. Without sizes the rows are split evenly.
    Source: Aurora Thm 4.2. Raises BadInput for sizes that do not fit, RankFailed when a peer is lost.
    """
    transport = _transport(group)
    ranks = transport.ranks
    if order is not None:
        check_order(order, ranks)
    if order is None:
        order = ORDER["all-at-once"](
            np.ones((ranks, ranks), dtype=np.int64), np.ones(ranks), np.ones(ranks), np.random.default_rng(0)
        )
    sends = _slices("input", input, input_split_sizes, ranks)
    recvs = _slices("output", output, output_split_sizes, ranks)
    recvs[transport.rank].copy_(sends[transport.rank])
    transport.exchange(order, sends, recvs, lambda *_event: None)


def _slices(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int) -> list[torch.Tensor]:
    if not tensor.is_contiguous():
        raise BadInput(f"all_to_all: expected a contiguous {name}")
    if sizes is None:
        if len(tensor) % ranks:
            raise BadInput(f"all_to_all: {name} has {len(tensor)} rows, which do not split evenly over {ranks} ranks")
        sizes = [len(tensor) // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != len(tensor) or min(sizes) < 0:
        raise BadInput(
            f"all_to_all: expected {ranks} {name} sizes that sum to its {len(tensor)} rows, "
            f"found {len(sizes)} that sum to {sum(sizes)}"
        )
    return list(torch.split(tensor, list(sizes)))


_TRANSPORTS: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()


def _transport(group: Any) -> Transport:
    """One transport a group, made on its first use."""
    key = group if group is not None else dist.group.WORLD
    if key not in _TRANSPORTS:
        on_gpu = dist.get_backend(group) == "nccl"
        made = NcclTransport(group, None, f"cuda:{torch.cuda.current_device()}") if on_gpu else GlooTransport(group)
        _TRANSPORTS[key] = made
    return _TRANSPORTS[key]
