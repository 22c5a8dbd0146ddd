"""The NCCL transport on an emulation of NCCL's rules: no deadlock, the order is held, every byte arrives."""

import os
import signal
import threading
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import timed
from aurora.errors import RankFailed
from aurora.runtime.distributed import launcher
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports import nccl, process_groups
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclTransport
from aurora.runtime.transports.process_groups import default_process_group
from aurora.types import Network, Order
from tests.runtime.transports.drawn_orders import drawn_order
from tests.runtime.transports.nccl_emulator import EmulatedCalls, NcclEmulator


def ignore(*_event):
    """Observes nothing."""


def drawn_bytes(rng, ranks):
    """Bytes of every pair, of very different sizes, many of them empty."""
    sizes_GG = rng.integers(1, 1 << rng.integers(1, 12, (ranks, ranks)))
    sizes_GG[rng.random((ranks, ranks)) < rng.choice([0.0, 0.3, 0.9])] = 0
    np.fill_diagonal(sizes_GG, 0)
    return sizes_GG


def payload(src, dst, size):
    """What src sends to dst."""
    return torch.from_numpy(np.random.default_rng((src, dst)).integers(0, 256, size, dtype=np.uint8))


def exchange(transports, order, sizes_GG, emulator, observe=ignore):
    """One exchange of all ranks, and a check that every byte has arrived."""
    ranks = len(transports)
    arrived = []
    for rank, transport in enumerate(transports):
        sends = [payload(rank, dst, sizes_GG[rank, dst]) for dst in range(ranks)]
        arrived.append([torch.zeros(size, dtype=torch.uint8) for size in sizes_GG[:, rank].tolist()])
        transport.exchange(order, sends, arrived[-1], observe)
    emulator.finish()
    for rank, transport in enumerate(transports):
        transport.wait()
        assert all(torch.equal(into, payload(src, rank, len(into))) for src, into in enumerate(arrived[rank]))


def emulated(ranks, seconds=lambda src, dst, size: 1.0, **options):
    """An emulated communicator and the transport of each of its ranks."""
    emulator = NcclEmulator(ranks, seconds, **options)
    return emulator, [NcclTransport(EmulatedCalls(emulator, rank), None) for rank in range(ranks)]


def check_held(order, sizes_GG, transfers):
    """Ports serve their rows in sequence, with no more at once than the order opens; a rank's stages do not overlap."""
    size_X = np.diff(order.cuts(sizes_GG[*order.pairs_X2.T]), axis=1)[:, 0]
    tier_X = np.zeros(len(size_X), np.int64) if order.tier_X is None else order.tier_X
    rows_of_pair = defaultdict(list)
    for row in np.flatnonzero(size_X).tolist():
        rows_of_pair[tuple(order.pairs_X2[row].tolist())].append(row)
    assert sum(map(len, rows_of_pair.values())) == len(transfers)
    spans_of_rank, spans_of_port = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for one in transfers:
        row = rows_of_pair[one.src, one.dst].pop(0)
        assert one.size == size_X[row]
        for side, rank in enumerate((one.src, one.dst)):
            spans_of_rank[rank][order.stage_X[row]].append((one.start_s, one.end_s))
            spans_of_port[rank, side, tier_X[row]].append((row, one.start_s, one.end_s))
    for stages in spans_of_rank.values():
        for before, after in pairwise(sorted(stages)):
            assert max(end_s for _, end_s in stages[before]) <= min(start_s for start_s, _ in stages[after]) + 1e-9
    for (rank, side, tier), spans in spans_of_port.items():
        opened = (order.sends_open, order.recvs_open)[side]
        if ((order.pairs_X2[:, side] == rank) & (tier_X == tier)).sum() > opened:
            stage_K = order.stage_X[[row for row, *_ in sorted(spans)]]
            assert (np.diff(stage_K) >= 0).all()
        for _, start_s, _ in spans:
            assert sum(start <= start_s + 1e-9 < end for _, start, end in spans) <= opened


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 1500), marks=pytest.mark.full)], ids=["60", "500"])
def test_any_order_ends_and_is_held(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        ranks = int(rng.integers(2, 17) if seed % 4 == 0 else rng.integers(2, 7))
        buffered_bytes, rounds_at_once = int(rng.choice([0, 0, 100])), (None, 1, 2)[seed % 3]
        emulator = NcclEmulator(ranks, lambda src, dst, size: 1.0 + size / 100, buffered_bytes, rounds_at_once)
        delays = [partial(rng.uniform, 0.0, late_s) for late_s in rng.choice([0.0, 1.0, 30.0], ranks)]
        calls = [EmulatedCalls(emulator, rank, delay_s) for rank, delay_s in enumerate(delays)]
        transports = [NcclTransport(each, None) for each in calls]
        emulator.finish()
        for _ in range(2):  # the next exchange does not wait for all ranks
            order, sizes_GG = drawn_order(rng, ranks), drawn_bytes(rng, ranks)
            emulator.transfers.clear()
            exchange(transports, order, sizes_GG, emulator)
            if not buffered_bytes:
                check_held(order, sizes_GG, emulator.transfers)


@pytest.mark.parametrize("method", ["openshop", "openshop-best", "birkhoff"])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_staged_schedule_is_what_the_rules_give(ranks, method):
    """The simulator's price of stages, of one partner each way, against the emulation by the same clock."""
    rng = np.random.default_rng(ranks)
    sizes_GG = drawn_bytes(rng, ranks)
    sizes_GG[0, 1] += 100
    network = Network(rng.uniform(1e5, 1e6, ranks), rng.uniform(1e5, 1e6, ranks), np.full(ranks, 1e-3))
    order = ORDER[method](sizes_GG, network, rng=rng)
    emulator, transports = emulated(ranks, lambda src, dst, size: 0.0)
    emulator.finish()
    emulator.seconds = lambda src, dst, size: 1e-3 + size / network.pair_Bps_GG[src, dst]
    exchange(transports, order, sizes_GG, emulator)
    took_s = max(one.end_s for one in emulator.transfers)
    assert timed(order, sizes_GG, network, staged=True).makespan_s == pytest.approx(took_s, rel=1e-9)


def test_transfers_are_observed_with_the_times_of_their_stage():
    emulator, transports = emulated(3, lambda src, dst, size: float(size) if size > 1 else 0.0)
    order = Order("by hand", np.array([[0, 1], [2, 0], [0, 2], [1, 0], [1, 2], [2, 1]]))
    seen = []
    exchange(transports, order, np.array([[0, 2, 3], [0, 0, 0], [4, 0, 0]]), emulator, lambda *event: seen.append(event))
    assert sorted(seen) == [
        (0, False, 2, 0.0, 2.0),
        (0, False, 3, 4.0, 7.0),
        (0, True, 4, 0.0, 4.0),
        (1, True, 2, 0.0, 4.0),  # a stage ends as a whole
        (2, False, 4, 0.0, 4.0),
        (2, True, 3, 4.0, 7.0),
    ]


def test_memory_of_times_that_nobody_reads_is_bounded(monkeypatch):
    monkeypatch.setattr(nccl, "MOST_QUEUED", 64)
    emulator, transports = emulated(2)
    order, sizes_GG = EACH_OTHER, np.array([[0, 3], [0, 0]])
    for _ in range(200):
        for rank, transport in enumerate(transports):
            sends = [torch.zeros(size, dtype=torch.uint8) for size in sizes_GG[rank].tolist()]
            recvs = [torch.zeros(size, dtype=torch.uint8) for size in sizes_GG[:, rank].tolist()]
            transport.exchange(order, sends, recvs, ignore)
        emulator.run()
    assert max(len(transport._queued) for transport in transports) <= 64


EACH_OTHER = Order("one", np.array([[0, 1], [1, 0]]))
TENSORS = [torch.zeros(3, dtype=torch.uint8)] * 2


def first_of_two():
    """The calls and the transport of rank 0 of two, both of which have begun to make their communicator."""
    emulator = NcclEmulator(2, lambda src, dst, size: 1.0)
    calls = [EmulatedCalls(emulator, rank) for rank in range(2)]
    transport, _ = (NcclTransport(each, None) for each in calls)
    return calls[0], transport


def test_a_cuda_error_stays():
    calls, transport = first_of_two()
    transport.exchange(EACH_OTHER, TENSORS, TENSORS, ignore)
    calls.fail("CUDA error: an illegal memory access was encountered")
    for again in (transport.wait, transport.wait, lambda: transport.exchange(EACH_OTHER, TENSORS, TENSORS, ignore)):
        with pytest.raises(RankFailed, match="rank 0 lost the others: CUDA error: an illegal memory access"):
            again()


def test_an_abort_ends_what_another_thread_posts():
    """A watcher aborts while a model's thread posts: whatever it posts next fails for the watcher's reason."""
    calls, transport = first_of_two()
    some_posted, said = threading.Event(), []

    def post_on():
        try:
            for number in range(nccl.MOST_QUEUED):
                transport.exchange(EACH_OTHER, TENSORS, TENSORS, ignore)
                if number == 4:
                    some_posted.set()
                time.sleep(0.01)
        except RankFailed as error:
            said.append(str(error))

    thread = threading.Thread(target=post_on)
    thread.start()
    assert some_posted.wait(60)
    calls.abort(RankFailed("rank 0 lost rank 1"))
    thread.join()
    assert said == ["rank 0 lost rank 1"]
    with pytest.raises(RankFailed, match=r"^rank 0 lost rank 1$"):
        transport.wait()


def test_exchanges_are_captured_until_times_must_be_read(monkeypatch):
    """A transport queues exchanges without a query; the first that would have to read times is what capture forbids."""
    monkeypatch.setattr(nccl, "MOST_QUEUED", 64)
    unmade = EmulatedCalls(NcclEmulator(2, lambda src, dst, size: 1.0), 0)
    unmade.capturing = True
    with pytest.raises(RankFailed, match="a communicator cannot be made while a graph is captured"):
        NcclTransport(unmade, None)
    calls, transport = first_of_two()
    calls.capturing = True
    for _ in range(nccl.MOST_QUEUED):
        transport.exchange(EACH_OTHER, TENSORS, TENSORS, ignore)
    with pytest.raises(RankFailed, match="operation not permitted when stream is capturing"):
        transport.exchange(EACH_OTHER, TENSORS, TENSORS, ignore)


class StuckCalls:
    """GroupedCalls and timer of which the first `done` end, and the others wait until they are aborted, as NCCL's do for a lost peer."""

    device = "cpu"

    def __init__(self, rank, ranks, done):
        self.rank, self.ranks, self.posted, self.done = rank, ranks, 0, done
        self.aborted, self.timer, self.failure = threading.Event(), self, None

    def post(self, ends):
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        self.posted += 1

    def mark(self):
        return self.posted

    def reached(self, mark):
        return mark <= self.done

    def seconds(self, mark):
        assert self.reached(mark) or self.aborted.wait(60)
        return 0.0

    def abort(self, failure):
        self.failure = failure
        self.aborted.set()


class Control:
    """A control group of which no connection is broken."""

    def broken_peers(self):
        return []


def test_a_peer_that_hangs_is_named_after_the_time_out(monkeypatch):
    """The second of three stages waits, for rank 2; the calls are aborted, and nobody waits any longer."""
    monkeypatch.setattr(nccl, "CHECK_S", 0.01)
    calls = StuckCalls(0, 3, done=2)  # the first is the communicator's
    transport = NcclTransport(calls, Control(), timeout_s=0.1)
    order = Order("by hand", np.array([[0, 1], [1, 0], [0, 2], [2, 0], [1, 2], [2, 1]]))
    tensors = [torch.zeros(1)] * 3
    transport.exchange(order, tensors, tensors, ignore)
    for again in (transport.wait, transport.wait, lambda: transport.exchange(order, tensors, tensors, ignore)):
        with pytest.raises(RankFailed, match=r"rank 0 lost rank 2: nothing within 0\.1 s"):
            again()


def test_an_exchange_behind_one_that_has_ended_is_watched(monkeypatch):
    """A layer queues its combine behind its dispatch, and may wait for the GPU elsewhere, so that nobody takes the dispatch away."""
    monkeypatch.setattr(nccl, "CHECK_S", 0.01)
    order = ORDER["all-at-once"](1 - np.eye(2, dtype=np.int64), Network.equal(2), rng=np.random.default_rng(0))
    calls = StuckCalls(0, 2, done=2)  # the communicator's and the dispatch
    transport = NcclTransport(calls, Control(), timeout_s=0.1)
    for _ in range(2):
        transport.exchange(order, [torch.zeros(1)] * 2, [torch.zeros(1)] * 2, ignore)
    assert calls.aborted.wait(60)
    with pytest.raises(RankFailed, match="rank 0 lost rank 1: nothing within"):
        transport.wait()


def test_a_gpu_that_has_failed_ends_the_wait(monkeypatch):
    """An error of CUDA stays with the process: the watching thread meets it when it asks an event."""
    monkeypatch.setattr(nccl, "CHECK_S", 0.01)

    def fail(_mark):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    calls = StuckCalls(0, 2, done=1)
    transport = NcclTransport(calls, Control(), timeout_s=60.0)
    calls.reached = fail
    order = ORDER["all-at-once"](1 - np.eye(2, dtype=np.int64), Network.equal(2), rng=np.random.default_rng(0))
    transport.exchange(order, [torch.zeros(1)] * 2, [torch.zeros(1)] * 2, ignore)
    assert calls.aborted.wait(30)
    assert "illegal memory access" in str(calls.failure)


def test_every_transport_of_an_aborted_process_fails_for_the_same_reason(monkeypatch):
    monkeypatch.setattr(process_groups, "_nccl_groups", [])
    monkeypatch.setattr(process_groups, "_nccl_failures", [])
    assert not process_groups.abort_nccl_groups(RankFailed("nothing to abort"))
    assert process_groups.nccl_failure() is None
    process_groups._nccl_groups.append(Group("one", []))
    for reason in ("rank 0 lost rank 1", "rank 0 lost the others"):
        assert process_groups.abort_nccl_groups(RankFailed(reason))
    assert str(nccl.NcclCalls.failure.fget(None)) == "rank 0 lost rank 1"


def lose_a_stopped_peer(rank_info, folder):
    """Rank 1 of 3 is stopped while the others' calls wait for each other, and for it only later."""
    with default_process_group(rank_info) as heartbeats:
        (folder / f"pid{rank_info.rank}").write_text(str(os.getpid()))
        transport = NcclTransport(StuckCalls(rank_info.rank, 3, done=1), GlooTransport(), 6.0, heartbeats)
        order = Order("by hand", np.array([[0, 2], [2, 0], [0, 1], [1, 0], [1, 2], [2, 1]]))
        transport.gather(torch.zeros(1))
        if rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "was stopped"
        transport.exchange(order, [torch.zeros(1)] * 3, [torch.zeros(1)] * 3, ignore)
        with pytest.raises(RankFailed) as lost:
            transport.wait()
        (folder / f"done{rank_info.rank}").touch()
        while len(list(folder.glob("done*"))) < 2:  # or the other would lose this rank
            time.sleep(0.01)
        if rank_info.rank == 0:
            os.kill(int((folder / "pid1").read_text()), signal.SIGCONT)
        return str(lost.value)


def test_a_stopped_peer_is_named_though_nobody_waits_for_it_yet(tmp_path):
    first, stopped, third = launch(lose_a_stopped_peer, 3, tmp_path, timeout_s=60)
    assert stopped == "was stopped"
    for rank, said in ((0, first), (2, third)):
        assert said == f"rank {rank} lost rank 1: nothing within 6 s"


class Unmade(StuckCalls):
    """Their first call, which makes the communicator, waits for a lost peer and cannot be aborted."""

    def post(self, ends):
        time.sleep(60)


class Silent:
    """Heartbeats of ranks of which one hangs."""

    silent = (2,)


def test_a_peer_that_hangs_while_a_communicator_is_made_is_named(monkeypatch):
    monkeypatch.setattr(nccl, "CHECK_S", 0.01)
    for heartbeats, lost in ((Silent(), "rank 2"), (None, "rank 1 or rank 2")):
        with pytest.raises(RankFailed, match=rf"^rank 0 lost {lost}: nothing within 0\.1 s"):
            NcclTransport(Unmade(0, 3, done=0), Control(), 0.1, heartbeats)


def test_a_communicator_that_cannot_be_made_fails():
    calls = StuckCalls(0, 3, done=0)
    calls.abort(None)
    for timeout_s in (None, 60.0):
        with pytest.raises(RankFailed, match="rank 0 lost the others: NCCL communicator was aborted"):
            NcclTransport(calls, Control(), timeout_s)


def lose_a_peer(rank_info, folder, early):
    """Rank 1 of 3 dies while the others' NCCL calls wait for it, or, early, while they make a communicator."""
    nccl.CHECK_S = 0.01
    with default_process_group(rank_info) as heartbeats:
        control = GlooTransport()
        if not early:
            transport = NcclTransport(StuckCalls(rank_info.rank, 3, done=1), control, timeout_s=300.0)
        control.gather(torch.zeros(1))
        order = ORDER["openshop"](1 - np.eye(3, dtype=np.int64), Network.equal(3), rng=np.random.default_rng(0))
        if rank_info.rank == 1:
            os._exit(3)
        if early:
            waits = partial(NcclTransport, Unmade(rank_info.rank, 3, done=0), control, 300.0, heartbeats)
        else:
            transport.exchange(order, [torch.zeros(1)] * 3, [torch.zeros(1)] * 3, ignore)
            waits = transport.wait
        began_s = time.monotonic()
        with pytest.raises(RankFailed) as lost:
            waits()
        (folder / str(rank_info.rank)).write_text(f"{time.monotonic() - began_s:.1f} {lost.value}")
        while len(list(folder.iterdir())) < 2:  # or the other would lose this rank
            time.sleep(0.01)


@pytest.mark.parametrize("early", [False, True])
def test_a_peer_that_dies_is_named_at_once(tmp_path, monkeypatch, early):
    monkeypatch.setattr(launcher, "GRACE_S", 60.0)  # until the others are stopped
    with pytest.raises(RankFailed, match="rank 1 of 3 died"):
        launch(lose_a_peer, 3, tmp_path, early, timeout_s=60)
    for rank in (0, 2):
        seconds, said = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert said == f"rank {rank} lost rank 1: the connection is broken"
        assert float(seconds) < 60


class Group:
    """An NCCL group that notes what is done to it and its backend."""

    def __init__(self, name, noted):
        self.name, self.noted = name, noted

    def _get_backend(self, _device):
        return self

    def _group_start(self):
        self.noted.append("together")

    def _group_end(self):
        self.noted.append("done")

    def abort(self):
        self.noted.append(self.name)


def lose_a_rank(rank_info, noted):
    """A lost rank ends the block in which NCCL groups were made."""
    with default_process_group(rank_info):
        process_groups._nccl_groups.extend([Group("one", noted), Group("two", noted)])
        raise RankFailed("rank 0 lost rank 1")


def lose_and_note(rank_info):
    noted = []
    with pytest.raises(RankFailed, match="lost rank 1"):
        lose_a_rank(rank_info, noted)
    assert not torch.distributed.is_initialized()
    assert not process_groups._nccl_groups
    return noted


def test_all_communicators_are_aborted_together_when_a_rank_is_lost():
    """One after the other, the first abort would wait for the second communicator's calls."""
    assert launch(lose_and_note, 1) == [["together", "one", "two", "done"]]
