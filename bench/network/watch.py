"""`--orders auto` beside torch's own collective while other processes come and go: quiet, four busy, quiet.

    python bench/network/watch.py [--hosts 8] [--seconds 0.06] [--exchanges 500] [--busy 4]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Ports of 200 Mbit/s, deep switch buffers, reno.
`auto` calibrates first and is watched through all phases. In each phase every exchange is made by both, one after the other and
the other first the next time; matrices are drawn anew, with the same fluid bound. A ratio is the time from the first rank's
start to the last one's end over that bound. Trials count as exchanges of `auto`. Everything is removed at the end, also after
an error or an interrupt. Results: bench/results/watch-DATE.md.
"""

import argparse
import os
import statistics
import tempfile
from collections import Counter

from hosts import AUTO, TORCH, measure_watched, together
from net import PAYLOAD, network
from protocol import DEEP, Results, options
from run import Setting
from traffic import traffic

from aurora.runtime.distributed.launcher import launch


def report(setting: Setting, seconds: float, exchanges: int, busy: int) -> list[str]:
    """Measured on a network of its own."""
    rates_Bps = setting.rates_bps / 8 * PAYLOAD
    drawn = [traffic("randint", rates_Bps, seconds, seed) for seed in range(exchanges)]
    phases = (0, busy, 0)
    with network(setting.rates_bps, setting.buffer_bytes) as hosts, tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        shares = launch(measure_watched, setting.hosts, hosts, meeting, drawn, rates_Bps, phases)
    _, used, calibration = shares[0]
    lines = [
        "| other processes | all_to_all_single: first half, second half | auto: first half, second half | auto's exchanges |",
        "|---|---|---|---|",
    ]
    served: Counter[str] = Counter()
    for index, count in enumerate(phases):
        cells = []
        for method in (TORCH, AUTO):
            ((taken, _),) = together([[spans[index][method]] for spans, *_ in shares])
            halves = (taken[: exchanges // 2], taken[exchanges // 2 :])
            cells.append(", ".join(f"{statistics.median(half) / seconds:.3f}" for half in halves))
        here = Counter(used[index].exchanges)
        here.subtract(served)
        served = Counter(used[index].exchanges)
        by = ", ".join(f"{method} {number}" for method, number in here.most_common() if number)
        lines.append(f"| {count or 'none'} | {' | '.join(cells)} | {by} |")
    changes = "; ".join(used[-1].changes) or "none"
    return [
        f"Medians of seconds / bound; {exchanges} exchanges of {seconds:g} s in each phase by each.",
        "",
        *lines,
        "",
        f"Change-overs: {changes}. Calibrated: {calibration}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, choices=(4, 8))
    parser.add_argument("--seconds", type=float, default=0.06, help="the bound of every all-to-all")
    parser.add_argument("--exchanges", type=int, default=500, help="of each phase")
    parser.add_argument("--busy", type=int, default=4, help="other processes in the second phase")
    chosen = options(parser)
    results, setting = Results("watch", "Orders watched on real sockets", chosen.out), Setting(chosen.hosts, False, DEEP)
    results.add(str(setting), *report(setting, chosen.seconds, chosen.exchanges, chosen.busy))


if __name__ == "__main__":
    main()
