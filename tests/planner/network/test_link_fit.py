"""A fitted link against the link that made the seconds, every line that could be the best, the switch, and recorded seconds."""

import csv
import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.link_fit import Link, fit_link
from aurora.planner.network.schedule_time import timed
from aurora.types import Network

RECORDED = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[4] / "shared" / "data")) / "gpu_moe_aiconfigurator"
SIZES = 2 ** np.arange(9, 30)
STARTUPS = st.floats(1e-6, 1e-4)
RATES = st.floats(1e9, 1e12)
NOISE = st.lists(st.floats(-0.03, 0.03), min_size=len(SIZES), max_size=len(SIZES)).map(np.array)


@given(STARTUPS, RATES)
def test_clean_seconds_give_the_link_back(startup, rate):
    link = fit_link(SIZES, Link(startup, rate, 0.0).seconds(SIZES))
    assert link.startup_s == pytest.approx(startup, rel=1e-5)
    assert link.rate_Bps == pytest.approx(rate, rel=1e-5)
    assert link.error < 1e-6


@given(STARTUPS, RATES, NOISE)
def test_noisy_seconds_give_nearly_the_link_back(startup, rate, noise):
    """Where six sizes or more are mostly start-up, or mostly rate, 3 % of noise moves it by less than 10 %."""
    link = fit_link(SIZES, Link(startup, rate, 0.0).seconds(SIZES) * (1 + noise))
    if startup * rate > 64 * SIZES[0]:
        assert link.startup_s == pytest.approx(startup, rel=0.1)
    if startup * rate < SIZES[-1] / 64:
        assert link.rate_Bps == pytest.approx(rate, rel=0.1)
    assert link.error <= 0.031


@given(STARTUPS, RATES, st.sets(st.integers(0, len(SIZES) - 1), max_size=2), st.floats(1.5, 20.0))
def test_two_slow_outliers_move_nothing(startup, rate, slow, factor):
    link_bytes = startup * rate
    sizes = np.geomspace(link_bytes / 1000, link_bytes * 1000, len(SIZES)).astype(np.int64)
    seconds = Link(startup, rate, 0.0).seconds(sizes)
    seconds[sorted(slow)] *= factor
    link = fit_link(sizes, seconds)
    assert link.startup_s == pytest.approx(startup, rel=1e-4)
    assert link.rate_Bps == pytest.approx(rate, rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=7))
def test_no_line_has_less_error(points):
    """An optimum lies on two points, or on one with a start-up or a slope of zero: try them all."""
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    if len(set(sizes.tolist())) < 2:
        return
    lines = [(t, 0.0) for t in seconds] + [(0.0, t / m) for m, t in points]
    for (m, t), (n, u) in combinations(points, 2):
        if m != n:
            slope = (u - t) / (n - m)
            lines.append((t - slope * m, slope))
    errors = {line: np.mean(abs((line[0] + line[1] * sizes) / seconds - 1)) for line in lines if min(line) >= 0}
    best = min(errors.values())
    try:
        link = fit_link(sizes, seconds)
    except BadInput:
        assert min(error for line, error in errors.items() if line[1] == 0) <= best + 1e-7
    else:
        assert link.error == pytest.approx(best, abs=1e-7)
        assert np.mean(abs(link.seconds(sizes) / seconds - 1)) == pytest.approx(link.error, abs=1e-7)


@given(st.integers(2, 6), st.integers(1, 10**9), STARTUPS, RATES)
def test_a_uniform_all_to_all_posted_at_once_takes_what_its_link_says(gpus, part, startup, rate):
    """Every port shares its rate evenly and pays its start-ups together; one partner at a time pays them in turn."""
    bytes_GG = np.where(np.eye(gpus, dtype=bool), 0, part)
    network = Network.equal(gpus, rate, startup)
    link = Link(startup, rate, 0.0)
    seconds = {}
    for method in ("all-at-once", "openshop"):
        order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
        seconds[method] = timed(order, bytes_GG, network).makespan_s
    assert seconds["all-at-once"] == pytest.approx(float(link.seconds((gpus - 1) * part)))
    assert seconds["openshop"] >= (gpus - 1) * float(link.seconds(part)) * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["a100_sxm", "h100_sxm"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_recorded_all_to_alls_from_1_mib_on_follow_a_link(kind, gpus):
    """Fitted to every other size on NVLink, the link is within 10 % of most of the sizes held back."""
    path = RECORDED / f"collectives_{kind}.csv"
    if not path.exists():
        pytest.skip("the recorded collectives are absent")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["op_name"] == "alltoall" and row["nccl_dtype"] == "int8"]
    points = sorted((int(r["message_size_elems"]), float(r["latency_ms"]) / 1e3) for r in rows if int(r["num_gpus"]) == gpus)
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    sent = sizes // gpus * (gpus - 1)
    sent, seconds = sent[sent >= 1 << 20], seconds[sent >= 1 << 20]
    link = fit_link(sent[::2], seconds[::2])
    assert np.median(abs(link.seconds(sent[1::2]) / seconds[1::2] - 1)) < 0.1


@pytest.mark.parametrize(
    ("sizes", "seconds", "found"),
    [
        ([], [], "expected integers, found float64"),
        ([8], [1.0], "two sizes, found 1"),
        ([8, 8], [1.0, 2.0], "two sizes, found 1"),
        ([8, 16], [1.0], "found 1 and 2"),
        ([8, 16], [1.0, float("nan")], "finite numbers, found nan"),
        ([8, 16], [1.0, float("inf")], "finite numbers, found inf"),
        ([8, 16], [1.0, 0.0], "seconds must be above zero, found 0.0"),
        ([0, 16], [1.0, 2.0], "message bytes must be above zero, found 0"),
        ([-8, 16], [1.0, 2.0], "zero or more, found -8"),
        ([8.0, 16.0], [1.0, 2.0], "expected integers, found float64"),
        ([8, 16], [2.0, 1.0], "no rate can be told"),
        ([8, 16], [1.0, 1.0], "no rate can be told"),
    ],
)
def test_refusals(sizes, seconds, found):
    with pytest.raises(BadInput, match=found) as refusal:
        fit_link(sizes, seconds)
    assert "\n" not in str(refusal.value)
