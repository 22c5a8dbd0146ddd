"""Elastic training runs: local ranks that may be lost and come back, and the lighthouse that outlives them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.commit_rule import Version
from aurora.runtime.distributed.elastic_steps import run_elastic
from aurora.runtime.distributed.epoch_transport import EpochTransport
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.runtime.distributed.lighthouse import HANG_S, HEARTBEAT_S, Lighthouse
from aurora.runtime.distributed.member import Member
from aurora.runtime.distributed.rank_processes import RankProcess, RankProcesses
from aurora.runtime.distributed.secret import new_secret, secret_from_environment
from aurora.training.checkpoint import newest_checkpoint, remove_newer
from aurora.training.elastic import ElasticTraining
from aurora.training.result import CHECKPOINTS, LOG, MODEL, CommittedStep, TrainResult, log_step
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray

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


def train_elastic(
    path: str, samples_NT: IntArray, options: TrainOptions, output: Path, watch: Watch = lambda step, pids: None
) -> TrainResult:
    """Trains on local processes, and goes on with the others when some are lost.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        watch: called after each new step with its number and the process id of every rank.

    Raises:
        BadInput: what a rank raises.
        RankFailed: if fewer than `min_ranks` ranks are left.
    """
    if options.resume:
        newest, _ = newest_checkpoint(output / CHECKPOINTS)
        remove_newer(output / CHECKPOINTS, 0 if newest is None else newest.steps)
    secret = secret_from_environment() or new_secret()
    with Lighthouse(secret, options.ranks, options.min_ranks, port=options.port) as lighthouse:
        args = secret, path, samples_NT, options, output
        launcher = _Launcher(
            RankProcesses(train_member, args, options.ranks, lighthouse.address, options.timeout_s), options, output, watch
        )
        return launcher.run()


def train_member(
    connection: Connection,
    rank_info: RankInfo,
    secret: bytes,
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
) -> None:
    """Trains as a member of an elastic run, and tells the launcher of each step and of the end, or of the error.

    Args:
        connection: to the launcher.
        rank_info: this rank, and where the lighthouse listens.
        secret: what all members share.
        path, samples_NT, options, output: as in `train_elastic`.
    """
    try:
        name = f"rank-{rank_info.rank:04d}"
        member = Member((rank_info.host, rank_info.port), name, secret, timeout_s=rank_info.timeout_s)
        work = ElasticTraining(
            lambda: load_trainer(path, "cpu", samples_NT, options),
            path,
            options,
            output,
            lambda _, groups: EpochTransport(groups[0], member.perform),
            lambda version, step: connection.send(FinalStep(version, step)),
        )
        run_elastic(member, work, work.paused)
        work.close()
        member.close()
        answer: Any = MemberFinished(tuple(work.remarks))
    except AuroraError as error:
        answer = error
    except BaseException as error:
        answer = RankFailed(describe_error(error))
    connection.send(answer)


class _Launcher:
    """Starts members, hears what they say, and keeps the log."""

    def __init__(self, processes: RankProcesses, options: TrainOptions, output: Path, watch: Watch) -> None:
        self._processes, self._options, self._output, self._watch = processes, options, output, watch
        self._running: dict[int, RankProcess] = {}
        self._respawns_left = [options.respawn] * options.ranks
        self._steps: dict[int, FinalStep] = {}
        self._lost: list[str] = []
        self._remarks: list[str] = []
        self._ended_s: float | None = None  # when the first member had finished

    def run(self) -> TrainResult:
        """Runs until all members have finished or are lost. None of their processes is left."""
        processes, options = self._processes, self._options
        try:
            for rank in range(options.ranks):
                processes.start(rank)
            while (self._running or processes.starting) and not self._late():
                for rank, started in processes.adopt_started():
                    if isinstance(started, OSError):
                        self._lose(rank, f"did not start: {started}")
                    else:
                        self._running[rank] = started
                for rank, message in processes.messages(HEARTBEAT_S):
                    self._handle(rank, message)
        finally:
            processes.close()
        steps = tuple(self._steps[number].step for number in sorted(self._steps))
        return TrainResult(
            self._output / MODEL, options.ranks, "gloo", options.min_replicas_among(options.ranks),
            options.batch * options.length, options.steps - len(steps), steps, tuple(dict.fromkeys(self._remarks)),
            tuple(self._lost),
        )  # fmt: skip

    def _late(self) -> bool:
        """Whether a member has finished and the others have had HANG_S seconds to do the same."""
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
            case FinalStep(version, step):
                before = self._steps.get(step.step)
                told = (
                    before is not None and version <= before.version
                )  # by another member, which may have joined after the pause
                if before is None or not told or (step.pause is not None and before.step.pause is None):
                    self._steps[step.step] = message
                    self._remarks += log_step(self._output / LOG, step)
                if not told:
                    self._watch(step.step, {each: found.process.pid for each, found in self._running.items()})

    def _lose(self, rank: int, reason: str) -> None:
        """Takes note of a lost rank, and restarts it if that is left."""
        if rank in self._running:
            self._end(rank)
        self._lost.append(f"rank {rank} was lost after {len(self._steps)} steps: {reason}")
        if self._respawns_left[rank] and self._ended_s is None:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)
        left, wanted = len(self._running) + self._processes.starting, self._options.min_ranks
        if left < wanted and self._ended_s is None:
            raise RankFailed(f"{left} ranks are left, at least {wanted} have to be; {self._lost[-1]}")

    def _end(self, rank: int) -> None:
        del self._running[rank]
        self._processes.kill(rank)
