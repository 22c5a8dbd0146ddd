"""Ranks in the hosts of a network: every method on every matrix, interleaved, and how long each took."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from net import enter, retransmitted

from aurora.algorithms.alltoall.registry import ORDER
from aurora.profiler.link_timing import LinkMeasurements, time_links
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.order_calibration import OrderCalibration, calibrate
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Cluster, Gpu, Order

TORCH, AUTO = "all_to_all_single", "auto"
PLANNED = "openshop-best"  # the order that AUTO may choose beside all at once, paced and TORCH
QUIET_S = 0.02  # between runs: queues drain
MEET_S = 0.005  # after all have met: gloo's barrier lets ranks go milliseconds apart


@dataclass(frozen=True)
class ExchangeJob:
    """One all-to-all. method: TORCH, AUTO, or of ORDER."""

    case: str
    method: str
    bytes_GG: np.ndarray


Span = tuple[float, float, int]  # start and end by time.perf_counter, segments sent again


def measure(
    seat: RankInfo, hosts: Sequence[str], meeting: str, jobs: Sequence[ExchangeJob], rates_Bps: np.ndarray, repetitions: int
) -> tuple[list[list[Span]], str]:
    """This rank's spans by job, and what AUTO chose."""
    cluster, transport = _joined(seat, hosts, meeting, rates_Bps)
    choice = calibrate(transport, cluster, PLANNED)
    return _spans(jobs, transport, cluster, choice, repetitions), str(choice)


def _joined(seat: RankInfo, hosts: Sequence[str], meeting: str, rates_Bps: np.ndarray) -> tuple[Cluster, GlooTransport]:
    join(seat, hosts, meeting)
    gpus = [Gpu(host, "cpu", 0, rate, rate, 1) for host, rate in zip(hosts, rates_Bps.tolist(), strict=True)]
    cluster = Cluster("network", tuple(gpus))
    return cluster, GlooTransport(None, cluster)


def _spans(
    jobs: Sequence[ExchangeJob], transport: GlooTransport, cluster: Cluster, choice: OrderCalibration | None, repetitions: int
) -> list[list[Span]]:
    runs = [_prepared(job, transport, cluster, choice) for job in jobs]
    spans: list[list[Span]] = [[] for _ in jobs]
    for repetition in range(repetitions + 1):  # one to warm up
        for index in range(len(jobs))[:: 1 if repetition % 2 else -1]:
            time.sleep(QUIET_S)
            start_together(transport)
            before, began_s = retransmitted(), time.perf_counter()
            runs[index]()
            if repetition:
                spans[index].append((began_s, time.perf_counter(), retransmitted() - before))
    dist.barrier()
    return spans


def find_links(seat: RankInfo, hosts: Sequence[str], meeting: str) -> LinkMeasurements:
    """What a rank in a namespace of its own finds of the network."""
    join(seat, hosts, meeting)
    return time_links(GlooTransport())


def measure_after_links(
    seat: RankInfo, hosts: Sequence[str], meeting: str, jobs: Sequence[ExchangeJob], rates_Bps: np.ndarray, repetitions: int
) -> tuple[list[list[Span]], LinkMeasurements]:
    """This rank's spans by job, and the links as found before; no job is AUTO."""
    cluster, transport = _joined(seat, hosts, meeting, rates_Bps)
    links = time_links(transport)
    return _spans(jobs, transport, cluster, None, repetitions), links


def join(seat: RankInfo, hosts: Sequence[str], meeting: str) -> None:
    enter(hosts[seat.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.FileStore(meeting, seat.ranks)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks)


def _prepared(
    job: ExchangeJob, transport: GlooTransport, cluster: Cluster, choice: OrderCalibration | None
) -> Callable[[], object]:
    to, of = job.bytes_GG[transport.rank].tolist(), job.bytes_GG[:, transport.rank].tolist()
    out, into = torch.zeros(sum(to), dtype=torch.uint8), torch.zeros(sum(of), dtype=torch.uint8)
    if job.method == TORCH:
        return lambda: dist.all_to_all_single(into, out, of, to)
    name = PLANNED if job.method == AUTO else job.method
    planned = ORDER[name](job.bytes_GG, cluster.network, rng=np.random.default_rng(0))
    order: Order | None = planned
    if choice is not None and job.method == AUTO:
        order = choice.order(planned, choice.method(float(job.bytes_GG.sum() / transport.ranks)))
    sends, recvs = torch.split(out, to), torch.split(into, of)
    return lambda: transport.exchange(order, sends, recvs, lambda *_: None)


def start_together(transport: GlooTransport) -> None:
    """All hosts read one clock here: sleep until it shows what is late enough for each."""
    now_s = transport.gather(torch.tensor([time.perf_counter()], dtype=torch.double))
    time.sleep(max(0.0, float(now_s.max()) + MEET_S - time.perf_counter()))


def all_ready(spans_RJ: Sequence[Sequence[Sequence[Span]]]) -> list[list[float]]:
    """By job: seconds of each repetition, from the last rank's start to the last one's end."""
    return [
        [max(span[1] for span in rows) - max(span[0] for span in rows) for rows in zip(*spans_R, strict=True)]
        for spans_R in zip(*spans_RJ, strict=True)
    ]


def together(spans_RJ: Sequence[Sequence[Sequence[Span]]]) -> list[tuple[list[float], float]]:
    """By job: seconds of each repetition, from the first rank's start to the last one's end; segments sent again a run."""
    found = []
    for spans_R in zip(*spans_RJ, strict=True):
        seconds = [max(s[1] for s in rows) - min(s[0] for s in rows) for rows in zip(*spans_R, strict=True)]
        found.append((seconds, sum(span[2] for spans in spans_R for span in spans) / len(seconds)))
    return found
