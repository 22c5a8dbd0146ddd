"""Two ranks meet on this machine: the smallest thing that a run needs of its network."""

import time

import torch

from aurora.errors import RankFailed
from aurora.runtime.distributed.gloo import GlooTransport
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.distributed.process_groups import default_process_group

TRIPS = 20


def meet(rank_info: RankInfo) -> float:
    """Median seconds of telling each other who is here. Raises RankFailed where that does not arrive."""
    with default_process_group(rank_info):
        transport = GlooTransport()
        took: list[float] = []
        for _ in range(TRIPS):
            began_s = time.perf_counter()
            rows = transport.gather(torch.tensor([rank_info.rank]))
            took.append(time.perf_counter() - began_s)
            if rows.flatten().tolist() != list(range(rank_info.ranks)):
                raise RankFailed(f"rank {rank_info.rank}: expected every rank's number, found {rows.flatten().tolist()}")
    return sorted(took)[TRIPS // 2]
