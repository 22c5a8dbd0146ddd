"""Ranks that watch the same exchanges by clocks of their own choose the same orders, and change over together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.order_calibration import COLLECTIVE, FLAT, OVER_SERVERS, OrderCalibration
from aurora.runtime.order_choice import OrderWatch
from aurora.runtime.phase_recorder import HostTimer, PhaseRecorder
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Exchange, Gpu, Network, TraceRecorder

pytestmark = pytest.mark.full

ONES = (np.ones((3, 3), dtype=np.int64) - np.eye(3, dtype=np.int64), Network.equal(3))
PLANNED, AT_ONCE = (ORDER[name](*ONES, rng=np.random.default_rng(0)) for name in ("openshop", "all-at-once"))
METHODS = ("all-at-once", COLLECTIVE, "openshop")
PORT = Gpu("g", "cpu", 0, 1e6, 1e6, 1)
STARTUP_S = 0.001


def watches(ranks, told=None):
    """One for each rank: all know that the planned order is the fastest at all sizes."""
    seconds_CW = np.array([[1.5, 1.2, 1.0], [150.0, 120.0, 100.0]]) * STARTUP_S
    orders = {"all-at-once": AT_ONCE, COLLECTIVE: None}
    calibration = OrderCalibration(METHODS, np.array([1000, 100_000]), seconds_CW, np.zeros((2, 3)), orders, {})
    return [OrderWatch(calibration, "m", PORT, None if told is None or rank else told.append) for rank in range(ranks)]


def layer(watch_R, rng, rank_bytes, seconds):
    """A dispatch and a combine of all ranks, then the gather of counts. Returns the method of each rank and phase.

    Ranks start one after the other; the exchange takes `seconds` of its method once the last has started.
    """
    chosen = []
    for phase, began_s in (("dispatch", 0.0), ("combine", 1000.0)):
        orders = [watch.order(PLANNED, phase, rank_bytes) for watch in watch_R]
        names = [COLLECTIVE if order is None else order.method for order in orders]
        starts = began_s + rng.random(len(watch_R))
        ends = starts.max() + seconds[names[0]] * rng.uniform(0.5, 1.0, len(watch_R))
        ends[rng.integers(len(watch_R))] = starts.max() + seconds[names[0]]
        out = rng.integers(0, rank_bytes + 1, len(watch_R))
        out[0] = rank_bytes
        for watch, start, end, size in zip(watch_R, starts, ends, out.tolist(), strict=True):
            watch.record(start, end, size, 0)
        chosen += names
    reports = np.stack([watch.report().numpy() for watch in watch_R])
    for watch in watch_R:
        watch.gathered(reports)
    return chosen


def test_all_ranks_change_over_together_and_tell_it():
    """Whatever each rank's own clock says; sizes and phases are watched apart, and rank 0 alone tells it."""
    told = []
    rng, watch_R = np.random.default_rng(0), watches(3, told)
    loaded = {"openshop": 1.4, COLLECTIVE: 1.1, "all-at-once": 1.6}
    for _ in range(1200):
        first, *others = zip(*[iter(layer(watch_R, rng, 1000, loaded))] * 3, strict=True)
        assert len(set(first)) == len(set(others[0])) == 1
    used = watch_R[0].used
    assert all(watch.used == used for watch in watch_R)
    assert sum(used.exchanges.values()) == 2400
    assert used.exchanges[COLLECTIVE] > 1200
    assert used.exchanges["all-at-once"] < 2400 * 0.03
    assert sorted(used.changes) == [
        f"m, {phase} of 0.00051 to 0.001 MB a rank: from openshop to {COLLECTIVE}, 21% shorter"
        for phase in ("combine", "dispatch")
    ]
    assert told == [f"order changed over: {line}" for line in used.changes]
    names = layer(watch_R, rng, 100_000, loaded)
    assert set(names) == {"openshop"}  # nothing was seen of this size


def test_what_one_kind_of_exchange_found_the_others_try_soon():
    """The machine changes for the better of a method that was never the fastest, and nothing drifts."""
    rng, watch_R = np.random.default_rng(0), watches(2)
    seconds = {"openshop": 1.0, COLLECTIVE: 1.2, "all-at-once": 1.5}
    for size in (1000, 100_000):
        for _ in range(300):
            layer(watch_R, rng, size, seconds)
    seconds["all-at-once"] = 0.7
    for _ in range(1000):
        layer(watch_R, rng, 1000, seconds)
    assert len(watch_R[0].used.changes) == 2  # dispatch and combine of the smaller size
    for _ in range(60):
        layer(watch_R, rng, 100_000, seconds)
    assert len(watch_R[0].used.changes) == 4
    assert watch_R[1].used == watch_R[0].used


class OwnClock(HostTimer):
    """A timer by a clock that its rank alone has."""

    def __init__(self, rank):
        super().__init__(0.0)
        self.now_s = 1000.0 * rank

    def mark(self):
        return self.now_s


class Emulated(MemoryTransport):
    """Exchanges take what their order takes, by the rank's own clock."""

    def __init__(self, memory, rank, clock):
        super().__init__(memory, rank)
        self.clock, self.seconds = clock, {"openshop": 1.0, COLLECTIVE: 1.2, "all-at-once": 2.0}

    def exchange(self, order, *args):
        self.clock.now_s += self.seconds[COLLECTIVE if order is None else order.method]


def serve(rank_info, memory):
    """Layers of one model on one rank, until the machine has been loaded for a while. Returns the orders used."""
    rank, clock = rank_info.rank, OwnClock(rank_info.rank)
    transport, (watch,) = Emulated(memory, rank, clock), watches(1)
    recorder = PhaseRecorder(TraceRecorder("measured", ("m",), 3), rank, 0, 0.0, clock)
    context = LayerContext(0, transport, *thread_port_arbiters(1), recorder, watch)
    for number in range(900):
        if number == 300:
            transport.seconds["openshop"] = 1.8
        counts = torch.tensor([[rank, number], [7, 2000 - number]])
        gathered = context.gather_counts(counts, 0)
        assert gathered.is_contiguous()
        assert gathered.tolist() == [[[other, number], [7, 2000 - number]] for other in range(3)]
        rows = [torch.zeros(1, 60, dtype=torch.uint8) for _ in range(3)]
        for phase in ("dispatch", "combine"):
            clock.now_s += 0.1 * rank  # the others' experts are done before
            with context.exchanging(0, Exchange(phase, PLANNED), np.ones((1, 3, 3), np.int64), 60) as exchange:
                exchange(rows, rows)
    return watch.used


def test_layers_change_over_together():
    """Times travel with the counts, which arrive as they were; no rank sends anything else."""
    first, *others = launch_threads(serve, 3, Memory(3, 30.0))
    assert others == [first, first]
    assert sum(first.exchanges.values()) == 1800
    assert first.exchanges[COLLECTIVE] > 600
    assert [change.split(": from ")[1] for change in first.changes] == [f"openshop to {COLLECTIVE}, 33% shorter"] * 2


@given(st.integers(1, 4), st.lists(st.integers(0, 200_000), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_all_ranks_choose_alike_at_any_sizes(ranks, sizes, seed):
    rng, watch_R = np.random.default_rng(seed), watches(ranks)
    for size in sizes * 10:
        names = layer(watch_R, rng, size, {method: float(rng.random()) for method in METHODS})
        assert len(set(names[:ranks])) == len(set(names[ranks:])) == 1
    assert all(watch.used == watch_R[0].used for watch in watch_R)


def test_exchanges_of_one_kind_count_over_their_bound():
    """Large and small ones of one kind mix; a way that gets the small ones is not thought faster for that."""
    rng, (watch,) = np.random.default_rng(0), watches(1)
    for _ in range(3000):
        for phase, began_s in (("dispatch", 0.0), ("combine", 10.0)):
            planned = watch.order(PLANNED, phase, 1000) is PLANNED
            size = int(rng.integers(*((800, 1000) if planned else (600, 800))))
            seconds = 1.2 * (size / PORT.out_Bps + STARTUP_S)
            watch.record(began_s, began_s + seconds, size, size // 2)
        watch.gathered(watch.report().numpy()[None])
    assert watch.used.changes == ()
    assert watch.used.exchanges["openshop"] == pytest.approx(6000, rel=0.05)


def test_all_to_alls_change_over_between_flat_and_servers():
    """By the seconds of a dispatch and its combine together; the plan's way stays until the other is surely faster."""
    sizes, seconds_CW = np.array([1000, 100_000]), np.array([[1.0, 1.0], [100.0, 100.0]]) * STARTUP_S
    spread_out = ORDER["spread-out"](*ONES, rng=np.random.default_rng(0))  # of the way that the plan has no orders for
    servers = OrderCalibration((FLAT, OVER_SERVERS), sizes, seconds_CW, np.zeros((2, 2)), {FLAT: spread_out}, {})
    (plain, *_), rank_bytes = watches(1), 10_000
    watch_R = [OrderWatch(plain._calibration, "m", PORT, None, servers) for _ in range(3)]
    seconds, ways = {OVER_SERVERS: 0.02, FLAT: 0.03}, []
    performed = set()
    for number in range(900):
        if number == 300:
            seconds[OVER_SERVERS] = 0.06
        chosen = {watch.is_hierarchical(rank_bytes) for watch in watch_R}
        assert len(chosen) == 1
        ways.append(OVER_SERVERS if chosen.pop() else FLAT)
        for phase, share in (("dispatch", 0.7), ("combine", 0.3)):
            for watch in watch_R:
                planned = PLANNED if phase == "dispatch" else PLANNED.reversed
                performed.add((ways[-1], phase, watch.order(planned, phase, rank_bytes)))
                watch.record(0.0, seconds[ways[-1]] * share, rank_bytes, 0)
        reports = np.stack([watch.report().numpy() for watch in watch_R])
        for watch in watch_R:
            watch.gathered(reports)
    assert ways[:300].count(OVER_SERVERS) > 270
    assert ways[-100:].count(FLAT) > 90
    assert {(FLAT, "dispatch", spread_out), (FLAT, "combine", spread_out.reversed)} <= performed
    assert {(OVER_SERVERS, "dispatch", PLANNED), (OVER_SERVERS, "combine", PLANNED.reversed)} <= performed
    assert not {order for way, _, order in performed if way == FLAT} & {PLANNED, PLANNED.reversed}
    used = watch_R[0].used
    assert sum(used.exchanges.values()) == 1800
    assert used.exchanges["openshop"] > 500 < used.exchanges[f"openshop {OVER_SERVERS}"]
    assert any(change.endswith("from over servers to flat, 50% shorter") for change in used.changes)
    assert used.servers == str(servers)
    assert all(watch.used == used for watch in watch_R)
