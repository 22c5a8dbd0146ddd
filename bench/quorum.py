"""Members killed and joining again: `python bench/quorum.py [EVENTS]` writes bench/results/quorum-DATE.md.

Ten processes commit steps of one small all-reduce. Some are killed (-9) and started again under their names, two at once every
fifth time. Then the same with processes that take the cores away and members that hold the interpreter's lock: who is only
waiting must not be taken for dead. Then a host's packets are dropped. Last, all courses of three members are explored.
"""

import ctypes
import datetime
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from machine import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from aurora.elastic.lighthouse import HEARTBEAT_TIMEOUT_S, Lighthouse
from aurora.elastic.member import Member
from aurora.elastic.steps import run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from tests.elastic.summed_steps import SummedSteps
from tests.elastic.test_commit_rule import explore
from tests.elastic.test_member_hosts import WHY_NOT, lose_a_host

MEMBERS = 10
BURNERS = 10
LOADED_S = 120.0
LOCKED_S = 1.0  # how long a member holds the interpreter's lock, now and then
STEP_S = 0.02
CUTS = 10
NO_END = 10**9


def run_member(connection, rank_info, address, name, locks):
    """Commits steps for ever; sends (epoch, step, when) of each, and the members of each epoch."""
    lock = ctypes.PyDLL(None).usleep  # calls of a PyDLL keep the interpreter's lock
    dice = random.Random(name)

    def committed(step):
        connection.send((work.epoch, step, time.monotonic()))
        if locks and dice.random() < 0.01:
            lock(int(LOCKED_S * 1e6))

    class Work(SummedSteps):
        def begin(self, epoch, settlement):
            self.epoch = epoch.number
            super().begin(epoch, settlement)
            connection.send(epoch.members)

    member = Member(address, name, timeout_s=120, expected=MEMBERS)
    work = Work(member, NO_END, STEP_S, on_commit=committed)
    run_elastic(member, work)


class Run:
    """Members as processes, and their lighthouse."""

    def __init__(self, locks=False):
        self.locks, self.children, self.ended = locks, {}, []
        self.last, self.gaps_s = {}, []  # each member's last commit; seconds between two that epochs part
        self.left_out = 0  # members that were left out of an epoch although nobody killed them
        self.lighthouse = Lighthouse()
        for number in range(MEMBERS):
            self.start(f"rank{number:02d}")

    def start(self, name):
        info = RankInfo(0, MEMBERS, "", 0, 120, 0, MEMBERS, True)
        self.children[name] = start_process(info, run_member, self.lighthouse.address, name, self.locks)

    def kill(self, name):
        self.ended.append(self.children.pop(name))
        self.last.pop(name, None)
        os.kill(self.ended[-1][0].pid, signal.SIGKILL)

    def after(self, moment_s, epochs):
        """Of each living member, the time of its first commit after a moment, in an epoch that is not among `epochs`."""
        found = {}
        for name, (_, connection) in self.children.items():
            while name not in found:
                if not connection.poll(120):
                    raise SystemExit(f"{name} commits nothing")
                said = connection.recv()
                if isinstance(said[0], str):  # the members of an epoch
                    self.left_out += len(self.last.keys() - set(said))
                    continue
                epoch, step, when_s = said
                before_epoch, before_step, before_s = self.last.get(name, (epoch, step - 1, when_s))
                assert step == before_step + 1, f"{name} committed step {step} after {before_step}"
                if before_epoch != epoch:
                    self.gaps_s.append(when_s - before_s)
                self.last[name] = epoch, step, when_s
                if when_s > moment_s and epoch not in epochs:
                    found[name] = epoch, step, when_s
        return found

    def close(self):
        end_processes([*self.children.values(), *self.ended])
        self.lighthouse.close()


def killed(events):
    """Returns a table of pauses, and how many members were lost that nobody killed."""
    dice, run, kills = random.Random(1), Run(), 0
    pauses_s, joins_s = [], []
    try:
        now = run.after(0.0, {None})
        for event in range(events):
            names = dice.sample(sorted(run.children), 2 if event % 5 == 4 else 1)
            time.sleep(dice.uniform(0.05, 0.3))
            epochs = {epoch for epoch, _, _ in now.values()}
            moment_s, kills = time.monotonic(), kills + len(names)
            for name in names:
                run.kill(name)
            now = run.after(moment_s, epochs)
            pauses_s.append(max(when_s for _, _, when_s in now.values()) - moment_s)
            epochs |= {epoch for epoch, _, _ in now.values()}
            run.gaps_s.clear()
            for name in names:
                run.start(name)
            now = run.after(moment_s, epochs)
            joins_s.append(max(run.gaps_s))
            print(f"{event}: {pauses_s[-1]:.3f} s", flush=True)
    finally:
        run.close()
    lines = ["| seconds | p50 | p95 | most |", "|---|---|---|---|"]
    rows = {
        "from kill -9 to the next step that all others have committed": pauses_s,
        "between two committed steps when they join again": joins_s,
    }
    for name, values in rows.items():
        lines.append(f"| {name} | {np.percentile(values, 50):.3f} | {np.percentile(values, 95):.3f} | {max(values):.3f} |")
    found = (
        f"{kills} processes killed in {events} events; members left out that nobody killed: {run.left_out}; "
        "steps lost or done twice: 0."
    )
    return [*lines, "", found]


def burn():
    while True:
        pass


def loaded():
    """Returns a line on members that wait for a core or for the interpreter's lock."""
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(BURNERS)]
    for burner in burners:
        burner.start()
    run = Run(locks=True)
    try:
        run.after(0.0, {None})
        end_s = time.monotonic() + LOADED_S
        steps = 0
        while time.monotonic() < end_s:
            steps = max(step for _, step, _ in run.after(time.monotonic(), {None}).values())
    finally:
        run.close()
        for burner in burners:
            burner.kill()
    return [
        f"{LOADED_S:.0f} s, {steps} steps, {BURNERS} processes that only burn cores, members that hold the interpreter's",
        f"lock for {LOCKED_S:g} s after one step in a hundred: members left out: {run.left_out}. One that gives no sign of",
        f"life for {HEARTBEAT_TIMEOUT_S:g} s would be.",
    ]


def explored():
    lines = ["| killed | come back | cut off | states reached | ends |", "|---|---|---|---|---|"]
    for kills, restarts, cuts in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (2, 1, 0), (1, 1, 1)):
        worlds, ends = explore(kills, restarts, cuts)
        lines.append(f"| {kills} | {restarts} | {cuts} | {worlds} | {ends} |")
    return lines


def cut():
    """Returns a line on a host whose packets are dropped."""
    if WHY_NOT is not None:
        return [f"Not measured: {WHY_NOT}."]
    alone_s = [lose_a_host()[0] for _ in range(CUTS)]
    return [
        f"The other goes on without a host whose packets are dropped without a word (network namespaces, {CUTS} times) after",
        f"{min(alone_s):.2f} to {max(alone_s):.2f} s. That comes back, fetches the state, and goes on.",
    ]


def main(events):
    today = datetime.date.today().isoformat()
    lines = [f"# Quorum, {today}", "", machine(), "", f"## {MEMBERS} processes, steps of {STEP_S:g} s and more", ""]
    lines += [*killed(events), "", "## Waiting is not death", "", *loaded()]
    lines += ["", "## A host that disappears", "", *cut()]
    lines += ["", "## All courses of three members and two steps: no step is committed by some only", "", *explored(), ""]
    path = Path(__file__).parent / "results" / f"quorum-{today}.md"
    path.write_text("\n".join(lines))
    print(path.read_text())


if __name__ == "__main__":
    from quorum import main  # members are started from a module that they can import

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
