"""What follows from a round."""

from aurora.elastic.member import Entry, by_name, next_epoch, others_wait, over

NOW_MS, ABSENT_S = 5000, 10.0


def entry(name, epoch=0, **said):
    return Entry(name, f"p-{name}", 1, epoch=epoch, **said)


def board(*entries):
    return by_name(entries)


def test_the_first_epoch_waits_for_those_who_are_expected_but_not_for_ever():
    two = [entry(name, expected=3, waited_s=20.0) for name in "ab"]
    assert next_epoch(board(*two, entry("c", waited_s=0.0)), NOW_MS, ABSENT_S) == NOW_MS
    assert next_epoch(board(*two), NOW_MS, ABSENT_S) == NOW_MS
    assert next_epoch(board(two[0], entry("b", expected=3, waited_s=9.0)), NOW_MS, ABSENT_S) == 0
    assert next_epoch(board(two[0], entry("b", least=3, waited_s=20.0)), NOW_MS, ABSENT_S) == 0


def test_later_epochs_begin_when_nobody_serves_and_have_greater_numbers_whatever_the_clock_says():
    waiting = [entry("a", 7000), entry("b", expected=3)]
    assert next_epoch(board(*waiting), NOW_MS, ABSENT_S) == 7001
    assert next_epoch(board(*waiting), 8000, ABSENT_S) == 8000
    assert next_epoch(board(*waiting, entry("c", 7000, serving=True)), NOW_MS, ABSENT_S) == 0
    assert next_epoch(board(*waiting, entry("c", 7000, unseen=1)), NOW_MS, ABSENT_S) == 0


def test_an_epoch_is_over_when_a_member_is_missing_or_another_or_has_left_it_by_itself():
    a, b = entry("a", 7, serving=True), entry("b", 7, serving=True)
    members = {"a": "p-a", "b": "p-b"}
    assert over(board(a, b), 7, members) is None
    assert over(board(a, b, entry("c")), 7, members) is None
    assert over(board(a), 7, members) == "b was lost"
    assert over(board(a), 7, members, {"b"}) is None
    assert over(board(a, Entry("b", "other", 1, epoch=7)), 7, members) == "b was lost"
    assert over(board(a, entry("b", 7)), 7, members) == "b has left the epoch"
    assert over(board(a, entry("b", 7, agreed=True)), 7, members) is None
    assert over(board(a, entry("b", 8, serving=True)), 7, members) == "b has left the epoch"
    assert over(board(a, entry("b", 3)), 7, members) == "b has left the epoch", "it missed the round"


def test_who_waits_and_is_no_member_is_waited_for():
    a, members = entry("a", 7, serving=True), {"a": "p-a"}
    assert not others_wait(board(a), members)
    assert others_wait(board(a, entry("b")), members)
    assert not others_wait(board(a, entry("b", 9, serving=True)), members)
    assert not others_wait(board(entry("a", 7, agreed=True)), members)


def test_of_two_processes_of_a_name_that_of_the_later_epoch_counts_then_the_first():
    first, second, serving = Entry("a", "x", 2), Entry("a", "y", 1), Entry("a", "z", 3, epoch=4, serving=True)
    assert board(first, second, serving)["a"] is serving
    assert board(first, second)["a"] is second
    assert list(board(entry("b"), entry("a"))) == ["a", "b"]
