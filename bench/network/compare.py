"""What the simulator's switch says of an all-to-all beside what it takes on real sockets, start-ups and rates as measured.

    python bench/network/compare.py [--repetitions 3] [--hosts 4] [--rates equal]

Root only (namespaces, token buckets). Ports and matrices are run.py's, switch buffers deep. Before anything is sent the
network is measured as `aurora run --compare` does, and the prediction is of that network alone. A case is a matrix, a size and
a method; its error is predicted / measured - 1, of the median run. Sizes are the bounds' seconds: PREFILL are of 0.6 MB a rank
and more, DECODE of some 30 kB, where wake-ups of the hosts count for more than their ports. Posting all at once is predicted as
fair shares, which TCP does not give. Results: bench/results/prediction-DATE.md, a section for each network.
"""

import argparse
import os
import statistics
import tempfile

import numpy as np
from hosts import ExchangeJob, measure_priced, together
from net import PAYLOAD, network
from protocol import DEEP, Results, options
from run import Setting
from traffic import MATRICES, traffic

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import timed
from aurora.runtime.distributed.launcher import launch
from aurora.types import Network

PREFILL, DECODE = (0.3, 0.05), 0.0012
METHODS = {
    False: ("openshop-best", "birkhoff", "paced", "all-at-once"),
    True: ("openshop-best", "paced", "all-at-once"),
}


def errors(setting: Setting, repetitions: int) -> list[str]:
    """The section of one network."""
    rates_Bps = setting.rates_bps / 8 * PAYLOAD
    jobs = [
        ExchangeJob(f"{matrix}, {seconds:g} s", method, traffic(matrix, rates_Bps, seconds))
        for seconds in (*PREFILL, DECODE)
        for matrix in MATRICES
        for method in METHODS[setting.mixed]
    ]
    with network(setting.rates_bps, setting.buffer_bytes) as hosts, tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        shares = launch(measure_priced, setting.hosts, hosts, meeting, jobs, rates_Bps, repetitions)
    found = together([spans for spans, _ in shares])
    before, after = shares[0][1]
    error: dict[tuple[str, str], float] = {}
    for job, (seconds, _) in zip(jobs, found, strict=True):
        order = ORDER[job.method](job.bytes_GG, Network(rates_Bps, rates_Bps), rng=np.random.default_rng(0))
        says = timed(order, job.bytes_GG, before.network).makespan_s
        error[job.case, job.method] = says / statistics.median(seconds) - 1
    methods = METHODS[setting.mixed]
    lines = [f"| case | {' | '.join(methods)} |", "|---|" + "---|" * len(methods)]
    for case in dict.fromkeys(job.case for job in jobs):
        lines.append(f"| {case} | {' | '.join(f'{error[case, method]:+.1%}' for method in methods)} |")
    for name, sizes in (("prefill", PREFILL), ("decode", (DECODE,))):
        cells = []
        for method in methods:
            of = [abs(error[job.case, method]) for job in jobs if job.method == method and _seconds(job) in sizes]
            cells.append(f"{statistics.median(of):.1%} / {max(of):.1%}")
        lines.append(f"| {name}: median / worst | {' | '.join(cells)} |")
    ordered = [abs(error[job.case, job.method]) for job in jobs if _seconds(job) in PREFILL and job.method != "all-at-once"]
    seen = ", ".join(
        f"{when} {each.gpus[0].startup_s * 1e3:.2f} ms a message and {each.out_Bps_G[0] / rates_Bps[0]:.1%} of the ports' rate"
        for when, each in (("before", before), ("after", after))
    )
    return [
        *lines,
        "",
        f"Orders, prefill: {len(ordered)} cases, median error {statistics.median(ordered):.1%}, worst {max(ordered):.1%}. "
        f"{repetitions} repetitions; measured {seen}.",
    ]


def _seconds(job: ExchangeJob) -> float:
    return float(job.case.split(", ")[1].removesuffix(" s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--hosts", type=int, action="append", choices=(4, 8))
    parser.add_argument("--rates", action="append", choices=("equal", "mixed"))
    chosen = options(parser)
    results = Results("prediction", "Predicted and measured all-to-alls", chosen.out)
    for hosts in chosen.hosts or (4,):
        for rates in chosen.rates or ("equal", "mixed"):
            setting = Setting(hosts, rates == "mixed", DEEP)
            results.add(str(setting), *errors(setting, chosen.repetitions))


if __name__ == "__main__":
    main()
