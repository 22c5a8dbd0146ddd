"""Ranks as threads: thousands of random orders, and what the transport refuses."""

import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.phase_recorder import HostTimer
from aurora.runtime.transports import ordered
from aurora.runtime.transports.nccl import NcclTransport
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Hierarchy, Network, Order
from tests.conftest import cluster
from tests.runtime.transports.drawn_orders import drawn_order

SCHEDULES = {2: 2000, 3: 1200, 4: 600, 5: 300, 6: 150, 7: 100, 8: 100}  # by ranks
FAST_Bps = 1e15


def cases(ranks, count):
    rng = np.random.default_rng(ranks)
    for number in range(count):
        sizes = rng.integers(0, 12, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.6)
        np.fill_diagonal(sizes, 0)
        if number % 20:
            yield sizes, drawn_order(rng, ranks)
        else:
            yield sizes, ORDER["paced"](sizes, Network.equal(ranks, FAST_Bps), rng=rng)


def perform(rank_info, memory, given):
    """Every case one after the other, without meeting in between; gives how many arrived as they should."""
    transport = MemoryTransport(memory, rank_info.rank, cluster(*[FAST_Bps] * rank_info.ranks))
    fine = 0
    for number, (sizes, order) in enumerate(given):
        sends = [torch.full((int(size),), (number + rank_info.rank) % 251, dtype=torch.uint8) for size in sizes[rank_info.rank]]
        recvs = [torch.full((int(size),), 255, dtype=torch.uint8) for size in sizes[:, rank_info.rank]]
        transport.exchange(order, sends, recvs, lambda *_: None)
        fine += all(bool((row == (number + src) % 251).all()) for src, row in enumerate(recvs) if src != rank_info.rank)
    return fine


@pytest.mark.full
def test_no_order_deadlocks(monkeypatch):
    monkeypatch.setattr(ordered, "PIECE_BYTES", 3)
    for ranks, count in SCHEDULES.items():
        given = list(cases(ranks, count))
        assert launch_threads(perform, ranks, Memory(ranks, 20.0), given) == [count] * ranks


class Watched(MemoryTransport):
    """Notes what it posts, and how much of the same direction and tier is then under way."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.posted = {True: [], False: []}
        self.seen = {True: [], False: []}

    def noted(self, sending, message, work):
        self.posted[sending].append((message, work))
        in_tier = [(each.size, work) for each, work in self.posted[sending] if each.tier == message.tier]
        under_way = [size for size, work in in_tier if not work._moved.is_set()]
        self.seen[sending].append((message.tier, len(under_way), sum(under_way)))
        return work

    def seen_in_sequence(self, sending, opened):
        """What was seen in the tiers with more rows than may be open; those of other tiers go at once."""
        tiers = {message.tier for message, _ in self.posted[sending]}
        rows = Counter(tier for tier, _ in {(message.tier, message.row) for message, _ in self.posted[sending]})
        return [seen for tier, *seen in self.seen[sending] if rows[tier] > opened or len(tiers) == 1]

    def _send(self, message):
        return self.noted(True, message, super()._send(message))

    def _receive(self, message):
        return self.noted(False, message, super()._receive(message))


class SlowThreads:
    """A pool whose threads get the processor late."""

    def __init__(self, pool):
        self._pool = pool

    def submit(self, function, *arguments):
        def later():
            time.sleep(0.05)
            return function(*arguments)

        return self._pool.submit(later)


class Sequence(MemoryTransport):
    """Notes whether it has posted a message to send while its first request was not posted."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._pool = SlowThreads(self._pool)
        self.requested = set()
        self.unrequested = []

    def _send(self, message):
        if message.tier not in self.requested:
            self.unrequested.append(message)
        return super()._send(message)

    def _receive(self, message):
        self.requested.add(message.tier)
        return super()._receive(message)


def unrequested(rank_info, memory, order, machines):
    transport = Sequence(memory, rank_info.rank, machines)
    sends, recvs = ([torch.zeros(100, dtype=torch.uint8) for _ in range(rank_info.ranks)] for _ in range(2))
    transport.exchange(order, sends, recvs, lambda *_: None)
    return len(transport.unrequested)


@pytest.mark.parametrize("method", ["openshop", "all-at-once", "paced"])
def test_a_rank_requests_before_it_sends_bulk_behind_which_its_requests_would_wait(method, monkeypatch):
    monkeypatch.setattr(ordered, "SMALL_BYTES", 0)
    order = ORDER[method](
        np.full((4, 4), 100) * (1 - np.eye(4, dtype=np.int64)), Network.equal(4), rng=np.random.default_rng(0)
    )
    tier_X = None if method == "paced" else (order.pairs_X2 // 2 != order.pairs_X2[:, ::-1] // 2).any(axis=1).astype(np.int64)
    assert launch_threads(unrequested, 4, Memory(4, 20.0), replace(order, tier_X=tier_X), cluster(*[FAST_Bps] * 4)) == [0] * 4


@pytest.mark.parametrize(("servers", "rail_pieces"), [(2, 1), (3, 4)])
def test_rows_of_a_tier_without_a_sequence_are_sent_whole(servers, rail_pieces, monkeypatch):
    """Two servers of two ranks: each rank has one row between them and one inside. With a third the former take turns."""
    monkeypatch.setattr(ordered, "PIECE_BYTES", 3)
    hierarchy, ranks = Hierarchy(np.arange(2 * servers) // 2, 1), 2 * servers
    sizes_RR = np.full((ranks, ranks), 12) * (1 - np.eye(ranks, dtype=np.int64))
    sizes_RR[(hierarchy.server_G[:, None] != hierarchy.server_G) & (np.arange(ranks)[:, None] % 2 != np.arange(ranks) % 2)] = 0
    order = hierarchical_order(sizes_RR, hierarchy, Network.equal(ranks), rng=np.random.default_rng(0))
    for transport in launch_threads(watch, ranks, Memory(ranks, 20.0), order, sizes_RR):
        pieces = Counter((message.peer, message.tier) for message, _ in transport.posted[True])
        inside = hierarchy.server_G[transport.rank]
        assert {number for (peer, _), number in pieces.items() if hierarchy.server_G[peer] != inside} == {rail_pieces}
        assert {number for (peer, _), number in pieces.items() if hierarchy.server_G[peer] == inside} == {1}


def watch(rank_info, memory, order, sizes_RR, cluster=None):
    transport = Watched(memory, rank_info.rank, cluster)
    sends = [torch.full((int(size),), rank_info.rank, dtype=torch.uint8) for size in sizes_RR[rank_info.rank]]
    recvs = [torch.full((int(size),), 255, dtype=torch.uint8) for size in sizes_RR[:, rank_info.rank]]
    transport.exchange(order, sends, recvs, lambda *_: None)
    assert all(bool((row == src).all()) for src, row in enumerate(recvs) if src != rank_info.rank)
    return transport


@pytest.mark.parametrize("piece", [3, 50])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.integers(2, 5), small=st.sampled_from([0, 40, 10**6]), seed=st.integers(0, 10**6))
def test_no_more_is_under_way_than_the_order_allows(monkeypatch, piece, ranks, small, seed):
    """One partner at a time: one piece leaves, some are asked for; whoever gets little asks for all of it first."""
    for name, value in (("PIECE_BYTES", piece), ("SMALL_BYTES", small), ("STEADY_BYTES", 1), ("AHEAD_BYTES", 8 * piece)):
        monkeypatch.setattr(ordered, name, value)
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 60, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.7)
    np.fill_diagonal(sizes, 0)
    order = drawn_order(rng, ranks)
    for transport in launch_threads(watch, ranks, Memory(ranks, 10.0), order, sizes):
        rank, opened = transport.rank, (order.recvs_open, order.sends_open)
        assert sum(m.size for m, _ in transport.posted[True]) == sizes[rank].sum()
        assert sum(m.size for m, _ in transport.posted[False]) == sizes[:, rank].sum()
        assert all(messages <= order.sends_open for messages, _ in transport.seen_in_sequence(True, order.sends_open))
        if opened == (1, 1):
            whole_X = np.zeros(len(order.pairs_X2), bool) if order.tier_X is None else ~order.in_sequence_X
            assert all(m.size <= piece or whole_X[m.row] for m, _ in transport.posted[False])
            assert all(messages == 1 or size <= 8 * piece for messages, size in transport.seen_in_sequence(False, 1))
        else:
            assert all(messages <= order.recvs_open for messages, _ in transport.seen_in_sequence(False, order.recvs_open))


class HeldUp(MemoryTransport):
    """Sends nothing of tier 0 until something of tier 1 has left."""

    def __init__(self, memory, rank, left):
        super().__init__(memory, rank)
        self.left = left

    def _send(self, message):
        if message.tier == 0:
            assert self.left.wait(60.0), "tier 1 waits for tier 0"
        work = super()._send(message)
        if message.tier == 1:
            self.left.set()
        return work


def send_held_up(rank_info, memory, order, left):
    sends, recvs = ([torch.full((4,), each, dtype=torch.uint8) for _ in range(4)] for each in (rank_info.rank, 255))
    HeldUp(memory, rank_info.rank, left).exchange(order, sends, recvs, lambda *_: None)
    return [int(each[0]) for each in recvs if int(each[0]) != 255]


@pytest.mark.parametrize("small", [0, 10**6])
def test_a_tier_does_not_wait_for_another(monkeypatch, small):
    """Of rank 0, the last row is of tier 1, and leaves although the two before it have not."""
    monkeypatch.setattr(ordered, "SMALL_BYTES", small)
    pairs_X2 = np.argwhere(~np.eye(4, dtype=np.bool_))
    order = Order("two tiers", pairs_X2, tier_X=(pairs_X2 == (0, 3)).all(axis=1).astype(np.int64))
    arrived = launch_threads(send_held_up, 4, Memory(4, 20.0), order, threading.Event())
    assert arrived == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_slow_ports_get_short_pieces():
    """Cut the same at both ends: by the slower of the sender's port and the receiver's, and no shorter than messages are worth."""
    rates_Bps = [1e6, 40e6, 1e9]
    memory, sizes = Memory(3, 10.0), 300_000 * (1 - np.eye(3, dtype=np.int64))
    order = ORDER["openshop"](sizes, Network.equal(3), rng=np.random.default_rng(0))
    transports = launch_threads(watch, 3, memory, order, sizes, cluster(*rates_Bps))
    pieces = {(0, 1): 12 * 1024, (0, 2): 12 * 1024, (1, 2): 40_000}
    for transport in transports:
        for sending, posted in transport.posted.items():
            for message, _ in posted:
                wanted = pieces[min(transport.rank, message.peer), max(transport.rank, message.peer)]
                assert message.size == min(wanted, message.row_bytes - message.offset), sending


def steps_to_post(ranks, method):
    """Function calls of one rank's host, by Python's profiler, for an exchange whose order it has met before."""

    class Calls:
        rank, device = 0, "cpu"

        def __init__(self):
            self.ranks, self.posted, self.timer = ranks, 0, HostTimer(0.0)

        def post(self, ends):
            self.posted += len(ends)

    traffic_GG = np.random.default_rng(0).integers(1, 10**6, (ranks, ranks)) * (1 - np.eye(ranks, dtype=np.int64))
    order = ORDER[method](traffic_GG, Network.equal(ranks), rng=np.random.default_rng(0))
    calls, rows, steps = Calls(), [torch.zeros(40, 8, dtype=torch.uint8) for _ in range(ranks)], []
    transport = NcclTransport(calls, None)
    transport.exchange(order, rows, rows, lambda *_: None)
    before = calls.posted
    sys.setprofile(lambda _frame, event, _argument: steps.append(event))
    try:
        transport.exchange(order, rows, rows, lambda *_: None)
    finally:
        sys.setprofile(None)
    return len(steps), calls.posted - before


@pytest.mark.parametrize("method", ["openshop", "birkhoff"])
def test_the_hosts_work_grows_with_its_own_transfers_and_not_with_all_pairs(method):
    (few, few_posted), (many, many_posted) = (steps_to_post(ranks, method) for ranks in (16, 64))
    assert few_posted >= 30
    assert many_posted >= 126
    assert many / many_posted < 1.3 * few / few_posted


def disagree(rank_info, memory, order, sizes_R):
    """Each rank has its own idea of what rank 0 sends to rank 1."""
    transport = MemoryTransport(memory, rank_info.rank, cluster(FAST_Bps, FAST_Bps))
    tensors = [[torch.zeros(0), torch.zeros(sizes_R[rank_info.rank])], [torch.zeros(sizes_R[rank_info.rank]), torch.zeros(0)]]
    sends, recvs = (tensors[0], [torch.zeros(0)] * 2) if rank_info.rank == 0 else ([torch.zeros(0)] * 2, tensors[1])
    transport.exchange(order, sends, recvs, lambda *_: None)


def test_sizes_that_differ_end_both_ranks():
    order = ORDER["openshop"](np.array([[0, 1], [1, 0]]), Network.equal(2), rng=np.random.default_rng(0))
    with pytest.raises(RankFailed, match=r"rank \d lost rank \d: it sends 12 bytes where 8 are expected"):
        launch_threads(disagree, 2, Memory(2, 5.0), order, (3, 2))
    with pytest.raises(RankFailed, match=r"rank 1 lost rank 0: nothing within 0\.2 s"):
        launch_threads(disagree, 2, Memory(2, 0.2), order, (0, 2))
    paced = ORDER["paced"](np.array([[0, 1], [1, 0]]), Network.equal(2), rng=np.random.default_rng(0))
    with pytest.raises(BadInput, match="rank 0 sends 12 bytes where rank 1 expects 8"):
        launch_threads(disagree, 2, Memory(2, 1.0), paced, (3, 2))


def test_orders_that_cannot_be_held_are_refused():
    order = ORDER["openshop"](np.array([[0, 1], [1, 0]]), Network.equal(2), rng=np.random.default_rng(0))
    transport = MemoryTransport(Memory(2, 1.0), 0)
    full = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(BadInput, match="order paced: expected a transport that knows the rates of 2 ports"):
        transport.exchange(ORDER["paced"](np.array([[0, 1], [1, 0]]), Network.equal(2), rng=None), full, full, lambda *_: None)
    half = Order("half", order.pairs_X2, share_X2=np.array([[0.0, 0.4], [0.0, 1.0]])[np.argsort(order.pairs_X2[:, 0])])
    with pytest.raises(BadInput, match=r"order half: carries 1 of the 3 rows of 0 -> 1"):
        transport.exchange(half, full, full, lambda *_: None)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_who_posts_everything_at_once_starts_with_the_next_rank(ranks):
    sizes = 5 * (1 - np.eye(ranks, dtype=np.int64))
    order = ORDER["all-at-once"](sizes, Network.equal(ranks), rng=np.random.default_rng(0))
    order = replace(order, pairs_X2=order.pairs_X2[::-1])
    for transport in launch_threads(watch, ranks, Memory(ranks, 10.0), order, sizes):
        peers = [message.peer for message, _ in transport.posted[True]]
        assert peers == [(transport.rank + step) % ranks for step in range(1, ranks)]
