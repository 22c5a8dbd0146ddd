"""All-to-alls on NCCL by size: torch's own, one grouped call, and stages of several widths.

Usage: torchrun --nproc-per-node GPUS bench/gpu/stages.py; with --smoke ranks are on the CPU, and talk over gloo.

Times are the slowest rank's, medians of interleaved repetitions; every byte that arrives is checked once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.planner.alltoall.registry import ORDER
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.phase_recorder import HostTimer
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclCalls, NcclTransport
from aurora.runtime.transports.process_groups import (
    default_process_group,
    device_of,
    new_process_group,
    rank_info_from_environment,
)
from aurora.types import Network
from aurora.types.arrays import IntArray

SIZES = tuple(1 << power for power in range(14, 28, 2))  # bytes that a rank sends on average
SMOKE_SIZES = (1 << 12, 1 << 16)
WIDTHS = (1, 2, 4)
REPETITIONS = 11
TRAFFIC: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "equal": lambda ranks, rng: np.ones((ranks, ranks)),
    "drawn": lambda ranks, rng: rng.integers(1, 100, (ranks, ranks)),
    "Zipf": lambda ranks, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(ranks))) for _ in range(ranks)]),
}


def measure(rank_info: RankInfo, smoke: bool) -> list[str]:
    """One rank's part. Returns the table's rows."""
    device = "cpu" if smoke else device_of(rank_info)
    assert smoke or device != "cpu", "expected a GPU for each rank"
    if not smoke:
        torch.cuda.set_device(device)
    with default_process_group(rank_info):
        group = new_process_group("gloo" if smoke else "nccl", rank_info.timeout_s)
        calls = NcclCalls(group, device, HostTimer(0.0) if smoke else None)  # the host waits for gloo's calls
        transport = NcclTransport(calls, GlooTransport(), rank_info.timeout_s)
        rng, rows = np.random.default_rng(0), []
        for traffic, draw in TRAFFIC.items():
            for size in SMOKE_SIZES if smoke else SIZES:
                share_GG = np.array(draw(transport.ranks, rng), dtype=np.float64)
                np.fill_diagonal(share_GG, 0.0)
                bytes_GG = np.round(share_GG * (size * transport.ranks / share_GG.sum())).astype(np.int64)
                took = times(transport, group, device, bytes_GG, 3 if smoke else REPETITIONS)
                rows.append(f"| {traffic} | {size} | " + " | ".join(f"{seconds * 1e6:.0f}" for seconds in took.values()) + " |")
        names = " | ".join(took)
        return [f"| traffic | bytes a rank | {names} |", "|---|" + "---:|" * (1 + len(took)), *rows]


def times(transport: NcclTransport, group: Any, device: str, bytes_GG: IntArray, repetitions: int) -> dict[str, float]:
    """Median seconds of each way to perform one all-to-all, the same on all ranks."""
    rank, network = transport.rank, Network.equal(transport.ranks)
    out_sizes, in_sizes = bytes_GG[rank].tolist(), bytes_GG[:, rank].tolist()
    payload = torch.cat([torch.full((size,), rank, dtype=torch.uint8) for size in out_sizes]).to(device)
    expected = torch.cat([torch.full((size,), src, dtype=torch.uint8) for src, size in enumerate(in_sizes)])
    arrived = torch.empty(len(expected), dtype=torch.uint8, device=device)
    sends, recvs = payload.split_with_sizes(out_sizes), arrived.split_with_sizes(in_sizes)
    orders = {"one group": ORDER["all-at-once"](bytes_GG, network, rng=np.random.default_rng(0))}
    for method in ("matchings", "openshop"):
        made = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
        orders |= {f"{method}, {width} wide": replace(made, sends_open=width, recvs_open=width) for width in WIDTHS}

    def torchs() -> None:
        dist.all_to_all_single(arrived, payload, in_sizes, out_sizes, group=group)
        if device != "cpu":
            torch.cuda.synchronize(device)

    def ordered(name: str) -> None:
        transport.exchange(orders[name], sends, recvs, lambda *_: None)
        transport.wait()

    ways: dict[str, Callable[[], None]] = {"all_to_all_single": torchs}
    ways |= {name: lambda name=name: ordered(name) for name in orders}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, perform in ways.items():
            arrived.fill_(255)
            transport.gather(torch.zeros(1))
            began_s = time.perf_counter()
            perform()
            took_s = time.perf_counter() - began_s
            slowest_s = float(transport.gather(torch.tensor([took_s], dtype=torch.float64)).max())
            if repetition:
                seconds[name].append(slowest_s)
            else:
                assert torch.equal(arrived.cpu(), expected), f"{name}: other bytes arrived than were sent"
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Prints the table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="CPU ranks over gloo, small sizes")
    smoke = parser.parse_args().smoke
    rank_info = rank_info_from_environment(300.0)
    assert rank_info is not None, "expected torchrun"
    rows = measure(rank_info, smoke)
    if rank_info.rank == 0:
        print("\n".join(rows))


if __name__ == "__main__":
    main()
