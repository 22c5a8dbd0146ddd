"""Elastic training runs, on one host or several: ranks that may be lost and come back, and the lighthouse of the run."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError, BadInput, RankFailed
from aurora.runtime.distributed.elastic_steps import run_elastic
from aurora.runtime.distributed.epoch_transport import EpochTransport
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.runtime.distributed.lighthouse import Lighthouse
from aurora.runtime.distributed.member import Member
from aurora.runtime.distributed.rank_processes import RankProcesses
from aurora.runtime.distributed.secret import new_secret, secret_from_environment, secret_of_hosts
from aurora.training.checkpoint import newest_checkpoint, remove_newer
from aurora.training.elastic import ElasticTraining
from aurora.training.elastic_launcher import Launcher, MemberFinished, Watch
from aurora.training.host_launchers import HostQueue, JoinedRun, JoiningLauncher, LeadingLauncher
from aurora.training.host_messages import FinalStep
from aurora.training.result import CHECKPOINTS, TrainResult
from aurora.training.shared_run import shared_by_hosts, sole_run
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
from aurora.types.addresses import parse_address
from aurora.types.arrays import IntArray

_Args = tuple[str, IntArray, TrainOptions, Path]
LEADER = "rank"  # names of the leader's ranks begin so; those of other hosts' come after them in sequence


def train_elastic(
    path: str, samples_NT: IntArray, options: TrainOptions, output: Path, watch: Watch = lambda step, pids: None
) -> TrainResult:
    """Trains on local processes, and goes on with the others when some are lost; with those of other hosts if wanted.

    Args:
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        watch: called after each new step with its number and the process id of every rank of this host.

    Raises:
        BadInput: what a rank raises; if this host differs from the one that leads.
        RankFailed: if fewer than `min_ranks` ranks are left, or the host that leads is lost.
    """
    if options.over_hosts:
        secret = secret_of_hosts("lead" if options.lead else "join")
    else:
        secret = secret_from_environment() or new_secret()
    args = path, samples_NT, options, output
    if options.join is not None:
        return _join(secret, args, watch, parse_address("join", options.join))
    with sole_run(output) as mark:
        if options.resume:
            newest, _ = newest_checkpoint(output / CHECKPOINTS)
            remove_newer(output / CHECKPOINTS, 0 if newest is None else newest.steps)
        if options.lead is not None:
            return _lead(secret, args, watch, parse_address("lead", options.lead), mark)
        with Lighthouse(secret, options.ranks, options.min_ranks, port=options.port) as lighthouse:
            return Launcher(_processes(secret, args, lighthouse.address, LEADER), options, output, watch).run()


def _lead(secret: bytes, args: _Args, watch: Watch, address: tuple[str, int], mark: str) -> TrainResult:
    """Leads a run over several hosts."""
    path, samples_NT, options, output = args
    shared, queue = shared_by_hosts(path, samples_NT, options), HostQueue()
    expected, (host, port) = max(options.ranks, options.min_ranks), address
    with Lighthouse(
        secret, expected, options.min_ranks, host=host, port=port, on_lost=queue.lose, on_host=queue.say
    ) as lighthouse:
        processes = _processes(secret, args, lighthouse.address, LEADER)
        return LeadingLauncher(processes, options, output, watch, lighthouse, queue, shared, mark).run()


def _join(secret: bytes, args: _Args, watch: Watch, address: tuple[str, int]) -> TrainResult:
    """Takes part in a run that another host leads."""
    path, samples_NT, options, output = args
    joined = JoinedRun(address, secret, options, output, shared_by_hosts(path, samples_NT, options))
    try:
        if not joined.wait():
            raise BadInput(f"`join`: expected a run that goes on, found that all steps are done at {options.join}")
        processes = _processes(secret, args, address, f"{LEADER}-at-{joined.host}")
    except BaseException:
        joined.close()
        raise
    return JoiningLauncher(processes, options, output, watch, joined).run()


def _processes(secret: bytes, args: _Args, lighthouse: tuple[str, int], host: str) -> RankProcesses:
    options = args[2]
    return RankProcesses(train_member, (secret, host, *args), options.ranks, lighthouse, options.timeout_s)


def train_member(
    connection: Connection,
    rank_info: RankInfo,
    secret: bytes,
    host: str,
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
        host: what the names of this host's members begin with.
        path, samples_NT, options, output: as in `train_elastic`.
    """
    try:
        name = f"{host}-{rank_info.rank:04d}"
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
