"""Ranks in the hosts of a network: every method on every matrix, interleaved, and how long each took."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from net import enter, retransmitted

from aurora.plan.order import ORDER
from aurora.ranks.gloo import GlooTransport
from aurora.ranks.launcher import Seat
from aurora.types import Cluster, Gpu

TORCH = "all_to_all_single"


@dataclass(frozen=True)
class Job:
    """One all-to-all. method: TORCH, or of ORDER."""

    matrix: str
    method: str
    bytes_GG: np.ndarray


Span = tuple[int, float, float, int]  # job, start and end by time.perf_counter, segments sent again


def measure(seat: Seat, hosts: Sequence[str], meeting: str, jobs: Sequence[Job], rates_Bps: np.ndarray, times: int) -> list[Span]:
    """This rank's spans; the parent takes the first start and the last end of each."""
    enter(hosts[seat.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.FileStore(meeting, seat.ranks)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks)
    gpus = tuple(Gpu(host, "cpu", 0, rate, rate, 1) for host, rate in zip(hosts, rates_Bps.tolist(), strict=True))
    transport = GlooTransport(None, Cluster("network", gpus))
    runs = [_prepared(job, transport, rates_Bps) for job in jobs]
    spans: list[Span] = []
    for repetition in range(-1, times):  # one to warm up
        sequence = range(len(jobs)) if repetition % 2 else range(len(jobs) - 1, -1, -1)
        for index in sequence:
            time.sleep(0.02)  # queues drain
            dist.barrier()
            before, began_s = retransmitted(), time.perf_counter()
            runs[index]()
            if repetition >= 0:
                spans.append((index, began_s, time.perf_counter(), retransmitted() - before))
    dist.barrier()
    return spans


def _prepared(job: Job, transport: GlooTransport, rates_Bps: np.ndarray) -> Any:
    rank, bytes_GG = transport.rank, job.bytes_GG
    out, into = torch.zeros(int(bytes_GG[rank].sum()), dtype=torch.uint8), torch.zeros(int(bytes_GG[:, rank].sum()), dtype=torch.uint8)
    to, of = bytes_GG[rank].tolist(), bytes_GG[:, rank].tolist()
    if job.method == TORCH:
        return lambda: dist.all_to_all_single(into, out, of, to)
    order = ORDER[job.method](bytes_GG, rates_Bps, rates_Bps, np.random.default_rng(0))
    sends, recvs = torch.split(out, to), torch.split(into, of)
    return lambda: transport.exchange(order, sends, recvs, lambda *_: None)


def summarise(spans_R: Sequence[Sequence[Span]], jobs: int) -> list[tuple[list[float], float]]:
    """By job: seconds of each repetition, and segments sent again on average."""
    seconds: list[list[float]] = [[] for _ in range(jobs)]
    again = [0] * jobs
    for rows in itertools.zip_longest(*spans_R):
        index = rows[0][0]
        seconds[index].append(max(row[2] for row in rows) - min(row[1] for row in rows))
        again[index] += sum(row[3] for row in rows)
    return [(taken, again[i] / len(taken)) for i, taken in enumerate(seconds)]
