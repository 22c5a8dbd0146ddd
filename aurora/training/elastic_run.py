"""Elastic training runs, on one host or several: ranks that may be lost and come back, and the lighthouse of the run.

Every host has a `Launcher`, which starts its ranks and receives their messages. One of them keeps the log of steps.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_hex
from typing import Any

from aurora.elastic.epoch_nccl import gpu_of_rank, transport_of_host
from aurora.elastic.lighthouse import Lighthouse, check_torchft
from aurora.elastic.member import HANG_S, Member, OtherRun, keep_collections_short, own_address
from aurora.elastic.processes import RankLoss, RankProcesses, silence_native_code
from aurora.elastic.steps import run_elastic
from aurora.errors import AuroraError, BadInput, RankFailed, plural
from aurora.models.hub import model_digest
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.training.data import samples_digest
from aurora.training.member_training import MemberTraining
from aurora.training.trainer import load_trainer
from aurora.training.training_run import (
    LOG,
    FinalStep,
    KeptSteps,
    TrainResult,
    log_step,
    logged_steps,
    shared_run,
    sole_run,
)
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray
from aurora.types.run_options import OF_EACH_HOST, address_text, parse_address

LOOK_S = 0.1  # at most, between two looks at processes
Watch = Callable[[int, dict[int, int]], None]


@dataclass(frozen=True)
class MemberFinished:
    """Message from member to launcher: all steps are done."""

    remarks: tuple[str, ...]


class Launcher:
    """Starts the ranks of an elastic training, receives their messages, and keeps the log of steps.

    Args:
        options, output: as in `aurora.train`.
        watch: called after each new step with (step number, {rank of this host: process id}).
    """

    def __init__(self, options: TrainOptions, output: Path, watch: Watch) -> None:
        self._options, self._output, self._watch = options, output, watch
        self._respawns_left = dict.fromkeys(range(options.ranks), options.respawn)
        self._steps = KeptSteps()
        self._logs = False
        self._ended_s: float | None = None  # when the first member had finished

    def run(self, processes: RankProcesses) -> TrainResult:
        """Runs until all members have finished or are lost, ends this host's processes, and returns the result."""
        self._processes = processes
        try:
            for rank in range(self._options.ranks):
                processes.start(rank)
            while (processes.running or processes.starting) and not self._late():
                for rank, event in processes.events(LOOK_S):
                    self._handle(rank, event)
        finally:
            processes.close()
        return self._steps.result(self._output, self._options, self._options.ranks)

    def _late(self) -> bool:
        """Returns whether a member has finished and the others have had HANG_S seconds to do the same."""
        return self._ended_s is not None and time.monotonic() - self._ended_s > HANG_S

    def _handle(self, rank: int, event: Any) -> None:
        """Handles one event of a rank. Raises the error that ends the run."""
        match event:
            case RankLoss(reason):
                self._lose(rank, reason)
            case RankFailed():
                self._lose(rank, str(event))
            case OtherRun():
                self._lose(rank, str(event), event)
            case AuroraError():
                raise event
            case MemberFinished(remarks):
                self._steps.remarks += remarks
                self._processes.kill(rank)
                self._ended_s = self._ended_s or time.monotonic()
            case FinalStep():
                new, first = self._steps.take(event)
                if new:
                    self._log(event)
                if first:
                    self._watch(event.step.step, {number: each.pid for number, each in self._processes.running.items()})

    def _log(self, final: FinalStep) -> None:
        """Logs a step if that is this host's task, and steps before it that the host which had the task has not logged."""
        file, numbers = self._output / LOG, {final.step.step}
        if final.logs and not self._logs:
            numbers |= self._steps.finals.keys() - logged_steps(file)
        self._logs = final.logs
        for number in sorted(numbers) if final.logs else ():
            self._steps.remarks += log_step(file, self._steps.finals[number].step)

    def _lose(self, rank: int, reason: str, refused: OtherRun | None = None) -> None:
        """Takes note of a lost rank, and restarts it if that is left, unless the others have refused it."""
        self._processes.kill(rank)
        self._steps.lost.append(f"rank {rank} was lost after {plural(len(self._steps), 'step')}: {reason}")
        if self._ended_s is not None:
            return
        if self._respawns_left.get(rank) and refused is None:
            self._respawns_left[rank] -= 1
            self._processes.start(rank)
        # Others may come from other hosts; members wait for them until their time-out.
        least = self._options.min_ranks if self._options.lighthouse is None else 1
        if (ranks := len(self._processes.running) + len(self._processes.starting)) < least:
            raise refused or RankFailed(f"{ranks} ranks are left, at least {least} have to be; {self._steps.lost[-1]}")


def train_elastic(
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
    watch: Watch = lambda step, pids: None,
    local_rank: int = 0,
) -> TrainResult:
    """Trains on local processes, with those of the other hosts at `options.lighthouse`, and continues when ranks are lost.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        watch: called after each new step with its number and the process id of every rank of this host.
        local_rank: number of the first rank among all that use GPUs of this host.

    Raises:
        BadInput: if a rank raises it, or this host differs from the others in its model, text, options, version or folder.
        MissingDependency: if torchft is not installed.
        RankFailed: if fewer than `min_ranks` ranks remain, or with a lighthouse none of this host.
    """
    check_torchft()
    options = replace(options, transport=transport_of_host(options.transport, local_rank + options.ranks))
    with ExitStack() as stack:
        if options.lighthouse is None:
            stack.enter_context(sole_run(output))
            address, host, mark = stack.enter_context(Lighthouse()).address, "rank", ""
        else:
            address = parse_address("lighthouse", options.lighthouse)
            host = f"{_reached_from(address)}-{token_hex(3)}"
            mark = stack.enter_context(shared_run(output, options.lighthouse, options.resume))
        same = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in OF_EACH_HOST}
        about = {
            "aurora's version": version("aurora-moe"), "`output` with the mark": mark,
            "`text`": samples_digest(samples_NT), **{f"`{name}`": str(value) for name, value in same.items()},
        }  # fmt: skip
        args = host, about, path, samples_NT, options, output, local_rank
        processes = RankProcesses(train_member, args, options.ranks, address, options.timeout_s)
        return Launcher(options, output, watch).run(processes)


def _reached_from(lighthouse: tuple[str, int]) -> str:
    """Returns this host's address on the route to the lighthouse. Raises BadInput if there is none."""
    try:
        return own_address(lighthouse)
    except OSError as error:
        raise BadInput(f"`lighthouse`: {address_text(lighthouse)} cannot be reached: {error.strerror}") from None


def train_member(
    connection: Connection,
    rank_info: RankInfo,
    host: str,
    about: Mapping[str, str],
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
    local_rank: int,
) -> None:
    """Trains as a member of an elastic run; reports each step, and at the end success or an error, to the launcher.

    Args:
        connection: pipe to the launcher.
        rank_info: this rank, and the address of the lighthouse.
        host: the host's name, with which the names of its members begin.
        about: values that must be the same on all hosts, by description.
        path, samples_NT, options, output, local_rank: as in `train_elastic`.
    """
    silence_native_code()
    try:
        gpu = gpu_of_rank(options.transport, local_rank + rank_info.local_rank, options.lighthouse is not None)

        load = partial(load_trainer, path, "cpu" if gpu is None else gpu.device, samples_NT, options)
        digest = model_digest(path)
        work = MemberTraining(load, path, options, output, lambda: member.transport(), connection.send, digest=digest)
        member = Member(
            (rank_info.host, rank_info.port), f"{host}-{rank_info.local_rank:04d}", timeout_s=rank_info.timeout_s,
            expected=max(options.ranks, options.min_ranks), least=options.min_ranks, gpu=gpu,
            about={"`model`": digest[:16], **about}, most=options.batch,
        )  # fmt: skip
        keep_collections_short()
        run_elastic(member, work, work.paused)
        work.close()
        member.close()
        answer: Any = MemberFinished(tuple(work.remarks))
    except AuroraError as error:
        answer = error
    except BaseException as error:
        answer = RankFailed(describe_error(error))
    connection.send(answer)
