"""Exchanges between real ranks against what a single process says should arrive."""

import time
from collections import defaultdict
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import RankFailed
from aurora.runtime.distributed import launcher
from aurora.runtime.distributed.launcher import RankInfo, launch
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.process_groups import default_process_group, device_of
from aurora.runtime.transports.shaped import CHUNK_S, LATE_S, Port, ShapedTransport
from aurora.types import Network
from tests.conftest import cluster


def payload(src, dst, size):
    """What src sends to dst, known to both."""
    return torch.arange(size, dtype=torch.float32) + 1000 * src + 100 * dst


def planned_peers(sizes, ranks, rank, sent):
    travelling = sizes * 4 * (1 - np.eye(ranks, dtype=int))
    order = ORDER["openshop"](travelling, Network.equal(ranks), rng=np.random.default_rng(ranks))
    me, other = (0, 1) if sent else (1, 0)
    return [p[other] for p in order.pairs_X2.tolist() if p[me] == rank and travelling[tuple(p)]]


METHODS = ("openshop", "birkhoff", "random", "all-at-once")


def exchange(rank_info, sizes, machines):
    """Exchanges in every order; gives the events of each, once everything arrived."""
    sizes = np.array(sizes)
    travelling = sizes * 4 * (1 - np.eye(rank_info.ranks, dtype=int))
    events = {method: [] for method in METHODS}
    with default_process_group(rank_info):
        transport = ShapedTransport(None, Port(machines, rank_info.rank)) if machines else GlooTransport()
        assert transport.gather(torch.tensor([rank_info.rank])).flatten().tolist() == list(range(rank_info.ranks))
        for method in 2 * METHODS:  # twice: nothing of the first may leak into the second
            order = ORDER[method](travelling, Network.equal(rank_info.ranks), rng=np.random.default_rng(rank_info.ranks))
            sends = [payload(rank_info.rank, dst, sizes[rank_info.rank, dst]) for dst in range(rank_info.ranks)]
            recvs = [torch.full((int(sizes[src, rank_info.rank]),), -1.0) for src in range(rank_info.ranks)]
            recvs[rank_info.rank].copy_(sends[rank_info.rank])
            transport.exchange(order, sends, recvs, lambda *event, method=method: events[method].append(event))
            expected = [payload(src, rank_info.rank, sizes[src, rank_info.rank]) for src in range(rank_info.ranks)]
            assert all(torch.equal(*pair) for pair in zip(recvs, expected, strict=True))
    return events


def drawn_sizes(ranks):
    sizes = np.random.default_rng(ranks).integers(0, 3000, (ranks, ranks))
    sizes[0, -1] = 0  # nothing at all for one pair
    return sizes


@cache
def exchanged(ranks, shaped):
    """The events of every order, by rank."""
    return launch(exchange, ranks, drawn_sizes(ranks).tolist(), cluster(*[10e6] * ranks, startup_s=0.001) if shaped else None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everything_arrives_in_every_order(ranks, shaped, method):
    sizes = drawn_sizes(ranks)
    events = [events[method] for events in exchanged(ranks, shaped)]
    for rank, seen in enumerate(events):
        if method == "openshop":  # the order is held: one partner at a time, each direction in the planned sequence
            for sent in (True, False):
                side = sorted((start, end, peer) for peer, s, _, start, end in seen if s == sent)
                assert all(a[1] <= b[0] for a, b in pairwise(side))
                planned = planned_peers(sizes, ranks, rank, sent)
                assert [peer for *_, peer in side] == planned * 2
        moved = defaultdict(int)
        for peer, sent, size, _, _ in seen:
            moved[peer, sent] += size
        expected = {(p, True): sizes[rank, p] * 4 for p in range(ranks) if p != rank and sizes[rank, p]}
        expected |= {(p, False): sizes[p, rank] * 4 for p in range(ranks) if p != rank and sizes[p, rank]}
        assert moved == {pair: 2 * size for pair, size in expected.items()}
        assert method == "birkhoff" or len(seen) == 2 * len(expected)
        assert all(start <= end for *_, start, end in seen)


def collective(rank_info, sizes):
    """torch's own collective on parts of one tensor, and on tensors that lie apart. Gives its events."""
    rank, events = rank_info.rank, []
    out_sizes, in_sizes = sizes[rank], [row[rank] for row in sizes]
    expected = [payload(src, rank, size) for src, size in enumerate(in_sizes)]
    with default_process_group(rank_info), torch.inference_mode():
        transport = GlooTransport()
        assert transport.has_collective
        for split in (True, False):
            sends = [payload(rank, dst, size) for dst, size in enumerate(out_sizes)]
            recvs = list(torch.full((sum(in_sizes),), -1.0).split_with_sizes(in_sizes))
            if split:
                sends = torch.cat(sends).split_with_sizes(out_sizes)
            else:
                recvs = [each.clone() for each in recvs]
            transport.exchange(None, sends, recvs, lambda *event: events.append(event))
            assert all(torch.equal(*pair) for pair in zip(recvs, expected, strict=True))
    return events


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everything_arrives_by_torchs_own_collective(ranks):
    sizes = drawn_sizes(ranks)
    for rank, seen in enumerate(launch(collective, ranks, sizes.tolist())):
        expected = [(p, True, sizes[rank, p] * 4) for p in range(ranks) if p != rank and sizes[rank, p]]
        expected += [(p, False, sizes[p, rank] * 4) for p in range(ranks) if p != rank and sizes[p, rank]]
        assert sorted(event[:3] for event in seen) == sorted(2 * expected)
        assert all(start <= end for *_, start, end in seen)


def shaped_seconds(rank_info, method):
    """Wall time of one exchange of 3 x 40 kB a rank through ports of 1 MB/s, from the first start to the last end."""
    sizes = 40_000 * (1 - np.eye(4, dtype=int))
    machines = cluster(*[1e6] * 4)
    order = ORDER[method](sizes, machines.network, rng=np.random.default_rng(0))
    events = []
    with default_process_group(rank_info):
        transport = ShapedTransport(None, Port(machines, rank_info.rank))
        buffers = [torch.zeros(int(size), dtype=torch.uint8) for size in sizes[rank_info.rank]]
        transport.gather(torch.zeros(1))
        transport.exchange(order, buffers, [b.clone() for b in buffers], lambda *event: events.append(event))
    return max(end for *_, end in events) - min(start for *_, start, _ in events)


@pytest.mark.parametrize("method", ["openshop", "all-at-once"])
def test_shaped_ports_are_never_faster_than_their_rate(method):
    """120 kB at 1 MB/s take 0.12 s; one chunk at either end may pass on credit. Slower is the machine's affair."""
    assert min(launch(shaped_seconds, 4, method)) >= 0.12 - 2 * CHUNK_S - LATE_S


def lose_a_peer(rank_info, method):
    import os

    with default_process_group(rank_info):
        transport = GlooTransport()
        transport.gather(torch.tensor([0]))
        if rank_info.rank == 1:
            os._exit(3)
        time.sleep(0.2)
        pair_GG = np.ones((2, 2), dtype=int) - np.eye(2, dtype=int)
        order = ORDER[method](pair_GG, Network.equal(2), rng=None) if method else None
        big = [torch.zeros(10), torch.zeros(10)]
        try:
            transport.exchange(order, big, [t.clone() for t in big], lambda *_: None)
        except RankFailed as error:
            print(error)
            raise


@pytest.mark.parametrize("method", ["openshop", None])
def test_a_lost_peer_ends_the_exchange(method):
    with pytest.raises(RankFailed, match=r"rank 1 of 2 died \(exit code 3\)"):
        launch(lose_a_peer, 2, method)


def miss_a_peer(rank_info, folder):
    """Rank 1 dies; rank 0 says whom it missed in a collective, before rank 2 can notice."""
    import os

    with default_process_group(rank_info):
        transport = GlooTransport()
        transport.gather(torch.tensor([0]))
        if rank_info.rank == 0:
            time.sleep(0.2)
            try:
                transport.gather(torch.tensor([0]))
            except RankFailed as error:
                (folder / "said").write_text(str(error))
        while not (folder / "said").exists():
            if rank_info.rank == 1:
                os._exit(3)
            time.sleep(0.01)


def test_who_is_missed_in_a_gather_of_many_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_S", 300.0)  # until rank 0 has said it
    with pytest.raises(RankFailed, match="rank 1 of 3 died"):
        launch(miss_a_peer, 3, tmp_path)
    assert (tmp_path / "said").read_text().startswith("rank 0 lost rank 1: ")


@pytest.mark.parametrize(("gpus", "device", "warned"), [(0, "cpu", False), (2, "cpu", True), (4, "cuda:0", False)])
def test_ranks_without_a_gpu_each_say_that_they_compute_on_the_cpu(monkeypatch, caplog, gpus, device, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_of(RankInfo(0, 4, "", 0, 1.0, 0, 4, launched=True)) == device
    assert [record.getMessage() for record in caplog.records] == (
        ["aurora: 4 ranks on this machine and 2 GPUs: they compute on the CPU"] if warned else []
    )


@pytest.mark.parametrize(("gpus", "devices"), [(0, ["cpu"] * 3), (1, ["cuda:0"] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"])])
def test_ranks_share_gpus_where_nccl_is_told_to(monkeypatch, gpus, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [device_of(RankInfo(rank, 3, "", 0, 1.0, rank, 3, launched=True)) for rank in range(3)] == devices
