"""A prediction over a measurement: invented traces by hand, and a real run whose traffic is simulated."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.reports.compare import CaseErrors, PhaseError, compare
from aurora.reports.formatting import as_text
from aurora.reports.trace_tables import comparison_table
from aurora.simulator.interpreter import simulate_plan
from aurora.types import TraceRecorder
from tests.conftest import cluster
from tests.strategies import profiles


def trace(kind, gate_s, send, receive, counts_s=0.5, ranks=2):
    """Rank 0 computes gate_s, rank 1 half of it; then rank 0 sends 8 bytes: (start, end) of either end."""
    recorder = TraceRecorder(kind, ("m",), ranks)
    recorder.add(0, 0, 0, 0, "gate", 0.0, gate_s)
    recorder.add(1, 0, 0, 0, "gate", 0.0, gate_s / 2)
    recorder.add(0, 0, 0, 0, "counts", gate_s, gate_s + counts_s)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, True, 8, *send)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, False, 8, *receive)
    return recorder.trace()


def test_a_transfer_begins_when_both_of_its_ends_are_ready():
    """The receiver waits from 3, the sender comes at 5, all is there at 9: 4 seconds, of which 5 were predicted."""
    found = compare(trace("predicted", 1.0, (4.0, 9.0), (4.0, 9.0)), trace("measured", 2.0, (5.0, 8.5), (3.0, 9.0)))
    assert found.phases == (
        PhaseError("m", "gate", 0.75, 1.5),
        PhaseError("m", "counts", 0.25, 0.25),
        PhaseError("m", "dispatch", 5.0, 3.75),
        PhaseError("m", "waiting", 3.0, 3.25),
    )
    assert [phase.error for phase in found.phases] == pytest.approx([-0.5, 0.0, 1 / 3, -1 / 13])
    assert found.network == CaseErrors(1, 0.25, 0.25, "m, step 0, layer 0, dispatch")
    assert found.compute == CaseErrors(1, 0.5, 0.5, "m, step 0, layer 0, gate")
    assert (found.predicted_s, found.measured_s, found.error, found.unmatched) == (9.0, 9.0, 0.0, 0)
    text = as_text([comparison_table(found)])
    assert re.search(r"dispatch\W+5 s\W+3\.75 s\W+33\.3%", text)
    assert "network: median error 25.0% of 1 cases, worst 25.0% (m, step 0, layer 0, dispatch)" in " ".join(text.split())


def test_medians_and_the_worst_over_cases_and_what_is_in_one_trace_alone():
    recorders = {kind: TraceRecorder(kind, ("m",), 1) for kind in ("predicted", "measured")}
    for step, (says, took) in enumerate([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)]):
        for kind, seconds in (("predicted", says), ("measured", took)):
            recorders[kind].add(0, 0, step, 0, "expert", 10.0 * step, 10.0 * step + seconds)
    recorders["measured"].add(0, 0, 3, 0, "expert", 40.0, 41.0)
    found = compare(recorders["predicted"].trace(), recorders["measured"].trace())
    assert found.compute == CaseErrors(3, 0.5, 0.75, "m, step 2, layer 0, expert")
    assert (found.network, found.unmatched) == (None, 1)


@pytest.mark.full
@given(profiles(sources=2), profiles(sources=2))
def test_a_prediction_laid_over_itself_has_no_error(a, b):
    plan = make_plan(cluster(2.0, 3.0), [a, b])
    predicted = simulate_plan(plan, [a, b])
    found = compare(predicted, replace(predicted, kind="measured"))
    assert found.error == pytest.approx(0.0)
    for errors in (found.network, found.compute):
        assert errors is None or errors.worst == pytest.approx(0.0)
    assert all(phase.error in (None, pytest.approx(0.0)) for phase in found.phases)


@given(st.floats(0.1, 10.0))
def test_errors_do_not_depend_on_the_unit_of_time(scale):
    send, receive = (np.array(ends) for ends in ((5.0, 8.5), (3.0, 9.0)))
    found = compare(
        trace("predicted", scale, *(np.array([4.0, 9.0]) * scale,) * 2),
        trace("measured", 2 * scale, send * scale, receive * scale),
    )
    assert (found.network.worst, found.compute.worst) == pytest.approx((0.25, 0.5))


def test_traces_that_do_not_belong_together_are_refused():
    predicted, measured = trace("predicted", 1.0, (1.0, 2.0), (1.0, 2.0)), trace("measured", 1.0, (1.0, 2.0), (1.0, 2.0))
    with pytest.raises(BadInput, match="compare: expected a predicted trace, found a measured one"):
        compare(measured, measured)
    with pytest.raises(BadInput, match="compare: measured m on 2 ranks, predicted m on 3"):
        compare(replace(predicted, ranks=3), measured)
