"""Process groups of a run with fixed members: torch.distributed's default group, one more for each model, and heartbeats.

Heartbeats reveal which ranks hang; connections do not, because a process that hangs keeps them open.
"""

import datetime
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aurora.errors import BadInput, RankFailed, first_line
from aurora.runtime.distributed.connections import marked_urgent
from aurora.runtime.distributed.launcher import RankInfo
from aurora.types.read_numbers import whole_number

BEAT_S = 0.5  # between two signs of life
SILENT = 5  # looks in which a rank gives no sign of life before it counts as hung


class Heartbeats:
    """Heartbeats of all ranks: one counter per rank in a shared store.

    Until `stop`, a thread increments this rank's counter and reads the others every BEAT_S. A thread does it because calls of
    the store may hang.

    Args:
        store: a torch.distributed Store that all ranks reach; it is cloned, because other threads may block in it for long.
        rank, ranks: this rank, and the number of ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._rank = store.clone(), rank
        self._keys = [f"aurora/heartbeat/{other}" for other in range(ranks)]
        for key in self._keys:
            self._store.add(key, 0)  # a look waits for keys that are not there
        self._seen_R, self._missed_R = [b""] * ranks, [0] * ranks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="aurora-heartbeats")
        self._thread.start()

    def beat(self) -> None:
        """Increments this rank's counter."""
        self._store.add(self._keys[self._rank], 1)

    def look(self) -> None:
        """Reads all counters, and records which ranks have incremented theirs since the last call."""
        seen_R = self._store.multi_get(self._keys)
        pairs = zip(seen_R, self._seen_R, self._missed_R, strict=True)
        self._missed_R = [missed + 1 if seen == before else 0 for seen, before, missed in pairs]
        self._seen_R = seen_R

    def stop(self) -> None:
        """Ends the thread, and with it this rank's heartbeats."""
        self._stopped.set()
        self._thread.join(BEAT_S)  # longer if the store hangs

    @property
    def silent(self) -> list[int]:
        """The other ranks that have sent no heartbeat in the last SILENT calls of `look`."""
        return [rank for rank, missed in enumerate(self._missed_R) if missed >= SILENT and rank != self._rank]

    def _run(self) -> None:
        """Beats and looks until it is stopped or the store is gone."""
        with suppress(RuntimeError):
            while not self._stopped.is_set():
                self.beat()
                self.look()
                self._stopped.wait(BEAT_S)


LOG = logging.getLogger("aurora.run")

_nccl_groups: list[Any] = []  # that this process has made
_nccl_failures: list[RankFailed] = []  # for which they were aborted
_aborting = threading.Lock()

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_info_from_environment(timeout_s: float) -> RankInfo | None:
    """Returns this process's RankInfo, from torchrun's environment variables (validated); None if they are not set."""
    if not all(name in os.environ for name in TORCHRUN):
        return None
    try:
        rank, ranks, port = (whole_number(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = whole_number(os.environ.get("LOCAL_RANK", rank))
        local_ranks = whole_number(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    except BadInput:
        variables = {name: os.environ[name] for name in TORCHRUN}
        raise BadInput(f"environment: RANK, WORLD_SIZE and MASTER_PORT must be whole numbers, found {variables}") from None
    if not 0 <= rank < ranks:
        raise BadInput(f"environment: expected 0 <= RANK < WORLD_SIZE, found {rank} and {ranks}")
    return RankInfo(rank, ranks, os.environ["MASTER_ADDR"], port, timeout_s, local_rank, local_ranks, launched=False)


@contextmanager
def default_process_group(rank_info: RankInfo) -> Iterator[Heartbeats]:
    """Context manager that creates torch.distributed's default group (gloo), yields its heartbeats, and destroys the group.

    Raises:
        RankFailed: if the other ranks do not join within rank_info.timeout_s.
    """
    timeout = datetime.timedelta(seconds=rank_info.timeout_s)
    try:
        if rank_info.launched:
            store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.ranks, timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        dist.barrier()  # or the first to join might leave while others still connect to it
    except (RuntimeError, ValueError) as error:
        where = f"{rank_info.host}:{rank_info.port}"
        raise RankFailed(f"rank {rank_info.rank}: cannot join the other ranks at {where}: {first_line(error)}") from None
    heartbeats = Heartbeats(dist.distributed_c10d._get_default_store(), rank_info.rank, rank_info.ranks)
    end = dist.destroy_process_group
    try:
        yield heartbeats
    except RankFailed as error:
        if abort_nccl_groups(error):  # their destruction would wait for the lost rank
            end = dist.distributed_c10d._abort_process_group
        raise
    finally:
        heartbeats.stop()
        end()
        _nccl_groups.clear()
        _nccl_failures.clear()


def device_of(rank_info: RankInfo) -> str:
    """Returns this rank's CUDA device name if every local rank has a GPU; else "cpu", with a warning if there are GPUs.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later: ranks may share a GPU), one GPU is enough for all ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= rank_info.local_ranks or (gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"):
        return f"cuda:{rank_info.local_rank % gpus}"
    if gpus and not rank_info.local_rank:
        LOG.warning("aurora: %d ranks on this machine and %d GPUs: they compute on the CPU", rank_info.local_ranks, gpus)
    return "cpu"


def device_for(rank_info: RankInfo, transport: str) -> str:
    """Returns the device of a rank with a transport, after making it this thread's current device: `device_of`, or "cpu".

    Raises:
        BadInput: if the transport is nccl and there are too few GPUs.
    """
    device = device_of(rank_info) if transport in ("auto", "nccl", "push") else "cpu"
    if transport == "nccl" and device == "cpu":
        raise BadInput(f"`transport` nccl: expected a CUDA device for each of {rank_info.ranks} ranks, found too few")
    if device != "cpu":
        torch.cuda.set_device(device)
    return device


def new_process_group(backend: str, timeout_s: float, urgent: bool = False) -> Any:
    """Returns a new gloo or NCCL group of all ranks. All ranks must create their groups in the same sequence.

    An NCCL group's own watchdog is off; `NcclTransport` aborts calls that wait for a lost peer, and names the peer.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: seconds to wait for a peer.
        urgent: True: mark its packets with IP type-of-service URGENT_TOS, which some networks forward first; gloo only.
    """
    if backend == "nccl":
        keep_watchdogs_from_ending_the_process()
    with marked_urgent() if urgent and backend == "gloo" else nullcontext():
        group = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
    if backend == "nccl":
        _nccl_groups.append(group)
    return group


def keep_watchdogs_from_ending_the_process() -> None:
    """Sets environment variables that keep torch's NCCL watchdogs from ending this process on a time-out or a lost peer.

    Call it before the first group is created. It also stops the watchdogs from polling the store for debug-dump requests.
    """
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


def nccl_failure() -> RankFailed | None:
    """Returns the error with which this process's NCCL groups were first aborted; None if they were not."""
    return next(iter(_nccl_failures), None)


def abort_nccl_groups(failure: RankFailed) -> bool:
    """Aborts all NCCL groups from `new_process_group`, which ends their calls. Returns False if there are no groups.

    They are aborted in one call: aborting a single group waits for the GPU, where calls of another group may wait for the same
    lost rank. May be called in any thread, and repeatedly.
    """
    if not _nccl_groups:
        return False
    _nccl_failures.append(failure)  # before the others' calls end
    with _aborting:
        backend = _nccl_groups[0]._get_backend(torch.device("cuda"))
        backend._group_start()
        for group in _nccl_groups:
            group.abort()
        backend._group_end()
    return True
