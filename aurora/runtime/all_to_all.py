"""Ordered all-to-all between the ranks of a torch process group: differentiable, and asynchronous with `async_op`."""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order
from aurora.errors import BadInput
from aurora.moe.transport import StreamWork, ThreadWork, Transport, lost_others
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclCalls, NcclTransport
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
    """Exchanges rows like torch.distributed.all_to_all_single, but sends them in a planned order. A collective call.

    Args:
        output: buffer for the received rows, sorted by sending rank.
        input: the rows to send, sorted by receiving rank; any dtype.
        output_split_sizes: number of rows to receive from each rank; None: equal parts of `output`.
        input_split_sizes: number of rows to send to each rank; None: equal parts of `input`.
        group: a torch process group; None: the default group.
        async_op: True: return immediately, with a handle that has wait().
        order: an Order, such as one of a plan; or the name of an ordering method, which computes the order from the sizes of
            this call; None or "all-at-once": torch's own collective. All ranks must pass the same order.

    Returns:
        A handle if async_op, else None. If `input` requires grad, the backward pass exchanges gradients in the reversed order.

    Raises:
        BadInput: if sizes, dtypes or devices do not match, or aurora has no transport for the group's back end and the device.
        RankFailed: if a peer is lost.

    Source:
        Aurora (arXiv:2410.17043) Thm 4.2.

    Example:
        >>> import aurora, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> output = torch.empty(4)
        >>> aurora.all_to_all(output, torch.arange(4.0), order="openshop")
        >>> output
        tensor([0., 1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    if dist.get_rank(group) < 0:
        return None  # as torch does for ranks that are not in the group
    if output.device != input.device:
        raise BadInput(f"all_to_all: expected an output on the input's device, {input.device}, found {output.device}")
    state = _group_state(group, input.device)
    in_sizes = _sizes("input", input, input_split_sizes, state.ranks)
    out_sizes = _sizes("output", output, output_split_sizes, state.ranks)
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise BadInput(
            f"all_to_all: expected output rows like the input's, {input.dtype} of shape {tuple(input.shape[1:])}, "
            f"found {output.dtype} of shape {tuple(output.shape[1:])}"
        )
    exchange = _Exchange(state, out_sizes, in_sizes, state.check_order(order), async_op)
    if torch.is_grad_enabled() and input.requires_grad:
        _Differentiable.apply(output, input, exchange)  # type: ignore[no-untyped-call]
    else:
        exchange.start(output, input)
    return exchange.handle


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


class _GroupState:
    """Shared state of one process group's calls on one kind of device: transport, and background exchanges, one at a time."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self._device = group, str(device)
        backends = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
        backend, on_gpu = backends.get(device.type), device.type == "cuda"
        if backend != ("nccl" if on_gpu else "gloo"):
            raise BadInput(
                f"all_to_all: expected a group with gloo for tensors on cpu and NCCL for those on cuda, found tensors on "
                f"{device} and a group with {backend or 'nothing'} for them"
            )
        self.transport: Transport = NcclTransport(NcclCalls(group, self._device), None) if on_gpu else GlooTransport(group)
        self.ranks = self.transport.ranks
        self._network = Network.equal(self.ranks)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="aurora-all-to-all")
        # Of background exchanges.
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._running: Future[None] | None = None
        self._valid_order: Order | None = None  # checked last

    def check_order(self, order: Order | str | None) -> Order | str | None:
        if isinstance(order, Order) and order is not self._valid_order:
            check_order(order, self.ranks)
            self._valid_order = order
        if isinstance(order, str) and order not in ORDER:
            raise BadInput(f"all_to_all: expected an order named {', '.join(ORDER)}, found {order!r}")
        return order

    def unordered(
        self, into: torch.Tensor, rows: torch.Tensor, out_sizes: list[int] | None, in_sizes: list[int] | None, async_op: bool
    ) -> Any:
        """torch's own collective. Returns its handle."""
        with lost_others(self.transport.rank):
            return dist.all_to_all_single(into, rows, out_sizes, in_sizes, group=self.group, async_op=async_op)

    def make_order(self, name: str, out_sizes: list[int], in_sizes: list[int]) -> Order:
        """Makes the order `name` from all ranks' sizes. Raises BadInput if a sender and its receiver disagree on a size."""
        mine = torch.tensor([in_sizes, out_sizes], device=self._device).expand(self.ranks, 2, self.ranks).contiguous()
        gathered = torch.empty_like(mine)
        self.unordered(gathered, mine, None, None, False)  # a gather: every rank sends all others the same
        sizes_R2R = gathered.cpu().numpy()
        rows_RR, expected_RR = sizes_R2R[:, 0].copy(), sizes_R2R[:, 1].T
        if (rows_RR != expected_RR).any():
            src, dst = np.argwhere(rows_RR != expected_RR)[0]
            raise BadInput(
                f"all_to_all: rank {src} sends {rows_RR[src, dst]} rows to rank {dst}, which expects {expected_RR[src, dst]}"
            )
        np.fill_diagonal(rows_RR, 0)
        return ORDER[name](rows_RR, self._network, rng=np.random.default_rng(0))

    def ordered(
        self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], async_op: bool
    ) -> ThreadWork | StreamWork | None:
        """Exchanges after all earlier calls; in the background in a thread (gloo) or on a stream (NCCL)."""
        job = partial(self.transport.exchange, order, sends, recvs, lambda *_event: None)
        if async_op and self._stream is None:
            self._running = self._background.submit(job)
            return ThreadWork(self._running)
        if async_op:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                job()
            return StreamWork(self._stream.record_event(), *sends, *recvs)
        if self._running is not None:
            wait([self._running])
            self._running = None
        job()
        return None


class _Exchange:
    """One call; `handle` is the caller's, with async_op."""

    def __init__(
        self, state: _GroupState, out_sizes: list[int], in_sizes: list[int], order: Order | str | None, async_op: bool = False
    ) -> None:
        self._state, self._out_sizes, self._in_sizes, self._order, self._async = state, out_sizes, in_sizes, order, async_op
        self._used_order: Order | None = None
        self.handle: Any = None

    def start(self, output: torch.Tensor, input: torch.Tensor) -> None:
        into, rows = _as_bytes(output), _as_bytes(input)
        state, order = self._state, self._order
        if order is None or order == "all-at-once":
            self.handle = state.unordered(into, rows, self._out_sizes, self._in_sizes, self._async)
            return
        self._used_order = order if isinstance(order, Order) else state.make_order(order, self._out_sizes, self._in_sizes)
        sends, recvs = rows.split_with_sizes(self._in_sizes), into.split_with_sizes(self._out_sizes)
        recvs[state.transport.rank].copy_(sends[state.transport.rank])
        self.handle = state.ordered(self._used_order, sends, recvs, self._async)

    def backward(self) -> "_Exchange":
        """The exchange of the gradients."""
        order = self._used_order.reversed if self._used_order else None
        return _Exchange(self._state, self._in_sizes, self._out_sizes, order)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, input: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        exchange.start(output, input)
        ctx.mark_dirty(output)
        ctx.exchange, ctx.input_shape = exchange, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back = gradients[0].new_empty(ctx.input_shape)
        exchange = ctx.exchange.backward()
        return None, _Differentiable.apply(back, gradients[0].contiguous(), exchange), None  # type: ignore[no-untyped-call]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, bytes) uint8 view: what travels needs no arithmetic, so every dtype does."""
    return tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)


_GROUP_STATES: dict[Any, _GroupState] = {}  # by group and kind of device


def _group_state(group: Any, device: torch.device) -> _GroupState:
    """The state of a group's calls on a kind of device, made on its first use."""
    key = group if group is not None else dist.group.WORLD, device.type
    if key not in _GROUP_STATES:
        for destroyed in [old for old in _GROUP_STATES if old[0] not in dist.distributed_c10d._world.pg_map]:
            del _GROUP_STATES[destroyed]
        _GROUP_STATES[key] = _GroupState(group, device)
    return _GROUP_STATES[key]
