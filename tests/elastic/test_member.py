"""Members that come and go: torchft's lighthouse in a process of its own, real process groups."""

import os
import signal
import threading
import time

import psutil
import pytest

pytest.importorskip("torchft")

from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S, LighthouseProcess
from aurora.elastic.member import BoardMember
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.elastic_steps import StateLost, run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from tests.runtime.distributed.summed_steps import SummedSteps

PATIENCE_S = 120  # for what takes seconds; ends a test that hangs


class Members:
    """Members as threads of this process: `start` one; `results` waits for all."""

    def __init__(self, lighthouse, steps, work=SummedSteps, **options):
        self.lighthouse, self.steps, self.work, self.options = lighthouse, steps, work, options
        self.works, self.errors, self._threads = {}, [], []

    def start(self, name):
        thread = threading.Thread(target=self._run, args=(name,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def results(self):
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.errors == []
        return self.works

    def _run(self, name):
        member = BoardMember(self.lighthouse.address, name, timeout_s=PATIENCE_S, expected=3)
        work = self.work(member, self.steps, **self.options)
        self.works[name] = work
        try:
            run_elastic(member, work)
        except BaseException as error:
            self.errors.append(error)
        finally:
            member.close()


@pytest.fixture
def lighthouse():
    with LighthouseProcess() as found:
        yield found


def test_members_that_join_during_steps_fetch_the_state_and_no_step_is_lost(lighthouse):
    joined, seen = threading.Event(), threading.Event()

    def join(step):
        if step == 5 and not joined.is_set():
            joined.set()
            members.start("late")
        if step == 40:
            seen.wait(PATIENCE_S)  # until it has been heard, so that it joins before the last step

    members = Members(lighthouse, steps=60, step_s=0.005, on_commit=join)
    for name in ("c", "a", "b"):
        members.start(name)
    listening = set()
    while not joined.wait(0.01):
        listening |= {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    until_s = time.monotonic() + PATIENCE_S
    while not members.works["a"].member.leaving and time.monotonic() < until_s:
        time.sleep(0.01)
    seen.set()
    works = members.results()
    assert [(work.step, work.total) for work in works.values()] == [(60, 1830.0)] * 4
    assert works["a"].log[0] == (("a", "b", "c"), 0, [])
    assert works["late"].log[0][0] == ("a", "b", "c", "late")
    assert works["late"].log[0][2] == ["late"]
    assert listening == {"127.0.0.1"}


@pytest.mark.full
def test_members_that_hold_too_little_go_back_together(lighthouse):
    restored = threading.Event()

    class Forgetful(SummedSteps):
        def restore(self):
            restored.set()
            self.step, self.total = 2, 3.0
            return self.step

        def begin(self, epoch, settlement, groups):
            super().begin(epoch, settlement, groups)
            if not restored.is_set():
                raise StateLost("of the sum")

    members = Members(lighthouse, 30, Forgetful)
    for name in "abc":
        members.start(name)
    works = members.results()
    assert [(work.step, work.total) for work in works.values()] == [(30, 465.0)] * 3
    assert all(work.log[-1] == (("a", "b", "c"), 2, []) for work in works.values())


def run_process(connection, rank_info, address, name, steps, step_s):
    member = BoardMember(address, name, timeout_s=PATIENCE_S, expected=3)
    work = SummedSteps(member, steps, step_s, on_commit=connection.send)
    run_elastic(member, work)
    connection.send((work.step, work.total, work.log))
    member.close()


class Processes:
    """Members as processes, which say each step that they commit and at last their step, sum and epochs."""

    def __init__(self, address, steps, step_s=0.02):
        self.children, self.args = {}, (steps, step_s)
        self._address, self._all = address, []

    def start(self, name):
        info = RankInfo(0, 3, "", 0, PATIENCE_S, 0, 3, True)
        self.children[name] = start_process(info, run_process, self._address, name, *self.args)
        self._all.append(self.children[name])

    def received(self, name):
        assert self.children[name][1].poll(PATIENCE_S)
        return self.children[name][1].recv()

    def result(self, name):
        while not isinstance(last := self.received(name), tuple):
            pass
        return last

    def signal(self, name, number):
        os.kill(self.children[name][0].pid, number)

    def close(self):
        for process, _ in self._all:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
        end_processes(self._all)


@pytest.fixture
def processes(lighthouse):
    found = Processes(lighthouse.address, 200)
    yield found
    found.close()


def test_killed_processes_cost_no_step_and_come_back_under_their_names(processes):
    for name in "abc":
        processes.start(name)
    while processes.received("a") < 10:
        pass
    for name in "bc":  # both at once
        processes.signal(name, signal.SIGKILL)
    while processes.received("a") < 40:
        pass
    processes.start("b")
    for name in "ab":
        step, total, log = processes.result(name)
        assert (step, total) == (200, 20_100)
    ((members, joined_at, stale),) = log
    assert (members, stale) == (("a", "b"), ["b"])
    assert joined_at > 40


@pytest.mark.full
def test_a_stopped_process_is_left_out_and_fetches_the_state_when_it_goes_on(processes):
    """Others go on after the heartbeat time-out; what it has missed it does not compute."""
    for name in "abc":
        processes.start(name)
    while processes.received("a") < 10:
        pass
    processes.signal("c", signal.SIGSTOP)
    began_s = time.monotonic()
    while processes.received("a") < 40:
        pass
    assert time.monotonic() - began_s > HEARTBEAT_TIMEOUT_S / 2  # it was missed, not waited for
    processes.signal("c", signal.SIGCONT)
    for name in "abc":
        step, total, log = processes.result(name)
        assert (step, total) == (200, 20_100)
    assert log[-1][0] == ("a", "b", "c")
    assert log[-1][2] == ["c"]


@pytest.mark.full
def test_a_lighthouse_that_is_lost_costs_no_step():
    first = LighthouseProcess()
    processes = Processes(first.address, 120)
    try:
        for name in "abc":
            processes.start(name)
        while processes.received("a") < 10:
            pass
        first.close()
        while processes.received("a") < 30:
            pass
        with LighthouseProcess(port=first.address[1]):
            for name in "abc":
                step, total, log = processes.result(name)
                assert (step, total, len(log)) == (120, 7260, 1)
    finally:
        first.close()
        processes.close()


@pytest.mark.full
def test_a_second_process_of_a_name_does_not_drive_out_the_first(lighthouse):
    first, second = (BoardMember(lighthouse.address, "a", timeout_s=20.0, expected=2, absent_s=30.0) for _ in range(2))
    failures = []

    def join(member):
        with pytest.raises(RankFailed) as failed:
            member.join()
        failures.append(str(failed.value))

    threads = []
    for member in (first, second):
        threads.append(threading.Thread(target=join, args=(member,)))
        threads[-1].start()
        time.sleep(0.2)
    threads[1].join(PATIENCE_S)
    assert [text for text in failures if text.endswith("another process is a")]
    threads[0].join(PATIENCE_S)
    assert failures[-1].startswith("a: no epoch began within 20 s")
    for member in (first, second):
        member.close()


def test_an_epoch_has_at_least_so_many_members(lighthouse):
    member = BoardMember(lighthouse.address, "a", timeout_s=5.0, least=2, absent_s=0.1)
    with pytest.raises(RankFailed, match=r"a: no epoch began within 5 s; lighthouse 127.0.0.1:\d+: 1 members wait for others"):
        member.join()
    member.close()


def test_an_address_that_is_taken_is_a_sentence(lighthouse):
    with pytest.raises(BadInput, match=r"port \d+ on 127.0.0.1 cannot be used: Address already in use"):
        LighthouseProcess(port=lighthouse.address[1])
