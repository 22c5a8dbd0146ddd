"""`aurora.all_to_all`: torch's all_to_all_single with an order."""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.errors import BadInput, RankFailed
from aurora.planner.alltoall.open_shop import DenseShop, openshop
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.check.plans import check_order
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.nccl import NcclTransport
from aurora.runtime.distributed.transport import Transport
from aurora.types import Network, Order


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    order: Order | str | None = None,
) -> Any:
    """Like torch.distributed.all_to_all_single: the i-th slice of `input` (rows) goes to rank i, `output` collects by rank.

    order: an Order of a plan; or a name in ORDER, then every rank plans the same one from this call's sizes; None or
    "all-at-once" is torch's own collective. All ranks pass the same. Without sizes the rows are split evenly. Any dtype.
    Where input requires grad, `output` is differentiable: its gradient goes back the same way, in the reversed order.
    async_op: gives a handle with wait(), else None; a named order is planned before it returns. Source: Aurora Thm 4.2.
    Raises BadInput for sizes that do not fit, RankFailed when a peer is lost.
    """
    if dist.get_rank(group) < 0:
        return None  # as torch does for ranks that are not in the group
    post = _post(group)
    in_sizes = _sizes("input", input, input_split_sizes, post.ranks)
    out_sizes = _sizes("output", output, output_split_sizes, post.ranks)
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise BadInput(
            f"all_to_all: expected output rows like the input's, {input.dtype} of shape {tuple(input.shape[1:])}, "
            f"found {output.dtype} of shape {tuple(output.shape[1:])}"
        )
    exchange = _Exchange(post, out_sizes, in_sizes, post.checked(order), async_op)
    if torch.is_grad_enabled() and input.requires_grad:
        _Differentiable.apply(output, input, exchange)  # type: ignore[no-untyped-call]
    else:
        exchange.begin(output, input)
    return exchange.work


def _sizes(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int) -> list[int]:
    if tensor.ndim == 0 or not tensor.is_contiguous():
        raise BadInput(f"all_to_all: expected a contiguous {name} of at least one axis")
    if not sizes:
        if len(tensor) % ranks:
            raise BadInput(f"all_to_all: {name} has {len(tensor)} rows, which do not split evenly over {ranks} ranks")
        return [len(tensor) // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != len(tensor) or min(sizes) < 0:
        raise BadInput(
            f"all_to_all: expected {ranks} {name} sizes that sum to its {len(tensor)} rows, "
            f"found {len(sizes)} that sum to {sum(sizes)}"
        )
    return list(sizes)


class _Handle:
    """An exchange in the background."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class _Post:
    """What calls on one group share: its transport, buffers to plan in, and the exchanges under way, one after the other."""

    def __init__(self, group: Any) -> None:
        self.group = group
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        self.transport: Transport = NcclTransport(group, None, self._device) if on_gpu else GlooTransport(group)
        self.ranks = self.transport.ranks
        self._makers = {**ORDER, "openshop": partial(openshop, shop=DenseShop(self.ranks))}
        self._network = Network.equal(self.ranks)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="aurora-all-to-all")
        self._under_way: Future[None] | None = None
        self._checked: Order | None = None

    def checked(self, order: Order | str | None) -> Order | str | None:
        if isinstance(order, Order) and order is not self._checked:
            check_order(order, self.ranks)
            self._checked = order
        if isinstance(order, str) and order not in ORDER:
            raise BadInput(f"all_to_all: expected an order named {', '.join(ORDER)}, found {order!r}")
        return order

    def at_once(
        self, into: torch.Tensor, rows: torch.Tensor, out_sizes: list[int] | None, in_sizes: list[int] | None, async_op: bool
    ) -> Any:
        """torch's own collective, and its handle."""
        try:
            return dist.all_to_all_single(into, rows, out_sizes, in_sizes, group=self.group, async_op=async_op)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankFailed(f"rank {self.transport.rank} lost the others: {reason}") from None

    def planned(self, name: str, out_sizes: list[int], in_sizes: list[int]) -> Order:
        """The order by that name for the rows that all ranks say they send; BadInput unless they agree with who receives."""
        mine = torch.tensor([in_sizes, out_sizes], device=self._device).expand(self.ranks, 2, self.ranks).contiguous()
        found = torch.empty_like(mine)
        self.at_once(found, mine, None, None, False)  # a gather: every rank sends everybody the same
        said = found.cpu().numpy()
        rows_RR, awaited_RR = said[:, 0].copy(), said[:, 1].T
        if (rows_RR != awaited_RR).any():
            src, dst = np.argwhere(rows_RR != awaited_RR)[0]
            raise BadInput(
                f"all_to_all: rank {src} sends {rows_RR[src, dst]} rows to rank {dst}, which expects {awaited_RR[src, dst]}"
            )
        np.fill_diagonal(rows_RR, 0)
        return self._makers[name](rows_RR, self._network, rng=np.random.default_rng(0))

    def in_order(
        self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], async_op: bool
    ) -> _Handle | None:
        """Exchange after what is under way: in the background over gloo, at once over NCCL, whose calls must not cross."""
        job = partial(self.transport.exchange, order, sends, recvs, lambda *_event: None)
        if async_op and self._device == "cpu":
            self._under_way = self._background.submit(job)
            return _Handle(self._under_way)
        if self._under_way is not None:
            wait([self._under_way])
            self._under_way = None
        job()
        done: Future[None] = Future()
        done.set_result(None)
        return _Handle(done) if async_op else None


class _Exchange:
    """One call: what goes where in which order. work: the caller's handle when async_op."""

    def __init__(
        self, post: _Post, out_sizes: list[int], in_sizes: list[int], order: Order | str | None, async_op: bool = False
    ) -> None:
        self._post, self._out_sizes, self._in_sizes, self._order, self._async = post, out_sizes, in_sizes, order, async_op
        self._taken: Order | None = None
        self.work: Any = None

    def begin(self, output: torch.Tensor, input: torch.Tensor) -> None:
        into, rows = _as_bytes(output), _as_bytes(input)
        post, order = self._post, self._order
        if order is None or order == "all-at-once":
            self.work = post.at_once(into, rows, self._out_sizes, self._in_sizes, self._async)
            return
        self._taken = order if isinstance(order, Order) else post.planned(order, self._out_sizes, self._in_sizes)
        sends, recvs = rows.split_with_sizes(self._in_sizes), into.split_with_sizes(self._out_sizes)
        recvs[post.transport.rank].copy_(sends[post.transport.rank])
        self.work = post.in_order(self._taken, sends, recvs, self._async)

    def backwards(self) -> "_Exchange":
        """The exchange of the gradients."""
        return _Exchange(self._post, self._in_sizes, self._out_sizes, self._taken.reversed if self._taken else None)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, input: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        exchange.begin(output, input)
        ctx.mark_dirty(output)
        ctx.exchange, ctx.input_shape = exchange, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back = gradients[0].new_empty(ctx.input_shape)
        exchange = ctx.exchange.backwards()
        return None, _Differentiable.apply(back, gradients[0].contiguous(), exchange), None  # type: ignore[no-untyped-call]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, bytes) uint8 view: what travels needs no arithmetic, so every dtype does."""
    return tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)


_POSTS: dict[Any, _Post] = {}


def _post(group: Any) -> _Post:
    """One a group, made on its first use."""
    key = group if group is not None else dist.group.WORLD
    if key not in _POSTS:
        for gone in [old for old in _POSTS if old not in dist.distributed_c10d._world.pg_map]:
            del _POSTS[gone]  # destroyed since
        _POSTS[key] = _Post(group)
    return _POSTS[key]
