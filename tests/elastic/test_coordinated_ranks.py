"""Ranks that die, hang, crash or come back: the others go on, and nothing is left behind."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from aurora.elastic import coordinated_ranks
from aurora.elastic.control_channel import Joined, Progress, Stop, Waits
from aurora.elastic.coordinated_ranks import CoordinatedRanks
from aurora.elastic.processes import RankProcess
from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.connections import unless_stopped
from aurora.runtime.transports.gloo import GlooTransport

pytestmark = pytest.mark.full

GOAL = 30  # rounds
HANG_S = 6.0  # of a rank that does hang; the others, which only wait for a core, must be heard within it
LEFT_OUT = "it hangs, or cannot be reached: the next epoch began without it"


@pytest.fixture(autouse=True)
def _time_to_hear_how(monkeypatch):
    """On a busy machine too, a loss says how a process ended."""
    monkeypatch.setattr("aurora.elastic.processes.EXIT_S", 10.0)


class Counting:
    """A coordinator that wants GOAL rounds from the last epoch's members, and hurts ranks after some of them."""

    def __init__(self, harm=None, goal=GOAL):
        self.harm, self.goal = harm or {}, goal
        self.pids = {}
        self.epochs, self.losses, self.rounds = [], {}, 0

    wants_new_epoch = False

    @property
    def finished(self):
        return self.rounds >= self.goal

    def assign(self, epoch, states):
        self.epochs.append(tuple(states))
        return {rank: self.assignment(rank) for rank in states}

    def assignment(self, rank):
        return f"work of {rank}"

    def on_progress(self, rank, value):
        assert value == (self.assignment(rank), list(self.epochs[-1]))
        self.rounds += rank == self.epochs[-1][0]
        for victim, sent in self.harm.pop(self.rounds, ()):
            os.kill(self.pids[victim], sent)
        return True

    def on_lost(self, rank, reason):
        self.losses[rank] = reason

    def watch(self, epoch, pids):
        self.pids |= pids


def gathered(transport, value, stopped):
    """What all ranks gave; gloo may wait on, when the epoch is over."""
    found = []
    unless_stopped(stopped, lambda: found.append(transport.gather(torch.tensor([value]))))
    return found[0].flatten().tolist()


def meets(rank_info, control, conduct="good", started=None, late_s=0.0):
    """In each epoch the members gather their ranks round after round, until they are stopped."""
    lost = None
    if started is not None and rank_info.rank == 1:
        if started.exists():
            time.sleep(late_s)
        started.touch()
    while (epoch := control.await_epoch("here", lost)) is not None:
        lost = None
        if conduct == "half" and rank_info.rank == 1:
            os.write(control._connection.fileno(), (4096).to_bytes(4, "big") + b"a message's beginning")
            os.kill(os.getpid(), signal.SIGSTOP)
        if conduct == "alone":
            lost = "nobody is there"
            continue
        try:
            control.member.connect(control.epoch)
        except RankFailed as error:
            lost = None if control.stopped.is_set() else str(error)
            continue
        epoch_groups = control.member.groups
        transport = GlooTransport(epoch_groups.groups[0])
        try:
            while not control.stopped.is_set():
                if conduct == "stumbles" and rank_info.rank == 1 and epoch.number == 1:
                    raise ZeroDivisionError("a bug")
                if conduct == "refuses" and rank_info.rank == 1:
                    raise BadInput("this file is wrong")
                if conduct == "dawdles" and rank_info.rank == 1 and epoch.number == 1:
                    time.sleep(600)
                control.send_progress((epoch.assignment, gathered(transport, rank_info.rank, control.stopped)))
                time.sleep(0.01)
        except RankFailed as error:
            lost = None if control.stopped.is_set() else str(error)
        finally:
            epoch_groups.abort()
    control.send_result(gc.get_freeze_count() if conduct == "counts" else rank_info.rank)


def run(coordinator, *args, ranks=4, timeout_s=120.0, hang_s=120.0, respawn=0):
    found = CoordinatedRanks(
        meets, ranks, coordinator, args, timeout_s=timeout_s, hang_s=hang_s, respawn=respawn, watch=coordinator.watch
    )
    try:
        return found.run()
    finally:
        assert not ranks_left()


def ranks_left():
    """Ranks are children of the fork server, which is a child of this process."""
    return [rank for child in psutil.Process().children() for rank in child.children()]


def test_without_losses_all_are_there_until_the_end():
    coordinator = Counting()
    assert run(coordinator) == {rank: rank for rank in range(4)}
    assert coordinator.epochs == [(0, 1, 2, 3)]


@pytest.mark.parametrize("victims", [(0,), (2,), (0, 3), (1, 2, 3)])
def test_those_left_go_on(victims):
    coordinator = Counting({5: [(victim, signal.SIGKILL) for victim in victims]})
    left = tuple(sorted(set(range(4)) - set(victims)))
    assert run(coordinator) == {rank: rank for rank in left}
    assert coordinator.epochs[-1] == left
    assert coordinator.losses == dict.fromkeys(victims, "killed by signal 9")


def test_one_that_is_lost_while_the_next_epoch_begins():
    coordinator = Counting({5: [(1, signal.SIGKILL)]})
    begin = coordinator.watch

    def watch(epoch, pids):
        begin(epoch, pids)
        if epoch == 2:
            os.kill(pids[2], signal.SIGKILL)

    coordinator.watch = watch
    assert run(coordinator) == {0: 0, 3: 3}
    assert coordinator.epochs[-1] == (0, 3)


def test_one_that_is_lost_after_it_has_joined_keeps_the_epoch_from_beginning(monkeypatch):
    coordinator = Counting()
    ranks = CoordinatedRanks(meets, 3, coordinator, (), timeout_s=9.0, hang_s=9.0)
    sent = []
    running = {rank: SimpleNamespace(pid=rank, send=sent.append) for rank in range(3)}
    ranks._processes = SimpleNamespace(kill=running.pop, running=running)
    for rank in range(3):
        ranks._handle(rank, Waits())
    for rank in (0, 1):
        ranks._handle(rank, Joined(7, (0, 1, 2), "here"))
    ranks._lose(1, "killed")
    ranks._handle(2, Joined(7, (0, 1, 2), "here"))
    assert (coordinator.epochs, sent) == ([], [])
    ranks._give_up_joined()
    assert sent == [], "one that lives may be about to say that it waits"
    monkeypatch.setattr(coordinated_ranks, "SETTLE_S", 0.0)
    ranks._give_up_joined()
    assert sent == [Stop(7)] * 2, "the others do not wait until they miss it"
    sent.clear()
    for rank in (0, 2):
        ranks._handle(rank, Joined(9, (0, 2), "here"))
    assert coordinator.epochs == [(0, 2)]
    assert [(start.epoch, start.number, start.members) for start in sent] == [(9, 1, (0, 2))] * 2
    assert coordinator.losses == {1: "killed"}


def test_ranks_that_meet_again_when_all_is_done_begin_no_epoch():
    """On a busy machine they do so before they hear that it is."""
    coordinator = Counting(goal=1)
    ranks = CoordinatedRanks(meets, 2, coordinator, (), timeout_s=9.0, hang_s=9.0)
    sent = []
    ranks._processes = SimpleNamespace(running={rank: SimpleNamespace(pid=rank, send=sent.append) for rank in range(2)})
    for epoch in (7, 9):
        for rank in range(2):
            ranks._handle(rank, Joined(epoch, (0, 1), "here"))
        ranks._handle(0, Progress(7, ("work of 0", [0, 1])))
    assert coordinator.finished
    assert (coordinator.epochs, [start.epoch for start in sent]) == ([(0, 1)], [7, 7])


def test_no_collection_goes_over_what_ranks_have_loaded():
    """It would keep them from giving a sign of life: with eight ranks and fourteen busy processes on two cores for seconds."""
    assert all(frozen > 10_000 for frozen in run(Counting(), "counts", ranks=2).values())


def test_one_that_stops_in_the_middle_of_a_message_is_ended():
    coordinator = Counting()
    assert run(coordinator, "half", ranks=3, hang_s=HANG_S) == {0: 0, 2: 2}
    assert coordinator.losses == {1: LEFT_OUT}


def test_one_that_hangs_is_ended():
    coordinator = Counting({5: [(1, signal.SIGSTOP)]})
    assert run(coordinator, ranks=3, hang_s=HANG_S) == {0: 0, 2: 2}
    assert coordinator.losses == {1: LEFT_OUT}


def test_one_that_does_not_read_a_message_larger_than_the_pipe_is_ended():
    """The supervisor waited for it in the middle of its message, and with it all others."""
    coordinator = Counting()
    coordinator.assignment = lambda rank: f"work of {rank}" * 100_000
    begin = coordinator.watch

    def watch(epoch, pids):
        begin(epoch, pids)
        if epoch == 1:
            os.kill(pids[1], signal.SIGSTOP)

    coordinator.watch = watch
    assert run(coordinator, ranks=3, hang_s=HANG_S) == {0: 0, 2: 2}
    assert coordinator.losses == {1: LEFT_OUT}


def test_a_message_that_nobody_reads_waits_in_the_background():
    ours, theirs = multiprocessing.Pipe()
    member = RankProcess(1, 0, None, ours)
    writing = threading.Thread(target=member.outbox.write, args=(ours.send_bytes,), daemon=True)
    writing.start()
    for message in (large := b"x" * 10**6, "small"):
        member.send(message)
    member.outbox.stop()
    assert [theirs.recv() for _ in range(2)] == [large, "small"]
    writing.join(60)
    assert not writing.is_alive()


def test_one_that_is_busy_for_ever_is_ended():
    coordinator = Counting()
    assert run(coordinator, "dawdles", ranks=3, timeout_s=HANG_S) == {0: 0, 2: 2}
    assert coordinator.losses == {1: LEFT_OUT}


def test_one_that_is_only_slow_stays():
    coordinator = Counting({5: [(1, signal.SIGSTOP)], 6: []})
    pids, on_progress = coordinator.pids, coordinator.on_progress

    def wakes(rank, value):
        on_progress(rank, value)
        if 5 not in coordinator.harm:
            os.kill(pids[1], signal.SIGCONT)
        return True

    coordinator.on_progress = wakes
    assert run(coordinator, ranks=3) == {0: 0, 1: 1, 2: 2}
    assert coordinator.epochs == [(0, 1, 2)]


@pytest.mark.parametrize("late_s", [0, 6])
def test_a_lost_rank_comes_back_and_is_used(late_s, tmp_path):
    """In the epoch that begins without the lost process; if it is later than that, in one for which the others leave theirs."""
    coordinator = Counting({5: [(1, signal.SIGKILL)]}, goal=10**9)
    assign = coordinator.assign

    def until_back(epoch, states):
        if epoch > 1 and len(states) == 3:
            coordinator.goal = coordinator.rounds + GOAL
        return assign(epoch, states)

    coordinator.assign = until_back
    assert run(coordinator, "good", tmp_path / "started", late_s, ranks=3, respawn=1) == {0: 0, 1: 1, 2: 2}
    everyone = (0, 1, 2)
    between = [everyone, (0, 2), everyone]
    assert coordinator.epochs in ([between] if late_s else [between, [everyone, everyone]])


def test_one_with_a_bug_is_left_behind_and_says_what_it_was():
    coordinator = Counting()
    assert run(coordinator, "stumbles", ranks=3) == {0: 0, 2: 2}
    assert "ZeroDivisionError at test_coordinated_ranks.py" in coordinator.losses[1]


def test_what_the_user_must_mend_ends_the_run():
    with pytest.raises(BadInput, match="this file is wrong"):
        run(Counting(), "refuses", ranks=2)


def test_when_all_are_lost_the_last_is_named():
    with pytest.raises(RankFailed, match=r"all ranks are lost; the last, rank \d: killed by signal 9"):
        run(Counting({5: [(0, signal.SIGKILL), (1, signal.SIGKILL)]}), ranks=2)


def test_epochs_without_progress_are_given_up():
    with pytest.raises(RankFailed, match=r"nothing moved in 5 epochs; the last ended by rank .: nobody is there"):
        run(Counting(), "alone", ranks=2)
