"""Ordered transport: one rank's side of an exchange, without others."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime.transports.ordered import OrderedTransport
from aurora.types import Cluster, Gpu, Hierarchy, Network, Servers


class OneSide(OrderedTransport):
    """One rank of an exchange: what comes arrives once this rank has posted all that it sends, as where others wait for it."""

    def __init__(self, rank, ranks, messages):
        super().__init__(rank, ranks)
        self.left, self.posted = messages, threading.Event()
        self.counting = threading.Lock()

    def _send(self, message):
        with self.counting:
            self.left -= 1
        if self.left == 0:
            self.posted.set()
        return SimpleNamespace(wait=lambda: None)

    def _receive(self, message):
        def wait():
            if not self.posted.wait(10):
                raise RuntimeError("nothing came")

        return SimpleNamespace(wait=wait)


def test_as_many_tiers_as_servers_of_64_ranks_have_are_performed_side_by_side():
    """Three servers of 64: 32 tiers inside a server, each with two rows of a rank that follow one another, and the NICs'."""
    hierarchy = Hierarchy(np.repeat(np.arange(3), 64))
    order = hierarchical_order(np.ones((192, 192), dtype=np.int64), hierarchy, Network.equal(192), rng=np.random.default_rng(0))
    inside_or_gateway = (hierarchy.server_G == 0) | np.isin(np.arange(192), hierarchy.gateway_GN[0])
    sizes = np.where(inside_or_gateway, 8192, 0)
    sizes[0] = 0
    transport = OneSide(0, 192, int((sizes > 0).sum()))
    sends, recvs = ([torch.zeros(size, dtype=torch.uint8) for size in sizes.tolist()] for _ in range(2))
    transport.exchange(order, sends, recvs, lambda *_: None)
    assert transport.left == 0


class Requests(OrderedTransport):
    """A rank that counts how many of its requests are open at once; what it waits for is there at once."""

    def _send(self, message):
        return SimpleNamespace(wait=lambda: None)

    def _receive(self, message):
        def wait():
            self.open -= 1

        self.open += 1
        self.most = max(self.most, self.open)
        return SimpleNamespace(wait=wait)


@pytest.mark.full
def test_a_fast_link_inside_a_server_does_not_make_a_rank_request_more_from_other_servers():
    gpus = tuple(Gpu(f"g{rank}", "x", rank // 2, 1e9, 1e9, 1) for rank in range(4))
    cluster = Cluster("c", gpus, servers=Servers.of([0, 0, 1, 1], 1e8))
    transport = Requests(0, 4, cluster)
    order = ORDER["openshop"](np.ones((4, 4)) - np.eye(4), cluster.network, rng=np.random.default_rng(0))

    def most_requests(sizes):
        transport.open = transport.most = 0
        sends, recvs = ([torch.zeros(size, dtype=torch.uint8) for size in each] for each in ([0] * 4, sizes))
        transport.exchange(order, sends, recvs, lambda *_: None)
        return transport.most

    assert most_requests([0, 4 << 20, 0, 0]) == 1  # nothing is known of the link yet
    assert most_requests([0, 4 << 20, 0, 0]) > 1
    assert most_requests([0, 0, 1 << 19, 1 << 19]) == 1
    assert most_requests([0, 4 << 20, 1 << 19, 1 << 19]) > 1
