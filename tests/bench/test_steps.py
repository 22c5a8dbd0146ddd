"""The bench of steps: its errors on measured steps, where they are at hand, and its parts without them."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import steps
from steps import Row, chunks, pairs

from aurora.advisor.engines.engine import Layout
from aurora.advisor.served_sizes import ServedSizes
from aurora.advisor.step_constants import DEFAULT
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.io.clusters import load_gpus
from aurora.io.model_configs import load_model_config

sys.path.pop()  # that folder has a vllm.py, which is not vLLM

measured = pytest.mark.skipif(not steps.DATA.is_dir(), reason="needs measured steps (AURORA_DATA)")


def test_pairs_are_of_the_same_step_on_two_configurations():
    step, other = SchedulerStep(decode_requests=4, kv_tokens=4000), SchedulerStep(decode_requests=5, kv_tokens=4000)
    rows = [
        Row("a", Layout(2), "decode", (step,), 1.0),
        Row("b", Layout(data=2, expert=2), "decode", (step,), 2.0),
        Row("c", Layout(4), "decode", (step,), 1.02),  # as fast as the first
        Row("d", Layout(2), "decode", (other,), 9.0),
    ]
    assert pairs(rows, [1.0, 3.0, 1.0, 1.0], alike=True) == (1, 1)
    assert pairs(rows, [3.0, 1.0, 2.0, 1.0], alike=False) == (2, 0)


def test_a_prompt_has_the_chunks_that_its_run_had():
    row = {"run": "a", "phase": "context", "prefill_requests": "1"}
    read = [row | {"prefill_tokens": "3000", "kv_tokens": "0"}, row | {"prefill_tokens": "1000", "kv_tokens": "3000"}]
    assert chunks(read, "a", 4000) == (SchedulerStep(3000), SchedulerStep(1000, kv_tokens=3000))
    assert chunks(read, "b", 4000) == (SchedulerStep(4000),)


def test_a_fit_recovers_the_constants_that_its_steps_show():
    truth = replace(DEFAULT, kernel_s=5e-6, launch_s=9e-6)
    kind, sizes = load_gpus()["NVIDIA H100 80GB HBM3"], ServedSizes.of(load_model_config("mixtral-topics"))
    drawn = [SchedulerStep(decode_requests=many, kv_tokens=100 * many) for many in (1, 8, 64)]
    drawn += [SchedulerStep(prefill_tokens=many) for many in (100, 700, 2000)]
    took_s = [step_seconds(sizes, kind, Layout(), step, constants=truth).total for step in drawn]
    fitted = steps.fit(DEFAULT, sizes, kind, Layout(), drawn, took_s)
    again = [step_seconds(sizes, kind, Layout(), step, constants=fitted).total for step in drawn]
    assert again == pytest.approx(took_s, rel=0.05)
    assert fitted.link_share == pytest.approx(DEFAULT.link_share, rel=1e-3)  # one GPU says nothing of links


@measured
def test_configurations_that_nothing_was_fitted_to():
    name, run = steps.FILES[steps.MODEL]
    kind = load_gpus()[steps.KIND]
    rows = [row for row in steps.rows_of(name) if row.run != run]
    predicted = [steps.predict(steps.MODEL, kind, row, DEFAULT) for row in rows]
    errors = np.abs([value / row.seconds - 1 for row, value in zip(rows, predicted, strict=True)])
    assert len({row.run for row in rows}) >= 3
    assert np.median(errors) <= 0.10
    assert np.quantile(errors, 0.9) <= 0.25
    total, right = pairs(rows, predicted, alike=True)
    assert right >= 0.9 * total > 0


def test_published_steps_of_other_gpus_are_within_a_quarter():
    """H800 and H20: the shares of kernels come from tables of these GPUs; nothing is fitted to these steps."""
    errors = {name: error for name, _, error in steps.published()}
    assert len(errors) == 4
    assert all(abs(error) < 0.25 for error in errors.values()), errors


@pytest.mark.skipif(not steps.TABLES.is_dir(), reason="needs recorded exchanges (AURORA_DATA)")
def test_exchanges_within_and_between_servers_are_as_recorded():
    """DeepEP on 1 to 8 servers of 8 H100: the NICs' rate is that of its low-latency kernels with many tokens, no more."""
    errors: dict[tuple[str, int], list[float]] = {}
    for exchange, servers, tokens, error in steps.exchanges():
        if exchange == "deepep-ll" or tokens >= steps.MANY:
            errors.setdefault((exchange, servers), []).append(abs(error))
    assert set(errors) == {(exchange, servers) for exchange in ("deepep-ll", "deepep-ht") for servers in (1, 2, 4, 8)}
    assert all(np.median(found) < 0.25 for found in errors.values()), errors
