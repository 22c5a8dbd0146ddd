"""How long simulating takes: `python bench/simulate.py` writes bench/results/simulate-DATE.md.

One all-to-all of uniform random sizes (seed 0) on equal ports, and one layer of 256 experts in DeepSeek-V3's shape (top-8 of
256, hidden 7168, fp8 dispatch, bf16 combine; Zipf 0.8, 128 tokens a rank) from profile to summary. Once each, after one small
run that compiles; on one core.
"""

import datetime
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import fluid_pieces, timed
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.reports.trace_times import summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Gpu, Network, PlanOptions, Profile, SyntheticOptions

SHAPE = {
    "n_routed_experts": 256,
    "num_hidden_layers": 1,
    "num_experts_per_tok": 8,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
}
PORT_BPS = 50e9


def one_exchange(method: str, ranks: int) -> str:
    rng = np.random.default_rng(0)
    bytes_GG = rng.integers(1, 10**6, (ranks, ranks))
    np.fill_diagonal(bytes_GG, 0)
    network = Network.equal(ranks, PORT_BPS)
    order = ORDER[method](bytes_GG, network, rng=rng)
    began = time.perf_counter()
    timed(order, bytes_GG, network)
    timed_s = time.perf_counter() - began
    began = time.perf_counter()
    fluid_pieces(order, bytes_GG[None], network)
    switch_s = time.perf_counter() - began
    return f"| {method} | {ranks} | {np.count_nonzero(bytes_GG):,} | {timed_s:.3f} | {switch_s:.3f} |"


def deepseek(ranks: int) -> tuple[Cluster, Profile]:
    cluster = Cluster("flat", tuple(Gpu(f"g{i}", "gpu", i // 8, PORT_BPS, PORT_BPS, 10**12) for i in range(ranks)))
    profile = draw_profile("zipf:0.8", SHAPE, SyntheticOptions(ranks, 128))
    return cluster, replace(profile, dispatch_bytes=7168, combine_bytes=2 * 7168)


def one_layer(ranks: int, options: PlanOptions) -> str:
    cluster, profile = deepseek(ranks)
    laps = [time.perf_counter()]
    plan = make_plan(cluster, [profile], options)
    laps.append(time.perf_counter())
    trace = simulate_plan(plan, [profile])
    laps.append(time.perf_counter())
    summarise(trace, cluster)
    laps.append(time.perf_counter())
    cells = [f"{lap:.1f}" for lap in np.diff(laps)]
    return f"| {ranks} | {plan.options.place} | {len(trace):,} | {' | '.join(cells)} | {laps[-1] - laps[0]:.1f} |"


def main() -> None:
    one_exchange("all-at-once", 4), one_exchange("openshop", 4), one_layer(8, PlanOptions())
    cases = (("all-at-once", 32), ("sjf", 48), ("openshop", 64), ("openshop", 320), ("openshop", 1024))
    lines = ["| order | ranks | transfers | `timed`, s | the switch, s |", "|---|---|---|---|---|"]
    for case in cases:
        lines.append(one_exchange(*case))
        print(lines[-1], flush=True)
    lines += [
        "",
        "| GPUs | placement | rows of the trace | plan, s | simulate, s | summary, s | all, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in (512, 1024):
        for options in (PlanOptions(), PlanOptions(slots_per_gpu=1)):
            lines.append(one_layer(ranks, options))
            print(lines[-1], flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = [
        f"# Simulating, {today}",
        "",
        machine(),
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().split("\n"),
        "",
        *lines,
        "",
    ]
    (Path(__file__).parent / "results" / f"simulate-{today}.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
