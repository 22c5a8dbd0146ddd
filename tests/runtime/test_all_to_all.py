"""aurora.all_to_all between real processes, against torch's own collective."""

import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import aurora
import aurora.runtime.all_to_all as runtime
from aurora.errors import BadInput
from aurora.planner.alltoall.registry import ORDER
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.process_groups import default_process_group
from aurora.types import Network

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool,
          torch.complex64)  # fmt: skip


def drawn_sizes(ranks, seed):
    """(R, R) rows; rank 1 sends nothing at all."""
    sizes_RR = torch.randint(0, 6, (ranks, ranks), generator=torch.Generator().manual_seed(seed))
    sizes_RR[1] = 0
    return sizes_RR


def orders(ranks):
    ones = Network.equal(ranks)
    planned = ORDER["birkhoff"](np.arange(ranks**2).reshape(ranks, ranks) * (1 - np.eye(ranks, dtype=int)), ones,
                                rng=np.random.default_rng(0))  # fmt: skip
    return (None, "all-at-once", "openshop", "spread-out", planned)


def rows_like(dtype, *shape):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def agree_on_values(rank_info):
    """Every dtype, shape and order: bit for bit what torch moves."""
    with default_process_group(rank_info):
        for number, order in enumerate(orders(rank_info.ranks)):
            sizes_RR = drawn_sizes(rank_info.ranks, number)
            outgoing, incoming = sizes_RR[rank_info.rank].tolist(), sizes_RR[:, rank_info.rank].tolist()
            for dtype in DTYPES:
                for shape in [(), (5,), (2, 3)] if dtype == torch.bfloat16 else [(3,)]:
                    rows = rows_like(dtype, sum(outgoing), *shape)
                    ours = rows_like(dtype, sum(incoming), *shape)
                    theirs = torch.empty_like(ours).reshape(len(ours), -1 if ours.numel() else 0).view(torch.uint8)
                    flat = rows.reshape(len(rows), -1 if rows.numel() else 0).view(torch.uint8)
                    dist.all_to_all_single(theirs, flat, incoming, outgoing)
                    assert aurora.all_to_all(ours, rows, incoming, outgoing, order=order) is None
                    assert torch.equal(ours.reshape(len(ours), -1 if ours.numel() else 0).view(torch.uint8), theirs)
            even, ours, theirs = torch.randn(2 * rank_info.ranks, 3), *torch.empty(2, 2 * rank_info.ranks, 3)
            dist.all_to_all_single(theirs, even)
            aurora.all_to_all(ours, even, order=order)
            assert torch.equal(ours, theirs)
    return True


def agree_on_gradients(rank_info):
    """First and second derivatives of a loss that weighs every received number differently; gives the orders taken."""
    taken, unrecorded = {}, GlooTransport.exchange
    with default_process_group(rank_info):
        for number, order in enumerate(orders(rank_info.ranks)):

            def recorded(self, order, *rest, number=number):
                taken.setdefault(number, []).append(order.pairs_X2.tolist())
                return unrecorded(self, order, *rest)

            GlooTransport.exchange = recorded
            sizes_RR = drawn_sizes(rank_info.ranks, number)
            outgoing, incoming = sizes_RR[rank_info.rank].tolist(), sizes_RR[:, rank_info.rank].tolist()
            rows = torch.randn(sum(outgoing), 3, dtype=torch.float64, requires_grad=True)
            weights = torch.randn(sum(incoming), 3, dtype=torch.float64)

            def ours(x, order=order, incoming=incoming, outgoing=outgoing):
                output = torch.empty(sum(incoming), 3, dtype=x.dtype)
                aurora.all_to_all(output, x, incoming, outgoing, order=order)
                return output

            def theirs(x, incoming=incoming, outgoing=outgoing):
                return all_to_all_single_autograd(x, incoming, outgoing, dist.group.WORLD)

            found = []
            for exchange in (ours, theirs):
                received = exchange(rows * 1)
                (first,) = torch.autograd.grad((received**3 * weights).sum(), rows, create_graph=exchange is ours)
                found.append(first)
            assert torch.equal(found[0], found[1])
            (second,) = torch.autograd.grad(found[0].sum(), rows)
            back = torch.empty_like(rows)
            dist.all_to_all_single(back, 6 * received.detach() * weights, outgoing, incoming)
            torch.testing.assert_close(second, back)
    return taken


def refuse(rank_info):
    said = []
    for sizes, width in (([1, 1], 3), ([2 - rank_info.rank, 1 + rank_info.rank], 2)):
        with pytest.raises(BadInput) as caught:
            aurora.all_to_all(torch.empty(3, 2), torch.empty(sum(sizes), width), [2, 1], sizes, order="openshop")
        said.append(str(caught.value))
    with pytest.raises(BadInput, match=r"expected an order named openshop, .* found 'fastest'"):
        aurora.all_to_all(torch.empty(2), torch.empty(2), order="fastest")
    with pytest.raises(BadInput, match="expected a contiguous input"):
        aurora.all_to_all(torch.empty(2, 2), torch.empty(2, 2).T, order="openshop")
    with pytest.raises(
        BadInput, match=r"expected a group with gloo .* found tensors on meta and a group with nothing for them"
    ):
        aurora.all_to_all(torch.empty(2, device="meta"), torch.empty(2, device="meta"))
    with pytest.raises(BadInput, match="expected an output on the input's device, cpu, found meta"):
        aurora.all_to_all(torch.empty(2, device="meta"), torch.empty(2))
    outside = dist.new_group([0])
    if rank_info.rank == 1:
        assert aurora.all_to_all(torch.empty(1), torch.empty(1), group=outside) is None
    return said


def in_pairs(rank_info):
    with default_process_group(rank_info):
        return refuse(rank_info)


@pytest.fixture(scope="module")
def pair():
    return launch(in_pairs, 2)


def test_every_dtype_and_order_moves_what_torch_moves():
    assert all(launch(agree_on_values, 3))


def test_gradients_are_torchs_and_go_back_in_the_reversed_order():
    """Every rank plans the named order from the sizes alone; torch's own collective takes none."""
    for taken in launch(agree_on_gradients, 3):
        planned = {4: orders(3)[4]}
        for number in (2, 3):
            sizes_RR = drawn_sizes(3, number).numpy().copy()
            np.fill_diagonal(sizes_RR, 0)
            planned[number] = ORDER[orders(3)[number]](sizes_RR, Network.equal(3), rng=np.random.default_rng(0))
        for number, order in planned.items():
            there, back = order.pairs_X2.tolist(), order.reversed.pairs_X2.tolist()
            assert taken[number] == [there, back, there, back]
        assert set(taken) == set(planned)


@pytest.mark.parametrize(
    ("config", "device", "found"),
    [("cpu:gloo,cuda:nccl", "cuda", None), ("cpu:gloo,cuda:gloo", "cuda", "gloo"), ("cuda:nccl", "cpu", "nothing")],
)
def test_the_tensors_choose_the_back_end(monkeypatch, config, device, found):
    """torch makes a group of both back ends by default, and calls it neither."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: config)
    monkeypatch.setattr(runtime, "NcclCalls", lambda _group, device: device)
    monkeypatch.setattr(runtime, "NcclTransport", lambda device, _control: types.SimpleNamespace(ranks=1, device=device))
    if found is None:
        assert runtime._GroupState(None, torch.device("cuda", 3)).transport.device == "cuda:3"
    else:
        with pytest.raises(BadInput, match=f"found tensors on {device} and a group with {found} for them"):
            runtime._GroupState(None, torch.device(device))


def test_sizes_that_do_not_fit_are_refused_by_every_rank(pair):
    for said in pair:
        assert "expected output rows like the input's" in said[0]
        assert said[1] == "all_to_all: rank 0 sends 1 rows to rank 1, which expects 2"
