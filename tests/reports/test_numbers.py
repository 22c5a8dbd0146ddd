"""Worth of a plan, computed again from the raw trace; traffic and loads, by hand and from first principles."""

import re
from dataclasses import replace

import numpy as np
import pytest

from aurora.planner.plan import make_plan
from aurora.reports.formatting import DASH
from aurora.reports.html import count, tiles
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers, contiguous
from aurora.types import Cluster, Gpu, PlanOptions, Servers
from tests.reports.conftest import profile


def tokens(profile):
    return profile.tokens_TLSE[:, 0].sum() / profile.top_k  # every layer has all tokens


def test_the_last_measured_run_is_what_the_plan_gives(alone):
    (_, _), (name, trace) = alone.traces
    found = ReportNumbers(alone).serving
    took_s = trace.end_s_X.max() - trace.start_s_X.min()
    assert (found.by, found.name, found.steps) == ("measured", name, alone.profiles[0].windows)
    assert found.tokens / found.seconds == pytest.approx(tokens(alone.profiles[0]) / took_s)
    assert found.step_s == pytest.approx(took_s / 2)
    shown = tiles(ReportNumbers(alone))
    assert [tile.title for tile in shown[:2]] == ["Tokens processed per second, measured", "Time per step, measured"]
    assert "MoE layers only" not in shown[0].note
    assert "MoE layers only" in tiles(ReportNumbers(replace(alone, traces=alone.traces[:1])))[0].note


def test_runs_on_other_prompts_have_tokens_by_their_bytes(alone):
    name, trace = alone.traces[1]
    half = replace(alone, traces=((name, replace(trace, bytes_X=trace.bytes_X // 2)),))
    found = ReportNumbers(half).serving
    assert found.tokens == pytest.approx(tokens(alone.profiles[0]) / 2, rel=1e-3)


def test_compared_runs_serve_the_same_tokens(alone):
    (_, run), others = alone.traces[1], alone.traces[1:]
    slow = replace(run, start_s_X=3 * run.start_s_X, end_s_X=3 * run.end_s_X)
    found = ReportNumbers(replace(alone, traces=(("in turn", slow), *others)))
    before, after = found.speedup
    assert (before.name, before.steps) == ("in turn", after.steps)
    rate, step = tiles(found)[:2]
    assert f"against {count(after.tokens / before.seconds)}: in turn" in rate.note
    assert all("against" in tile.note and "in turn" in tile.note for tile in (rate, step))


def test_without_runs_it_is_the_objective_and_without_traffic_nothing(alone):
    found = ReportNumbers(replace(alone, traces=()))
    before, after = found.speedup
    assert found.serving == after
    assert (before.seconds, after.seconds) == found.objective_s
    assert after.tokens == tokens(alone.profiles[0]) / alone.profiles[0].windows  # of one window, by the mean of all
    assert ReportNumbers(ReportInputs(alone.plan)).serving is None


def test_times_of_other_traffic_are_not_compared(alone):
    plan, ((name, predicted), (other, measured)) = alone.plan, alone.traces
    assert ReportNumbers(alone).why_incomparable is None
    fewer = replace(measured, bytes_X=measured.bytes_X // 10, end_s_X=measured.start_s_X + 0.1)
    found = ReportNumbers(ReportInputs(plan, ((name, predicted), (other, fewer)), alone.profiles))
    said = f"{name} dispatches .*, {other} .*: aurora run --compare predicts the run's own traffic"
    assert re.fullmatch(said, found.why_incomparable)
    (tile,) = [each for each in tiles(found) if each.title == "Prediction error"]
    assert (tile.value, tile.note) == (DASH, f"Of other traffic: {found.why_incomparable}")


def test_contiguous_deals_experts_in_order():
    assert contiguous(profile(sources=3)).slots_LG == (((0, 1, 2), (3, 4, 5), (6, 7)),) * 2


def test_tokens_travel_from_sources_to_where_experts_sit(alone):
    (given,) = alone.profiles
    (flows,) = ReportNumbers(alone).traffic_M
    for side, placed in enumerate((contiguous(given), alone.plan.models[0].placement)):
        for layer in range(2):
            tokens_SE = given.tokens_TLSE[:, layer].sum(axis=0)
            for gpu, held in enumerate(placed.slots_LG[layer]):
                into_S = tokens_SE[:, list(held)].sum(axis=1)
                into_S[gpu] = 0
                assert np.array_equal(flows.tokens_BLGG[side, layer, :, gpu], into_S)
    sends, receives = flows.tokens_BLGG.sum(axis=3), flows.tokens_BLGG.sum(axis=2)
    assert np.allclose(flows.port_s_BLG, np.maximum(sends, receives) * given.dispatch_bytes / 1e6)
    assert (flows.expert_s_BLG.max(axis=2) >= flows.expert_bound_s_L * (1 - 1e-9)).all()


def test_the_plan_is_no_slower_than_index_order_and_at_its_own_value(alone):
    before_s, after_s = ReportNumbers(alone).objective_s
    assert after_s == pytest.approx(alone.plan.objective_s)
    assert before_s >= after_s


@pytest.mark.parametrize("shared", [False, True])
def test_the_nics_of_servers_count_where_they_take_longer_than_ports(shared):
    gpus = tuple(Gpu(f"g{i}", "x", i // 2, 1e9, 1e9, 10**12) for i in range(4))
    machines, given = Cluster("servers", gpus, Servers.of([0, 0, 1, 1], 1e6, shared)), profile(2)
    plan = make_plan(machines, [given], PlanOptions("contiguous"))
    (flows,) = ReportNumbers(ReportInputs(plan, profiles=(given,))).traffic_M
    for layer in range(2):
        far_GG = flows.tokens_BLGG[1, layer] * given.dispatch_bytes
        far_GG[:2, :2] = far_GG[2:, 2:] = 0
        sums = [far_GG.sum(axis=axis) for axis in (0, 1)]
        if shared:
            sums = [sum_G.reshape(2, 2).sum(axis=1).repeat(2) for sum_G in sums]
        assert flows.port_s_BLG[1, layer] == pytest.approx(np.maximum(*sums) / 1e6)
