"""Seconds between preemption points, chosen by the interactive model's layers."""

from dataclasses import replace

import pytest

import aurora
from aurora.algorithms.compile import SLICE_INTERVALS, compile_plan
from aurora.planner.options import LAYER_SHARE, with_preemption
from aurora.planner.plan import make_plan
from aurora.types import PREEMPTION_INTERVAL_S
from tests.simulator.test_interpreter import KEEP, cluster, profile

LAYER = [[0, 1], [1, 0]]


@pytest.fixture
def pair():
    """A layer of a takes 1 + 1 + 2 + 1 alone in its smaller windows, one of b 8 + 8."""
    small, large = [LAYER, LAYER], [[[0, 5], [5, 0]]] * 2
    return [profile([large, small, small], gate=1, expert=2, name="a"), profile([[[[0, 8], [8, 0]]] * 2], name="b")]


def test_they_are_a_share_of_a_layer_that_is_alone(pair):
    plan = aurora.plan(cluster(1.0, 1.0), pair, replace(KEEP, priorities=("interactive", "batch")))
    chosen_s = plan.options.preemption_s
    assert chosen_s == pytest.approx(5 * LAYER_SHARE, rel=0.05)
    program = compile_plan(plan)
    assert program.preemption_s == chosen_s
    assert program.policies_M[1].slice_s == SLICE_INTERVALS * chosen_s
    assert plan.strategies["preemption"] == f"{chosen_s:g} s"
    (note,) = plan.notes
    assert note == f"`preemption`: {chosen_s:g} s, {LAYER_SHARE:.0%} of a layer of a, which takes 5 s alone"


def test_of_several_interactive_models_the_one_with_the_shortest_layers_decides(pair):
    plan = aurora.plan(cluster(1.0, 1.0), [*reversed(pair)], replace(KEEP, priorities=("interactive", "interactive")))
    assert plan.options.preemption_s == pytest.approx(5 * LAYER_SHARE, rel=0.05)


def test_what_is_given_stays_and_models_that_are_alike_need_none(pair):
    machines = cluster(1.0, 1.0)
    plan = aurora.plan(machines, pair, replace(KEEP, priorities=("interactive", "batch"), preemption_s=0.5))
    assert (plan.options.preemption_s, plan.notes) == (0.5, ())
    alike = aurora.plan(machines, pair, KEEP)
    assert alike.options.preemption_s is None
    assert compile_plan(alike).preemption_s == PREEMPTION_INTERVAL_S
    unseen = make_plan(machines, pair, replace(KEEP, priorities=("batch", "batch")))
    assert with_preemption(unseen, pair) is unseen
