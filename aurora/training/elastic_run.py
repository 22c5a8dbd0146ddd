"""Elastic training runs, on one host or several: ranks that may be lost and come back, and the lighthouse of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aurora.errors import AuroraError, BadInput, RankFailed
from aurora.runtime.distributed.elastic_steps import run_elastic
from aurora.runtime.distributed.epoch_gpu import gpu_of_rank, transport_of_host
from aurora.runtime.distributed.launcher import RankInfo, describe_error
from aurora.runtime.distributed.lighthouse import Lighthouse
from aurora.runtime.distributed.member import Member
from aurora.runtime.distributed.rank_processes import RankProcesses
from aurora.runtime.distributed.secret import new_secret, secret_from_environment, secret_of_hosts
from aurora.training.checkpoint import newest_checkpoint, remove_newer
from aurora.training.data import read_samples
from aurora.training.elastic import ElasticTraining
from aurora.training.elastic_launcher import Launcher, MemberFinished, Watch
from aurora.training.host_launchers import HostQueue, JoinedRun, JoiningLauncher, LeadingLauncher
from aurora.training.host_messages import FinalStep, Welcome
from aurora.training.shared_run import leaders_options, samples_digest, shared_by_hosts, sole_run
from aurora.training.trainer import load_trainer
from aurora.training.training_run import CHECKPOINTS, TrainResult
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
        options, output: as in `aurora.train`, without `join`.
        watch: called after each new step with its number and the process id of every rank of this host.

    Raises:
        BadInput: what a rank raises.
        RankFailed: if fewer than `min_ranks` ranks are left.
    """
    options = replace(options, transport=transport_of_host(options.transport, options.ranks))
    secret = secret_of_hosts("lead") if options.lead else secret_from_environment() or new_secret()
    args = path, samples_NT, options, output
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
    shared, queue = shared_by_hosts(path), HostQueue()
    welcome = Welcome(mark, leaders_options(options), samples_digest(samples_NT))
    expected, (host, port) = max(options.ranks, options.min_ranks), address
    with Lighthouse(
        secret, expected, options.min_ranks, host=host, port=port, on_lost=queue.lose, on_host=queue.say
    ) as lighthouse:
        processes = _processes(secret, args, lighthouse.address, LEADER)
        return LeadingLauncher(processes, options, output, watch, lighthouse, queue, shared, welcome).run()


def join_training(
    path: str, files: Sequence[str | Path], options: TrainOptions, output: Path, watch: Watch = lambda step, pids: None
) -> TrainResult:
    """Trains on local processes in the run that is led at `options.join`.

    Args:
        path: the model's folder.
        files, output: `text` and `output` of `aurora.train`; the same as the leader's.
        options: of which only those of each host are used; the others are the leader's.
        watch: as of `train_elastic`.

    Raises:
        BadInput: what a rank raises; if this host differs from the one that leads.
        RankFailed: if fewer than `min_ranks` ranks are left, or the host that leads is lost.
    """
    assert options.join is not None
    secret, address = secret_of_hosts("join"), parse_address("join", options.join)
    joined = JoinedRun(address, secret, options, output, shared_by_hosts(path))
    try:
        if (welcome := joined.wait()) is None:
            raise BadInput(f"`join`: expected a run that goes on, found that all steps are done at {options.join}")
        options = _with_leaders(options, welcome.options)
        transport_of_host(options.transport, options.ranks)  # refuses nccl without enough GPUs
        samples_NT = read_samples(path, files, options.length)
        if (found := samples_digest(samples_NT)) != welcome.text:
            raise BadInput(f"host {joined.host}: expected `text` {welcome.text} as the leader has, found {found}")
        processes = _processes(secret, (path, samples_NT, options, output), address, f"{LEADER}-at-{joined.host}")
    except BaseException:
        joined.close()
        raise
    return JoiningLauncher(processes, options, output, watch, joined).run()


def _with_leaders(options: TrainOptions, leaders: Mapping[str, Any]) -> TrainOptions:
    """Returns a host's options with those of the leader. Raises BadInput if they are no such options."""
    try:
        if leaders.keys() == leaders_options(options).keys():
            return replace(options, **leaders)
    except (TypeError, BadInput):
        pass
    raise BadInput(f"{options.join} sent options of another version")


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
        gpu = gpu_of_rank(options.transport, rank_info.local_rank, options.over_hosts)
        member = Member((rank_info.host, rank_info.port), name, secret, timeout_s=rank_info.timeout_s, gpu=gpu)
        work = ElasticTraining(
            lambda: load_trainer(path, "cpu" if gpu is None else gpu.device, samples_NT, options),
            path,
            options,
            output,
            lambda *_: member.transport(),
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
