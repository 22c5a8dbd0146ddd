"""Network measurement before serving: start-up time of a message and reached share of each port's rate."""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from aurora.runtime.distributed.transport import Transport
from aurora.types import Cluster

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes from each rank to each
REPETITIONS = 5
LONG_S = (
    0.1  # larger sizes are not tried once one takes this long: shorter ones tell more of start-ups and bursts than of the rate
)


def measured_network(transport: Transport, cluster: Cluster, device: str) -> Cluster:
    """Returns `cluster` with the measured start-up time and rates. A collective call; all ranks get the same result.

    Every rank sends equally many bytes to every other rank, one partner at a time, so that start-ups add up. All port rates are
    scaled by one factor.
    """
    from aurora.planner.alltoall.registry import ORDER
    from aurora.planner.network.schedule_time import timed  # which compiles: seconds that other runs shall not pay

    ranks, rank = transport.ranks, transport.rank
    if ranks == 1:
        return cluster
    ports, ports_s, took_s = cluster.network.without_startup, [], []
    for size in SIZES:
        bytes_GG = np.full((ranks, ranks), size) - np.diag([size] * ranks)
        order = ORDER["openshop"](bytes_GG, ports, rng=np.random.default_rng(0))
        buffers = [torch.zeros(0 if peer == rank else size, dtype=torch.uint8, device=device) for peer in range(ranks)]
        seconds = []
        for _ in range(REPETITIONS + 1):  # one to warm up
            transport.gather(torch.zeros(1))
            began_s = time.perf_counter()
            transport.exchange(order, buffers, [torch.empty_like(buffer) for buffer in buffers], lambda *_: None)
            transport.wait()
            seconds.append(float(transport.gather(torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)).max()))
        ports_s.append(timed(order, bytes_GG, ports).makespan_s)
        took_s.append(statistics.median(seconds[1:]))
        if took_s[-1] > max(LONG_S, 4 * took_s[0]):
            break
    startups_s, share = startups_and_share((ports_s[0], ports_s[-1]), (took_s[0], took_s[-1]))
    startup_s = startups_s / (ranks - 1)
    gpus = (replace(gpu, startup_s=startup_s, out_Bps=gpu.out_Bps * share, in_Bps=gpu.in_Bps * share) for gpu in cluster.gpus)
    return replace(cluster, gpus=tuple(gpus))


def startups_and_share(ports_s: tuple[float, float], took_s: tuple[float, float]) -> tuple[float, float]:
    """Fits a line through the seconds of a small and a large exchange, at the ports' full rate and as measured.

    Returns:
        (start-up seconds of an exchange, share of the ports' rate that is reached). A small exchange may pass in a burst,
        faster than its port; the rate is then that of the large one.
    """
    (small_s, large_s), (first_s, last_s) = ports_s, took_s
    startups_s = max(0.0, first_s - small_s * max(0.0, last_s - first_s) / (large_s - small_s))
    return startups_s, large_s / (last_s - startups_s) if last_s > startups_s else 1.0
