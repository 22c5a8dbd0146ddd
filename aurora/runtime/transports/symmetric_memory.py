"""Symmetric memory: one buffer per rank of a group, into which all ranks can write; on GPUs, or in shared files."""

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from aurora.errors import first_line
from aurora.runtime.transports.nvlink import fabric_of, linked_by_nvlink

LONGEST_NAME = 256  # bytes of a text that ranks tell each other
TRIED = 256  # bytes
Gather = Callable[[torch.Tensor], torch.Tensor]  # all-gathers a tensor, as `Transport.gather`
MakeMemory = Callable[[int], "SymmetricMemory"]  # called with a size in bytes


class SymmetricMemory(NamedTuple):
    """One rank's view of the group's buffers, which are initialised to zero.

    Attributes:
        rank, ranks: this rank's number in the group, and the number of ranks.
        local: (bytes,) uint8, this rank's buffer.
        address_R: (R,) int64 on the device, address of each rank's buffer in this rank's address space.
        keeps: reference to objects that must stay alive while the buffers are used.
    """

    rank: int
    ranks: int
    local: torch.Tensor
    address_R: torch.Tensor
    keeps: Any


def device_memory(group: Any, size: int, device: str) -> SymmetricMemory:
    """Allocates a buffer of `size` bytes on each GPU of one NVLink domain. A collective call of the group's ranks.

    Args:
        group: an NCCL process group.
        size: bytes per rank.
        device: this rank's CUDA device, which is the current device.
    """
    import torch.distributed._symmetric_memory as symmetric

    local = symmetric.empty(size, dtype=torch.uint8, device=torch.device(device))
    handle: Any = symmetric.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody writes before all are zero
    addresses = torch.tensor([base + handle.offset for base in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return SymmetricMemory(handle.rank, handle.world_size, local, addresses, handle)


def shared_memory(folder: Path, rank: int, ranks: int, size: int) -> SymmetricMemory:
    """Allocates `size` bytes per rank in files that processes of one machine share, for Triton's interpreter on CPUs.

    Args:
        folder: an empty folder that only this user can access, the same on all ranks; in /dev/shm it is in memory.
        rank, ranks: this rank, and the number of ranks.
        size: bytes per rank.
    """
    files = [torch.from_file(str(folder / str(peer)), shared=True, size=size, dtype=torch.uint8) for peer in range(ranks)]
    addresses = torch.tensor([file.data_ptr() for file in files], dtype=torch.int64)
    return SymmetricMemory(rank, ranks, files[rank], addresses, files)


def memory_of_peers(gather: Gather, rank: int, ranks: int, device: str, group: Any = None) -> MakeMemory | str:
    """Returns what allocates memory into which all ranks can write, or the reason in words why these ranks have none.

    Ranks on GPUs try it with a few bytes, and tell each other whether that went well. They do not try where NVML is sure that
    no NVLink connects them, nor on several machines unless NVML names one fabric for all: the others would wait for ever. A
    collective call with the same kind of result on all ranks.

    Args:
        gather: all-gathers a tensor, as `Transport.gather`.
        rank, ranks: this rank, and the number of ranks.
        device: this rank's device: its current CUDA device, or "cpu".
        group: an NCCL process group of the ranks; unused on CPUs.
    """
    machines = {*told(gather, Path("/proc/sys/kernel/random/boot_id").read_text().strip())}
    if device == "cpu":
        if len(machines) == 1 and os.environ.get("TRITON_INTERPRET") == "1":
            return partial(processes_memory, gather, rank, ranks)
        return "expected GPUs that NVLink connects, each to each, found CPUs"
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    uuids_R, fabrics = told(gather, uuid), {*told(gather, fabric_of(uuid))}
    apart = len(machines) == 1 and linked_by_nvlink(uuids_R) is False
    if "yes" in told(gather, "yes" if apart else ""):
        return "expected GPUs that NVLink connects, each to each, found others by NVML"
    if len(machines) > 1 and (len(fabrics) > 1 or "" in fabrics):
        return f"expected GPUs of one machine or one NVLink fabric, found {len(machines)} machines and by NVML no fabric of all"
    failed = ""
    try:
        device_memory(group, TRIED, device)
    except RuntimeError as error:
        failed = first_line(error) or "no reason"
    failures = [f"rank {peer}: {failure}" for peer, failure in enumerate(told(gather, failed)) if failure]
    return (
        f"expected GPUs that share memory, found some that do not: {failures[0]}"
        if failures
        else partial(device_memory, group, device=device)
    )


def told(gather: Gather, text: str) -> list[str]:
    """All-gathers a short text, cut to LONGEST_NAME bytes. Returns the ranks' texts, by rank. A collective call."""
    sent = torch.tensor([*text.encode()[:LONGEST_NAME].ljust(LONGEST_NAME, b"\0")], dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gather(sent).tolist()]


def processes_memory(gather: Gather, rank: int, ranks: int, size: int) -> SymmetricMemory:
    """Calls `shared_memory` with a temporary folder of rank 0, removed once all ranks have opened its files. Collective call.

    Args:
        gather: all-gathers a tensor, as `Transport.gather`.
        rank, ranks, size: as in `shared_memory`.
    """
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) if rank == 0 else ""
    path = Path(told(gather, folder)[0])
    try:
        memory = shared_memory(path, rank, ranks, size)
        gather(torch.zeros(1, dtype=torch.uint8))
    finally:
        if rank == 0:
            shutil.rmtree(path)
    return memory
