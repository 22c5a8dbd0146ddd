"""When an epoch begins and with whom, and when it is over: the lighthouse's decisions, without a network."""

from itertools import count

import pytest

from aurora.runtime.distributed.quorum import BeginEpoch, JoinEpoch, LeaveEpoch, Quorum, StopEpoch


def quorum(expected=3, min_members=1, first=1):
    numbers = count(first)
    return Quorum(expected, min_members, absent_s=10.0, number=lambda epoch: max(epoch + 1, next(numbers)))


def begun(found, now_s=0.0):
    """The epoch that begins now and its members; all members are told the same."""
    told = found.due(now_s)
    assert told
    (message,) = {id(message): message for _, message in told}.values()
    assert isinstance(message, BeginEpoch)
    assert [name for name, _ in told] == list(message.data)
    return message.epoch, list(message.data)


def started(names="cab", **options):
    found = quorum(expected=len(names), **options)
    for name in names:
        assert found.due(0.0) == []
        found.join(name, JoinEpoch(data=name * 2), 0.0)
    return found, begun(found)


def test_the_first_epoch_begins_when_all_are_there_in_the_sequence_of_their_names():
    found, (epoch, members) = started()
    assert (epoch, members) == (1, ["a", "b", "c"])
    assert found.due(100.0) == []


def test_the_first_epoch_waits_only_so_long_after_the_last_arrival():
    found = quorum(expected=3)
    found.join("a", JoinEpoch(), 5.0)
    found.join("b", JoinEpoch(), 9.0)
    assert found.due(18.9) == []
    assert begun(found, 19.0) == (1, ["a", "b"])


def test_a_lost_member_ends_the_epoch_for_all_and_the_others_go_on_once_all_of_them_have_left():
    found, (epoch, _) = started()
    found.lose("b")
    assert found.due(1.0) == [("a", StopEpoch(epoch)), ("c", StopEpoch(epoch))]
    assert found.due(1.0) == []  # told once
    found.join("a", JoinEpoch(epoch), 1.0)
    assert found.due(1.0) == []
    found.join("c", JoinEpoch(epoch), 1.0)
    assert begun(found, 1.0) == (2, ["a", "c"])


def test_two_that_are_lost_at_once_cost_one_epoch_and_one_that_is_lost_while_the_others_wait_is_not_waited_for():
    found, (epoch, _) = started("abcd")
    found.lose("b")
    found.lose("c")
    assert found.due(1.0) == [("a", StopEpoch(epoch)), ("d", StopEpoch(epoch))]
    found.join("a", JoinEpoch(epoch), 1.0)
    found.lose("d")
    assert begun(found, 1.0) == (2, ["a"])


def test_a_member_that_leaves_by_itself_ends_the_epoch_but_not_one_that_leaves_by_agreement():
    for agreed in (False, True):
        found, (epoch, _) = started()
        found.join("a", JoinEpoch(epoch, agreed=agreed), 1.0)
        kind = LeaveEpoch if agreed else StopEpoch
        assert found.due(1.0) == [("b", kind(epoch)), ("c", kind(epoch))]


def test_who_joins_later_waits_until_the_others_leave_by_agreement_and_may_have_a_lost_members_name():
    found, (epoch, _) = started()
    found.join("d", JoinEpoch(), 1.0)
    assert found.due(1.0) == [(name, LeaveEpoch(epoch)) for name in "abc"]
    found.lose("b")
    assert found.due(1.0) == [(name, StopEpoch(epoch)) for name in "ac"]
    found.join("b", JoinEpoch(), 1.5)
    for name in "ac":
        found.join(name, JoinEpoch(epoch), 2.0)
    assert begun(found, 2.0) == (2, list("abcd"))


def test_fewer_than_min_members_wait_for_more():
    found, (epoch, _) = started(min_members=2)
    found.lose("b")
    found.lose("c")
    found.join("a", JoinEpoch(epoch), 1.0)
    assert found.due(1000.0) == []
    assert found.waiting == 1
    found.join("x", JoinEpoch(), 1001.0)
    assert begun(found, 1001.0) == (2, ["a", "x"])


def test_a_restarted_lighthouse_finds_the_epoch_going_on_and_disturbs_nobody():
    restarted = quorum(first=5)
    members = ("a", "b", "c")
    for name in members:
        restarted.join(name, JoinEpoch(4, members, serving=True), 0.0)
        assert restarted.due(0.0) == []
    assert restarted.due(100.0) == []
    assert restarted.serving(4) == list(members)


def test_a_restarted_lighthouse_splits_nobody_off():
    restarted = quorum(expected=1, first=5)
    members = ("a", "b", "c")
    restarted.join("a", JoinEpoch(4, members), 0.0)
    assert restarted.due(9.0) == []  # b and c are of the same epoch
    restarted.join("b", JoinEpoch(4, members, serving=True), 9.0)
    assert restarted.due(9.0) == [("b", StopEpoch(4))]
    restarted.join("b", JoinEpoch(4, members), 9.1)
    assert restarted.due(19.0) == []
    assert begun(restarted, 19.1) == (5, ["a", "b"])
    restarted.join("c", JoinEpoch(4, members, serving=True), 20.0)  # of an epoch that is over
    assert ("c", StopEpoch(4)) in restarted.due(20.0)


def test_members_that_a_restarted_lighthouse_misses_end_the_epoch_of_the_others():
    restarted = quorum(expected=1, first=5)
    restarted.join("a", JoinEpoch(4, ("a", "b"), serving=True), 0.0)
    assert restarted.due(9.0) == []
    assert restarted.due(10.0) == [("a", StopEpoch(4))]


def test_who_connects_again_is_told_again_and_ends_an_epoch_that_it_was_never_told_of():
    found, (epoch, members) = started()
    found.join("a", JoinEpoch(epoch, tuple(members), serving=True), 1.0)  # its connection was lost for a moment
    assert found.due(1.0) == []
    found.lose("b")
    assert len(found.due(1.0)) == 2
    found.join("a", JoinEpoch(epoch, tuple(members), serving=True), 1.0)
    assert found.due(1.0) == [("a", StopEpoch(epoch))]
    for name in "ac":
        found.join(name, JoinEpoch(epoch), 1.0)
    after, _ = begun(found, 1.0)
    found.join("a", JoinEpoch(epoch), 2.0)
    assert found.due(2.0) == [("c", StopEpoch(after))]


def test_who_does_not_stop_is_overdue():
    found, (epoch, _) = started()
    found.lose("b")
    found.due(1.0)
    found.join("a", JoinEpoch(epoch), 2.0)
    assert found.overdue(5.0, patience_s=4.0) == []
    assert found.overdue(5.1, patience_s=4.0) == ["c"]


@pytest.mark.parametrize("newer", [1, 2**40])
def test_an_epochs_number_is_greater_than_any_that_a_member_was_told(newer):
    restarted = quorum(expected=1)
    restarted.join("a", JoinEpoch(newer, ("a",)), 0.0)
    assert begun(restarted) == (newer + 1 if newer > 1 else 2, ["a"])
