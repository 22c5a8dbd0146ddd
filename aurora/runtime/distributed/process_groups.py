"""Ranks find each other: the default process group and one group a model."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed.launcher import RankInfo

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def seat_from_environment(timeout_s: float) -> RankInfo | None:
    """This process's seat when torchrun's variables are set, else None."""
    if not all(name in os.environ for name in TORCHRUN):
        return None
    try:
        rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        found = {name: os.environ[name] for name in TORCHRUN}
        raise BadInput(f"environment: RANK, WORLD_SIZE and MASTER_PORT must be whole numbers, found {found}") from None
    if not 0 <= rank < ranks:
        raise BadInput(f"environment: expected 0 <= RANK < WORLD_SIZE, found {rank} and {ranks}")
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return RankInfo(rank, ranks, os.environ["MASTER_ADDR"], port, timeout_s, local_rank, local_ranks, launched=False)


@contextmanager
def joined(seat: RankInfo) -> Iterator[None]:
    """The default group (gloo, for control) stands inside the block. Raises RankFailed when the others do not come."""
    timeout = datetime.timedelta(seconds=seat.timeout_s)
    try:
        if seat.launched:
            store = TCPStore(seat.host, seat.port, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks, timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        dist.barrier()  # or the first to stand might leave while others still connect to it
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RankFailed(f"rank {seat.rank}: cannot meet the others at {seat.host}:{seat.port}: {reason}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_of(seat: RankInfo) -> str:
    """The CUDA device of this rank where every local rank has one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= seat.local_ranks:
        return f"cuda:{seat.local_rank}"
    return "cpu"


def model_group(backend: str, timeout_s: float) -> Any:
    """A new group of all ranks; every rank makes its groups in the same order."""
    return dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
