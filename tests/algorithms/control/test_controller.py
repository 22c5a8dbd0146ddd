"""The controller, window by window."""

import re
from itertools import count, groupby

import numpy as np
import pytest

from aurora.algorithms.control.controller import Controller, ControlOptions
from aurora.algorithms.control.load_tracker import gpu_loads
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


def served(control, loads, rng, step_s=lambda _: None):
    """Serves windows; returns the decisions. Every change is performed."""
    decisions = []
    for load_LE in loads:
        decisions.append(control.window(drawn(load_LE, rng), step_s(control)))
        if decisions[-1].action != "keep":
            control.moved()
    return decisions


def test_a_skewed_placement_is_changed_once_and_then_kept():
    control, rng = controller(), np.random.default_rng(0)
    before = slowest(skewed(0), control.held_LGP)
    decisions = served(control, [skewed(0)] * 30, rng)
    assert [each.action for each in decisions].count("move") == 1
    assert slowest(skewed(0), control.held_LGP) < 1.03 < before
    assert decisions[-1].reason.endswith("no more than 2.0%")


def test_a_change_of_traffic_is_followed_and_nothing_swings():
    control, rng = controller(), np.random.default_rng(0)
    tasks = [skewed(0)] * 10 + [skewed(8)] * 10 + [skewed(0)] * 10
    decisions = served(control, tasks, rng)
    moved = [window for window, each in enumerate(decisions) if each.action == "move"]
    assert moved == [0, 10, 20]
    assert slowest(skewed(0), control.held_LGP) < 1.03


def test_each_expert_keeps_its_min_replicas_on_different_nodes_while_experts_move():
    pairs, rng, node_G = np.arange(EXPERTS).reshape(2, -1), np.random.default_rng(0), [0, 0, 1, 1]
    held_GP = np.concatenate([pairs, pairs[::-1]])  # every expert on both nodes
    control = Controller(np.repeat(held_GP[None], LAYERS, axis=0), 1000, min_replicas=2, domain_G=node_G)
    before, now_LGP = slowest(skewed(0), control.held_LGP), control.held_LGP.copy()
    decisions = served(control, [skewed(0)] * 3 + [skewed(5)] * 3, rng)
    assert sum(each.action == "move" for each in decisions) == 2
    for _, moves in groupby(
        ((at, each) for at in decisions for each in at.moves), key=lambda pair: (pair[0].at_s, pair[1].round)
    ):
        for _, move in moves:
            now_LGP[move.layer, move.dst, move.slot] = move.expert
        assert all(set(nodes_GP.ravel()) == set(range(EXPERTS)) for nodes_GP in now_LGP.reshape(LAYERS * 2, -1))
    assert slowest(skewed(5), control.held_LGP) < before


def test_the_spare_slot_takes_a_replica_of_the_expert_whose_load_varies():
    """Experts 0 and 1 have the same load in the mean, five times that of the others; that of expert 1 varies."""
    held_LGP = np.array([[[0, 4], [1, 5], [2, 6], [3, -1]]])
    control = Controller(held_LGP, 1000, ControlOptions(loss=0.9))  # until it has seen enough, nothing is worth a change
    loads_TLE = np.tile([20_000.0, 20_000, *[4000] * 5], (8, 1, 1))
    loads_TLE[:, :, 1] *= np.tile([0.2, 1.8], 4)[:, None]
    for load_LE in loads_TLE[:-1]:
        assert control.window(load_LE).action == "keep"
    control.options = ControlOptions()
    decision = control.window(loads_TLE[-1])
    assert decision.action == "move"
    assert decision.held_LGP.tolist() == [[[0, 4], [1, 5], [2, 6], [3, 1]]]
    before, after = (np.mean([slowest(each, held) for each in loads_TLE]) for held in (held_LGP, decision.held_LGP))
    assert after < 0.85 * before


def test_equal_traffic_moves_nothing():
    control, rng = controller(loss=0.01), np.random.default_rng(0)
    assert {each.action for each in served(control, [np.full((LAYERS, EXPERTS), 5000.0)] * 30, rng)} == {"keep"}


def test_moves_wait_until_traffic_lasts_long_enough_to_pay_for_them():
    rng = np.random.default_rng(0)
    control = Controller(start(), 10**9, ControlOptions(period_s=1.0), move_Bps=1e9)
    actions = [each.action for each in served(control, [skewed(0)] * 40, rng)]
    assert actions[0] == "keep"
    assert "move" in actions


def test_tasks_that_end_before_moves_would_pay_are_served_by_one_placement():
    rng, tasks = np.random.default_rng(0), ([skewed(0)] * 3 + [skewed(8)] * 3) * 8
    control = Controller(start(), 1000, ControlOptions(period_s=10.0), move_Bps=250.0)  # four seconds an expert
    actions = [each.action for each in served(control, tasks, rng)]
    assert actions[18:].count("keep") >= 28  # of 30 windows, in which the task changes ten times


def test_bytes_stay_within_the_budget_and_all_layers_move_in_the_end():
    rng = np.random.default_rng(0)
    control = controller(bytes_per_s=800.0, period_s=10.0)
    decisions = [each for each in served(control, [skewed(0)] * 12, rng) if each.action == "move"]
    assert all(0 < each.bytes <= 8000 for each in decisions)
    assert len(decisions) > 1
    assert {layer for each in decisions for layer in each.layers} == {0, 1, 2}
    assert slowest(skewed(0), control.held_LGP) < 1.05


def test_a_change_that_makes_steps_longer_is_undone_and_not_tried_again_at_once():
    control, rng = controller(), np.random.default_rng(0)
    first_LGP = control.held_LGP.copy()

    def step_s(control):
        return 1.0 if np.array_equal(np.sort(control.held_LGP, axis=2), np.sort(first_LGP, axis=2)) else 3.2

    actions = [each.action for each in served(control, [skewed(0)] * 12, rng, step_s)]
    assert actions[:4] == ["move", "keep", "undo", "keep"]
    np.testing.assert_array_equal(np.sort(control.held_LGP, axis=2), np.sort(first_LGP, axis=2))
    assert actions.count("move") <= 2  # then twice as long again


@pytest.mark.parametrize(("factor", "undone"), [(1.4, False), (2.1, True)])
def test_a_change_is_undone_only_if_steps_become_slower_than_by_the_machines_noise(factor, undone):
    """Steps take 1 s in four windows and 1.4 s in the next four, whatever is in force; the change comes after the former."""
    control, noisy_s = controller(bytes_per_s=1.0), [1.0, 1.4]  # until it may move something
    for window in range(11):
        assert control.window(skewed(0), noisy_s[window // 4 % 2]).action == "keep"
    control.options = ControlOptions()
    assert control.window(skewed(0), noisy_s[0]).action == "move"
    control.moved()
    assert [control.window(skewed(0), factor).action for _ in range(2)] == ["keep", "undo" if undone else "keep"]


def undone_at_once():
    """A controller that has undone its first change, after which steps took twice as long."""
    control = controller()
    for step_s, action in ((1.0, "move"), (2.0, "keep"), (2.0, "undo")):
        assert control.window(skewed(0), step_s).action == action
        if action != "keep":
            control.moved()
    return control


@pytest.mark.parametrize(("step_s", "last"), [(1.0, "held-off"), (2.0, "gain")])
def test_an_undone_change_is_made_again_if_steps_take_as_long_without_it(step_s, last):
    control = undone_at_once()
    assert [control.window(skewed(0), step_s).kind for _ in range(2)] == ["held-off", last]


def test_steps_with_more_tokens_do_not_say_that_a_change_was_undone_for_nothing():
    control = undone_at_once()
    assert [control.window(skewed(0), 2.0, tokens).kind for tokens in (8, 64, 64)] == ["held-off"] * 3


def test_other_traffic_is_followed_at_once_after_a_change_that_was_undone():
    control = undone_at_once()
    assert control.window(skewed(0), 1.0).kind == "held-off"
    assert control.window(skewed(8), 1.0).kind == "gain"


def test_changes_in_each_window_that_make_steps_longer_are_undone_together():
    """As a budget makes them: a layer at a time."""
    control, rng = controller(bytes_per_s=800.0, period_s=10.0), np.random.default_rng(0)
    first_LGP = control.held_LGP.copy()

    def step_s(control):
        return 1.5 ** (np.sort(control.held_LGP, axis=2) != np.sort(first_LGP, axis=2)).any(axis=(1, 2)).sum()

    decisions = served(control, [skewed(0)] * 6, rng, step_s)
    assert [each.action for each in decisions] == ["move", "move", "undo", "keep", "keep", "keep"]
    np.testing.assert_array_equal(np.sort(control.held_LGP, axis=2), np.sort(first_LGP, axis=2))


def test_traffic_whose_steps_take_longer_is_no_reason_to_undo_a_change():
    control, rng = controller(), np.random.default_rng(0)
    slow = []

    def step_s(control):
        slow.append(control.tracker.windows >= 10)
        return 2.0 if slow[-1] else 1.0  # from the tenth window on, because other traffic has longer prompts

    decisions = served(control, [skewed(0)] * 10 + [skewed(8)] * 10, rng, step_s)
    assert [each.action for each in decisions].count("move") == 2
    assert "undo" not in {each.action for each in decisions}


@pytest.mark.parametrize(("tokens", "action"), [(8, "undo"), (64, "keep")])
def test_steps_with_more_tokens_are_no_reason_to_undo_a_change(tokens, action):
    """A batch begins with more requests than the one before it ended with."""
    control = controller()
    assert control.window(skewed(0), 1.0, 8).action == "move"
    control.moved()
    assert [control.window(skewed(0), 2.0, tokens).action for _ in range(2)] == ["keep", action]


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
        ({"bytes_per_s": 0.0}, "`bytes_per_s`: expected more than zero, found 0.0"),
        ({"period_s": float("inf")}, "`period_s`: expected more than zero, found inf"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(BadInput, match=sentence):
        ControlOptions(**options)


def test_over_servers_experts_stay_on_theirs_and_move_inside():
    server_G, clock = np.array([0, 1, 0, 1]), count()
    control = Controller(start(), 1000, ControlOptions(), clock=lambda: float(next(clock)), server_G=server_G)
    held_before = [[set(held_GP[server_G == server].flat) - {-1} for server in (0, 1)] for held_GP in start()]
    decisions = served(control, [skewed(0)] * 12 + [skewed(5)] * 12, np.random.default_rng(0))
    moved = [each for each in decisions if each.action == "move"]
    assert moved
    assert all(server_G[move.src] == server_G[move.dst] for each in moved for move in each.moves)
    assert held_before == [[set(held_GP[server_G == server].flat) - {-1} for server in (0, 1)] for held_GP in control.held_LGP]
    gpu_LG = gpu_loads(skewed(5)[None].astype(float), control.held_LGP, np.ones(GPUS))[0]
    for server in (0, 1):  # as equal as a spare slot makes them
        assert (np.ptp(gpu_LG[:, server_G == server], axis=1) < 0.1 * gpu_LG.mean()).all()
