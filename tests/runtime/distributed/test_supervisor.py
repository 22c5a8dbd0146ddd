"""Ranks that die, hang, crash or come back: the others go on, and nothing is left behind."""

import os
import signal
import time

import psutil
import pytest
import torch

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.control_channel import EpochStart
from aurora.runtime.distributed.epoch_groups import meet, unless_stopped
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.supervisor import Supervisor

GOAL = 30  # rounds


@pytest.fixture(autouse=True)
def _time_to_hear_how(monkeypatch):
    """On a busy machine too, a loss says how a process ended."""
    monkeypatch.setattr("aurora.runtime.distributed.supervisor.EXIT_S", 10.0)


class Counting:
    """A steward who wants GOAL rounds from the last epoch's members, and hurts ranks after some of them."""

    def __init__(self, harm=None, goal=GOAL):
        self.harm, self.goal = harm or {}, goal
        self.pids = {}
        self.epochs, self.losses, self.rounds = [], {}, 0

    restless = False

    @property
    def finished(self):
        return self.rounds >= self.goal

    def assign(self, epoch, standing):
        self.epochs.append(tuple(standing))
        return {seat: f"part of {seat}" for seat in standing}

    def told(self, seat, value):
        assert value == (f"part of {seat}", list(self.epochs[-1]))
        self.rounds += seat == self.epochs[-1][0]
        for victim, sent in self.harm.pop(self.rounds, ()):
            os.kill(self.pids[victim], sent)
        return True

    def lost(self, seat, how):
        self.losses[seat] = how

    def watch(self, epoch, pids):
        self.pids |= pids


def gathered(transport, value, stopped):
    """What all ranks gave; gloo may wait on, when the epoch is over."""
    found = []
    unless_stopped(stopped, lambda: found.append(transport.gather(torch.tensor([value]))))
    return found[0].flatten().tolist()


def meets(seat, link, conduct="good"):
    """In each epoch the members gather their seats round after round, until they are stopped."""
    lost = None
    while isinstance(epoch := link.stand_by("here", lost), EpochStart):
        rank, lost = epoch.seats.index(seat.rank), None
        if conduct == "half" and seat.rank == 1:
            os.write(link._connection.fileno(), (4096).to_bytes(4, "big") + b"a message's beginning")
            os.kill(os.getpid(), signal.SIGSTOP)
        if conduct == "alone":
            lost = "nobody is there"
            continue
        try:
            meeting = meet(seat.host, seat.port, epoch.number, rank, len(epoch.seats), 1, 20.0, link.stopped)
        except RankFailed as error:
            lost = None if link.stopped.is_set() else str(error)
            continue
        link.on_stop(meeting.abort)
        transport = GlooTransport(meeting.groups[0])
        try:
            while not link.stopped.is_set():
                if conduct == "stumbles" and seat.rank == 1 and epoch.number == 1:
                    raise ZeroDivisionError("a bug")
                if conduct == "refuses" and seat.rank == 1:
                    raise BadInput("this file is wrong")
                if conduct == "dawdles" and seat.rank == 1 and epoch.number == 1:
                    since = time.monotonic()
                    link.busy(lambda since=since: since)
                    time.sleep(60)
                link.tell((epoch.part, gathered(transport, seat.rank, link.stopped)))
                time.sleep(0.01)
        except RankFailed as error:
            lost = None if link.stopped.is_set() else str(error)
        finally:
            meeting.abort()
    link.bring(seat.rank)


def run(steward, *args, seats=4, timeout_s=20.0, hang_s=20.0, respawn=0):
    supervisor = Supervisor(
        meets, seats, steward, args, timeout_s=timeout_s, hang_s=hang_s, respawn=respawn, watch=steward.watch
    )
    try:
        return supervisor.run()
    finally:
        assert not ranks_left()


def ranks_left():
    """Ranks are children of the fork server, which is a child of this process."""
    return [rank for child in psutil.Process().children() for rank in child.children()]


def test_without_losses_all_are_there_until_the_end():
    steward = Counting()
    assert run(steward) == {seat: seat for seat in range(4)}
    assert steward.epochs == [(0, 1, 2, 3)]


@pytest.mark.parametrize("victims", [(0,), (2,), (0, 3), (1, 2, 3)])
def test_those_left_go_on(victims):
    steward = Counting({5: [(victim, signal.SIGKILL) for victim in victims]})
    left = tuple(sorted(set(range(4)) - set(victims)))
    assert run(steward) == {seat: seat for seat in left}
    assert steward.epochs[-1] == left
    assert steward.losses == dict.fromkeys(victims, "killed by signal 9")


def test_one_that_is_lost_while_the_next_epoch_begins():
    steward = Counting({5: [(1, signal.SIGKILL)]})
    begin = steward.watch

    def watch(epoch, pids):
        begin(epoch, pids)
        if epoch == 2:
            os.kill(pids[2], signal.SIGKILL)

    steward.watch = watch
    assert run(steward) == {0: 0, 3: 3}
    assert steward.epochs[-1] == (0, 3)


def test_one_that_stops_in_the_middle_of_a_message_is_ended():
    steward = Counting()
    assert run(steward, "half", seats=3, hang_s=1.0) == {0: 0, 2: 2}
    assert steward.losses == {1: "said nothing for 1 s"}


def test_one_that_hangs_is_ended():
    steward = Counting({5: [(1, signal.SIGSTOP)]})
    assert run(steward, seats=3, hang_s=1.0) == {0: 0, 2: 2}
    assert steward.losses == {1: "said nothing for 1 s"}


def test_one_that_is_busy_for_ever_is_ended():
    steward = Counting()
    assert run(steward, "dawdles", seats=3, timeout_s=2.0) == {0: 0, 2: 2}
    assert steward.losses == {1: "was busy with one thing for 2 s"}


def test_one_that_is_only_slow_stays():
    steward = Counting({5: [(1, signal.SIGSTOP)], 6: []})
    pids, told = steward.pids, steward.told

    def wakes(seat, value):
        told(seat, value)
        if 5 not in steward.harm:
            os.kill(pids[1], signal.SIGCONT)
        return True

    steward.told = wakes
    assert run(steward, seats=3) == {0: 0, 1: 1, 2: 2}
    assert steward.epochs == [(0, 1, 2)]


def test_a_lost_rank_comes_back_and_is_used():
    steward = Counting({5: [(1, signal.SIGKILL)]}, goal=10**9)
    assign = steward.assign

    def until_back(epoch, standing):
        if epoch > 2 and len(standing) == 3:
            steward.goal = steward.rounds + GOAL
        return assign(epoch, standing)

    steward.assign = until_back
    assert run(steward, seats=3, respawn=1) == {0: 0, 1: 1, 2: 2}
    assert steward.epochs == [(0, 1, 2), (0, 2), (0, 1, 2)]


def test_one_with_a_bug_is_left_behind_and_says_what_it_was():
    steward = Counting()
    assert run(steward, "stumbles", seats=3) == {0: 0, 2: 2}
    assert "ZeroDivisionError at test_supervisor.py" in steward.losses[1]


def test_what_the_user_must_mend_ends_the_run():
    with pytest.raises(BadInput, match="this file is wrong"):
        run(Counting(), "refuses", seats=2)


def test_when_all_are_lost_the_last_is_named():
    with pytest.raises(RankFailed, match=r"all ranks are lost; the last, rank \d: killed by signal 9"):
        run(Counting({5: [(0, signal.SIGKILL), (1, signal.SIGKILL)]}), seats=2)


def test_epochs_without_progress_are_given_up():
    with pytest.raises(RankFailed, match=r"nothing moved in 5 epochs; the last ended by rank .: nobody is there"):
        run(Counting(), "alone", seats=2)
