"""Members that come and go: real connections to a lighthouse, real process groups."""

import json
import os
import signal
import socket
import threading
import time

import psutil
import pytest

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.elastic_steps import StateLost, run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from aurora.runtime.distributed.lighthouse import Lighthouse
from aurora.runtime.distributed.member import Member
from aurora.runtime.distributed.quorum import JoinEpoch
from aurora.runtime.distributed.signed_messages import Alive, Hello, Refused, Signatures, SignedMessages
from tests.runtime.distributed.summed_steps import SummedSteps

SECRET = b"of all members, and of nobody else"


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
            thread.join(60)
        assert self.errors == []
        return self.works

    def _run(self, name):
        member = Member(self.lighthouse.address, name, SECRET, timeout_s=60)
        work = self.work(member, self.steps, **self.options)
        self.works[name] = work
        try:
            run_elastic(member, work)
        except BaseException as error:
            self.errors.append(error)
        finally:
            member.close()


@pytest.fixture
def lost():
    return []


@pytest.fixture
def lighthouse(lost):
    with Lighthouse(SECRET, 3, absent_s=30, on_lost=lambda name, reason: lost.append((name, reason))) as found:
        yield found


def test_members_that_join_during_steps_fetch_the_state_and_no_step_is_lost(lighthouse, lost):
    joined = threading.Event()

    def join(step):
        if step == 5 and not joined.is_set():
            joined.set()
            members.start("late")

    members = Members(lighthouse, steps=60, step_s=0.005, on_commit=join)
    for name in ("c", "a", "b"):
        members.start(name)
    listening = set()
    while not joined.wait(0.01):
        listening |= {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    works = members.results()
    assert [(work.step, work.total) for work in works.values()] == [(60, 1830.0)] * 4
    assert works["a"].log[0] == (("a", "b", "c"), 0, [])
    assert works["late"].log[0][0] == ("a", "b", "c", "late")
    assert works["late"].log[0][2] == ["late"]
    assert lost == []
    assert listening == {"127.0.0.1"}


def test_members_that_hold_too_little_go_back_together(lighthouse, lost):
    joined, restored = threading.Event(), threading.Event()

    class Forgetful(SummedSteps):
        def restore(self):
            restored.set()
            self.step, self.total = 2, 3.0
            return self.step

        def begin(self, epoch, settlement, groups):
            super().begin(epoch, settlement, groups)
            if len(epoch.members) == 4 and not restored.is_set():
                raise StateLost("of the sum")

    def join(step):
        if step == 5 and not joined.is_set():
            joined.set()
            members.start("late")

    members = Members(lighthouse, 30, Forgetful, step_s=0.005, on_commit=join)
    for name in "abc":
        members.start(name)
    works = members.results()
    assert [(work.step, work.total) for work in works.values()] == [(30, 465.0)] * 4
    assert all(work.log[-1] == (("a", "b", "c", "late"), 2, []) for work in works.values())
    assert lost == []


def test_a_restarted_lighthouse_costs_no_step(lost):
    first = Lighthouse(SECRET, 3, on_lost=lambda name, reason: lost.append(name))
    restarted = threading.Event()

    def restart(step):
        if step == 10 and not restarted.is_set():
            restarted.set()
            first.close()
            time.sleep(0.1)
            again.append(Lighthouse(SECRET, 3, port=first.address[1], on_lost=lambda name, reason: lost.append(name)))

    again = []
    members = Members(first, steps=60, step_s=0.01, on_commit=restart)
    for name in "abc":
        members.start(name)
    works = members.results()
    assert [(work.step, work.total, len(work.log)) for work in works.values()] == [(60, 1830.0, 1)] * 3
    assert lost == []
    again[0].close()


def run_process(connection, rank_info, address, name, steps):
    def committed(step):
        connection.send(step)
        if step == 40 and name == "a":
            connection.recv()

    member = Member(address, name, SECRET, timeout_s=60)
    work = SummedSteps(member, steps, on_commit=committed)
    run_elastic(member, work)
    connection.send((work.step, work.total, work.log))
    member.close()


def test_killed_processes_cost_no_step_and_come_back_under_their_names(lighthouse, lost):
    steps, children = 80, {}

    def start(name):
        children[name] = start_process(RankInfo(0, 3, "", 0, 60, 0, 3, True), run_process, lighthouse.address, name, steps)

    def received(name):
        assert children[name][1].poll(60)
        return children[name][1].recv()

    for name in "abc":
        start(name)
    ended = []
    try:
        while received("a") < 10:
            pass
        for name in "bc":  # both at once
            os.kill(children[name][0].pid, signal.SIGKILL)
            ended.append(children[name])
        while received("a") < 40:
            pass
        start("b")
        while lighthouse.waiting == 0:
            time.sleep(0.01)
        children["a"][1].send("go on")
        for name in "ab":
            while not isinstance(last := received(name), tuple):
                pass
            assert last[:2] == (steps, sum(range(steps + 1)))
        ((members, joined_at, stale),) = last[2]
        assert (members, stale) == (("a", "b"), ["b"])
        assert joined_at > 40
        assert sorted(name for name, _ in lost) == ["b", "c"]
    finally:
        end_processes([*children.values(), *ended])  # perhaps before they have said goodbye


def test_who_does_not_know_the_secret_is_not_heard(lighthouse, lost):
    member = Member(lighthouse.address, "liar", b"another secret, as long as it is", timeout_s=0.5)
    with pytest.raises(RankFailed, match=r"liar: no epoch began within 0.5 s; lighthouse 127.0.0.1:\d+: .*secret"):
        member.join(None)
    member.close()
    for sent in (b"\n", b"{}\n", b"[1]\n", b'{"name": 3}\n', Hello("a", "p").line() + b"x {}\n", b"\xff" * 100 + b"\n"):
        with socket.create_connection(lighthouse.address) as connection:
            connection.settimeout(60)
            connection.sendall(sent)
            with connection.makefile("rb") as lines:
                assert len(lines.readlines()) <= 1  # its hello
    assert lost == []


def test_a_line_of_another_connection_direction_or_place_is_refused():
    ours, theirs = Hello("a", "p"), Hello()
    member, lighthouse = (SignedMessages(SECRET, ours, theirs, at_member) for at_member in (True, False))
    first, second = member.pack(Alive()), member.pack(JoinEpoch(data={"step": 3}))
    for wrong in (second, lighthouse.pack(Alive()), first.replace(b"Alive", b"Alivf"), b"", first[:-9]):
        with pytest.raises(Refused):
            SignedMessages(SECRET, ours, theirs, at_member=False).unpack(wrong)
    with pytest.raises(Refused):
        SignedMessages(SECRET, Hello("a", "p"), theirs, at_member=False).unpack(first)
    reader = SignedMessages(SECRET, ours, theirs, at_member=False)
    assert [reader.unpack(first), reader.unpack(second)] == [Alive(), JoinEpoch(data={"step": 3})]
    with pytest.raises(Refused):
        reader.unpack(second)
    with pytest.raises(Refused):
        Hello.parse(b"[" * 100_000)


@pytest.mark.parametrize("said", [
    ["Nothing", {}], ["Alive", {"x": 1}], 3, ["JoinEpoch", {"epoch": "1"}], ["JoinEpoch", {"members": [1]}],
    ["StoreValue", {"epoch": [], "key": "a", "value": ""}], ["StoreValue", {"epoch": 1, "key": ["a"], "value": ""}],
    ["StoreValue", {"epoch": 1, "key": "a", "value": "no hexadecimal digits"}],
])  # fmt: skip
def test_what_is_no_message_is_refused_although_a_member_says_it(said):
    ours, theirs = Hello("a", "p"), Hello()
    text = json.dumps(said).encode()
    signed = Signatures(SECRET, (ours, theirs), "member", "lighthouse").sign(text)
    with pytest.raises(Refused, match="no message of this version"):
        SignedMessages(SECRET, ours, theirs, at_member=False).unpack(signed + b" " + text)


def test_a_member_that_is_closed_while_it_connects_does_not_join():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Member(listener.getsockname()[:2], "a", SECRET, timeout_s=1.0)

        def join():
            with pytest.raises(RankFailed):
                member.join(None)

        joining = threading.Thread(target=join)
        joining.start()
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(10)
            Hello.parse(lines.readline())
            member.close()
            connection.sendall(Hello().line())
            assert lines.readline() == b""
        joining.join()


def test_a_second_process_of_a_name_does_not_drive_out_the_first(lighthouse, lost):
    first, second = (Member(lighthouse.address, "a", SECRET, timeout_s=1.0) for _ in range(2))
    failures = []

    def join(member):
        with pytest.raises(RankFailed) as failed:
            member.join(None)
        failures.append(str(failed.value))

    threads = []
    for member in (first, second):
        threads.append(threading.Thread(target=join, args=(member,)))
        threads[-1].start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert len(failures) == 2
    assert failures[1].endswith("another process is a")
    for member in (first, second):
        member.close()
    assert lost == []


def test_an_address_that_is_taken_is_a_sentence(lighthouse):
    with pytest.raises(BadInput, match=r"port \d+ on 127.0.0.1 cannot be used: Address already in use"):
        Lighthouse(SECRET, 1, port=lighthouse.address[1])
