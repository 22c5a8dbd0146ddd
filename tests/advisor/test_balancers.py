"""Methods against imbalance: what they may know, their order, and figures by brute force."""

import json
from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.balancers import BALANCERS, RECORDED_RANGE, BalancingCase, reach, recorded_range
from aurora.advisor.ceiling import TOKENS, RankCurve, ServedTraffic
from aurora.errors import BadInput
from aurora.io.files import shipped
from tests.advisor.test_ceiling import SKEWED, profile

SEE_BATCH = ("lplb", "exact")  # methods that need the batch's counts
PLANNED_ONCE = ("static", "eplb", "lplb")


@pytest.fixture(scope="module")
def drifting():
    """Windows whose shares wander, with chance."""
    rng = np.random.default_rng(0)
    walk_TE = np.exp(np.cumsum(rng.normal(0, 0.05, (20, 8)), axis=0)) * SKEWED
    return profile(walk_TE, 4000, rng)


def case(traffic, slots=3, curve=TOKENS, **others):
    return BalancingCase(traffic, 4, slots, curve, 1000, **others)


def served(traffic, step_tokens=200):
    return ServedTraffic.of(traffic, step_tokens, np.random.default_rng(0))


@pytest.mark.parametrize("curve", [TOKENS, RankCurve(50.0, 40.0, 0.01)])
def test_every_method_is_between_the_ceiling_and_a_loss_that_it_states(drifting, curve):
    found = {each.name: each for each in reach(drifting, 4, 3, step_tokens=200, curve=curve)}
    assert set(found) == set(BALANCERS)
    assert found["exact"].share == pytest.approx(1.0)
    assert found["exact"].ratio == pytest.approx(1.0)
    assert found["linear"].share == pytest.approx(0.0)
    for each in found.values():
        assert each.ratio >= 1 - 1e-9
        assert each.low <= each.ratio <= each.high
        assert each.worst >= each.ratio - 1e-9
        assert each.share == pytest.approx((found["linear"].ratio - each.ratio) / (found["linear"].ratio - 1), abs=1e-9)
        assert each.memory_bytes == max(each.slots - 2, 0) * drifting.layers * drifting.expert_bytes
    if curve is TOKENS:
        assert found["lplb"].ratio <= found["eplb"].ratio + 1e-9
        assert found["static"].share > 0.5


@pytest.mark.parametrize("name", PLANNED_ONCE)
def test_what_was_planned_for_a_block_does_not_know_it(drifting, name):
    traffic = served(drifting)
    other = traffic.load_TLE.copy()
    last_T = traffic.block_T == traffic.block_T[-1]
    other[last_T] = other[last_T][:, :, ::-1]
    before, after = (BALANCERS[name](case(each)).seconds_D for each in (traffic, replace(traffic, load_TLE=other)))
    at_D = traffic.block_D == traffic.block_T[-1]
    assert (before[at_D] == after[at_D]).all()
    assert (before[~at_D] != after[~at_D]).any()


def test_what_is_planned_while_serving_knows_the_past_alone(drifting):
    traffic = served(drifting)
    other = traffic.load_TLE.copy()
    other[12:] = other[12:, :, ::-1] ** 2
    before, after = (BALANCERS["eplb-every"](case(each)).seconds_D for each in (traffic, replace(traffic, load_TLE=other)))
    known_D = traffic.window_D <= 12
    assert (before[known_D] == after[known_D]).all()
    assert (before[~known_D] != after[~known_D]).any()


@pytest.mark.parametrize("name", SEE_BATCH)
def test_what_sees_the_batch_needs_nothing_else_of_its_window(drifting, name):
    traffic = served(drifting)
    few = replace(traffic, step_DLE=traffic.step_DLE[::2], window_D=traffic.window_D[::2])
    all_D, few_D = (BALANCERS[name](case(each)).seconds_D for each in (traffic, few))
    assert few_D == pytest.approx(all_D[::2])


def test_eplb_plans_by_the_windows_before_and_counts_what_gpus_fetch(drifting):
    traffic = served(drifting)
    windows = len(traffic.load_TLE)
    every, lag = 3, 2
    found = BALANCERS["eplb-every"](case(traffic, every=every, lag=lag))
    held = {0: BALANCERS["linear"], **{end: case(traffic).plan(traffic.load_TLE[end - every : end].sum(axis=0), "eplb", 3) for end in range(every, windows, every)}}  # fmt: skip
    fetched, seconds_D = 0, np.zeros(len(traffic.step_DLE))
    for window in range(windows):
        end = max((window - lag) // every, 0) * every
        before = max((window - 1 - lag) // every, 0) * every
        at_D = traffic.window_D == window
        if not end:
            seconds_D[at_D] = BALANCERS["linear"](case(traffic)).seconds_D[at_D]
        else:
            seconds_D[at_D] = traffic.seconds_D([held[end]], np.zeros(windows, dtype=np.int64), TOKENS)[at_D]
        if end != before and traffic.block_T[window] > 0:
            old = held[before].held_LGP if before else np.arange(8).reshape(1, 4, 2).repeat(2, axis=0)
            pairs = zip(old.reshape(8, -1).tolist(), held[end].held_LGP.reshape(8, -1).tolist(), strict=True)
            fetched += sum(len(set(new) - set(was) - {-1}) for was, new in pairs)
    assert found.seconds_D == pytest.approx(seconds_D)
    assert found.fetched == pytest.approx(fetched / np.count_nonzero(traffic.block_T > 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ("magic",)}, "methods"),
        ({"every": 0}, "expected `every` of one or more"),
        ({"slots_per_gpu": 1}, "`slots_per_gpu`: expected at least 2"),
    ],
)
def test_bad_arguments_are_named(drifting, arguments, message):
    with pytest.raises(BadInput, match=message):
        reach(drifting, 4, **arguments)


@pytest.mark.parametrize(
    ("gpus", "slots", "step_tokens"), [(16, 1, None), (16, 2, 64), (1, None, 64), (8, 8, 1.0), (5, 3, 1e9)]
)
def test_any_number_of_gpus_slots_and_tokens_is_served(drifting, gpus, slots, step_tokens):
    for each in reach(drifting, gpus, slots, step_tokens=step_tokens, curve=RankCurve(1.0, 2.0, 3.0), every=2, lag=1):
        assert np.isfinite([each.ratio, each.share, each.worst, each.moved_bytes]).all()
        assert each.ratio >= 1 - 1e-9


def test_the_range_over_recorded_models_is_that_of_the_nearest_recordings():
    found = recorded_range(8, 2048)
    assert len(found.models) >= 3
    assert set(found.parts) == {"whole", "stable", "drifting", "per_step"}
    for least, most in (*found.parts.values(), *found.ratios.values()):
        assert least <= most
    assert found.ratios["linear"][0] >= 1
    few, many = (recorded_range(8, tokens).parts["per_step"] for tokens in (128, 32768))
    assert few[0] > many[0]  # less is chance in larger steps
    assert few[1] > many[1]
    assert recorded_range(8).parts["whole"][1] >= found.parts["whole"][1]
    assert recorded_range(1000, 1.0).gpus == recorded_range(64, 100).gpus


def test_shipped_ranges_add_up():
    for row in json.loads(shipped(RECORDED_RANGE).read_text())["recordings"]:
        parts = row["parts"]
        assert parts["stable"] + parts["drifting"] + parts["per_step"] == pytest.approx(parts["whole"], abs=3e-4)
        assert set(row["ratios"]) <= set(BALANCERS)
        assert min(row["ratios"].values()) >= 1
