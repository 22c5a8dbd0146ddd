"""Spot traces of bench/baselines.py: compressed, of groups of nodes, and how much the nodes could compute."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from baselines import CappedOptions, apart, in_groups, node_seconds

from bench.papers.lazarus.membership_traces import MembershipEvent

pytestmark = pytest.mark.full

sys.path.pop()  # that folder has a vllm.py, which is not vLLM

TRACE = [
    MembershipEvent(0.0, (), tuple("abcdefg")),
    MembershipEvent(60.0, ("b",), ()),
    MembershipEvent(70.0, ("g",), ()),
    MembershipEvent(100.0, (), ("h",)),
    MembershipEvent(400.0, ("c", "h"), ("i", "j")),
]


def test_changes_are_as_far_apart_as_wanted():
    assert [at_s for at_s, _ in apart(TRACE, 10.0)] == pytest.approx([0.0, 5.0, 15.0, 25.0, 45.0])
    assert [change for _, change in apart(TRACE, 10.0)] == TRACE


def test_a_group_is_lost_with_a_node_and_free_nodes_make_new_ones():
    found = in_groups(apart(TRACE, 10.0), 3)
    assert found[0] == (0.0, MembershipEvent(0.0, (), ("group0", "group1")))
    # b is lost: a and c make a group with g, which was in none. g is lost too: they wait until h has come.
    assert found[1] == (5.0, MembershipEvent(60.0, ("group0",), ("group2",)))
    assert found[2] == (15.0, MembershipEvent(70.0, ("group2",), ()))
    assert found[3] == (25.0, MembershipEvent(100.0, (), ("group3",)))
    assert found[4] == (45.0, MembershipEvent(400.0, ("group3",), ("group4",)))


def test_changes_of_nodes_that_are_in_no_group_are_none_of_the_groups():
    assert in_groups([(0.0, TRACE[0]), (5.0, MembershipEvent(60.0, ("g",), ()))], 2)[1:] == []


def test_seconds_of_nodes_are_counted_while_they_are_there():
    assert node_seconds(apart(TRACE, 10.0), 50.0) == pytest.approx(7 * 5 + 6 * 10 + 5 * 10 + 6 * 20 + 6 * 5)


@pytest.mark.parametrize(("ranks", "replicas"), [(10, 3), (8, 3), (7, 2), (5, 1), (3, 1)])
def test_replicas_fit_into_the_memory_that_is_left(ranks, replicas):
    found = CappedOptions(min_replicas=3).min_replicas_among(ranks)
    assert found == replicas
    assert -(-8 * found // ranks) <= 3
