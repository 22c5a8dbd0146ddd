"""Parts of an imbalance: steps cut from windows, and traffic whose parts are known by how it is made."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.advisor.ceiling import (
    TOKENS,
    RankCurve,
    SlotMap,
    imbalance_split,
    linear_map,
    map_seconds,
    perfect_seconds,
    planned_map,
    ratio_interval,
    serving_steps,
)
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.types import Gpu

CONFIG = {
    "num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 512, "intermediate_size": 1024,
}  # fmt: skip
SKEWED = np.array([8.0, 6, 5, 4, 3, 2, 1, 1])


def profile(share_TE, pairs, rng=None, sources=2):
    """Windows of so many pairs in each of two layers; without a generator, shares are exact."""
    share_TE = np.asarray(share_TE) / np.sum(share_TE, axis=1, keepdims=True)
    if rng is None:
        load_TE = np.rint(share_TE * pairs).astype(np.int64)
        tokens_TLSE = np.repeat(np.stack([load_TE, load_TE[:, ::-1]], axis=1)[:, :, None], sources, axis=2)
    else:
        drawn = [rng.multinomial(pairs // sources, share_E, size=(2, sources)) for share_E in share_TE]
        tokens_TLSE = np.stack(drawn)
    return Shape.of(CONFIG | {"num_local_experts": share_TE.shape[1]}).profile(tokens_TLSE, {})


def jitter(share_G, pairs, rng):
    """The mean of the largest of multinomial counts over their mean, minus 1, drawn directly."""
    drawn_DG = rng.multinomial(pairs, share_G, size=4000)
    return drawn_DG.max(axis=1).mean() / pairs * len(share_G) - 1


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=6),
    st.floats(0.3, 60.0),
    st.integers(1, 50),
)
def test_steps_take_every_token_once_at_most_and_have_the_asked_number(loads_TE, step_pairs, most):
    load_TLE = np.array(loads_TE)[:, None]
    total = load_TLE.sum()
    if total < step_pairs:
        with pytest.raises(BadInput, match="steps: expected at most"):
            serving_steps(load_TLE, step_pairs, most, np.random.default_rng(0))
        return
    steps = serving_steps(load_TLE, step_pairs, most, np.random.default_rng(0))
    assert len(steps.load_DLE) == len(steps.window_D) == min(most, int(total / step_pairs))
    assert (steps.load_DLE >= 0).all()
    assert (steps.load_DLE.sum(axis=0) <= load_TLE.sum(axis=0)).all()
    windows = np.count_nonzero(load_TLE.any(axis=(1, 2)))
    assert abs(steps.load_DLE.sum(axis=(1, 2)) - step_pairs).max() <= windows + 1  # each part is rounded
    assert (np.diff(steps.window_D) >= 0).all()


def test_steps_as_long_as_windows_are_the_windows_and_longer_ones_their_sums():
    load_TLE = np.random.default_rng(0).multinomial(60, np.full(4, 0.25), size=(6, 2))
    rng = np.random.default_rng(1)
    assert (serving_steps(load_TLE, 60, 9, rng).load_DLE == load_TLE).all()
    assert (serving_steps(load_TLE, 120, 9, rng).load_DLE == load_TLE[::2] + load_TLE[1::2]).all()
    half = serving_steps(load_TLE, 90, 9, rng).load_DLE
    assert (half.sum(axis=2) == 90).all()
    assert (half[0] + half[1] == load_TLE[:3].sum(axis=0)).all()


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.sampled_from([TOKENS, RankCurve(2.0, 3.0, 0.5)]))
def test_no_division_of_tokens_over_gpus_is_faster_than_perfect_balance(load_E, curve):
    least = np.inf
    divided = [[(a, load - a) for a in range(load + 1)] for load in load_E]
    for parts_E2 in product(*divided):  # of each expert's tokens over two GPUs
        tokens_2E = np.array(parts_E2).T
        least = min(least, float(curve(tokens_2E.sum(axis=1), np.count_nonzero(tokens_2E, axis=1)).max()))
    assert perfect_seconds(np.array(load_E, dtype=np.float64)[None, None], 2, curve)[0, 0] <= least + 1e-12


@given(st.integers(1, 5), st.lists(st.integers(0, 30), min_size=6, max_size=6))
def test_a_map_takes_the_time_of_its_slowest_gpu(gpus, load_E):
    load_DLE, curve = np.array(load_E, dtype=np.float64)[None, None], RankCurve(1.0, 2.0, 3.0)
    gpu_E = np.random.default_rng(gpus).integers(0, gpus, 6)
    expected = max(
        1 + sum((2 + 3 * load) * (load > 0) for load, at in zip(load_E, gpu_E, strict=True) if at == g) for g in range(gpus)
    )
    assert map_seconds(load_DLE, SlotMap.of_gpus(gpu_E, gpus, 1), curve)[0, 0] == expected
    tokens = max(sum(load for load, at in zip(load_E, gpu_E, strict=True) if at == g) for g in range(gpus))
    assert map_seconds(load_DLE, SlotMap.of_gpus(gpu_E, gpus, 1), TOKENS)[0, 0] == tokens


def test_experts_that_do_not_divide_lie_in_sequence_one_more_on_the_first_gpus():
    assert linear_map(1, 8, 3).held_LGP[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, -1]]
    planned = planned_map(np.tile(SKEWED, (2, 1)), 3, None)
    assert all(np.bincount(held[held >= 0], minlength=8).tolist() == [1] * 8 for held in planned.held_LGP)


def test_the_imbalance_of_equal_windows_is_stable():
    split = imbalance_split(profile([SKEWED] * 20, 3000), 4)
    loads = SKEWED.reshape(4, 2).sum(axis=1)
    assert split.whole.value == pytest.approx(loads.max() / loads.mean() - 1)
    assert split.stable.value == pytest.approx(split.whole.value - split.by_slots)
    assert split.drifting.value == pytest.approx(0.0)
    assert split.per_step.value == pytest.approx(split.by_slots)
    assert split.by_slots == pytest.approx(9 / 7.5 - 1)  # pairs of 8 6 5 4 3 2 1 1: 8+1, 6+2, 5+3, 4+1 and 9 is least


def test_what_changes_slowly_drifts():
    """Popularity is drawn anew every five windows, so that none of it can be known from other times."""
    share_RLE = np.random.default_rng(0).lognormal(sigma=0.5, size=(8, 16, 16))
    tokens_TLSE = np.rint(np.repeat(share_RLE, 5, axis=0)[:, :, None] * 1000).astype(np.int64)
    config = CONFIG | {"num_local_experts": 16, "num_hidden_layers": 16}
    split = imbalance_split(Shape.of(config).profile(tokens_TLSE, {}), 4)
    assert abs(split.stable.value) < 0.15 * split.whole.value
    assert split.drifting.value > 0.3 * split.whole.value  # windows between two spells see half of the other
    assert split.drifting.low > 0


@pytest.mark.parametrize("step_tokens", [32, 128])
def test_the_imbalance_of_equal_experts_is_chance_as_large_as_multinomial_counts_have(step_tokens):
    rng = np.random.default_rng(0)
    split = imbalance_split(profile([np.ones(8)] * 20, 40_000, rng), 4, step_tokens)
    chance = jitter(np.full(4, 0.25), 2 * step_tokens, rng)
    assert split.whole.value == pytest.approx(chance, rel=0.06)
    assert split.per_step.value == pytest.approx(chance, rel=0.06)
    assert abs(split.stable.value) < 0.1 * chance
    assert split.drifting.value < 0.1 * chance


def test_chance_falls_with_the_root_of_the_tokens_of_a_step():
    traffic = profile([SKEWED] * 20, 400_000, np.random.default_rng(0))
    few, many = (imbalance_split(traffic, 4, tokens, 4) for tokens in (64, 1024))
    assert few.per_step.value - few.by_slots == pytest.approx(4 * (many.per_step.value - many.by_slots), rel=0.1)


@given(st.integers(1, 12), st.sampled_from([None, 1.0, 17.5, 1e6]), st.integers(1, 10), st.integers(0, 3))
def test_parts_add_up_for_any_number_of_gpus_steps_and_windows(gpus, step_tokens, windows, more):
    traffic = profile([SKEWED] * windows, 200, np.random.default_rng(windows))
    split = imbalance_split(traffic, gpus, step_tokens, min(8, -(-8 // gpus) + more), RankCurve(1.0, 2.0, 1.0))
    assert split.stable.value + split.drifting.value + split.per_step.value == pytest.approx(split.whole.value)
    assert split.drifting.value >= 0
    assert split.step_tokens <= min(step_tokens or np.inf, 100 * windows)


def test_intervals_hold_the_ratio_in_most_samples():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        below_B = rng.uniform(0.5, 1.5, 5)
        interval = ratio_interval(below_B * 0.3 + rng.normal(0, 0.02, 5), below_B)
        held += interval.low <= 0.3 <= interval.high
    assert 0.9 <= held / 400 <= 0.99


def test_a_curve_is_the_line_through_a_profiles_seconds():
    traffic = profile([SKEWED] * 8, 400)
    gpu = Gpu("g", next(iter(traffic.curves)), 0, 1e9, 1e9, 10**12)
    curve = RankCurve.of(traffic, gpu, 64, 8)
    for tokens in (1, 16):
        assert curve.active_s + curve.token_s * tokens == pytest.approx(float(traffic.seconds("expert", gpu, tokens)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`gpus`: expected a whole number"),
        ((4, -1), "`step_tokens`: expected a number above zero, found -1"),
        ((4, None, 1), "`slots_per_gpu`: expected at least 2 for 8 experts on 4 GPUs, found 1"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    with pytest.raises(BadInput, match=message):
        imbalance_split(profile([SKEWED] * 8, 400), *arguments)


def test_curves_without_seconds_are_refused():
    with pytest.raises(BadInput, match="rank curve"):
        RankCurve(1.0, 0.0, 0.0)
