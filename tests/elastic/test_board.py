"""What follows from the entries of a round: when an epoch is over, and when the next one begins."""

from aurora.elastic.board import Entry, by_name, next_epoch, others_wait, over


def entry(name, process="p", since_ms=0, **fields):
    return Entry(name, process, since_ms, **fields)


def test_of_two_processes_of_a_name_the_one_that_is_further_or_older_counts():
    first, second = entry("a", "first", 1), entry("a", "second", 2)
    assert by_name([second, first]) == {"a": first}
    assert by_name([first, entry("a", "second", 2, epoch=3)])["a"].process == "second"
    assert list(by_name([entry("b"), entry("a")])) == ["a", "b"]


def test_an_epoch_is_over_when_a_member_is_missing_or_has_left():
    processes = {"a": "p", "b": "p"}
    serving = {name: entry(name, epoch=7, serving=True) for name in "ab"}
    assert over(serving, 7, processes) is None
    assert over({"a": serving["a"]}, 7, processes) == "b was lost"
    assert over({"a": serving["a"]}, 7, processes, unseen={"b"}) is None
    assert over({**serving, "b": entry("b", "another", epoch=7, serving=True)}, 7, processes) == "b was lost"
    assert over({**serving, "b": entry("b", epoch=7)}, 7, processes) == "b has left the epoch"
    assert over({**serving, "b": entry("b", epoch=7, agreed=True)}, 7, processes) is None
    assert over({**serving, "b": entry("b", epoch=8, serving=True)}, 7, processes) == "b has left the epoch"


def test_who_is_no_member_and_waits_is_waited_for():
    serving = {name: entry(name, epoch=7, serving=True) for name in "ab"}
    processes = {"a": "p", "b": "p"}
    assert not others_wait(serving, processes)
    assert others_wait({**serving, "c": entry("c")}, processes)
    assert others_wait({**serving, "b": entry("b", "another")}, processes)


def test_an_epoch_begins_when_nobody_serves_and_enough_wait():
    now_ms = 1000
    waiting = {name: entry(name, epoch=7, waited_s=1.0) for name in "ab"}
    assert next_epoch(waiting, now_ms, 10.0) == 1000
    assert next_epoch(waiting, 3, 10.0) == 8  # greater than every number before, whatever the clock says
    assert next_epoch({**waiting, "b": entry("b", epoch=7, serving=True)}, now_ms, 10.0) == 0
    assert next_epoch({**waiting, "b": entry("b", epoch=7, unseen=1)}, now_ms, 10.0) == 0
    assert next_epoch({**waiting, "b": entry("b", least=3)}, now_ms, 10.0) == 0
    first = {name: entry(name, waited_s=1.0, expected=3) for name in "ab"}
    assert next_epoch(first, now_ms, 10.0) == 0
    assert next_epoch(first, now_ms, 0.5) == 1000
