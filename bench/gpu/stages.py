"""All-to-alls by size: torch's own, one grouped call of NCCL, stages of several widths.

Usage: python -m bench.gpu.stages --ranks 8 [--shared] [--large]

Times are the slowest rank's, medians of interleaved repetitions; every byte that arrives is checked once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aurora.algorithms.alltoall.registry import ORDER
from aurora.runtime.distributed.launcher import RankInfo, launch, start_fork_server
from aurora.runtime.phase_recorder import HostTimer
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclCalls, NcclTransport
from aurora.runtime.transports.process_groups import default_process_group, new_process_group
from aurora.types import Network, Order
from aurora.types.arrays import IntArray
from bench.gpu.device import Cuda, chosen, report, skip

SIZES = {
    "small": (1 << 14, 1 << 18, 1 << 22, 1 << 26),
    "large": (1 << 20, 1 << 23, 1 << 26, 1 << 29),
}  # bytes that a rank sends
DRY_SIZES = (1 << 10, 1 << 12)
WIDTHS = (1, 2, 4)
METHODS = ("all-at-once", "matchings", "openshop")
REPETITIONS = 11
SHARED_NCCL = (2, 30)  # from which several ranks may share a GPU
TRAFFIC: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "equal": lambda ranks, rng: np.ones((ranks, ranks)),
    "Zipf": lambda ranks, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(ranks))) for _ in range(ranks)]),
    "hot receiver": lambda ranks, rng: np.where(np.arange(ranks) == 0, 8.0, 1.0)[None].repeat(ranks, 0),
}
Table = dict[str, dict[str, float]]  # microseconds by traffic and size, and by way


def measure(rank_info: RankInfo, sizes: Sequence[int], shared: bool = False) -> Table:
    """One rank's part. Returns the microseconds of each way."""
    device = chosen(0 if shared else rank_info.local_rank)
    with default_process_group(rank_info):
        group = new_process_group("gloo" if device.dry else "nccl", rank_info.timeout_s)
        calls = NcclCalls(group, device.name, HostTimer(0.0) if device.dry else None)  # the host waits for gloo's calls
        transport = NcclTransport(calls, GlooTransport(), rank_info.timeout_s)
        rng, table = np.random.default_rng(0), {}
        for traffic, draw in TRAFFIC.items():
            for size in sizes:
                share_GG = np.array(draw(transport.ranks, rng), dtype=np.float64)
                np.fill_diagonal(share_GG, 0.0)
                bytes_GG = np.round(share_GG * (size * transport.ranks / share_GG.sum())).astype(np.int64)
                seconds = times(transport, group, device, bytes_GG)
                table[f"{traffic}, {size} B"] = {way: round(1e6 * each, 1) for way, each in seconds.items()}
        return table


def times(transport: NcclTransport, group: Any, device: Cuda, bytes_GG: IntArray) -> dict[str, float]:
    """Median seconds of each way to perform one all-to-all, the same on all ranks."""
    rank, network = transport.rank, Network.equal(transport.ranks)
    out_sizes, in_sizes = bytes_GG[rank].tolist(), bytes_GG[:, rank].tolist()
    payload = torch.cat([torch.full((size,), rank, dtype=torch.uint8) for size in out_sizes]).to(device.name)
    expected = torch.cat([torch.full((size,), src, dtype=torch.uint8) for src, size in enumerate(in_sizes)]).to(device.name)
    arrived = torch.empty_like(expected)
    sends, recvs = payload.split_with_sizes(out_sizes), arrived.split_with_sizes(in_sizes)
    made = {name: ORDER[name](bytes_GG, network, rng=np.random.default_rng(0)) for name in METHODS}

    def torchs() -> None:
        dist.all_to_all_single(arrived, payload, in_sizes, out_sizes, group=group)
        device.synchronize()

    def ordered(by: Any, order: Order) -> None:
        by.exchange(order, sends, recvs, lambda *_: None)
        by.wait()

    ways: dict[str, Callable[[], None]] = {"torch": torchs, "one group": partial(ordered, transport, made["all-at-once"])}
    for name in ("matchings", "openshop"):
        for width in WIDTHS:
            order = replace(made[name], sends_open=width, recvs_open=width)
            ways[f"{name}, {width} wide"] = partial(ordered, transport, order)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(2 if device.dry else REPETITIONS + 1):
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
                assert torch.equal(arrived, expected), f"{name}: other bytes arrived than were sent"
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Prints a table in microseconds, and the fastest way of each traffic's largest exchange over torch's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--has-shared", action="store_true", help="only say whether NCCL lets ranks share a GPU")
    parser.add_argument("--large", action="store_true", help="exchanges of up to 512 MB a rank")
    given = parser.parse_args()
    device = chosen()
    if (given.shared or given.has_shared) and device.nccl() < SHARED_NCCL:
        skip(f"NCCL 2.30 or newer lets several ranks share a GPU, this is {'.'.join(map(str, device.nccl()))}")
    if given.has_shared:
        sys.exit()
    from bench.gpu import stages  # by a name that ranks can import

    sizes = DRY_SIZES if device.dry else SIZES["large" if given.large else "small"]
    start_fork_server([stages.__name__])
    (table, *_) = launch(stages.measure, given.ranks, sizes, given.shared, timeout_s=60.0)
    over: dict[str, Any] = {}
    for case, us in table.items():  # the last of a traffic is its largest
        print(f"{case}: " + ", ".join(f"{way} {each:.0f}" for way, each in us.items()) + " us")
        traffic, best = case.partition(",")[0].replace(" ", "_"), min(us.keys() - {"torch"}, key=us.__getitem__)
        over |= {traffic: best, f"{traffic}_over_torch": us[best] / us["torch"]}
    report(**over, us=table)


if __name__ == "__main__":
    main()
