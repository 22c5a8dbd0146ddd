"""Members as processes, each of which does work in steps and tells of it, and members as threads of this process."""

import os
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import wait

from aurora.elastic.member import Member
from aurora.elastic.steps import run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from tests.elastic.emulated_gpu import Killed
from tests.elastic.summed_steps import SummedSteps

PATIENCE_S = 120.0  # for what takes seconds on a quiet machine
INFO = RankInfo(0, 3, "", 0, PATIENCE_S, 0, 3, True)


def run_member(connection, _info, address, name, steps, step_s, options):
    """Sends (epoch, step, when) of each commit, at the end (steps, sum, log); "hold" makes it wait after its next commit."""

    def committed(step):
        connection.send((work.epoch, step, time.monotonic()))
        while connection.poll():  # "hold": until another member waits to join
            connection.recv()
            until_s = time.monotonic() + PATIENCE_S
            while not (member.leaving or member.stopped.is_set()) and time.monotonic() < until_s:
                time.sleep(0.01)

    class Work(SummedSteps):
        def begin(self, epoch, settlement):
            self.epoch = epoch.number
            super().begin(epoch, settlement)

    member = Member(address, name, timeout_s=PATIENCE_S, **options)
    work = Work(member, steps, step_s, on_commit=committed)
    try:
        run_elastic(member, work)
        connection.send((work.step, work.total, work.log))
    except Exception as error:
        connection.send(error)
    connection.recv()
    member.close()


def end(member):
    """Ends a member of this process, threads and all: Python's end would break off their calls of torchft."""
    member.close()
    for thread in member._threads:
        thread.join(PATIENCE_S)


class Members:
    """Processes of members by name."""

    def __init__(self, address, steps=60, step_s=0.01, **options):
        self._args, self.options = (address, steps, step_s), options
        self.children, self._ended, self.last = {}, [], {}
        self._said = {}

    def start(self, *names, **options):
        for name in names:
            address, steps, step_s = self._args
            self.children[name] = start_process(INFO, run_member, address, name, steps, step_s, self.options | options)

    def signal(self, name, number):
        os.kill(self.children[name][0].pid, number)

    def kill(self, *names):
        for name in names:
            self.signal(name, signal.SIGKILL)
            self._ended.append(self.children.pop(name))
            self.last.pop(name, None)
            self._said.pop(name, None)

    def hold(self, name):
        """Makes a member wait after its next commit, until another waits to join or the epoch is over."""
        self.children[name][1].send("hold")

    def received(self, name):
        """What a member says next. What all others say meanwhile is kept: a full pipe would stop them."""
        end_s = time.monotonic() + PATIENCE_S
        while not self._said.get(name):
            connections = {connection: each for each, (_, connection) in self.children.items()}
            ready = wait(connections, end_s - time.monotonic())
            assert ready, f"{name} says nothing"
            for connection in ready:
                self._said.setdefault(connections[connection], deque()).append(connection.recv())
        said = self._said[name].popleft()
        if isinstance(said, Exception):
            raise said
        return said

    def until(self, name, step, epoch=0):
        """Waits until a member has committed a step in an epoch after `epoch`; returns (epoch, step, when)."""
        while True:
            said = self.received(name)
            assert isinstance(said[2], float), f"{name} has ended: {said}"
            before = self.last.get(name)
            assert before is None or said[1] == before[1] + 1, "a step is lost or done twice"
            self.last[name] = said
            if said[1] >= step and said[0] > epoch:
                return said

    def result(self, name):
        """Waits for a member's end: (steps, sum, log)."""
        while isinstance((said := self.received(name))[2], float):
            pass
        return said

    def close(self):
        end_processes([*self.children.values(), *self._ended])


class Threads:
    """Members as threads of this process, by name; one that was killed says nothing more.

    Attributes:
        works: what each member does in steps.
    """

    def __init__(self, lighthouse):
        self.works, self._address = {}, lighthouse.address
        self._errors, self._threads, self._members = [], [], {}

    def make(self, name, work, gpu=None):
        """Makes a member, and its work by a function of the member. Returns the member."""
        member = self._members[name] = Member(self._address, name, timeout_s=PATIENCE_S, expected=3, gpu=gpu)
        self.works[name] = work(member)
        return member

    def start(self, *names):
        for name in names:
            self._threads.append(threading.Thread(target=self._run, args=(name,), daemon=True))
            self._threads[-1].start()

    def results(self):
        """Waits until all have ended; returns their work."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for member in self._members.values():
            end(member)
        assert self._errors == []
        return self.works

    def _run(self, name):
        try:
            run_elastic(self._members[name], self.works[name])
            self._members[name].close()
        except Killed:
            pass
        except BaseException as error:
            self._errors.append(error)
