"""Launcher of an elastic training run: starts ranks, hears what they say, keeps the steps, and admits hosts that join."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aurora.elastic.commit_rule import Version
from aurora.elastic.host_agreement import difference
from aurora.elastic.host_connection import JoinRun
from aurora.elastic.hosts import LedRanks
from aurora.elastic.member import HANG_S
from aurora.elastic.processes import RankProcess, RankProcesses, StartedRank
from aurora.errors import AuroraError, RankFailed
from aurora.training.training_run import LOG, MODEL, CommittedStep, TrainResult, log_step
from aurora.types import TrainOptions

LOOK_S = 0.1  # at most, between two looks at processes
Watch = Callable[[int, dict[int, int]], None]


@dataclass(frozen=True)
class FinalStep:
    """Member to launcher: a step that all members know to be committed."""

    version: Version
    step: CommittedStep


@dataclass(frozen=True)
class MemberFinished:
    """Member to launcher: all steps are done."""

    remarks: tuple[str, ...]


class KeptSteps:
    """Steps that members have said to be final; of two accounts of a step that of the later epoch counts, or with a pause."""

    def __init__(self) -> None:
        self.finals: dict[int, FinalStep] = {}  # by step

    def __len__(self) -> int:
        return len(self.finals)

    def take(self, final: FinalStep) -> tuple[bool, bool]:
        """Takes an account of a step. Returns whether it tells something new, and whether it is the first of its epoch."""
        before = self.finals.get(final.step.step)
        told = before is not None and final.version <= before.version  # by another member: it may have joined after a pause
        new = before is None or not told or (final.step.pause is not None and before.step.pause is None)
        if new:
            self.finals[final.step.step] = final
        return new, not told

    def result(self, output: Path, options: TrainOptions, ranks: int, remarks: list[str], lost: list[str]) -> TrainResult:
        """Returns the result of a run of these steps."""
        steps = tuple(self.finals[number].step for number in sorted(self.finals))
        return TrainResult(
            output / MODEL, ranks, options.transport, options.min_replicas_among(ranks), options.batch * options.length,
            min(self.finals, default=options.steps), steps, tuple(dict.fromkeys(remarks)), tuple(lost),
        )  # fmt: skip


class Launcher:
    """Starts ranks, hears what they say, and keeps the log.

    Args:
        options, output: as in `aurora.train`.
        watch: called after each new step with its number and the process id of every rank of this host.
    """

    def __init__(self, options: TrainOptions, output: Path, watch: Watch) -> None:
        self._options, self._output, self._watch = options, output, watch
        self._processes: RankProcesses | LedRanks | None = None
        self._running: dict[int, StartedRank] = {}
        self._names = {rank: f"rank {rank}" for rank in range(options.ranks)}
        self._respawns_left = dict.fromkeys(range(options.ranks), options.respawn)
        self._steps = KeptSteps()
        self._lost: list[str] = []
        self._remarks: list[str] = []
        self._most = options.ranks  # ranks at one time
        self._ended_s: float | None = None  # when the first member had finished

    def run(self, processes: RankProcesses | LedRanks) -> TrainResult:
        """Runs until all members have finished or are lost. None of this host's processes is left."""
        self._processes = processes
        try:
            for rank in range(self._options.ranks):
                processes.start(rank)
            while (self._running or processes.starting) and not self._late():
                for rank, started in processes.adopt_started():
                    self._adopt(rank, started)
                for rank, message in processes.messages(LOOK_S):
                    self._handle(rank, message)
        finally:
            processes.close(self._ended_s is not None)
        return self._steps.result(self._output, self._options, self._most, self._remarks, self._lost)

    def refusal(self, shared: Mapping[str, str], host: JoinRun) -> str | None:
        """Returns in a sentence why a host cannot join; None: it can.

        Args:
            shared: what hosts have to have as this one has it; see `shared_by_hosts`.
            host: what it says of itself.
        """
        assert isinstance(self._processes, LedRanks)
        if self._ended_s is not None:
            return "expected a run that goes on, found that all steps are done"
        if (sentence := difference(shared, host.about)) is not None:
            return sentence
        ranks = self._options.ranks + sum(len(each.ranks) for each in (*self._processes.joined, host) if each.name != host.name)
        if (ranks := ranks + len(host.ranks)) > self._options.batch:
            return f"`batch`: expected a sample for each of {ranks} ranks or more, found {self._options.batch}"
        return None

    def _adopt(self, rank: int, started: StartedRank | OSError) -> None:
        """Takes note of a process that was started, or was not."""
        if isinstance(self._processes, LedRanks) and (host := self._processes.host_of(rank)) is not None:
            self._names[rank] = f"{host.name}: rank {host.ranks.index(rank)}"
            self._respawns_left.setdefault(rank, host.respawn)
        if isinstance(started, OSError):
            self._lose(rank, f"did not start: {started}")
        else:
            self._running[rank] = started
            self._most = max(self._most, len(self._running))

    def _late(self) -> bool:
        """Returns whether a member has finished and the others have had HANG_S seconds to do the same."""
        return self._ended_s is not None and time.monotonic() - self._ended_s > HANG_S

    def _handle(self, rank: int, message: Any) -> None:
        """Handles one message of a member. Raises the error that ends the run."""
        match message:
            case None:
                self._lose(rank, self._running[rank].exit_reason())
            case RankFailed():
                self._lose(rank, str(message))
            case AuroraError():
                raise message
            case MemberFinished(remarks):
                self._remarks += remarks
                self._end(rank)
                self._ended_s = self._ended_s or time.monotonic()
            case FinalStep():
                new, first = self._steps.take(message)
                if new:
                    self._remarks += log_step(self._output / LOG, message.step)
                if first:
                    here = {each: rank.pid for each, rank in self._running.items() if isinstance(rank, RankProcess)}
                    self._watch(message.step.step, here)

    def _lose(self, rank: int, reason: str) -> None:
        """Takes note of a lost rank, and restarts it if that is left."""
        assert self._processes is not None
        if rank in self._running:
            self._end(rank)
        self._lost.append(f"{self._names.get(rank, f'rank {rank}')} was lost after {len(self._steps)} steps: {reason}")
        if self._ended_s is not None:
            return
        if self._respawns_left.get(rank):
            self._respawns_left[rank] -= 1
            self._processes.start(rank)
        # Others may come from other hosts; members wait for them until their time-out.
        wanted = 1 if isinstance(self._processes, LedRanks) else self._options.min_ranks
        if (left := len(self._running) + self._processes.starting) < wanted:
            raise RankFailed(f"{left} ranks are left, at least {wanted} have to be; {self._lost[-1]}")

    def _end(self, rank: int) -> None:
        assert self._processes is not None
        del self._running[rank]
        self._processes.kill(rank)
