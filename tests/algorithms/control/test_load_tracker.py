"""The load tracker, on traffic whose changes are known."""

import numpy as np
import pytest

from aurora.algorithms.control.load_tracker import LoadTracker
from aurora.errors import BadInput

LAYERS, EXPERTS, TOKENS = 4, 32, 20_000


def tasks(number, seed=0):
    """Shares (number, L, E) of tasks that have nothing in common."""
    return np.random.default_rng(seed).dirichlet(np.full(EXPERTS, 0.7), (number, LAYERS))


def windows(share_LE, number, rng, prompts=40):
    """Windows of prompts, whose tokens choose alike."""
    for _ in range(number):
        prompt_PLE = rng.gamma(share_LE * 60, size=(prompts, *share_LE.shape))
        mixed_LE = (prompt_PLE / prompt_PLE.sum(axis=2, keepdims=True)).mean(axis=0)
        yield rng.multinomial(TOKENS, mixed_LE / mixed_LE.sum(axis=1, keepdims=True))


def tracked(*parts):
    """A tracker after windows of (shares, how many), and the windows at which it saw a change."""
    tracker, rng, seen = LoadTracker(LAYERS, EXPERTS), np.random.default_rng(1), []
    for share_LE, number in parts:
        for load_LE in windows(share_LE, number, rng):
            before = tracker.changes
            tracker.add(load_LE)
            seen += [tracker.windows - 1] * (tracker.changes > before)
    return tracker, seen


@pytest.mark.parametrize("seed", range(5))
def test_the_same_traffic_has_no_change_and_is_known_better_with_every_window(seed):
    (task_LE,) = tasks(1, seed)
    short, long = tracked((task_LE, 1))[0], tracked((task_LE, 60))[0]
    assert long.changes == 0
    errors = [abs(each.expected_LE / TOKENS - task_LE).sum() for each in (short, long)]
    assert errors[1] < errors[0] / 3
    assert (long.sample_L > 20 * short.sample_L).all()


def test_a_change_is_seen_in_its_first_window_and_nothing_before_it_counts():
    one_LE, other_LE = tasks(2)
    tracker, seen = tracked((one_LE, 12), (other_LE, 1))
    assert seen == [12]
    assert abs(tracker.expected_LE / TOKENS - other_LE).sum() < abs(tracker.expected_LE / TOKENS - one_LE).sum() / 5


def test_traffic_that_returns_is_known_at_once():
    one_LE, other_LE = tasks(2)
    again, seen = tracked((one_LE, 20), (other_LE, 20), (one_LE, 1))
    new, _ = tracked((one_LE, 1))
    assert seen == [20, 40]
    assert (again.sample_L > 5 * new.sample_L).all()
    assert abs(again.expected_LE / TOKENS - one_LE).sum() < abs(new.expected_LE / TOKENS - one_LE).sum()


def test_slow_drift_is_followed():
    one_LE, other_LE = tasks(2)
    parts = [(one_LE * (1 - part) + other_LE * part, 1) for part in np.linspace(0, 1, 60)]
    tracker, seen = tracked(*parts)
    assert len(seen) >= 3
    last_LE = parts[-1][0]
    everything_LE = np.mean([share_LE for share_LE, _ in parts], axis=0)
    assert abs(tracker.expected_LE / TOKENS - last_LE).sum() < abs(everything_LE - last_LE).sum() / 3


def test_traffic_is_expected_to_last_as_long_as_it_did():
    one_LE, other_LE = tasks(2)
    tracker, _ = tracked((one_LE, 10), (other_LE, 10), (one_LE, 10), (other_LE, 2))
    assert (tracker.age, tracker.remaining) == (2, 8.0)


def test_how_much_loads_vary_is_known_after_a_few_windows():
    tracker = LoadTracker(1, 2)
    for load in ([60, 40], [40, 60], [120, 80]):
        tracker.add([load])
        assert not tracker.spread_LE.any()
    tracker.add([[80, 120]])
    np.testing.assert_allclose(tracker.spread_LE, 200 * np.std([0.6, 0.4, 0.6, 0.4], ddof=1))


def test_windows_without_tokens_tell_nothing():
    tracker = LoadTracker(1, 2)
    tracker.add([[0, 0]])
    assert (tracker.windows, tracker.expected_LE.tolist()) == (0, [[0.0, 0.0]])
    tracker.add([[30, 10]])
    tracker.add([[0, 0]])
    assert tracker.windows == 1


def test_loads_of_another_shape_are_refused():
    with pytest.raises(BadInput, match=r"loads: expected 2 layers of 3 experts, found shape \(1, 3\)"):
        LoadTracker(2, 3).add([[1, 2, 3]])


@pytest.mark.parametrize("seed", range(3))
def test_the_first_windows_of_few_prompts_are_no_changes(seed):
    (task_LE,) = tasks(1, seed)
    tracker, rng = LoadTracker(LAYERS, EXPERTS), np.random.default_rng(seed)
    for load_LE in windows(task_LE, 8, rng, prompts=3):
        tracker.add(load_LE)
    assert tracker.changes == 0
