"""Orders on real sockets: 4 and 8 hosts as network namespaces, gloo between them, every method on every matrix.

    python bench/network/run.py [--repetitions 9] [--seconds 0.5] [--hosts 4 --hosts 8]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Ports of 200 Mbit/s, or of 400/320/200/160 in equal
parts; switch buffers of 16 MB or 256 kB a port; reno; send buffers of 1 MB. A ratio is the time from the first rank's start to
the last one's end over the fluid bound, at the rate that TCP leaves of a port (1448/1514). Methods run interleaved, in
alternating sequence, after one round to warm up; `auto` calibrates first. `model` is what the fluid model of the switch says.
Everything is removed at the end, also after an error or an interrupt. Results: bench/results/network-DATE.md.
"""

import argparse
import datetime
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hosts import AUTO, TORCH, Job, measure, together
from net import PAYLOAD, network, refusal
from traffic import MATRICES, traffic

from aurora.plan.order import ORDER
from aurora.plan.timing import timed
from aurora.ranks.launcher import launch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from machine import machine  # noqa: E402

DEEP, SHALLOW = 16 << 20, 256_000
EQUAL = (TORCH, "all-at-once", "sjf", "random", "spread-out", "openshop", "birkhoff", "paced", AUTO)
MIXED = (TORCH, "all-at-once", "sjf", "openshop", "lanes", "paced", AUTO)


@dataclass(frozen=True)
class Setting:
    """One network."""

    hosts: int
    mixed: bool
    buffer_bytes: int

    @property
    def rates_bps(self) -> np.ndarray:
        mix = np.array([400e6, 320e6, 200e6, 160e6])[np.arange(self.hosts) * 4 // self.hosts]
        return mix if self.mixed else np.full(self.hosts, 200e6)

    def __str__(self) -> str:
        rates = "400/320/200/160" if self.mixed else "200"
        return f"{self.hosts} hosts, {rates} Mbit/s, switch buffer {self.buffer_bytes / 1e6:.3g} MB"


def table(setting: Setting, seconds: float, repetitions: int) -> list[str]:
    """Measured on a network of its own."""
    methods = MIXED if setting.mixed else EQUAL
    rates_Bps = setting.rates_bps / 8 * PAYLOAD
    jobs = [Job(name, method, traffic(name, rates_Bps, seconds)) for name in MATRICES for method in methods]
    began = time.perf_counter()
    with network(setting.rates_bps, setting.buffer_bytes) as hosts, tempfile.TemporaryDirectory() as folder:
        shares = launch(measure, setting.hosts, hosts, os.path.join(folder, "meeting"), jobs, rates_Bps, repetitions)
    found = iter(zip(jobs, together([spans for spans, _ in shares]), strict=True))
    lines = [
        f"## {setting}: seconds / bound, median / worst (segments sent again a run)",
        "",
        f"| matrix | {' | '.join(methods)} | model: {', '.join(m for m in methods if m in ORDER)} |",
        "|---|" + "---|" * (len(methods) + 1),
    ]
    for name in MATRICES:
        cells, models = [], []
        for _ in methods:
            job, (taken, again) = next(found)
            cells.append(f"{statistics.median(taken) / seconds:.3f} / {max(taken) / seconds:.2f} ({again:.0f})")
            if job.method in ORDER:
                order = ORDER[job.method](job.bytes_GG, rates_Bps, rates_Bps, np.random.default_rng(0))
                models.append(f"{timed(order, job.bytes_GG, rates_Bps, rates_Bps).makespan_s / seconds:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(models)} |")
    lines += ["", f"`auto` chose: {shares[0][1]}. Took {time.perf_counter() - began:.0f} s."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="the bound of every all-to-all")
    parser.add_argument("--hosts", type=int, action="append", choices=(4, 8))
    chosen = parser.parse_args()
    if reason := refusal():
        print(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = HERE.parent / "results" / f"network-{today}.md"
    command = f"python bench/network/run.py --repetitions {chosen.repetitions} --seconds {chosen.seconds:g}"
    parts = [f"# Orders on real sockets, {today}\n\n`{command}` on {machine()}; load average {os.getloadavg()[0]:.1f} before."]
    for hosts in chosen.hosts or (4, 8):
        for mixed, buffer_bytes in ((False, DEEP), (False, SHALLOW), (True, DEEP), (True, SHALLOW)):
            lines = table(Setting(hosts, mixed, buffer_bytes), chosen.seconds, chosen.repetitions)
            print("\n".join(lines), flush=True)
            parts.append("\n".join(lines))
            out.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {out}; load average {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
