"""A fitted link against the link that made the seconds, the switch, and recorded seconds."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.measured_links import LinkFit, fit_link
from aurora.algorithms.network.switch import timed
from aurora.types import Network

RECORDED = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[4] / "shared" / "data")) / "gpu_moe_aiconfigurator"
SIZES = 2 ** np.arange(9, 30)
STARTUPS = st.floats(1e-6, 1e-4)
RATES = st.floats(1e9, 1e12)


@given(st.floats(0.0, 1e-2), st.floats(1e6, 1e11))
def test_a_line_is_told_exactly(startup_s, rate_Bps):
    found = fit_link(SIZES, startup_s + SIZES / rate_Bps)
    assert (found.startup_s, found.rate_Bps, found.median_error) == pytest.approx(
        (startup_s, rate_Bps, 0.0), rel=1e-3, abs=1e-6
    )
    assert found.seconds(SIZES) == pytest.approx(startup_s + SIZES / rate_Bps, rel=1e-3)


@given(st.integers(1, 80_000), st.floats(1e6, 1e9))
def test_what_a_shaper_lets_pass_at_once_moves_no_rate(burst, rate_Bps):
    """A token bucket's burst makes every message quicker by the same time."""
    sizes = SIZES[SIZES > 80_000]
    assert fit_link(sizes, (sizes - burst) / rate_Bps).rate_Bps == pytest.approx(rate_Bps)


def test_one_size_and_noise_still_give_a_rate():
    assert fit_link([512], [0.5]).rate_Bps == 512 / 0.5
    assert fit_link([512, 1024], [0.5, 0.4]).rate_Bps == 1024 / 0.4


@given(st.integers(2, 6), st.integers(1, 10**9), STARTUPS, RATES)
def test_a_uniform_all_to_all_posted_at_once_takes_what_its_link_says(gpus, part, startup, rate):
    """Every port shares its rate evenly and pays its start-ups together; one partner at a time pays them in turn."""
    bytes_GG = np.where(np.eye(gpus, dtype=bool), 0, part)
    network = Network.equal(gpus, rate, startup)
    link = LinkFit(startup, rate, 0.0)
    seconds = {}
    for method in ("all-at-once", "openshop"):
        order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
        seconds[method] = timed(order, bytes_GG, network).makespan_s
    assert seconds["all-at-once"] == pytest.approx(float(link.seconds((gpus - 1) * part)))
    assert seconds["openshop"] >= (gpus - 1) * float(link.seconds(part)) * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["a100_sxm", "h100_sxm"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_recorded_all_to_alls_from_1_mib_on_follow_a_link(kind, gpus):
    """Fitted to every other size on NVLink, the link is within 15 % of most of the sizes held back."""
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
    assert np.median(abs(link.seconds(sent[1::2]) / seconds[1::2] - 1)) < 0.15
