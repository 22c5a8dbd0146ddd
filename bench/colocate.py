"""Three and more models that share GPUs, planned and simulated: `python bench/colocate.py` writes results/colocate-DATE.md.

Mixed GPUs have ports of 100, 80, 50 and 40 Gbps in equal parts, and compute speeds in that ratio; equal GPUs have 100 Gbps.
Plans of four layers are compared by their time in the simulator, with the faster time slice of each; ratios are mean / worst
over the cases of a row.
"""

import statistics
import time
from dataclasses import replace

import numpy as np
from machine import machine
from order import kinds, ratios
from scipy.stats import spearmanr
from tables import Table, today, write

from aurora.planner.choice import with_time_slice
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Curve, Gpu, PlanOptions, Profile

GBPS = (100, 80, 50, 40)
TOKEN_BYTES = 4096
RATIOS = (0.25, 1.0, 4.0)  # an expert's seconds a token on the fastest GPU, over the token's seconds on its port

GPUS, LAYERS, CASES, DRAWS = 8, 4, 4, 12
TRAFFIC = ("uniform", "zipf 0.8", "lognormal")
ORDER = "openshop"
CONTIGUOUS = PlanOptions("contiguous", "contiguous", "contiguous", ORDER)
OTHERS = {
    "matching": PlanOptions(colocate="matching", order=ORDER),
    "contiguous": CONTIGUOUS,
}


def mixed(n: int) -> Cluster:
    rates = [GBPS[g * 4 // n] for g in range(n)]
    return Cluster(
        "mixed", tuple(Gpu(f"g{g}", f"{r}", 0, r * 1.25e8, r * 1.25e8, 10**12, r / 100) for g, r in enumerate(rates))
    )


def drawn(name: str, n: int, seed: int, model: int = 0, layers: int = 1) -> Profile:
    """n groups of experts on n ranks, tokens as the traffic `name` of bench/order.py, compute against traffic from RATIOS."""
    rng = np.random.default_rng([n, seed, model])
    scale = TOKEN_BYTES if name.startswith("recorded") else 100
    tokens_LSE = np.stack([kinds()[name](n, rng) // scale for _ in range(layers)])
    second = float(rng.choice(RATIOS)) * TOKEN_BYTES / 12.5e9
    at = np.array([1.0, 2.0])
    phases = {phase: Curve(at, at * second * share) for phase, share in (("gate", 0.3), ("expert", 1.0), ("aggregate", 0.1))}
    return Profile(name, "", tokens_LSE[None], 1, TOKEN_BYTES, TOKEN_BYTES, 1, 1, {"reference": phases})


def planned(cluster: Cluster, profiles: list[Profile], options: PlanOptions) -> tuple[float, float]:
    """(seconds by the objective, seconds in the simulator)."""
    plan = with_time_slice(make_plan(cluster, profiles, options), profiles)
    return plan.objective_s, simulate_plan(plan, profiles).seconds


def row(table: Table, cluster: Cluster, kind: str, models: int, traffic: str) -> None:
    """Adds the row of some cases."""
    over: dict[str, list[float]] = {name: [] for name in ("one after the other", *OTHERS, "random")}
    off, ranks, gaps, took = [], [], [], []
    for seed in range(CASES):
        profiles = [drawn(traffic, GPUS, seed, model, LAYERS) for model in range(models)]
        began = time.perf_counter()
        plan = make_plan(cluster, profiles, PlanOptions(order=ORDER))
        took.append(time.perf_counter() - began)
        plan = with_time_slice(plan, profiles)
        simulated_s = simulate_plan(plan, profiles).seconds
        found = {name: planned(cluster, profiles, options) for name, options in OTHERS.items()}
        random = [
            planned(cluster, profiles, replace(CONTIGUOUS, assign="random", colocate="random", seed=draw))
            for draw in range(DRAWS)
        ]
        for name, (_, seconds) in found.items():
            over[name].append(seconds / simulated_s)
        over["random"] += [seconds / simulated_s for _, seconds in random]
        over["one after the other"].append(simulate_plan(plan, profiles, interleave="off").seconds / simulated_s)
        objective_s, by_simulator_s = zip((plan.objective_s, simulated_s), *found.values(), *random, strict=True)
        ranks.append(float(spearmanr(objective_s, by_simulator_s).statistic))
        off.append(simulated_s / plan.objective_s)
        gaps.append(plan.gap)
    cells = " | ".join(ratios(values) for values in over.values())
    spread = f"{statistics.mean(off):.3f} ({min(off):.3f} to {max(off):.3f})"
    shown = f"{statistics.mean(ranks):.2f}", f"{statistics.mean(gaps):.1%}", f"{statistics.median(took):.2f}"
    table.add(kind, models, traffic, cells, spread, *shown)


def main() -> None:
    heading = [
        f"# Three and more models on {GPUS} GPUs, {today()}",
        "",
        f"`python bench/colocate.py` on {machine()}. {CASES} cases a row, {LAYERS} layers, {DRAWS} random placements a case.",
        "The first five columns are times in the simulator over that of the default plan (`local-search`); above 1 is slower.",
        "Simulated over objective: how much longer the simulator takes than `busiest-resource` says. Rank correlation:",
        "Spearman's, of both times over all placements of a case. Gap: the objective over the bound, minus one.",
    ]
    table = Table(
        "Plans of several models",
        "GPUs | models | traffic | one after the other | matching | contiguous | random "
        "| simulated over objective | rank correlation | gap | seconds to plan",
    )
    rates = mixed(GPUS)
    fastest = tuple(replace(gpu, name=f"g{rank}") for rank, gpu in enumerate([rates.gpus[0]] * GPUS))
    for kind, cluster in (("equal", Cluster("equal", fastest)), ("mixed", rates)):
        for models in (3, 5):
            for traffic in TRAFFIC:
                row(table, cluster, kind, models, traffic)
    write("colocate", heading, table.lines)


if __name__ == "__main__":
    main()
