"""The controller, window by window."""

import re
from itertools import count

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller, ControlOptions
from aurora.algorithms.gpu_slots import gpu_loads
from aurora.errors import BadInput

EXPERTS, GPUS, SLOTS, LAYERS = 16, 4, 5, 3


def start():
    """Experts in sequence, and a spare slot on each GPU."""
    held_GP = np.full((GPUS, SLOTS), -1)
    held_GP[:, : EXPERTS // GPUS] = np.arange(EXPERTS).reshape(GPUS, -1)
    return np.repeat(held_GP[None], LAYERS, axis=0)


def skewed(first, tokens=100_000):
    """Loads (L, E) of one task: the hottest experts follow each other from `first` on."""
    share_E = 1.0 / (1 + (np.arange(EXPERTS) - first) % EXPERTS)
    return np.tile(np.round(tokens * share_E / share_E.sum()), (LAYERS, 1))


def controller(**options):
    clock = count()
    return Controller(start(), 1000, ControlOptions(**options), clock=lambda: float(next(clock)))


def drawn(load_LE, rng):
    return rng.poisson(load_LE)


def slowest(load_LE, held_LGP):
    gpu_LG = gpu_loads(load_LE[None].astype(float), held_LGP, np.ones(GPUS))[0]
    return gpu_LG.max(axis=1).sum() / gpu_LG.mean(axis=1).sum()


def served(control, loads, rng):
    """Serves windows; returns the decisions. Every change is performed."""
    decisions = []
    for load_LE in loads:
        decisions.append(control.window(drawn(load_LE, rng)))
        if decisions[-1].action != "keep":
            control.moved()
    return decisions


def test_a_change_of_traffic_is_followed_and_nothing_swings():
    control, rng = controller(), np.random.default_rng(0)
    tasks = [skewed(0)] * 10 + [skewed(8)] * 10 + [skewed(0)] * 10
    decisions = served(control, tasks, rng)
    moved = [window for window, each in enumerate(decisions) if each.action == "move"]
    assert moved == [0, 10, 20]
    assert slowest(skewed(0), control.held_LGP) < 1.03


def test_each_expert_keeps_its_min_replicas_on_different_nodes():
    pairs, rng, node_G = np.arange(EXPERTS).reshape(2, -1), np.random.default_rng(0), [0, 0, 1, 1]
    held_GP = np.concatenate([pairs, pairs[::-1]])  # every expert on both nodes
    control = Controller(np.repeat(held_GP[None], LAYERS, axis=0), 1000, min_replicas=2, domain_G=node_G)
    before, moved = slowest(skewed(0), control.held_LGP), 0
    for load_LE in [skewed(0)] * 3 + [skewed(5)] * 3:
        (decision,) = served(control, [load_LE], rng)
        moved += decision.action == "move"
        assert all(set(nodes_GP.ravel()) == set(range(EXPERTS)) for nodes_GP in control.held_LGP.reshape(LAYERS * 2, -1))
    assert moved == 2
    assert slowest(skewed(5), control.held_LGP) < before


def test_equal_traffic_moves_nothing():
    control, rng = controller(loss=0.01), np.random.default_rng(0)
    assert {each.action for each in served(control, [np.full((LAYERS, EXPERTS), 5000.0)] * 30, rng)} == {"keep"}


def test_moves_wait_until_traffic_lasts_long_enough_to_pay_for_them():
    rng = np.random.default_rng(0)
    control = Controller(start(), 10**9, ControlOptions(period_s=1.0), move_Bps=1e9)
    actions = [each.action for each in served(control, [skewed(0)] * 40, rng)]
    assert actions[0] == "keep"
    assert "move" in actions


def test_tasks_that_end_before_moves_would_pay_are_not_all_followed():
    tasks, moves = ([skewed(0)] * 3 + [skewed(8)] * 3) * 8, []
    for seed in range(5):
        control = Controller(start(), 1000, ControlOptions(period_s=10.0), move_Bps=250.0)  # four seconds an expert
        actions = [each.action for each in served(control, tasks, np.random.default_rng(seed))]
        moves.append(actions[18:].count("move"))
    assert np.mean(moves) <= 6  # in 30 windows, in which the task changes ten times


def test_moves_that_failed_leave_the_placement_in_force():
    control = controller()
    held_LGP = control.held_LGP.copy()
    assert control.window(skewed(0)).action == "move"
    assert control.window(skewed(0)).kind == "under-way"
    control.failed()
    np.testing.assert_array_equal(control.held_LGP, held_LGP)
    assert control.window(skewed(0)).action == "move"


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        (np.full((LAYERS, EXPERTS), np.nan), "expected finite|NaN|nan"),
        (np.full((LAYERS, EXPERTS), -1.0), "expected loads of zero or more, found -1"),
        (np.zeros((LAYERS, EXPERTS)), "no tokens"),
        (np.ones((1, EXPERTS)), r"expected 3 layers of 16 experts, found shape \(1, 16\)"),
        ([["a"]], "loads: expected numbers"),
    ],
)
def test_what_tells_nothing_keeps_the_placement(loads, reason):
    control = controller()
    decision = control.window(loads)
    assert decision.action == "keep"
    assert re.search(reason, decision.reason)
    assert control.window(skewed(0)).action == "move"


def test_the_same_windows_give_the_same_decisions():
    one, other = (served(controller(), [skewed(0)] * 5 + [skewed(5)] * 5, np.random.default_rng(3)) for _ in range(2))
    assert [(a.action, a.reason, a.moves, a.at_s) for a in one] == [(b.action, b.reason, b.moves, b.at_s) for b in other]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss": 1.0}, "`loss`: expected a number from zero to below one, found 1.0"),
        ({"period_s": float("inf")}, "`period_s`: expected more than zero, found inf"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(BadInput, match=sentence):
        ControlOptions(**options)
