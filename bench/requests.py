"""How far interpolated steps of simulated requests are from simulated ones: `python bench/requests.py` writes results.

No times of this machine are in the table: other work on it changes nothing but how long this takes.
"""

import argparse

import numpy as np
from tables import Table, write

from aurora import plan as planned
from aurora.advisor.recommend import engine_default
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_cluster, shipped
from aurora.reports.formatting import seconds
from aurora.reports.trace_tables import percentiles
from aurora.simulator.requests import drawn_requests, simulate_requests
from aurora.types import PlanOptions, RequestOptions, SyntheticOptions

SMALL = {
    "num_local_experts": 64,
    "num_hidden_layers": 8,
    "num_experts_per_tok": 6,
    "hidden_size": 2048,
    "intermediate_size": 1408,
}
CLUSTERS = {  # requests per second: prompts beside requests that generate, and no queue that grows
    "h100-nvlink-8": 200.0,
    "l40s-100gbe-8": 20.0,
    "h100-a100-8": 100.0,
    "paper-mixed-8": 20.0,
    "h100-servers-32": 400.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--duration", type=float, default=10.0, help="seconds in which requests arrive")
    args = parser.parse_args()
    table = Table(
        "Interpolated over simulated seconds of a step, minus one",
        "cluster | served by | requests/s | steps | simulated | error: median | most | mean | TTFT p50 | TPOT p50",
        f"`python bench/requests.py --clusters {' '.join(args.clusters)} --duration {args.duration:g}`; a model of "
        f"{SMALL['num_hidden_layers']} layers x {SMALL['num_local_experts']} experts, "
        "top-6, Zipf 0.8; prompts of 1000 tokens, 100 generated. `simulated`: steps of the grid; the error is that of steps "
        "drawn in proportion to their time, simulated with all layers and other draws of the traffic. `mean` has its sign.",
    )
    for name in args.clusters:
        cluster = load_cluster(shipped(f"clusters/{name}.toml"))
        profile = draw_profile("zipf:0.8", SMALL, SyntheticOptions(sources=len(cluster), windows=2))
        options = RequestOptions(rate=CLUSTERS[name], isl=1000, osl=100, duration_s=args.duration)
        plans = {
            "plan": planned(cluster, profile),
            "plan, all at once": planned(cluster, profile, PlanOptions(order="all-at-once")),
            "default": engine_default(cluster, profile),
        }
        for served_by, plan in plans.items():
            found = simulate_requests(plan, profile, drawn_requests(options), options)
            off, served = np.abs(found.off_C), found.served
            errors = [f"{value:.1%}" for value in (np.median(off), off.max(), found.off_C.mean())]
            times = [seconds(percentiles(each)["p50"] or 0.0) for each in (served.ttft_s_Q, served.tpot_s_X)]
            rate = f"{options.rate:g}" + (", queue grows" if served.queue_grows else "")
            table.add(name, served_by, rate, served.steps, found.points, *errors, *times)
    write("requests", ["# Simulated requests"], table.lines)


if __name__ == "__main__":
    main()
