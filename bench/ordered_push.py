"""Ordered push, without a GPU: its price on an emulated clock, and drawn exchanges between processes in Triton's interpreter.

Usage: python bench/ordered_push.py price
       python bench/ordered_push.py drawn [--first 0] [--exchanges 1000] [--seconds 3600]

`price` prints the microseconds of each delivery, for even and skewed traffic of 8 ranks: 128 tokens each, top 8 of 256 experts,
hidden size 7168 in bf16, one row for all experts of a rank. Then, by fabric, the bytes of a rank from which an order pays. The
clock is the simulator's. Its costs are the estimates of `aurora.algorithms.network.delivery`.

`drawn` checks every byte of dispatches and every sum of combines, of all dtypes, on 2 to 8 processes.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from aurora.algorithms.network.bounds import fluid_bound
from aurora.algorithms.network.delivery import DELIVERY, chosen, delivery_prices
from aurora.runtime.distributed.launcher import launch
from aurora.types import Network
from aurora.types.arrays import IntArray
from tests.runtime.transports.drawn_pushes import exchanges

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN = 8, 128, 8, 256, 7168
SKEWS = {"even": 0.0, "Zipf 0.8": 0.8, "Zipf 1.2": 1.2}
RATES = {"50 GB/s": 50e9, "450 GB/s": 450e9}
INCAST = {"no incast loss": 0.0, "2 % a sender": 0.02, "10 % a sender": 0.1}
A_LAUNCH = 72  # exchanges of processes that are started once


def rows_GG(skew: float, ranks: int = RANKS, tokens: int = TOKENS) -> IntArray:
    """Returns (G, G) int64, rows from each rank to each other, of tokens that choose experts by Zipf's law."""
    rng = np.random.default_rng(0)
    part_E = rng.permutation((1.0 + np.arange(EXPERTS)) ** -skew)
    found = np.zeros((ranks, ranks), dtype=np.int64)
    for rank in range(ranks):
        for _ in range(tokens):
            experts = rng.choice(EXPERTS, TOP_K, replace=False, p=part_E / part_E.sum())
            found[rank, np.unique(experts * ranks // EXPERTS)] += 1
    np.fill_diagonal(found, 0)
    return found


def price() -> list[str]:
    """Returns the lines of both tables."""
    lines = ["| port | traffic | phase | bound | " + " | ".join(DELIVERY) + " | ordered / unordered | auto |"]
    lines.append("|---|---|---|" + "---:|" * (2 + len(DELIVERY)) + "---|")
    for rate, Bps in RATES.items():
        network = Network.equal(RANKS, Bps)
        for traffic, skew in SKEWS.items():
            rows = rows_GG(skew)
            for phase, bytes_GG in (("dispatch", rows * (2 * HIDDEN + 64)), ("combine", rows.T * 2 * HIDDEN)):
                took, _ = delivery_prices(bytes_GG, network)
                ratio = min(took["ordered push"], took["gated push"]) / took["unordered push"]
                columns = " | ".join(f"{seconds * 1e6:.1f}" for seconds in (fluid_bound(bytes_GG, network), *took.values()))
                lines.append(f"| {rate} | {traffic} | {phase} | {columns} | {ratio:.2f} | {chosen(took)} |")
    ways = [name for name in DELIVERY if name != "unordered push"]
    lines += ["", "| port | receivers lose | traffic | " + " | ".join(ways) + " |", "|---|---|---|" + "---:|" * len(ways)]
    for rate, Bps in RATES.items():
        for lost, incast in INCAST.items():
            for traffic, skew in SKEWS.items():
                network = replace(Network.equal(RANKS, Bps), incast=incast)
                _, from_bytes = delivery_prices(rows_GG(skew), network)
                lines.append(f"| {rate} | {lost} | {traffic} | " + " | ".join(amount(from_bytes[name]) for name in ways) + " |")
    return lines


def amount(size: float) -> str:
    return "never" if size == np.inf else f"{size / 1e6:.3g} MB"


def drawn(first: int, count: int, seconds: float) -> list[str]:
    """Checks drawn exchanges, so many from `first` on or as long. Returns the lines of the result."""
    began_s, done, rows, wrong = time.monotonic(), 0, 0, 0
    lines = ["| processes | exchanges | rows | differing bytes |", "|---:|---:|---:|---:|"]
    while done < count and time.monotonic() - began_s < seconds:
        for ranks in (2, 3, 4, 5, 6, 7, 8):
            seeds = range(10_000 + first + done, 10_000 + first + done + A_LAUNCH)
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                found = launch(exchanges, ranks, str(Path(folder) / "push"), seeds)
            arrived, differing = (sum(each[place] for of_rank in found for each in of_rank) for place in (0, 1))
            done, rows, wrong = done + len(seeds), rows + arrived, wrong + differing
            lines.append(f"| {ranks} | {len(seeds)} | {arrived} | {differing} |")
            print(lines[-1], flush=True)
            if done >= count or time.monotonic() - began_s > seconds:
                break
    return [*lines, f"| all | {done} | {rows} | {wrong} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("price", "drawn"))
    parser.add_argument("--first", type=int, default=0, help="exchanges that ran before")
    parser.add_argument("--exchanges", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    print("\n".join(price() if given.what == "price" else drawn(given.first, given.exchanges, given.seconds)))


if __name__ == "__main__":
    main()
