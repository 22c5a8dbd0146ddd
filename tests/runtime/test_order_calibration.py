"""Which method is chosen at which size, and that every rank chooses alike."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER
from aurora.planner.plan import make_plan
from aurora.runtime import order_calibration as measuring
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.order_calibration import (
    OrderCalibration,
    calibrate,
    planned_method,
)
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Curve, Hierarchy, Network, PlanOptions, Profile, Servers
from tests.conftest import cluster

ONES = (np.ones((2, 2), dtype=np.int64) - np.eye(2, dtype=np.int64), Network.equal(2))
SKEWED = (np.random.default_rng(0).integers(1, 100, (8, 8)) * (1 - np.eye(8, dtype=np.int64)), Network.equal(8))
MADE = {name: ORDER[name](*ONES, rng=np.random.default_rng(0)) for name in ("all-at-once", "paced", "birkhoff")}


def made_calibration(seconds, spread=0.0):
    seconds = np.array(seconds)
    fixed = {name: MADE[name] for name in ("paced", "all-at-once")}
    sizes = 100 * 16 ** np.arange(len(seconds))
    return OrderCalibration(("birkhoff", *fixed), sizes, seconds, np.full(seconds.shape, spread), fixed, {})


def test_the_fastest_at_every_size():
    """At once and paced cross half way between the first two sizes, in logarithms; outside of them the nearest counts."""
    calibration = made_calibration([[5.0, 4.0, 1.0], [5.0, 1.0, 4.0], [4.0, 5.0, 5.0]])
    for rank_bytes, method in ((0, "all-at-once"), (100, "all-at-once"), (399, "all-at-once"), (401, "paced"), (1600, "paced")):
        assert calibration.method(rank_bytes) == method
        assert calibration.order(MADE["birkhoff"], method) is MADE[method]
    assert calibration.method(100 * 256) == calibration.method(1e12) == "birkhoff"
    assert calibration.order(MADE["birkhoff"], "birkhoff") is MADE["birkhoff"]
    assert calibration.seconds_W(400) == pytest.approx(np.array([5.0, 2.0, 2.0]))
    assert str(calibration).startswith("0.0001 MB a rank: all-at-once (birkhoff 5000 ms, paced 4000 ms, all-at-once 1000 ms)\n")


@given(st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 3), min_size=1, max_size=4), st.floats(0.0, 0.5), st.floats(1.0, 1e9))
def test_an_order_is_taken_only_where_it_beats_all_at_once_by_more_than_its_spread(seconds, spread, rank_bytes):
    """By what straight lines say at the size; of those that do, the fastest is taken."""
    calibration = made_calibration(seconds, spread)
    at = np.clip(math.log2(rank_bytes), *np.log2(calibration.sizes_C[[0, -1]]))
    says = [np.exp(np.interp(at, np.log2(calibration.sizes_C), np.log(column))) for column in calibration.seconds_CW.T]
    taken = says[calibration.methods.index(calibration.method(rank_bytes))]
    sure = [took_s for took_s in says[:-1] if took_s < says[-1] * math.exp(-spread) * (1 - 1e-9)]
    assert taken <= min([*sure, says[-1]]) * (1 + 1e-9)
    assert taken == says[-1] or taken < says[-1] * math.exp(-spread) * (1 + 1e-9)


class Emulated(MemoryTransport):
    """An exchange in the planned order takes 0.8 of all at once or 1.1, from round to round; one in sequence always 0.9.

    It is under way until `wait`, as on a GPU.
    """

    def __init__(self, memory, rank):
        super().__init__(memory, rank)
        self.now_s, self.left_s, self.exchanges = 0.0, 0.0, Counter()

    def exchange(self, order, *args):
        self.exchanges[order.method] += 1
        ratios = {"all-at-once": (1.0,), "paced": (0.9,), "openshop": (0.8, 1.1)}[order.method]
        weather = 1.0 + self.exchanges[order.method] % 3  # the machine is slow in one round for all
        self.left_s = 1e-4 * weather * ratios[self.exchanges[order.method] % len(ratios)]

    def wait(self):
        self.now_s, self.left_s = self.now_s + self.left_s, 0.0


def test_what_is_faster_in_some_rounds_alone_is_not_taken(monkeypatch):
    """Pairs of one round show 0.9 under all the noise of the machine, and that the planned order is not surely faster."""
    transport = Emulated(Memory(1, 10.0), 0)
    monkeypatch.setattr(measuring, "SIZES", (1 << 10,))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: transport.now_s)
    calibration = calibrate(transport, cluster(1e9), "openshop")
    assert calibration.methods == ("openshop", "paced", "all-at-once")
    assert calibration.seconds_CW[0, 1] / calibration.seconds_CW[0, 2] == pytest.approx(0.9)
    assert calibration.spread_CW[0, 1:] == pytest.approx(0.0, abs=1e-9)
    assert calibration.spread_CW[0, 0] == pytest.approx(math.log(1.1 / 0.8) / 2, rel=0.1)
    assert calibration.method(1 << 10) == "paced"


def choose(rank_info, memory, planned):
    return calibrate(
        MemoryTransport(memory, rank_info.rank, cluster(*[1e9] * rank_info.ranks)), cluster(*[1e9] * rank_info.ranks), planned
    )


@pytest.mark.parametrize(
    ("planned", "methods"),
    [
        ("birkhoff", ("birkhoff", "paced", "all-at-once")),
        ("paced", ("paced", "all-at-once")),
        ("hierarchical", ("hierarchical", "paced", "all-at-once")),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_comes_to_the_same_choice(planned, methods, ranks, monkeypatch):
    monkeypatch.setattr(measuring, "SIZES", (1 << 10, 1 << 14))
    first, *rest = launch_threads(choose, ranks, Memory(ranks, 10.0), planned)
    assert first.methods == methods
    assert first.seconds_CW.shape == (2, len(methods))
    assert all(np.array_equal(other.seconds_CW, first.seconds_CW) for other in rest)
    assert all(np.array_equal(other.spread_CW, first.spread_CW) for other in rest)


class StagedMemory(MemoryTransport):
    """As NCCL says of itself, and keeps what it is asked to do."""

    in_stages = True

    def __init__(self, *args):
        super().__init__(*args)
        self.orders = []

    def exchange(self, order, *args):
        self.orders.append(order)
        super().exchange(order, *args)


def choose_stages(rank_info, memory, planned):
    machines = cluster(*[1e9] * rank_info.ranks)
    transport = StagedMemory(memory, rank_info.rank, machines)
    return calibrate(transport, machines, planned), transport.orders


@pytest.mark.parametrize(
    ("planned", "methods", "widths"),
    [
        ("openshop", ("openshop", "openshop in stages of 4", "openshop in stages of 2", "all-at-once"), {7, 4, 2, 1}),
        pytest.param("spread-out", ("spread-out", "all-at-once"), {7, 1}, marks=pytest.mark.full),
        ("all-at-once", ("all-at-once",), {7}),
    ],
)
def test_stages_of_several_widths_are_tried_where_orders_run_in_stages(planned, methods, widths, monkeypatch):
    """A stage is as wide as the order says, and as many sends of 8 ranks as fit into it."""
    monkeypatch.setattr(measuring, "SIZES", (1 << 10,))
    found = launch_threads(choose_stages, 8, Memory(8, 30.0), planned)
    calibration, orders = found[0]
    assert calibration.methods == methods
    assert calibration.seconds_CW.shape == (1, len(methods))
    order = ORDER[planned](*SKEWED, rng=np.random.default_rng(0))
    sends = {}
    for method in methods:
        used = calibration.order(order, method)
        of_rank_X = used.stage_X[used.rows_of(0, sending=True)[0]]
        sends[method] = int(np.bincount(of_rank_X).max())
        assert used is calibration.order(order, method)
    assert set(sends.values()) <= widths
    assert sends["all-at-once"] == 7
    if planned == "openshop":
        assert list(sends.values()) == [1, 4, 2, 7]
        assert {each.sends_open for each in orders} >= {1, 2, 4}


@pytest.mark.parametrize(("order", "rates", "method"), [
    ("auto", (2.0, 1.0, 1.0), "openshop-best"), ("auto", (1.0, 1.0, 1.0), "openshop-best"), ("sjf", (1.0, 1.0, 1.0), "sjf"),
    ("all-at-once", (2.0, 1.0, 1.0), "all-at-once"),
])  # fmt: skip
def test_beside_the_unordered_the_plans_own_method_is_tried(order, rates, method):
    """On mixed ports the first layer, one sender to two, goes all at once; the other two are as short one at a time."""
    nothing = Curve(np.array([1.0]), np.array([0.0]))
    traffic = np.array([[[[0, 8, 8], [0, 0, 0], [0, 0, 0]], [[0, 8, 0], [0, 0, 8], [8, 0, 0]]]])
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), nothing)}
    profile = Profile("m", "", traffic, 1, 1, 1, 1, 1, curves)
    plan = make_plan(cluster(*rates), [profile], PlanOptions("contiguous", "contiguous", order=order))
    assert planned_method(plan) == method


class Counting(MemoryTransport):
    """Keeps the bytes that it sends between servers and inside, and takes a second for each exchange."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = []

    def exchange(self, order, sends, recvs, observe):
        self.sent.append([len(each) for each in sends])
        super().exchange(order, sends, recvs, observe)


def test_it_stops_where_exchanges_take_long(monkeypatch):
    monkeypatch.setattr(measuring, "LONG_S", 0.0)
    (calibration,) = launch_threads(choose, 1, Memory(1, 10.0), "openshop")
    assert len(calibration.sizes_C) == 1


def plan_of_four_ranks(**options):
    """A model whose tokens choose four of sixteen experts, of which the first is chosen by nearly all, on two servers of two."""
    tokens_TLSE = np.full((1, 2, 4, 16), 8)
    tokens_TLSE[..., 0] = 80
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), Curve(np.array([1.0]), np.array([0.0])))}
    profile = Profile("m", "", tokens_TLSE, 4, 64, 64, 1, 1, curves)
    machines = replace(cluster(*[1e9] * 4), servers=Servers.of([0, 0, 1, 1], 1e8))
    return make_plan(machines, [profile], PlanOptions("contiguous", "contiguous", **options))


def test_a_planned_order_of_servers_is_tried_as_it_is(monkeypatch):
    monkeypatch.setattr(measuring, "SIZES", (1 << 10,))
    plan, hierarchy = plan_of_four_ranks(), Hierarchy(np.array([0, 0, 1, 1]))
    order = hierarchical_order(np.ones((4, 4), np.int64), hierarchy, plan.cluster.network, rng=np.random.default_rng(0))
    model = replace(plan.models[0], hierarchy=hierarchy, dispatch_L=(order,) * 2)
    planned = planned_method(replace(plan, models=(model,)))
    assert planned is order
    first, *_ = launch_threads(choose, 4, Memory(4, 10.0), planned)
    assert first.methods == ("hierarchical", "paced", "all-at-once")
    assert first.order(order, "hierarchical") is order
