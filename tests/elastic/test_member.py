"""Members that come and go: processes, torchft's lighthouse, real process groups."""

import signal
import socket
import threading
import time

import psutil
import pytest

pytest.importorskip("torchft")

from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S
from aurora.elastic.member import Entry, Member, OtherRun, admitted
from aurora.elastic.steps import StateLost
from aurora.errors import RankFailed
from tests.elastic.processes import PATIENCE_S, Members, Threads, end
from tests.elastic.summed_steps import SummedSteps


@pytest.fixture
def members(lighthouse):
    """Starts members as processes; none is left."""
    found = []

    def start(*names, **options):
        found.append(Members(lighthouse.address, **options))
        found[-1].start(*names)
        return found[-1]

    yield start
    for each in found:
        each.close()


def check_results(run, names, steps):
    """Returns the members' logs."""
    found = {name: run.result(name) for name in names}
    assert {each[:2] for each in found.values()} == {(steps, sum(range(steps + 1)))}
    return {name: log for name, (_, _, log) in found.items()}


def test_killed_members_cost_no_step_and_come_back_under_their_names(members):
    steps = 150
    run = members("a", "b", "c", steps=steps, step_s=0.02, expected=3)
    epoch, _, _ = run.until("a", 10)
    run.kill("b", "c")  # both at once
    alone, _, _ = run.until("a", 0, epoch)
    run.hold("a")
    run.start("b")
    logs = check_results(run, "ab", steps)
    ((both, joined_at, stale),) = logs["b"]
    assert (both, stale) == (("a", "b"), ["b"])
    assert joined_at > 10
    assert logs["a"][0] == (("a", "b", "c"), 0, [])
    assert alone > epoch


def test_members_that_join_during_steps_fetch_the_state_and_listen_on_loopback_only(members, lighthouse):
    run = members("c", "a", "b", expected=3)
    run.until("a", 5)
    run.hold("a")
    run.start("late")
    logs = check_results(run, ["a", "b", "c", "late"], 60)
    assert logs["a"][0] == (("a", "b", "c"), 0, [])
    assert logs["late"][0][0] == ("a", "b", "c", "late")
    assert logs["late"][0][2] == ["late"]
    processes = [child for child, _ in run.children.values()] + [lighthouse._child[0]]
    assert {address for child in processes for address in listening(child.pid)} == {"127.0.0.1"}


def listening(pid):
    return [each.laddr.ip for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]


@pytest.mark.full
def test_a_stopped_member_is_left_out_and_fetches_the_state_when_it_goes_on(members):
    steps = 400
    run = members("a", "b", "c", steps=steps, step_s=0.02, expected=3)
    epoch, _, _ = run.until("a", 10)
    began_s = time.monotonic()
    run.signal("b", signal.SIGSTOP)
    without, _, when_s = run.until("a", 0, epoch)
    assert when_s - began_s > HEARTBEAT_TIMEOUT_S - 1  # it was missed, not only waited for
    run.hold("a")
    run.signal("b", signal.SIGCONT)
    run.until("a", 0, without)
    logs = check_results(run, "abc", steps)
    assert [each[0] for each in logs["a"]] == [("a", "b", "c"), ("a", "c"), ("a", "b", "c")]
    assert logs["b"][-1][2] == ["b"]


@pytest.mark.full
def test_a_lighthouse_that_is_killed_is_started_again_and_costs_neither_step_nor_epoch(lighthouse):
    """On a machine so busy that a member is silent for two seconds an epoch ends rightly: one of three runs has a single one."""
    for _ in range(3):
        run, first = Members(lighthouse.address, steps=100, step_s=0.05, expected=3), lighthouse._child[0]
        try:
            run.start("a", "b", "c")
            run.until("a", 10)
            first.kill()
            logs = check_results(run, "abc", 100)
        finally:
            run.close()
        until_s = time.monotonic() + PATIENCE_S
        while lighthouse._child[0] is first and time.monotonic() < until_s:  # the steps may end before it is back
            time.sleep(0.01)
        assert lighthouse._child[0] is not first
        if all(len(log) == 1 for log in logs.values()):
            return
    pytest.fail(f"the members took part in several epochs: {logs}")


@pytest.mark.full
def test_members_wait_until_there_are_enough(members):
    run = members("a", "b", steps=120, step_s=0.02, expected=2, least=2)
    epoch, _, _ = run.until("a", 5)
    run.kill("b")
    run.start("b")
    (_, done, _), (again, _, _) = run.last["a"], run.until("b", 0, epoch)
    logs = check_results(run, "ab", 120)
    assert again > epoch
    assert done <= 120
    assert {members for log in logs.values() for members, _, _ in log} == {("a", "b")}


def test_a_second_process_of_a_name_does_not_drive_out_the_first(members, lighthouse):
    run = members("a", steps=10**6, step_s=0.01)
    epoch, step, _ = run.until("a", 5)
    second = Member(lighthouse.address, "a", timeout_s=60)
    with pytest.raises(RankFailed, match="a: another process is a"):
        second.join()
    end(second)
    assert run.until("a", step + 300)[0] == epoch


def test_no_epoch_without_a_lighthouse_or_with_too_few_members(lighthouse):
    few = Member(lighthouse.address, "few", least=2, timeout_s=2)
    with pytest.raises(RankFailed, match=r"few: no epoch began within 2 s; lighthouse 127.0.0.1:\d+: 1 members? wait"):
        few.join()
    end(few)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    alone = Member(address, "alone", timeout_s=1)
    with pytest.raises(RankFailed, match=f"alone: no epoch began within 1 s; lighthouse 127.0.0.1:{address[1]}: "):
        alone.join()
    end(alone)


def test_members_that_hold_too_little_go_back_together(lighthouse):
    joined, restored = threading.Event(), threading.Event()

    class Forgetful(SummedSteps):
        def restore(self):
            restored.set()
            self.step, self.total = 2, 3.0
            return self.step

        def begin(self, epoch, settlement):
            super().begin(epoch, settlement)
            if len(epoch.members) == 4 and not restored.is_set():
                raise StateLost("of the sum")

    def join(step):
        if step == 5 and not joined.is_set():
            joined.set()
            members.start("late")

    members = Threads(lighthouse)
    for name in (*"abc", "late"):
        members.make(name, lambda member: Forgetful(member, 200, step_s=0.01, on_commit=join))
    members.start(*"abc")
    works = members.results()
    assert [(work.step, work.total) for work in works.values()] == [(200, 20100.0)] * 4
    assert all(work.log[-1] == (("a", "b", "c", "late"), 2, []) for work in works.values())


def test_one_that_does_not_come_back_after_its_epoch_is_left_out(lighthouse):
    """It is alive, and takes part in rounds; its main thread computes on and on."""
    busy, others = Member(lighthouse.address, "a", hang_s=1.0, expected=3), Threads(lighthouse)
    for name in "bc":
        others.make(name, lambda member: SummedSteps(member, 30))
    others.start(*"bc")
    epoch = busy.join({"committed": {"epoch": 0, "step": 0}, "prepared": None, "epoch": 0})
    assert epoch.members == ("a", "b", "c")
    with busy._changed:
        busy._end()
    works = others.results()
    end(busy)
    assert [work.step for work in works.values()] == [30, 30]
    assert works["b"].log[-1][0] == ("b", "c")


def entry(name, since_ms, epoch=0, **about):
    return Entry(name, f"process of {name}", since_ms, epoch=epoch, about=about)


@pytest.mark.parametrize(("entries", "refused"), [
    ([entry("a", 1, model="1"), entry("b", 2, model="1")], {}),
    ([entry("a", 2, model="1"), entry("b", 1, model="2")], {"a": "a: expected model 2 as the other ranks have, found 1"}),
    ([entry("a", 2, 7, model="1"), entry("b", 1, model="2")], {"b": "b: expected model 1 as the other ranks have, found 2"}),
    ([entry("a", 1), entry("b", 2, text="2")], {"b": "b: expected text None as the other ranks have, found 2"}),
    ([entry("a", 3), entry("b", 2, 7), entry("c", 1)],
     {"a": "a: expected at most 2 ranks, a sample of `batch` for each, found 2 others"}),
    ([], {}),
])  # fmt: skip
def test_the_first_entry_says_what_all_are_about(entries, refused):
    alike, found = admitted({each.name: each for each in entries}, 2)
    assert found == refused
    assert sorted([*alike, *found]) == [each.name for each in entries]


def test_a_member_with_another_model_is_refused_and_the_others_go_on(members):
    run = members("a", "b", steps=150, step_s=0.02, expected=2, about={"`model`": "1"})
    run.until("a", 5)
    run.start("c", about={"`model`": "2"})
    with pytest.raises(OtherRun, match=r"^c: expected `model` 1 as the other ranks have, found 2$"):
        run.received("c")
    logs = check_results(run, "ab", 150)
    assert all(log == [(("a", "b"), 0, [])] for log in logs.values()), "one epoch, which nobody has left"
