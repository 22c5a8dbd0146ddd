"""Two ranks meet on this machine: the smallest thing that a run needs of its network."""

import time

import torch

from aurora.errors import RankFailed
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.distributed.process_groups import joined

TRIPS = 20


def meet(seat: RankInfo) -> float:
    """Median seconds of telling each other who is here. Raises RankFailed where that does not arrive."""
    with joined(seat):
        transport = GlooTransport()
        took: list[float] = []
        for _ in range(TRIPS):
            began_s = time.perf_counter()
            rows = transport.gather(torch.tensor([seat.rank]))
            took.append(time.perf_counter() - began_s)
            if rows.flatten().tolist() != list(range(seat.ranks)):
                raise RankFailed(f"rank {seat.rank}: expected every rank's number, found {rows.flatten().tolist()}")
    return sorted(took)[TRIPS // 2]
