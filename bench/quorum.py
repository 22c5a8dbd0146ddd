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

from aurora.runtime.distributed.elastic_steps import run_elastic
from aurora.runtime.distributed.launcher import RankInfo, end_processes, start_process
from aurora.runtime.distributed.lighthouse import HEARTBEAT_S, Lighthouse
from aurora.runtime.distributed.member import Member
from aurora.runtime.distributed.secret import new_secret
from tests.runtime.distributed.summed_steps import SummedSteps
from tests.runtime.distributed.test_commit_rule import explore
from tests.runtime.distributed.test_member_hosts import WHY_NOT, lose_a_host

MEMBERS = 10
BURNERS = 10
LOADED_S = 120.0
LOCKED_S = 1.0  # how long a member holds the interpreter's lock, now and then
STEP_S = 0.02
CUTS = 10
NO_END = 10**9


class ListeningLighthouse(Lighthouse):
    """A lighthouse that notes how long living members were silent."""

    def __init__(self, *args, **options):
        self.silence_s = []
        super().__init__(*args, **options)

    def _handle(self, connection, message):
        self.silence_s.append(self._clock() - connection.heard_s)
        super()._handle(connection, message)


def run_member(connection, rank_info, address, secret, name, locks):
    """Commits steps for ever; sends (epoch, step, when) of each."""
    lock = ctypes.PyDLL(None).usleep  # calls of a PyDLL keep the interpreter's lock
    dice = random.Random(name)

    def committed(step):
        connection.send((work.epoch, step, time.monotonic()))
        if locks and dice.random() < 0.01:
            lock(int(LOCKED_S * 1e6))

    class Work(SummedSteps):
        def begin(self, epoch, settlement, groups):
            self.epoch = epoch.number
            super().begin(epoch, settlement, groups)

    member = Member(address, name, secret, timeout_s=120)
    work = Work(member, NO_END, STEP_S, on_commit=committed)
    run_elastic(member, work)


class Run:
    """Members as processes, and the lighthouse in this one."""

    def __init__(self, locks=False):
        self.secret, self.locks, self.lost, self.children, self.ended = new_secret(), locks, {}, {}, []
        self.last, self.gaps_s = {}, []  # each member's last commit; seconds between two that epochs part
        self.lighthouse = ListeningLighthouse(self.secret, MEMBERS, on_lost=self._note)
        for number in range(MEMBERS):
            self.start(f"rank{number:02d}")

    def _note(self, name, reason):
        self.lost.setdefault(name, []).append((time.monotonic(), reason))

    def start(self, name):
        info = RankInfo(0, MEMBERS, "", 0, 120, 0, MEMBERS, True)
        self.children[name] = start_process(info, run_member, self.lighthouse.address, self.secret, name, self.locks)

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
                epoch, step, when_s = connection.recv()
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
    pauses_s, noticed_s, joins_s = [], [], []
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
            noticed_s.append(max(run.lost[name][-1][0] for name in names) - moment_s)
            epochs |= {epoch for epoch, _, _ in now.values()}
            run.gaps_s.clear()
            for name in names:
                run.start(name)
            now = run.after(moment_s, epochs)
            joins_s.append(max(run.gaps_s))
            print(f"{event}: {pauses_s[-1]:.3f} s, noticed after {noticed_s[-1]:.3f} s", flush=True)
        false = sum(len(each) for each in run.lost.values()) - kills
    finally:
        run.close()
    lines = ["| seconds | p50 | p95 | most |", "|---|---|---|---|"]
    rows = {
        "from kill -9 to the next step that all others have committed": pauses_s,
        "of it until the lighthouse knows": noticed_s,
        "between two committed steps when they join again": joins_s,
    }
    for name, values in rows.items():
        lines.append(f"| {name} | {np.percentile(values, 50):.3f} | {np.percentile(values, 95):.3f} | {max(values):.3f} |")
    found = (
        f"{kills} processes killed in {events} events; members lost that nobody killed: {false}; steps lost or done twice: 0."
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
        run.lighthouse.silence_s.clear()
        end_s = time.monotonic() + LOADED_S
        steps = 0
        while time.monotonic() < end_s:
            steps = max(step for _, step, _ in run.after(time.monotonic(), {None}).values())
        false, silence_s = sum(len(each) for each in run.lost.values()), np.array(run.lighthouse.silence_s)
    finally:
        run.close()
        for burner in burners:
            burner.kill()
    return [
        f"{LOADED_S:.0f} s, {steps} steps, {BURNERS} processes that only burn cores, members that hold the interpreter's",
        f"lock for {LOCKED_S:g} s after one step in a hundred: members lost: {false}. Signs of life are due every",
        f"{HEARTBEAT_S:g} s; the longest silence was {silence_s.max():.2f} s, and {int((silence_s > 0.4).sum())} were longer",
        "than 0.4 s: a lighthouse that takes silence for death after 0.4 s would have lost a member each time.",
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
    noticed_s = [lose_a_host()[0] for _ in range(CUTS)]
    return [
        f"A host whose packets are dropped without a word (network namespaces, {CUTS} times) is lost after",
        f"{min(noticed_s):.2f} to {max(noticed_s):.2f} s. It comes back, fetches the state, and goes on.",
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
