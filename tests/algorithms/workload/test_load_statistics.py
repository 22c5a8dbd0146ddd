"""Intervals hold the truth about as often as they say, on traffic whose truth is known."""

import numpy as np
import pytest
from hypothesis import given

from aurora.algorithms.workload.load_statistics import MIN_ROUNDS, bottleneck, load_intervals, rounds_again, rounds_of
from aurora.algorithms.workload.traffic import contiguous_split
from tests.strategies import profiles

SHARE_E = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
SPLIT_LEG = contiguous_split(8, 4)[None]
TRIALS = 200


def alike(rng, rounds, tokens=300):
    """Every token by itself."""
    return rng.multinomial(tokens, SHARE_E, size=(rounds, 1, 2))


def in_prompts(rng, rounds, tokens=300):
    """All tokens of a round and source by shares of their own, which are SHARE_E on average."""
    own = rng.dirichlet(20 * SHARE_E, size=(rounds, 1, 2))
    return rng.multinomial(tokens, own)


def held(traffic, rounds, replicates=200):
    """Of TRIALS profiles: how often each expert's interval, and the bottleneck's, hold the truth; and what was drawn."""
    rng = np.random.default_rng(1)
    truth = float(bottleneck(SHARE_E[None, None], SPLIT_LEG)[0])
    loads, bottlenecks = np.zeros(8), 0
    for _ in range(TRIALS):
        found = load_intervals(traffic(rng, rounds), None, SPLIT_LEG, rng, replicates)
        loads += (found.low_LE[0] <= SHARE_E) & (found.high_LE[0] >= SHARE_E)
        bottlenecks += found.bottleneck.low <= truth <= found.bottleneck.high
    return loads / TRIALS, bottlenecks / TRIALS, found.drawn


@pytest.mark.parametrize(
    ("traffic", "rounds", "drawn"), [(alike, 30, "rounds"), (in_prompts, 30, "rounds"), (alike, 1, "tokens")]
)
def test_coverage(traffic, rounds, drawn):
    """95 % with some loss to 30 rounds and to few counts of rare experts; 200 trials are good for 1.5 % each way."""
    loads, bottlenecks, found = held(traffic, rounds)
    assert found == drawn
    assert (loads > 0.86).all()
    assert 0.93 < loads.mean() + 0.03 < 1.01
    assert 0.86 < bottlenecks <= 1


def test_drawing_tokens_of_prompts_would_hold_the_truth_too_seldom():
    """Why rounds are drawn: with few rounds tokens are, and what prompts have in common is not seen."""
    loads, _, drawn = held(in_prompts, MIN_ROUNDS - 1)
    assert drawn == "tokens"
    assert loads[0] < 0.6


def test_more_rounds_narrow_the_interval_by_their_root():
    rng = np.random.default_rng(2)
    narrow, wide = (
        load_intervals(alike(rng, rounds), None, SPLIT_LEG, rng, 1000).bottleneck.half_width for rounds in (640, 40)
    )
    assert wide / narrow == pytest.approx(4, rel=0.35)


def test_a_round_is_a_prefill_and_what_follows():
    tokens = np.arange(5).reshape(5, 1, 1, 1)
    stages = ("prefill", "decode", "decode", "prefill", "decode")
    assert rounds_of(tokens, stages).ravel().tolist() == [0 + 1 + 2, 3 + 4]
    assert rounds_of(tokens, None).ravel().tolist() == [0, 1, 2, 3, 4]


def test_rounds_are_drawn_apart_for_every_source():
    """Rounds all alike draw what they are; as many tokens of each source as it had."""
    rounds = np.zeros((12, 1, 2, 2), dtype=np.int64)
    rounds[:, 0, 0, 0], rounds[:, 0, 1, 1] = 3, 5
    assert (rounds_again(rounds, np.random.default_rng(0), 50) == [[36, 60]]).all()


@given(profiles(2))
def test_intervals_hold_the_value_and_depend_on_the_seed_alone(profile):
    split = np.broadcast_to(contiguous_split(profile.experts, 2), (profile.layers, profile.experts, 2))
    one, other = (load_intervals(profile.tokens_TLSE, None, split, np.random.default_rng(3), 50) for _ in range(2))
    assert one.bottleneck == other.bottleneck
    assert np.array_equal(one.low_LE, other.low_LE)
    assert one.share_LE.sum(axis=1) == pytest.approx(1)
    assert one.bottleneck.low <= one.bottleneck.value <= one.bottleneck.high
    assert one.bottleneck.value >= 1 - 1e-9
