"""Launcher of an elastic training run: starts this host's ranks, hears what they say, and keeps the steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.lighthouse import HANG_S, HEARTBEAT_S
from aurora.runtime.distributed.rank_processes import RankProcess, RankProcesses
from aurora.training.host_messages import FinalStep
from aurora.training.training_run import LOG, MODEL, TrainResult, log_step
from aurora.types import TrainOptions

Watch = Callable[[int, dict[int, int]], None]


@dataclass(frozen=True)
class MemberFinished:
    """Member to launcher: all steps are done."""

    remarks: tuple[str, ...]


class Launcher:
    """Starts ranks, hears what they say, and keeps the log.

    Args:
        processes: of the ranks.
        options, output: as in `aurora.train`.
        watch: called after each new step with its number and the process id of every rank.
    """

    def __init__(self, processes: RankProcesses, options: TrainOptions, output: Path, watch: Watch) -> None:
        self._processes, self._options, self._output, self._watch = processes, options, output, watch
        self._running: dict[int, RankProcess] = {}
        self._respawns_left = [options.respawn] * options.ranks
        self._steps: dict[int, FinalStep] = {}
        self._lost: list[str] = []
        self._remarks: list[str] = []
        self._most_elsewhere = 0  # ranks of other hosts at one time
        self._ended_s: float | None = None  # when the first member had finished

    def run(self) -> TrainResult:
        """Runs until all members have finished or are lost. None of this host's processes is left."""
        processes, options = self._processes, self._options
        try:
            for rank in range(options.ranks):
                processes.start(rank)
            while (self._here or self._elsewhere) and not self._late():
                for rank, started in processes.adopt_started():
                    if isinstance(started, OSError):
                        self._lose(rank, f"did not start: {started}")
                    else:
                        self._running[rank] = started
                for rank, message in processes.messages(HEARTBEAT_S):
                    self._handle(rank, message)
                self._hear_hosts()
        finally:
            processes.close()
        steps, ranks = tuple(self._steps[number].step for number in sorted(self._steps)), options.ranks + self._most_elsewhere
        return TrainResult(
            self._output / MODEL, ranks, options.transport, options.min_replicas_among(ranks),
            options.batch * options.length, min(self._steps, default=options.steps), steps,
            tuple(dict.fromkeys(self._remarks)), tuple(self._lost),
        )  # fmt: skip

    @property
    def _here(self) -> int:
        """Ranks of this host that run or are about to."""
        return len(self._running) + self._processes.starting

    @property
    def _elsewhere(self) -> int:
        """Ranks of other hosts."""
        return 0

    def _hear_hosts(self) -> None:
        """Handles what other hosts say."""

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
                self._finish()
            case FinalStep():
                self._take(message)

    def _take(self, final: FinalStep) -> None:
        """Takes note of a step that a member says is final."""
        before = self._steps.get(final.step.step)
        told = before is not None and final.version <= before.version  # by another member: it may have joined after a pause
        if before is None or not told or (final.step.pause is not None and before.step.pause is None):
            self._steps[final.step.step] = final
            self._keep(final)
        if not told:
            self._watch(final.step.step, {each: found.process.pid for each, found in self._running.items()})

    def _keep(self, final: FinalStep) -> None:
        """Keeps a step where it is read later."""
        self._remarks += log_step(self._output / LOG, final.step)

    def _finish(self) -> None:
        """Takes note that a member has finished."""
        self._ended_s = self._ended_s or time.monotonic()

    def _lose(self, rank: int, reason: str) -> None:
        """Takes note of a lost rank, and restarts it if that is left."""
        if rank in self._running:
            self._end(rank)
        self._note(f"rank {rank} was lost after {len(self._steps)} steps: {reason}")
        if self._respawns_left[rank] and self._ended_s is None:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)
        self._check_left()

    def _note(self, sentence: str) -> None:
        """Takes note of a loss."""
        self._lost.append(sentence)

    def _check_left(self, wanted: int | None = None) -> None:
        """Raises RankFailed if fewer ranks are left than `wanted`, by default `min_ranks`, and none comes back."""
        left, wanted = self._here + self._elsewhere, self._options.min_ranks if wanted is None else wanted
        if left < wanted and self._ended_s is None:
            raise RankFailed(f"{left} ranks are left, at least {wanted} have to be; {self._lost[-1]}")

    def _end(self, rank: int) -> None:
        del self._running[rank]
        self._processes.kill(rank)
