"""Orders on real sockets: 4 and 8 hosts as network namespaces, gloo between them, every method on every matrix.

    python bench/network/run.py [--repetitions 9] [--seconds 0.5] [--hosts 4] [--rates equal] [--buffers deep] [--burst-ms 0.8]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Ports of 200 Mbit/s, or of 400/320/200/160 in
equal parts; switch buffers of 16 MB or 256 kB a port; reno; send buffers of 1 MB; bursts of 80 kB, or shorter ones, which
forgive less. A ratio is the time from the first rank's start to the last one's end over the fluid bound, at the rate that TCP
leaves of a port (1448/1514). Methods run interleaved, in alternating sequence, after one round to warm up; `auto` calibrates
first. `model` is what the fluid model of the switch says. A method's start-up is what it takes for TINY_BYTES a pair; `small`
and `tiny` flows are SMALL and TINY of the seconds.
Everything is removed at the end, also after an error or an interrupt. Results: bench/results/network-DATE.md, a section for
each network, which replaces that of an earlier run on the same day.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hosts import AUTO, TORCH, ExchangeJob, measure, together
from net import BURST_S, PAYLOAD, network
from protocol import DEEP, Results, options
from traffic import MATRICES, traffic

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.port_bounds import fluid_bound
from aurora.algorithms.network.switch import timed
from aurora.runtime.distributed.launcher import launch
from aurora.types import Network

SHALLOW = 256_000
BUFFERS = {"deep": DEEP, "shallow": SHALLOW}
EQUAL = (TORCH, "all-at-once", "sjf", "random", "spread-out", "openshop-best", "birkhoff", "paced", AUTO)
MIXED = (TORCH, "all-at-once", "sjf", "openshop-best", "paced", AUTO)
SMALL, TINY = 1 / 25, 1 / 250
TINY_BYTES = 64
STARTUP = "start-up"


@dataclass(frozen=True)
class Setting:
    """One network."""

    hosts: int
    mixed: bool
    buffer_bytes: int
    burst_s: float = BURST_S

    @property
    def rates_bps(self) -> np.ndarray:
        mix = np.array([400e6, 320e6, 200e6, 160e6])[np.arange(self.hosts) * 4 // self.hosts]
        return mix if self.mixed else np.full(self.hosts, 200e6)

    def __str__(self) -> str:
        rates = "400/320/200/160" if self.mixed else "200"
        burst = "" if self.burst_s == BURST_S else f", bursts of {self.burst_s * 1e3:g} ms"
        return f"{self.hosts} hosts, {rates} Mbit/s, switch buffer {self.buffer_bytes / 1e6:.3g} MB{burst}"


def cases(matrices: Sequence[str], rates_Bps: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
    """What is sent, by name."""
    found = {name: traffic(name, rates_Bps, seconds) for name in matrices}
    for name, part in (("small", SMALL), ("tiny", TINY)):
        found |= {f"{matrix}, {name} flows": traffic(matrix, rates_Bps, seconds * part) for matrix in ("randint", "uniform")}
    ranks = len(rates_Bps)
    return {**found, STARTUP: TINY_BYTES * (1 - np.eye(ranks, dtype=np.int64))}


def table(setting: Setting, seconds: float, repetitions: int, matrices: Sequence[str], methods: Sequence[str]) -> list[str]:
    """Measured on a network of its own."""
    methods = [method for method in (MIXED if setting.mixed else EQUAL) if not methods or method in methods]
    rates_Bps = setting.rates_bps / 8 * PAYLOAD
    bytes_C = cases(matrices, rates_Bps, seconds)
    jobs = [ExchangeJob(name, method, bytes_GG) for name, bytes_GG in bytes_C.items() for method in methods]
    with (
        network(setting.rates_bps, setting.buffer_bytes, burst_s=setting.burst_s) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        shares = launch(measure, setting.hosts, hosts, os.path.join(folder, "meeting"), jobs, rates_Bps, repetitions)
    found = dict(zip([(job.case, job.method) for job in jobs], together([spans for spans, _ in shares]), strict=True))
    startup_s = {method: statistics.median(found[STARTUP, method][0]) for method in methods}
    over: dict[str, list[float]] = {method: [] for method in methods}
    model = Network(rates_Bps, rates_Bps)
    modelled = [method for method in methods if method in ORDER]
    lines = [
        "Seconds / bound, median / worst (segments sent again a run):",
        "",
        f"| matrix | bound ms | {' | '.join(methods)} | model: {', '.join(modelled)} |",
        "|---|" + "---|" * (len(methods) + 2),
    ]
    for name, bytes_GG in bytes_C.items():
        if name == STARTUP:
            continue
        bound_s = fluid_bound(bytes_GG, model)
        cells, models = [], []
        for method in methods:
            taken, again = found[name, method]
            cells.append(f"{statistics.median(taken) / bound_s:.3f} / {max(taken) / bound_s:.2f} ({again:.0f})")
            if name in MATRICES:
                over[method].append(statistics.median(taken) / (bound_s + startup_s[method]))
        for method in modelled:
            order = ORDER[method](bytes_GG, model, rng=np.random.default_rng(0))
            models.append(f"{timed(order, bytes_GG, model).makespan_s / bound_s:.2f}")
        lines.append(f"| {name} | {bound_s * 1e3:.0f} | {' | '.join(cells)} | {', '.join(models)} |")
    startups = " | ".join(f"{1e3 * startup_s[method]:.1f}" for method in methods)
    middles, worsts = ([f"{fold(over[method]):.3f}" for method in methods] for fold in (statistics.median, max))
    lines += [
        f"| start-up, ms | | {startups} | |",
        f"| medians / (bound + start-up), median | | {' | '.join(middles)} | |",
        f"| medians / (bound + start-up), worst | | {' | '.join(worsts)} | |",
        "",
        f"Bounds of {seconds:g} s, {repetitions} repetitions. `auto` chose: {shares[0][1]}.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="the bound of every all-to-all")
    parser.add_argument("--hosts", type=int, action="append", choices=(4, 8))
    parser.add_argument("--rates", action="append", choices=("equal", "mixed"))
    parser.add_argument("--buffers", action="append", choices=tuple(BUFFERS))
    parser.add_argument("--burst-ms", type=float, default=1e3 * BURST_S, help="what a port lets pass at once after a rest")
    parser.add_argument("--matrix", action="append", choices=tuple(MATRICES), help="repeat for several; default all")
    parser.add_argument("--method", action="append", choices=sorted({*EQUAL, *MIXED}), help="repeat for several; default all")
    chosen = options(parser)
    results = Results("network", "Orders on real sockets", chosen.out)
    settings = [
        Setting(hosts, rates == "mixed", BUFFERS[buffers], chosen.burst_ms / 1e3)
        for hosts in chosen.hosts or (4, 8)
        for rates in chosen.rates or ("equal", "mixed")
        for buffers in chosen.buffers or BUFFERS
    ]
    for setting in settings:
        matrices, methods = chosen.matrix or list(MATRICES), chosen.method or ()
        results.add(str(setting), *table(setting, chosen.seconds, chosen.repetitions, matrices, methods))


if __name__ == "__main__":
    main()
