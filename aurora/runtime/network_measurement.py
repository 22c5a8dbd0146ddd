"""Network measurement before serving: start-up time of a message and reached shares of the rates of ports and NICs."""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from aurora.moe.transport import Transport
from aurora.types import Cluster, servers
from aurora.types.arrays import BoolArray

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes of a message
REPETITIONS = 5
LONG_S = (
    0.1  # larger sizes are not tried once one takes this long: shorter ones tell more of start-ups and bursts than of the rate
)


def measured_network(transport: Transport, cluster: Cluster, device: str) -> Cluster:
    """Returns `cluster` with the measured start-up time and rates, without link curves.

    A collective call; all ranks get the same result. Every rank sends equally many bytes to every other rank, one partner at a
    time, so that start-ups add up. All port rates are scaled by one factor. On a fabric of servers two exchanges are timed:
    inside servers, which tells of ports, and between servers, which tells of NICs.
    """
    other_GG, startups_s, messages = ~np.eye(transport.ranks, dtype=bool), 0.0, 0
    server_G = np.array(cluster.fabric.server_G if cluster.fabric is not None else (), dtype=np.int64)
    same_GG = np.equal.outer(server_G, server_G) if server_G.any() else other_GG
    inside_GG, between_GG = other_GG & same_GG, other_GG & ~same_GG
    if inside_GG.any():
        took_s, share = _timed_exchange(transport, cluster, inside_GG, device)
        startups_s, messages, cluster = took_s, int(inside_GG.sum(axis=1).max()), _scaled(cluster, ports=share)
    if between_GG.any():
        took_s, share = _timed_exchange(transport, cluster, between_GG, device)
        startups_s, messages = startups_s + took_s, messages + int(between_GG.sum(axis=1).max())
        cluster = _scaled(cluster, ports=1.0 if inside_GG.any() else share, nics=share)
    gpus = (replace(gpu, startup_s=startups_s / messages if messages else gpu.startup_s) for gpu in cluster.gpus)
    return replace(cluster, gpus=tuple(gpus), link_curves=())


def _timed_exchange(transport: Transport, cluster: Cluster, pairs_GG: BoolArray, device: str) -> tuple[float, float]:
    """The start-up seconds of an exchange between some pairs of ranks, and the share of the cluster's rates that it reaches."""
    from aurora.planner.alltoall.registry import ORDER
    from aurora.planner.network.schedule_time import timed  # which compiles: seconds that other runs shall not pay

    network, network_s, took_s = cluster.network.without_startup, [], []
    to_G, from_G = pairs_GG[transport.rank].tolist(), pairs_GG[:, transport.rank].tolist()
    for size in SIZES:
        bytes_GG = pairs_GG * size
        order = ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0))
        sends, recvs = (
            [torch.zeros(size * there, dtype=torch.uint8, device=device) for there in each] for each in (to_G, from_G)
        )
        seconds = []
        for _ in range(REPETITIONS + 1):  # one to warm up
            transport.gather(torch.zeros(1))
            began_s = time.perf_counter()
            transport.exchange(order, sends, recvs, lambda *_: None)
            transport.wait()
            seconds.append(float(transport.gather(torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)).max()))
        network_s.append(timed(order, bytes_GG, network).makespan_s)
        took_s.append(statistics.median(seconds[1:]))
        if took_s[-1] > max(LONG_S, 4 * took_s[0]):
            break
    return startups_and_share((network_s[0], network_s[-1]), (took_s[0], took_s[-1]))


def _scaled(cluster: Cluster, ports: float = 1.0, nics: float = 1.0) -> Cluster:
    """The cluster with its ports' rates times a factor, and those of its servers' NICs times another."""
    gpus = tuple(replace(gpu, out_Bps=gpu.out_Bps * ports, in_Bps=gpu.in_Bps * ports) for gpu in cluster.gpus)
    fabric = cluster.fabric
    if fabric is not None and fabric.nic_Bps is not None:
        rates = [gpu.out_Bps for gpu in gpus], [gpu.in_Bps for gpu in gpus]
        fabric = servers(fabric.server_G, *rates, fabric.nic_Bps * nics, fabric.shared_nic)
    return replace(cluster, gpus=gpus, fabric=fabric)


def startups_and_share(ports_s: tuple[float, float], took_s: tuple[float, float]) -> tuple[float, float]:
    """Fits a line through the seconds of a small and a large exchange, at the network's full rates and as measured.

    Returns:
        (start-up seconds of an exchange, share of the rates that is reached). A small exchange may pass in a burst,
        faster than its port; the rate is then that of the large one.
    """
    (small_s, large_s), (first_s, last_s) = ports_s, took_s
    startups_s = max(0.0, first_s - small_s * max(0.0, last_s - first_s) / (large_s - small_s))
    return startups_s, large_s / (last_s - startups_s) if last_s > startups_s else 1.0
