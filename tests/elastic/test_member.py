"""Members that come and go: processes, torchft's lighthouse, real process groups."""

import signal
import socket
import time

import psutil
import pytest

pytest.importorskip("torchft")

from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S, LighthouseProcess
from aurora.elastic.member import BoardMember
from aurora.errors import BadInput, RankFailed
from tests.elastic.processes import PATIENCE_S, Members


@pytest.fixture
def lighthouse():
    with LighthouseProcess() as found:
        yield found


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


def end(member):
    """Ends a member of this process, threads and all: Python's end would break off their calls of torchft."""
    member.close()
    for thread in member._threads:
        thread.join(PATIENCE_S)


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
def test_a_restarted_lighthouse_costs_neither_step_nor_epoch():
    first = LighthouseProcess()
    run = Members(first.address, steps=100, step_s=0.05, expected=3)
    try:
        run.start("a", "b", "c")
        run.until("a", 10)
        first.close()
        run.until("a", 15)
        with LighthouseProcess(port=first.address[1]):
            logs = check_results(run, "abc", 100)
    finally:
        run.close()
    assert all(len(log) == 1 for log in logs.values())


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
    second = BoardMember(lighthouse.address, "a", timeout_s=60)
    with pytest.raises(RankFailed, match="a: another process is a"):
        second.join()
    end(second)
    assert run.until("a", step + 300)[0] == epoch


def test_no_epoch_without_a_lighthouse_or_with_too_few_members(lighthouse):
    few = BoardMember(lighthouse.address, "few", least=2, timeout_s=2)
    with pytest.raises(RankFailed, match=r"few: no epoch began within 2 s; lighthouse 127.0.0.1:\d+: 1 members? wait"):
        few.join()
    end(few)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    alone = BoardMember(address, "alone", timeout_s=1)
    with pytest.raises(RankFailed, match=f"alone: no epoch began within 1 s; lighthouse 127.0.0.1:{address[1]}: "):
        alone.join()
    end(alone)


def test_an_address_that_is_taken_is_a_sentence(lighthouse):
    with pytest.raises(BadInput, match=r"port \d+ on 127.0.0.1 cannot be used: Address already in use"):
        LighthouseProcess(port=lighthouse.address[1])
