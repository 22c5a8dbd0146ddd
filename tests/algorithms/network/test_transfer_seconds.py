"""Measured curves of exchanges: fitted, interpolated, extrapolated by bounds, and priced as measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import Switch, fluid_pieces, steps_seconds, timed
from aurora.algorithms.network.transfer_seconds import exchange_seconds, fit_transfer_curve
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.types import Network, SyntheticOptions, TransferCurve, servers
from tests.conftest import cluster
from tests.strategies import traffics_on_ports

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
CURVES = (
    TransferCurve(1, [1e3, 1e5, 1e7], [5e-6, 1.5e-5, 1.1e-3]),
    TransferCurve(3, [2e3, 1e5, 2e7], [9e-6, 1.6e-5, 2.2e-3]),
)


def uniform(ranks, size):
    return np.full((ranks, ranks), size, dtype=np.int64) * ~np.eye(ranks, dtype=bool)


def test_measured_points_come_back_and_bounds_extrapolate():
    for curve in CURVES:
        assert exchange_seconds(CURVES, curve.bytes_X, curve.partners) == pytest.approx(curve.seconds_X)
    assert exchange_seconds(CURVES, [1.0, 2e7], 1) == pytest.approx([5e-6, 2.2e-3])  # the start-up; twice the largest's seconds


@given(st.lists(st.floats(1.0, 1e9), min_size=2, max_size=8, unique=True).map(sorted), st.sampled_from([1, 3]))
def test_seconds_never_fall_with_bytes(sizes, partners):
    assert (np.diff(exchange_seconds(CURVES, sizes, partners)) >= -1e-15).all()


def test_partners_between_measured_ones_lie_between_them_at_one_buffer():
    few, two, many = (exchange_seconds(CURVES, 1e5 * n / (n + 1), n)[()] for n in (1, 2, 3))
    assert min(few, many) <= two <= max(few, many)


def test_more_partners_than_measured_go_by_what_limits():
    """Ports of their own: seconds of a buffer grow with (n - 1) / n. One path for all: with n - 1, or faster."""
    for of_gpus in (lambda n: 1e-5 + 1e-3 * (n - 1) / n, lambda n: 1e-3 * (n - 1), lambda n: 1e-3 * (n - 1) ** 1.5):
        curves = [TransferCurve(n - 1, [1e6 * (n - 1) / n], [of_gpus(n)]) for n in (2, 4)]
        assert exchange_seconds(curves, 1e6 * 7 / 8, 7) == pytest.approx(of_gpus(8))


def test_a_fitted_curve_never_falls_and_takes_the_mean_of_a_size():
    made = fit_transfer_curve(3, [4, 2, 2, 8], [3.0, 1.0, 4.0, 2.5])
    assert made == TransferCurve(3, [2, 4, 8], [2.0, 2.5, 2.5])
    for bytes_X, seconds_X in (([1], []), ([], []), ([0], [1.0]), ([1], [0.0])):
        with pytest.raises(BadInput, match="link curve: "):
            fit_transfer_curve(1, bytes_X, seconds_X)


@pytest.mark.parametrize("size", [100, 30_000, 3_000_000])
def test_an_exchange_posted_together_takes_what_was_measured(size):
    network = replace(Network.equal(4, 2e10), curves=CURVES)
    bytes_GG = uniform(4, size)
    order = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))
    assert timed(order, bytes_GG, network).makespan_s == pytest.approx(exchange_seconds(CURVES, 3 * size, 3)[()])


def test_an_order_of_one_message_at_a_time_pays_each_alone():
    network = replace(Network.equal(4, 2e10), curves=CURVES)
    bytes_GG = uniform(4, 30_000)
    order = ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0))
    assert timed(order, bytes_GG, network).makespan_s == pytest.approx(3 * exchange_seconds(CURVES, 30_000, 1)[()])


@pytest.mark.parametrize("method", ["all-at-once", "openshop", "random"])
@settings(max_examples=25)
@given(traffic=traffics_on_ports(equal=True, startups=(0.5,)))
def test_a_line_as_curve_prices_as_start_up_and_rate(method, traffic):
    """Two ways to say the same: a start-up, and the curve of an exchange without bytes to speak of."""
    bytes_GG, network = traffic
    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
    sizes = np.geomspace(1e-6, max(1.0, float(bytes_GG.sum())), 300)
    curve = TransferCurve(1, sizes, 0.5 + sizes / network.out_Bps_G[0])
    found, said = (
        fluid_pieces(order, bytes_GG[None], one).end_s_X.max(initial=0.0)
        for one in (replace(network, curves=(curve,)), network)
    )
    assert found == pytest.approx(said, rel=1e-3)


def test_faster_ports_than_the_slowest_do_not_pay_its_seconds():
    """Measured on unequal ports, an exchange waits for the slowest: what it takes beyond that port's bytes is start-up."""
    startup_s, slow_Bps, fast_Bps = 1e-5, 1e9, 4e9
    sizes = np.geomspace(1e3, 1e7, 20)
    ports_Bps = np.array([fast_Bps, fast_Bps, fast_Bps, slow_Bps])
    network = Network(ports_Bps, ports_Bps, curves=(TransferCurve(3, sizes, startup_s + sizes / slow_Bps),))
    for pairs, Bps in (([0, 1], fast_Bps), ([0, 3], slow_Bps)):
        bytes_GG = np.zeros((4, 4), dtype=np.int64)
        bytes_GG[*pairs] = 1_000_000
        order = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))
        assert timed(order, bytes_GG, network).makespan_s == pytest.approx(startup_s + 1e6 / Bps, rel=1e-3)


def test_no_scheduled_exchange_is_faster_than_its_ports():
    network = replace(Network.equal(4, 1e3), curves=CURVES)
    bytes_GG = uniform(4, 10_000)
    order = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))
    assert timed(order, bytes_GG, network).makespan_s == pytest.approx(30.0)


STARTUP_S, BUCKET_BYTES = 0.5, 4000.0


def of_buckets(ranks):
    """Ports of 1000 bytes a second whose token buckets let BUCKET_BYTES pass at once."""
    sizes = np.unique(np.concatenate([np.geomspace(1.0, 1e6, 400), [BUCKET_BYTES]]))
    seconds_X = STARTUP_S + np.maximum(sizes - BUCKET_BYTES, 0.0) / 1e3
    return replace(Network.equal(ranks, 1e3), curves=tuple(TransferCurve(many, sizes, seconds_X) for many in (1, 2, 3)))


@pytest.mark.parametrize("size", [100, 1000, 3000, 100_000])
def test_a_prediction_lets_at_once_pass_what_was_measured_to(size):
    network, bytes_GG = of_buckets(4), uniform(4, size)
    at_once, in_turn = (
        ORDER[method](bytes_GG, network, rng=np.random.default_rng(0)) for method in ("all-at-once", "openshop")
    )
    measured_s = STARTUP_S + max(3 * size - BUCKET_BYTES, 0.0) / 1e3
    assert steps_seconds(at_once, bytes_GG[None], network) == pytest.approx(measured_s, rel=1e-2)
    # one at a time, each message pays its start-up, and one bucket serves all three
    found_s = steps_seconds(in_turn, bytes_GG[None], network)
    assert measured_s * 0.99 <= found_s <= (measured_s + 2 * STARTUP_S) * 1.01


def test_ports_let_bytes_pass_at_once_only_after_a_rest():
    """Three exchanges of 6000 bytes: the first uses up the bucket, the second comes at once, the third after two seconds."""
    network, bytes_GG = of_buckets(2), np.array([[0, 6000], [0, 0]])
    order, switch, ends_s = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0)), Switch(network), []
    for rest_s in (0.0, 0.0, 2.0):
        switch.run(switch.now_s + rest_s)
        number, began_s = switch.open(order, bytes_GG), switch.now_s
        for rank in range(2):
            switch.join(number, rank)
        while switch.busy:
            switch.run()
        switch.close(number)
        ends_s.append(switch.now_s - began_s)
    assert ends_s == pytest.approx([STARTUP_S + 2.0, 6.0, 4.0], rel=0.01)


@settings(max_examples=25)
@given(traffic=traffics_on_ports(equal=True, startups=(0.5,)))
def test_without_buckets_predictions_are_those_of_schedules(traffic):
    bytes_GG, network = traffic
    sizes = np.geomspace(1e-6, max(1.0, float(bytes_GG.sum())), 300)
    network = replace(network, curves=(TransferCurve(1, sizes, 0.5 + sizes / network.out_Bps_G[0]),))
    order = ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))
    found_s = steps_seconds(order, bytes_GG[None], network)
    assert found_s == pytest.approx(timed(order, bytes_GG, network).makespan_s, rel=1e-3)


def test_wrong_curves_are_refused():
    for args, said in (
        ((0, [1], [1]), "partners must be"),
        ((1, [1, 1], [1, 2]), "bytes that rise"),
        ((1, [1, 2], [2, 1]), "never fall"),
        ((1, [1, 2], [1]), "as many seconds as bytes"),
        ((1, [], []), "as many seconds as bytes"),
    ):
        with pytest.raises(BadInput, match=said):
            TransferCurve(*args)
    with pytest.raises(BadInput, match="two of 3"):
        replace(Network.equal(2), curves=(CURVES[1], CURVES[1]))
    fabric = servers([0, 1], [1.0, 1.0], [1.0, 1.0], 1.0)
    with pytest.raises(BadInput, match="no fabric beside link curves"):
        replace(Network.equal(2), fabric=fabric, curves=CURVES)
    with pytest.raises(BadInput, match=r"no incast beside link curves, which include it, found 0\.25"):
        replace(Network.equal(2), incast=0.25, curves=CURVES)


def test_without_startup_has_no_curves():
    assert replace(Network.equal(4, 2e10), curves=CURVES).without_startup == Network.equal(4, 2e10)


def test_faster_ports_keep_start_ups():
    faster = [curve.at_rate(4.0) for curve in CURVES]
    assert exchange_seconds(faster, [1.0, 4e7], 1) == pytest.approx(exchange_seconds(CURVES, [1.0, 1e7], 1))


def test_plans_on_curves_choose_between_one_at_a_time_and_all_at_once():
    """Every exchange takes a second whatever its bytes: three messages at once are faster than three in turn."""
    profile = draw_profile("uniform", CONFIG, SyntheticOptions(sources=4, window_tokens=32))
    line = cluster(1e6, 1e6, 1e6, 1e6)
    plans = [
        make_plan(machines, [profile])
        for machines in (line, replace(line, link_curves=(TransferCurve(1, [1, 1e9], [1.0, 1.0]),)))
    ]
    assert [plan.options.order for plan in plans] == ["openshop-best", "auto"]
    assert {order.method for order in plans[1].models[0].dispatch_L} == {"all-at-once"}
