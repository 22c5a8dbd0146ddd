"""Membership traces replayed: time adds up, nothing is trained from nothing, and who can go on does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.errors import BadInput
from bench.papers.lazarus.membership_traces import MembershipEvent, changes, limited, shifted
from bench.papers.lazarus.training_failures import SYSTEMS, TrainingJob, busiest, replay

pytestmark = pytest.mark.full

JOB = TrainingJob(
    np.ones((1, 4)), slots=2, group=2, batch=1, dense_s=0.5, experts_s=0.5, state_bytes=1.25e10
)  # 10 s a checkpoint
ALL = MembershipEvent(0.0, (), ("a", "b", "c", "d"))


@st.composite
def traces(draw):
    there, found, now = [], [], 0
    for fresh in range(draw(st.integers(1, 12))):
        now += draw(st.integers(1, 400))
        if there and draw(st.booleans()):
            found.append((float(now), "remove", there.pop(draw(st.integers(0, len(there) - 1)))))
        else:
            there.append(f"n{fresh}")
            found.append((float(now), "add", there[-1]))
    return found


@settings(max_examples=50, deadline=None)
@given(traces(), st.sampled_from(sorted(SYSTEMS)), st.integers(1, 5000))
def test_time_adds_up_and_samples_take_time(rows, name, end_s):
    run = replay(JOB, SYSTEMS[name], shifted(changes(rows)), float(end_s))
    assert sum(run.seconds.values()) == pytest.approx(end_s)
    assert all(seconds >= -1e-6 for seconds in run.seconds.values())
    most = max((rate for _, _, rate in run.rates), default=0.0)
    assert -1e-6 <= run.samples <= run.seconds["compute"] * most + 1e-6
    for _, used, _ in run.rates:
        assert SYSTEMS[name].method or used % JOB.group == 0


def test_nothing_happens_without_failures_but_checkpoints():
    run = replay(JOB, SYSTEMS["DS"], [ALL], 600.0)  # 50 steps of a second, then 10 s
    assert run.seconds["compute"] == 500
    assert run.seconds["checkpoint"] == 100
    assert run.samples == 2000


def test_one_failure_loses_what_was_not_saved_unless_another_holds_it():
    trace = [ALL, MembershipEvent(110.0, ("a",), ())]
    plain = replay(JOB, SYSTEMS["DS"], trace, 200.0)
    assert (plain.restarts, plain.seconds["lost"], plain.seconds["restart"]) == (1, 50.0, 70.0)
    assert [used for _, used, _ in plain.rates] == [4, 2]
    tolerant = replay(JOB, SYSTEMS["DS(FT)"], trace, 200.0)
    assert (tolerant.restarts, tolerant.seconds["lost"], tolerant.seconds["reconfigure"]) == (0, 0.0, 30.0)
    ours = replay(JOB, SYSTEMS["aurora"], trace, 200.0)
    assert [used for _, used, _ in ours.rates] == [4, 3]
    assert ours.samples > tolerant.samples > plain.samples


def test_dropped_nodes_are_used_at_the_next_restart_alone():
    """Groups of two: after b fails, d is dropped; after a too, one half of the experts is gone and everything restarts."""
    trace = [ALL, MembershipEvent(100.0, ("b",), ()), MembershipEvent(200.0, ("a",), ())]
    run = replay(JOB, SYSTEMS["DS(FT)"], trace, 300.0)
    assert [used for _, used, _ in run.rates] == [4, 2, 2]
    assert run.restarts == 1


def test_joining_waits_two_minutes():
    trace = [MembershipEvent(0.0, (), ("a", "b")), MembershipEvent(100.0, (), ("c",)), MembershipEvent(150.0, (), ("d",))]
    for name in ("aurora", "DS"):
        assert [(at, used) for at, used, _ in replay(JOB, SYSTEMS[name], trace, 500.0).rates] == [(0.0, 2), (220.0, 4)]


def test_replicas_even_out_skewed_loads():
    skewed = replace(JOB, load_LE=np.array([[4.0, 1, 1, 1]]), slots=4)
    assert busiest(skewed, SYSTEMS["DS"], 4) == pytest.approx(10 / 7)
    assert busiest(skewed, SYSTEMS["aurora"], 4) < 10 / 7


def test_a_full_cluster_takes_no_more():
    trace = limited([ALL, MembershipEvent(5.0, ("a", "d"), ()), MembershipEvent(6.0, (), ("e", "f"))], 3)
    assert trace == [
        MembershipEvent(0.0, (), ("a", "b", "c")),
        MembershipEvent(5.0, ("a",), ()),
        MembershipEvent(6.0, (), ("e",)),
    ]


@pytest.mark.parametrize("rows", [[(0.0, "remove", "a")], [(0.0, "add", "a"), (1.0, "add", "a")], [(0.0, "drop", "a")]])
def test_traces_that_cannot_be_are_refused(rows):
    with pytest.raises(BadInput, match="expected `add` of an absent node or `remove` of a present one"):
        changes(rows)


def test_coming_back_from_nothing_is_a_restart():
    """Two nodes hold everything once; with one there is nothing to go on with, and 90 s later all is read again."""
    trace = [MembershipEvent(0.0, (), ("a", "b")), MembershipEvent(10.0, ("a",), ()), MembershipEvent(100.0, (), ("c",))]
    run = replay(JOB, SYSTEMS["DS"], trace, 200.0)
    assert run.rates == [(0.0, 2, 2.0), (10.0, 0, 0.0), (100.0, 2, 2.0)]
    assert (run.seconds["lost"], run.seconds["idle"], run.seconds["restart"], run.seconds["compute"]) == (10, 90, 70, 30)


def test_who_joins_for_nothing_costs_nothing():
    """A third node makes no second group of two; its place in the next one is worth a pause."""
    trace = [MembershipEvent(0.0, (), ("a", "b")), MembershipEvent(100.0, (), ("c",)), MembershipEvent(400.0, (), ("d",))]
    run = replay(JOB, SYSTEMS["DS(FT)"], trace, 600.0)
    assert [(at, used) for at, used, _ in run.rates] == [(0.0, 2), (520.0, 4)]
    assert run.seconds["reconfigure"] == 30


def test_busiest_gpu_of_a_node():
    """GPUs of a slot each, shares 1/2, 1/6, 1/6, 1/6: on four the first has twice the mean, on six three share it evenly."""
    job = replace(JOB, load_LE=np.array([[3.0, 1, 1, 1]]), gpus=2)
    assert busiest(job, SYSTEMS["DS"], 2) == pytest.approx(2.0)
    assert busiest(job, SYSTEMS["lazarus"], 2) == pytest.approx(2.0)
    assert busiest(job, SYSTEMS["lazarus"], 3) == pytest.approx(1.0)


def test_two_events_of_a_node_at_once_are_refused():
    rows = [(0.0, "add", "a"), (5.0, "add", "n"), (5.0, "remove", "n")]
    with pytest.raises(BadInput, match="failures, 5 s: expected one event of 'n' at a time, found two"):
        changes(rows)
