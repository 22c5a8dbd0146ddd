"""Work in steps whose result tells which steps were done, in how many halves and by whom: an all-reduce for each."""

import time

import torch
from torch.distributed import BroadcastOptions, ReduceOp


class SummedSteps:
    """Each step adds its number to a sum, shared out over the members; members that are stale fetch the sum.

    Attributes:
        log: (members, step, stale members) at the start of each epoch.
        commits: (step, time by time.monotonic) of each step committed here.
    """

    def __init__(self, member, steps, step_s=0.0, on_commit=lambda step: None):
        self.member, self.steps, self.step, self.total = member, steps, 0, 0.0
        self.log, self.commits, self._pending, self._step_s, self._on_commit = [], [], None, step_s, on_commit

    def restore(self):
        raise AssertionError("a member always holds the sum")

    def begin(self, epoch, settlement):
        group = self._group = self.member.groups.group
        self._members = len(epoch.members)
        state = torch.tensor([self.total, self.step], dtype=torch.float64)
        options = BroadcastOptions()
        options.rootRank = next(rank for rank, name in enumerate(epoch.members) if name not in settlement.stale)
        self.member.perform(lambda: group.broadcast([state], options).wait())
        assert state[1] == settlement.version.step
        if self.member.name in settlement.stale:
            self.total, self.step = state[0].item(), int(state[1])
        assert (self.total, self.step) == tuple(state.tolist())
        self.log.append((epoch.members, self.step, sorted(settlement.stale)))

    def prepare(self):
        share = torch.full((1,), (self.step + 1) / self._members, dtype=torch.float64)
        group = self._group
        self.member.perform(lambda: group.allreduce([share], ReduceOp.SUM).wait())
        time.sleep(self._step_s)
        self._pending = share.item()

    def commit(self):
        assert round(self._pending, 9) == self.step + 1
        self.total, self.step, self._pending = self.total + round(self._pending), self.step + 1, None
        self.commits.append((self.step, time.monotonic()))
        self._on_commit(self.step)

    def discard(self):
        self._pending = None
