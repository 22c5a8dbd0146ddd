"""Curves against brute force, exact lines, and recorded kernels whose points were held back."""

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.workload.curve_fit import fit_curve
from aurora.errors import BadInput

RECORDED = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[4] / "shared" / "data")) / "gpu_moe_aiconfigurator"

points = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-6, 10.0)), min_size=1, max_size=9, unique_by=lambda point: point[0]
).map(lambda rows: (np.array([float(tokens) for tokens, _ in rows]), np.array([seconds for _, seconds in rows])))


@given(points)
def test_a_curve_never_falls_and_keeps_to_measured_points(measured):
    tokens, seconds = measured
    fit = fit_curve(tokens, seconds)
    assert (np.diff(fit.seconds_X) >= 0).all()
    assert set(fit.tokens_X) == set(tokens)
    assert seconds.min() * (1 - 1e-9) <= fit.seconds_X.min()
    assert fit.seconds_X.max() <= seconds.max() * (1 + 1e-9)


def test_a_line_is_kept_and_noise_its_median():
    tokens = 2.0 ** np.arange(12)
    exact = fit_curve(tokens, 1e-5 + tokens * 1e-7)
    assert exact(tokens) == pytest.approx(1e-5 + tokens * 1e-7, rel=1e-9)
    repeated = fit_curve(np.repeat(tokens, 3), np.outer(1e-5 + tokens * 1e-7, [1.0, 1.0, 50.0]).ravel())
    assert repeated(tokens) == pytest.approx(1e-5 + tokens * 1e-7, rel=1e-9)
    assert repeated(100.0) == pytest.approx(2e-5)
    falling = fit_curve([1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 1.0, 4.0])  # the middle two share their geometric mean
    assert falling.seconds_X.tolist() == pytest.approx([1.0, 2.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("tokens", "seconds", "says"),
    [
        ([], [], "as many seconds as tokens, one at least, found 0"),
        ([1.0, 2.0], [1.0], "found 1 and 2"),
        ([0.0], [1.0], "tokens must be above zero"),
        ([1.0], [0.0], "seconds must be above zero"),
        ([1.0], [float("nan")], "finite"),
    ],
)
def test_what_no_curve_goes_through(tokens, seconds, says):
    with pytest.raises(BadInput, match=says):
        fit_curve(np.array(tokens), np.array(seconds))


@pytest.mark.skipif(not RECORDED.exists(), reason="recorded kernels are not here: set AURORA_DATA")
@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "l40s"])
def test_recorded_kernels_predict_every_other_point(gpu):
    """Fused MoE layers with balanced tokens: the median curve's median held-back error is a few per cent."""
    series = defaultdict(list)
    with (RECORDED / f"moe_bf16_{gpu}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["distribution"] == "balanced":
                series[row["shape"], row["topk"], row["num_experts"], row["moe_ep_size"]].append(
                    (float(row["num_tokens"]), float(row["latency_ms"]) / 1e3)
                )
    errors = []
    for rows in series.values():
        tokens, seconds = np.array(sorted(rows)).T
        fit = fit_curve(tokens[::2], seconds[::2])
        inside = tokens[1::2] < tokens[::2][-1]
        errors.append(np.median(np.abs(fit(tokens[1::2]) / seconds[1::2] - 1)[inside]))
    assert len(errors) > 5
    assert np.median(errors) < 0.10
