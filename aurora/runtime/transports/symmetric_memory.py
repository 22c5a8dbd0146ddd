"""Symmetric memory: one buffer per rank of a group, into which all ranks can write; on GPUs, or in shared files."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LONGEST_NAME = 256  # bytes of a folder's name


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
    handle = symmetric.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody writes before all are zero
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
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


def processes_memory(gather: Callable[[torch.Tensor], torch.Tensor], rank: int, ranks: int, size: int) -> SymmetricMemory:
    """Calls `shared_memory` with a temporary folder of rank 0, removed once all ranks have opened its files. Collective call.

    Args:
        gather: all-gathers a tensor, as `Transport.gather`.
        rank, ranks, size: as in `shared_memory`.
    """
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) if rank == 0 else ""
    name_R = gather(torch.tensor([*os.fsencode(folder).ljust(LONGEST_NAME)], dtype=torch.uint8)).tolist()
    path = Path(os.fsdecode(bytes(name_R[0]).rstrip()))
    try:
        memory = shared_memory(path, rank, ranks, size)
        gather(torch.zeros(1, dtype=torch.uint8))
    finally:
        if rank == 0:
            shutil.rmtree(path)
    return memory
