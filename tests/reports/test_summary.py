"""Numbers from a trace, by hand."""

import numpy as np
import pytest

from aurora.planner.make_plan import make_plan
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.reports.summary import summarise
from aurora.reports.tables import as_text, percent, plan_table, profile_table, seconds, summary_table
from aurora.simulator.interpreter import simulate_plan
from aurora.types import SyntheticOptions, TraceRecorder
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}


def test_times_bounds_and_utilisation_by_hand():
    """Rank 0 computes 0..2 and sends 6 bytes to rank 1 in 2..8 over ports of 2 B/s, whose bound is 3 s."""
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 0.0, 2.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, True, 6, 2.0, 8.0)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, False, 6, 1.0, 8.0)
    recorder.add(1, 0, 0, 0, "expert", 8.0, 10.0)
    found = summarise(recorder.trace(), cluster(2.0, 2.0))
    assert found.seconds == 10
    assert found.utilisation_G.tolist() == pytest.approx([0.2, 0.2])
    (layer,) = found.layers
    assert (layer.seconds, layer.dispatch_s, layer.combine_s, layer.bound_s) == (10, 7, 0, 3)
    assert layer.gap == pytest.approx(7 / 3 - 1)


def test_a_simulated_exclusive_plan_is_at_its_own_bound():
    p = synthetic_profile("zipf:1", CONFIG, SyntheticOptions(sources=1, window_tokens=32))
    trace = simulate_plan(make_plan(cluster(1e6), [p]), [p])
    found = summarise(trace, cluster(1e6))
    assert found.utilisation == pytest.approx(1.0)  # one rank sends nothing
    assert found.exchange_gap == 0


def test_tables_show_every_layer_of_every_model():
    p = synthetic_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=32))
    plan = make_plan(cluster(1e6, 1e6), [p, p])
    trace = simulate_plan(plan, [p, p])
    text = as_text([profile_table(p), plan_table(plan), summary_table(summarise(trace, plan.cluster))])
    assert text.count("synthetic") == 1 + 4 + 4
    assert "colocated, equal GPUs" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 ns"), (2e-9, "2 ns"), (1e-6, "1 us"), (2.5e-3, "2.5 ms"), (1.234, "1.23 s"), (2500, "2500 s")]
)
def test_seconds_have_units(value, text):
    assert seconds(value) == text


def test_percent():
    assert percent(np.float64(0.1234)) == "12.3%"
