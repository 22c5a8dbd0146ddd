"""How good placements of one group of experts a GPU are: `python bench/assign.py` writes bench/results/assign-DATE.md.

Mixed GPUs of 100, 80, 50 and 40 Gbps in equal parts, compute speeds in that ratio. Ratios are mean / worst over the cases of a
row; seconds are medians a layer, on one core. Recorded traffic is read as in bench/order.py.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations

import numpy as np
from machine import machine
from order import kinds, ratios
from tables import Table, today, write

from aurora.algorithms.placement import objective
from aurora.algorithms.placement.assignment import ASSIGN, bottleneck_sum_matching
from aurora.algorithms.placement.branch_and_bound import prove_bound
from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.colocation_problem import ColocationProblem
from aurora.algorithms.placement.cost_model import GroupCosts, layer_costs
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Curve, Gpu, PlanOptions, Profile
from tests.algorithms.placement.coupled_requests import coupled_s

GBPS = (100, 80, 50, 40)
TOKEN_BYTES = 4096
RATIOS = (0.25, 1.0, 4.0)  # an expert's seconds a token on the fastest GPU, over the token's seconds on its port
LIMIT_S = 10.0


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


def sum_of_maxima(parts_XGJ: np.ndarray, group_G: np.ndarray) -> float:
    return float(parts_XGJ[:, np.arange(len(group_G)), group_G].max(axis=1).sum())


def coupled_optimum(parts_XGJ: np.ndarray) -> float:
    """The least sum of three bottlenecks: the best matching of the first two under each limit on the third."""
    first, second, third = parts_XGJ
    under = (bottleneck_sum_matching(np.where(third <= limit, first, np.inf), second) for limit in np.unique(third))
    return min(sum_of_maxima(parts_XGJ, group_G) for group_G in under if (group_G >= 0).all())


def drawn_costs(name: str, n: int, seed: int, model: int = 0) -> GroupCosts:
    return layer_costs(mixed(n), drawn(name, n, seed, model), 0).grouped(np.arange(n))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def exclusive() -> list[str]:
    methods = ("by-load", "matching", "contiguous", "random")
    table = Table(
        "One model, mixed GPUs: Eq. 1 over the optimum (`exact`; 40 cases a row at n = 8, 10 at 64, 3 at 256)",
        f"n | traffic | {' | '.join(methods)} | brute force agrees | by-load, coupled | seconds, exact",
    )
    every = np.array(list(permutations(range(8))))
    for n in (8, 64, 256):
        for name in kinds():
            if name.startswith("recorded") and n != 8:
                continue
            found: dict[str, list[float]] = {method: [] for method in methods}
            coupled, took, agree = [], [], 0
            cases = 40 if n == 8 else 10 if n == 64 else 3
            for seed in range(cases):
                costs = drawn_costs(name, n, seed)
                took.append(timed(partial(ASSIGN["exact"], costs, np.random.default_rng(0))))
                best = objective.exclusive_s(costs.phase_times(ASSIGN["exact"](costs, np.random.default_rng(0))))
                for method, values in found.items():
                    values.append(
                        objective.exclusive_s(costs.phase_times(ASSIGN[method](costs, np.random.default_rng(seed)))) / best
                    )
                if n == 8:
                    first, second = costs.gate_s_G[:, None] + costs.dispatch_s_GJ, costs.expert_s_GJ + costs.combine_s_GJ
                    parts = [part[np.arange(8), every].max(axis=1) for part in (first, second)]
                    agree += bool(abs((parts[0] + parts[1]).min() + costs.aggregate_s_G.max() - best) <= 1e-12 * best)
                    moved = coupled_s(mixed(n), drawn(name, n, seed), 0, np.arange(n))
                    by_load = ASSIGN["by-load"](costs, np.random.default_rng(0))
                    coupled.append(sum_of_maxima(moved, by_load) / coupled_optimum(moved))
            brute = f"{agree} of {cases}" if n == 8 else "-"
            cells = " | ".join(ratios(found[method]) for method in methods)
            sorted_ = ratios(coupled) if coupled else "-"
            table.add(n, name, cells, brute, sorted_, f"{statistics.median(took):.5f}")
    return [
        *table.lines,
        "",
        "Coupled: the paper's model, in which a rank's requests move with its experts; over that model's own optimum.",
    ]


def shared(name: str, n: int, seed: int, priced_by: str) -> ColocationProblem:
    end_s = time.monotonic() + LIMIT_S
    costs = tuple(drawn_costs(name, n, seed, model) for model in (0, 1))
    return ColocationProblem(costs, {0: np.arange(n)}, objective=priced_by, until_s=end_s)


def colocated() -> list[str]:
    methods = ("local-search", "decoupled", "random")
    table = Table(
        f"Two models, mixed GPUs: over the best bound that `exact` proved within {LIMIT_S:g} s",
        f"n | objective | traffic | cases | exact | {' | '.join(methods)} | local-search optimal | beats or equals decoupled "
        "| local-search's own bound: gap | seconds: local-search | its bound | exact, median | exact, worst",
    )
    for n, cases in ((8, 40), (16, 20), (32, 10), (64, 5)):
        for priced_by in ("causal", "paper"):
            for name in kinds():
                found: dict[str, list[float]] = {method: [] for method in ("exact", *methods)}
                own, took = [], {"search": [], "bound": [], "exact": []}
                for seed in range(cases):
                    problem = shared(name, n, seed, priced_by)
                    began = time.perf_counter()
                    best = COLOCATE["exact"](problem, np.random.default_rng(0))
                    took["exact"].append(time.perf_counter() - began)
                    for method, values in found.items():
                        began = time.perf_counter()
                        made = best if method == "exact" else COLOCATE[method](problem, np.random.default_rng(0))
                        if method == "local-search":
                            took["search"].append(time.perf_counter() - began)
                        value = problem.value_s(made.group_MG)
                        values.append(value / best.bound_s)
                        if method == "local-search":
                            began = time.perf_counter()
                            own.append(value / prove_bound(problem, value).bound_s)
                            took["bound"].append(time.perf_counter() - began)
                cells = " | ".join(ratios(values) for values in found.values())
                optimal = sum(value < 1 + 1e-6 for value in found["local-search"])
                beats = sum(a <= b for a, b in zip(found["local-search"], found["decoupled"], strict=True))
                spent = " | ".join(f"{statistics.median(values):.3f}" for values in took.values())
                table.add(n, priced_by, name, cases, cells, optimal, beats, ratios(own), spent, f"{max(took['exact']):.2f}")
    return table.lines


def plans() -> list[str]:
    table = Table(
        "Whole plans of two models with 4 layers, uniform traffic: seconds, orders included",
        "n | local-search | exact | decoupled",
    )
    for n in (4, 8, 16, 32):
        pair = [drawn("uniform", n, 0, model, layers=4) for model in (0, 1)]
        cells = []
        for method in ("local-search", "exact", "decoupled"):
            options = PlanOptions(colocate=method, order="openshop")
            took = [timed(partial(make_plan, mixed(n), pair, options)) for _ in range(6)]
            cells.append(f"{statistics.median(took[1:]):.3f}")
        table.add(n, *cells)
    return table.lines


def main() -> None:
    heading = [
        f"# Placement of one group a GPU, {today()}",
        "",
        f"`python bench/assign.py` on {machine()}. 100, 80, 50 and 40 Gbps in equal parts, compute speeds in that ratio;",
        f"compute a token over traffic a token: one of {RATIOS}.",
    ]
    COLOCATE["exact"](shared("uniform", 4, 0, "causal"), np.random.default_rng(0))  # compiles
    write("assign", heading, *(part() for part in (exclusive, plans, colocated)))


if __name__ == "__main__":
    main()
