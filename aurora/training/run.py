"""Training runs: local ranks, or one rank under torchrun."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from aurora.errors import BadInput, InfeasiblePlan
from aurora.io.files import make_folder
from aurora.moe.transport import Transport
from aurora.runtime.distributed.launcher import RankInfo, launch, launch_threads
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import nccl_transport
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.runtime.transports.process_groups import (
    default_process_group,
    device_for,
    new_process_group,
    rank_info_from_environment,
)
from aurora.training.coded_gradients import code_of, train_coded
from aurora.training.data import read_samples
from aurora.training.elastic_run import train_elastic
from aurora.training.member_training import take_steps
from aurora.training.trainer import load_trainer
from aurora.training.training_run import MODEL, TrainResult, check_begun, sole_run
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray


def train(
    model: str | Path, text: Sequence[str | Path], options: TrainOptions = TrainOptions(), *, output: str | Path
) -> TrainResult | None:
    """Trains a MoE model on text, on real ranks, with replicas of its experts.

    All ranks share each global batch, which is a fixed set of samples: the result does not depend on the number of ranks. It
    starts one local process per rank (one thread with the memory transport); under torchrun, this process is one rank.

    Args:
        model: folder of a transformers MoE model, or its name in the local hub cache.
        text: files of text, prompts or token ids.
        options: steps, ranks, sizes, optimizer, replicas and checkpoints.
        output: folder for the trained model, its checkpoints and the log of all steps.

    Returns:
        The steps with their losses, and the folder of the trained model; None under torchrun on ranks other than 0.

    Raises:
        BadInput: if model, text and options do not fit together, or the loss is no longer finite.
        InfeasiblePlan: if the replicas do not fit.
        RankFailed: if a rank is lost; with `options.elastic`, only if fewer than `min_ranks` remain.

    Source:
        Lazarus (arXiv:2407.04656).

    Example:
        >>> import tempfile
        >>> import aurora
        >>> from aurora.io import shipped
        >>> mixtral, text = shipped("models/mixtral-topics"), shipped("models/mixtral-topics/recipe.json")
        >>> options = aurora.TrainOptions(steps=2, ranks=2, batch=2, length=16, transport="memory")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = aurora.train(mixtral, [text], options, output=folder)
        >>> len(result.steps)
        2
    """
    output = Path(output)
    rank_info = None if options.transport == "memory" else rank_info_from_environment(options.timeout_s)
    ranks = options.ranks if rank_info is None else rank_info.ranks
    if options.elastic and rank_info is not None and options.lighthouse is None:
        raise BadInput("`elastic`: starts its ranks by itself, expected `lighthouse` under torchrun, found none")
    if options.min_replicas is not None and options.min_replicas > ranks and options.lighthouse is None:
        raise InfeasiblePlan(
            f"`min_replicas` {options.min_replicas}: replicas of an expert are on different ranks, found {ranks}"
        )
    if options.redundancy > 1:
        if rank_info is not None:
            raise BadInput("`redundancy`: starts its ranks by itself, expected none of torchrun's environment variables")
        code_of(options)  # refused before a folder is made, if there is none
    if options.batch < ranks:
        raise BadInput(f"`batch`: expected a sample for each of {ranks} ranks or more, found {options.batch}")
    check_begun(output, options.resume or options.lighthouse is not None)
    if Path(model).resolve() == (output / MODEL).resolve():
        raise BadInput(f"{model}: is the folder to which the trained model is written: expected another folder")
    args = (str(model), read_samples(model, text, options.length), options, output)
    make_folder(output)
    if options.elastic and rank_info is not None:  # each process of torchrun joins as a host of one rank
        result = train_elastic(str(model), args[1], replace(options, ranks=1), output, local_rank=rank_info.local_rank)
        return result if rank_info.rank == 0 else None
    if options.elastic:
        return train_elastic(*args)
    if options.redundancy > 1:
        with sole_run(output):
            return train_coded(*args)
    with nullcontext() if rank_info is not None and rank_info.rank != 0 else sole_run(output):
        if options.transport == "memory":
            memory = Memory(ranks, options.timeout_s)
            results: list[TrainResult] = launch_threads(train_rank, ranks, *args, memory, timeout_s=options.timeout_s)
        elif rank_info is None:
            results = launch(train_rank, ranks, *args, timeout_s=options.timeout_s)
        else:
            results = [train_rank(rank_info, *args)]
    if rank_info is not None and rank_info.rank != 0:
        return None
    return replace(results[0], remarks=tuple(dict.fromkeys(remark for result in results for remark in result.remarks)))


def train_rank(
    rank_info: RankInfo, path: str, samples_NT: IntArray, options: TrainOptions, output: Path, memory: Memory | None = None
) -> TrainResult:
    """Trains as one rank of a run with fixed ranks.

    Args:
        rank_info: this rank and its peers.
        path: the model's folder.
        samples_NT: (N, T) int64, the token ids of all samples.
        options, output: as in `aurora.train`.
        memory: the Memory that all ranks share if they are threads of one process; else None.

    Returns:
        The result of the run; on all ranks the same, except for seconds and remarks.
    """
    device = device_for(rank_info, options.transport)
    loaded = load_trainer(path, device, samples_NT, options)
    with _transport(rank_info, options, device, memory) as (transport, name):
        # Transformers changes torch's default dtype while it loads the model of a rank that is another thread.
        transport.gather(torch.zeros(1, dtype=torch.uint8))
        machine = rank_info.local_ranks if rank_info.local_ranks < rank_info.ranks else 1
        members = [f"host{rank // machine}-{rank}" for rank in range(rank_info.ranks)]
        return take_steps(lambda: loaded, path, replace(options, transport=name), output, transport, members)


@contextmanager
def _transport(
    rank_info: RankInfo, options: TrainOptions, device: str, memory: Memory | None
) -> Iterator[tuple[Transport, str]]:
    """Context manager of the transport of this rank; yields it and its name."""
    if memory is not None:
        yield MemoryTransport(memory, rank_info.rank), "memory"
        return
    with default_process_group(rank_info) as heartbeats:
        if device == "cpu":
            yield GlooTransport(new_process_group("gloo", options.timeout_s), heartbeats=heartbeats), "gloo"
        else:
            yield nccl_transport(device, options.timeout_s, heartbeats), "nccl"
