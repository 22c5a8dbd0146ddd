"""The sweep: its grammar, and points whose outcome arithmetic knows."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.sweep import Point, Setting, read_axis, sweep
from aurora.errors import BadInput
from aurora.types import Fabric, Link
from tests.conftest import cluster

CONFIG = {"num_local_experts": 4, "num_hidden_layers": 3, "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64}
FOUR = cluster(1e6, 1e6, 1e6, 1e6)


def test_axes():
    assert read_axis("bandwidth=10e9:1000e9:log3")[1] == pytest.approx((1e10, 1e11, 1e12))
    assert read_axis("skew=0:2:5")[1] == pytest.approx((0, 0.5, 1, 1.5, 2))
    assert read_axis("tokens=8:8:1") == ("tokens", (8.0,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour=1:2:3", "expected one of bandwidth, skew, tokens, speed before =, found 'colour'"),
        ("skew", r"expected skew=FIRST:LAST:COUNT or skew=FIRST:LAST:logCOUNT"),
        ("skew=0:1", "expected skew=FIRST:LAST:COUNT"),
        ("skew=0:1:log", "expected skew=FIRST:LAST:COUNT"),
        ("skew=0:2:log3", "expected 1e-06 <= FIRST <= LAST"),
        ("speed=2:1:3", "FIRST <= LAST"),
        ("speed=1:inf:3", "expected speed=FIRST:LAST:COUNT"),
        ("tokens=0:4:3", "expected 1 <= FIRST"),
        ("skew=0:nan:2", "expected skew=FIRST:LAST:COUNT"),
        ("skew=0:1:0", "a COUNT from 1 to 10000"),
    ],
)
def test_axes_that_say_nothing(text, said):
    with pytest.raises(BadInput, match=said):
        read_axis(text)


def test_one_or_two_axes_each_once():
    axis = read_axis("skew=0:1:2")
    for axes in ([], [axis, axis], [axis, read_axis("speed=1:2:2"), read_axis("tokens=1:2:2")]):
        with pytest.raises(BadInput, match="expected one or two keys, each once"):
            sweep(FOUR, CONFIG, axes)
    with pytest.raises(BadInput, match="at most 10000 points, found 40000"):
        sweep(FOUR, CONFIG, [read_axis("skew=0:1:200"), read_axis("speed=1:2:200")])


def test_a_grid_in_order_with_progress():
    seen = []
    axes = [read_axis("bandwidth=1e6:1e8:log2"), read_axis("skew=0:1:2")]
    points = sweep(FOUR, CONFIG, axes, progress=lambda *at: seen.append(at))
    assert [(p.setting.bandwidth, p.setting.skew) for p in points] == [(1e6, 0), (1e6, 1), (1e8, 0), (1e8, 1)]
    assert seen == [("points", done, 4) for done in range(5)]
    assert points == sweep(FOUR, CONFIG, axes)


def test_where_the_network_is_all_bandwidth_scales_time_and_changes_no_speedup():
    """A thousandth of the rate on ports and links, and compute that takes next to nothing."""
    links = tuple(Link(*way, 1e3) for g in range(4) for way in ((g, "s"), ("s", g)))
    machines = replace(FOUR, fabric=Fabric(4, links))
    fast, slow = (sweep(machines, CONFIG, [read_axis(f"bandwidth={b}:{b}:1")])[0] for b in (1.0, 1e-3))
    assert slow.order_s["openshop"] == pytest.approx(1000 * fast.order_s["openshop"], rel=1e-4)
    assert list(slow.speedups.values()) == pytest.approx(list(fast.speedups.values()), rel=1e-4)


def test_where_the_network_is_free_no_order_pays():
    point = sweep(FOUR, CONFIG, [read_axis("bandwidth=1e20:1e20:1")])[0]
    *orders, _ = point.speedups.values()
    assert orders == pytest.approx([1, 1])
    assert point.pays in ("neither", "colocating")


def test_what_pays():
    def pays(deduplicated, random, together):
        return Point(Setting(), {"openshop": 1.0, "all-at-once": deduplicated, "random": random}, 1.0, together).pays

    assert pays(1.2, 1.3, 1.5) == "both"
    assert pays(1.2, 1.3, 1.0) == "order"
    assert pays(1.0, 1.3, 1.5) == "colocating"
    assert pays(1.2, 1.04, 1.04) == "neither"
    assert np.isclose(Point(Setting(), {"openshop": 2.0, "random": 3.0}, 4.0, 6.0).speedups["order over random"], 1.5)
