"""The transport by put and signal on an emulation of their rules: every byte arrives, senders keep their order, slow ranks lose nothing."""

import types

import numpy as np
import pytest
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import RankFailed
from aurora.runtime.transports.put import PutTransport
from aurora.types import Network
from tests.runtime.transports.put_emulator import EmulatedPutCalls, PutEmulator

MOST, A_ROUND = 1000, 400


class InAGroup(PutTransport):
    """A mutant that puts in one grouped call."""

    def _put(self, *given):
        with self._calls.group():
            super()._put(*given)


class OneHalf(PutTransport):
    """A mutant that uses one half of the buffers."""

    def _put(self, half_of, *given):
        super()._put(dict.fromkeys(half_of, 0), *given)

    def _take(self, half_of, *given):
        super()._take(dict.fromkeys(half_of, 0), *given)


class OneWay(PutTransport):
    """A mutant that signals only where it has bytes, so that nothing acknowledges them."""

    def _put(self, half_of, outs, observe):
        super()._put({peer: half for peer, half in half_of.items() if len(outs[peer])}, outs, observe)

    def _take(self, half_of, intos, observe):
        super()._take({peer: half for peer, half in half_of.items() if len(intos[peer])}, intos, observe)


def payload(src, dst, size, number):
    return torch.from_numpy(np.random.default_rng((src, dst, number)).integers(0, 256, size, dtype=np.uint8))


def exchanges(seed, kind=PutTransport, count=4):
    """Drawn exchanges of drawn orders, queued one after the other. Returns the senders' faults of order and the wrong tensors."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 7))
    emulator = PutEmulator(ranks, A_ROUND, rng)
    transports = [kind(EmulatedPutCalls(emulator, rank), None) for rank in range(ranks)]
    arrived, wanted_R, told = [], [[] for _ in range(ranks)], []
    for number in range(count):
        sizes_GG = rng.integers(0, MOST + 1, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.8)
        np.fill_diagonal(sizes_GG, 0)
        order = ORDER[rng.choice(["openshop", "random"])](sizes_GG, Network.equal(ranks), rng=rng)
        for rank in rng.permutation(ranks).tolist():
            sends = [payload(rank, dst, size, number) for dst, size in enumerate(sizes_GG[rank].tolist())]
            recvs = [torch.zeros(size, dtype=torch.uint8) for size in sizes_GG[:, rank].tolist()]
            transports[rank].exchange(order, sends, recvs, lambda *event, rank=rank: told.append((rank, *event[:3])))
            arrived += [(recvs[src], payload(src, rank, len(recvs[src]), number)) for src in range(ranks)]
            longer_G = np.maximum(sizes_GG[rank], sizes_GG[:, rank])
            turns = dict.fromkeys([*order.rows_of(rank, True)[1].tolist(), *range(ranks)])
            wanted_R[rank] += [dst for first in range(0, MOST, A_ROUND) for dst in turns if longer_G[dst] > first]
            emulator.run(steps=int(rng.integers(0, 40)))
    for transport in transports:
        transport.wait()
    for sent in (True, False):
        if kind is PutTransport:
            assert sum(size for _, _, each, size in told if each is sent) == sum(len(into) for into, _ in arrived)
    faults = sum([dst for src, dst, _ in emulator.puts if src == rank] != wanted_R[rank] for rank in range(ranks))
    return faults, sum(not torch.equal(*pair) for pair in arrived)


def test_every_byte_arrives_and_senders_keep_their_order():
    assert [exchanges(seed) for seed in range(60)] == [(0, 0)] * 60


def test_a_group_that_keeps_no_order_is_caught():
    assert sum(exchanges(seed, InAGroup)[0] for seed in range(10)) > 0


@pytest.mark.parametrize("mutant", [OneHalf, OneWay])
def test_buffers_that_are_used_too_early_are_caught(mutant):
    """A rank that is late reads what the next exchange has brought."""
    assert sum(exchanges(seed, mutant)[1] for seed in range(30)) > 0


@pytest.mark.parametrize(("heartbeats", "lost"), [(None, 1), (types.SimpleNamespace(silent=[0]), 0)])
def test_a_peer_that_never_puts_is_named(heartbeats, lost):
    """If a rank is known to hang, it is named instead, since the peer may wait for it too."""
    emulator = PutEmulator(3, A_ROUND, np.random.default_rng(0))
    order = ORDER["openshop"](1 - np.eye(3, dtype=np.int64), Network.equal(3), rng=np.random.default_rng(0))
    transports = [PutTransport(EmulatedPutCalls(emulator, rank), None, 0.05, heartbeats) for rank in range(3)]
    for rank in (0, 2):
        transports[rank].exchange(order, [torch.ones(5)] * 3, [torch.zeros(5) for _ in range(3)], lambda *_: None)
    with pytest.raises(RankFailed, match=rf"rank 2 lost rank {lost}: nothing within 0\.05 s"):
        transports[2].wait()
