"""aurora.all_to_all between real processes, against torch's own collective."""

import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import aurora
import aurora.runtime.all_to_all as runtime
from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import BadInput
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


def in_the_background(rank_info):
    """Three at once and a differentiable one; then one under way while torch's collective and another call go on."""
    found = []
    for order in ("openshop", None):
        outputs = torch.empty(3, rank_info.ranks)
        rows = torch.arange(3.0 * rank_info.ranks).reshape(3, rank_info.ranks) + 100 * rank_info.rank
        handles = [aurora.all_to_all(outputs[k], rows[k], async_op=True, order=order) for k in range(3)]
        last, leaf = torch.empty(rank_info.ranks), torch.ones(rank_info.ranks, requires_grad=True)
        handle = aurora.all_to_all(last, leaf * (rank_info.rank + 1), async_op=True, order=order)
        assert all(each.wait() and each.is_completed() for each in [*handles, handle])
        last.sum().backward()
        assert leaf.grad.tolist() == [rank_info.rank + 1] * rank_info.ranks
        found.append(outputs.tolist())
        big = torch.full((rank_info.ranks, 10**5), float(rank_info.rank))
        into, beside, after = torch.empty_like(big), torch.empty_like(big), torch.empty_like(big)
        handle = aurora.all_to_all(into, big, async_op=True, order="openshop")
        dist.all_to_all_single(beside, big)
        aurora.all_to_all(after, big, order="openshop")
        assert handle.wait()
        assert torch.equal(into, beside)
        assert torch.equal(after, beside)
    return found


def refuse(rank_info):
    said = []
    for sizes, width in (([1, 1], 3), ([2 - rank_info.rank, 1 + rank_info.rank], 2)):
        with pytest.raises(BadInput) as caught:
            aurora.all_to_all(torch.empty(3, 2), torch.empty(sum(sizes), width), [2, 1], sizes, order="openshop")
        said.append(str(caught.value))
    with pytest.raises(BadInput, match=r"expected an order named openshop, .* found 'fastest'"):
        aurora.all_to_all(torch.empty(2), torch.empty(2), order="fastest")
    with pytest.raises(BadInput, match="expected 2 input sizes that sum to its 2 rows"):
        aurora.all_to_all(torch.empty(2), torch.empty(2), [1, 1], [2])
    with pytest.raises(BadInput, match="do not split evenly over 2 ranks"):
        aurora.all_to_all(torch.empty(2), torch.empty(3))
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
        return in_the_background(rank_info), refuse(rank_info)


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


def test_exchanges_in_the_background_keep_their_order(pair):
    for rank, (found, _) in enumerate(pair):
        assert found == [[[2.0 * k + rank, 2.0 * k + rank + 100] for k in range(3)]] * 2


class Stream:
    """A CUDA stream: work runs when `run` comes to it, and waits for other streams' events."""

    current = None

    def __init__(self, _device=None):
        self.queue = []

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before

    def wait_stream(self, other):
        self.queue.append(other.record_event().query)

    def record_event(self):
        self.queue.append(event := Event())
        return event

    def run(self):
        while self.queue and self.queue[0]():
            del self.queue[0]


class Event:
    """An event: reached when its stream comes to it."""

    reached = False

    def __call__(self):
        self.reached = True
        return True

    def query(self):
        return self.reached

    def wait(self):
        Stream.current.queue.append(self.query)


class Queueing:
    """A transport that queues exchanges on the current stream, as NcclTransport does."""

    rank, ranks = 0, 1

    def __init__(self, *_):
        self.arrived = False

    def exchange(self, _order, _sends, _recvs, _observe):
        Stream.current.queue.append(lambda: self.arrived)


def test_a_handle_of_nccl_is_done_when_the_rows_have_arrived(monkeypatch):
    """The call's stream goes on; the stream that is current in `wait` goes on when the rows have arrived."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: "cpu:gloo,cuda:nccl")
    for name, value in (("current_stream", lambda _device: Stream.current),
                        ("Stream", Stream), ("stream", lambda stream: stream)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(runtime, "NcclCalls", lambda *_: None)
    monkeypatch.setattr(runtime, "NcclTransport", Queueing)
    calling, waiting, seen = Stream(), Stream(), []
    with calling:
        state = runtime._GroupState(None, torch.device("cuda", 0))
        calling.queue.append(lambda: seen.append("made") or True)
        handle = state.ordered(None, [torch.ones(1)], [torch.ones(1)], True)
        calling.queue.append(lambda: seen.append("beside") or True)
    with waiting:
        assert handle.wait()
        waiting.queue.append(lambda: seen.append("arrived") or True)
    assert not handle.is_completed()
    state._stream.run()
    assert state._stream.queue[0]() is False  # not before the rows are made
    for arrived in (False, True):
        state.transport.arrived = arrived
        for stream in (calling, state._stream, waiting):
            stream.run()
        assert handle.is_completed() == arrived
        assert seen == (["made", "beside", "arrived"] if arrived else ["made", "beside"])
    with calling:
        assert state.ordered(None, [torch.ones(1)], [torch.ones(1)], False) is None
    assert len(calling.queue) == 1  # it waits for the rows itself


@pytest.mark.parametrize(
    ("config", "device", "found"),
    [("cpu:gloo,cuda:nccl", "cuda", None), ("cpu:gloo,cuda:gloo", "cuda", "gloo"), ("cuda:nccl", "cpu", "nothing")],
)
def test_the_tensors_choose_the_back_end(monkeypatch, config, device, found):
    """torch makes a group of both back ends by default, and calls it neither."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: config)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(runtime, "NcclCalls", lambda _group, device: device)
    monkeypatch.setattr(runtime, "NcclTransport", lambda device, _control: types.SimpleNamespace(ranks=1, device=device))
    if found is None:
        assert runtime._GroupState(None, torch.device("cuda", 3)).transport.device == "cuda:3"
    else:
        with pytest.raises(BadInput, match=f"found tensors on {device} and a group with {found} for them"):
            runtime._GroupState(None, torch.device(device))


def test_sizes_that_do_not_fit_are_refused_by_every_rank(pair):
    for _, said in pair:
        assert "expected output rows like the input's" in said[0]
        assert said[1] == "all_to_all: rank 0 sends 1 rows to rank 1, which expects 2"
