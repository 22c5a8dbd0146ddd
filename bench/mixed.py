"""One model on mixed GPUs, beside a solver: `python bench/mixed.py` writes bench/results/mixed-DATE.md.

64 experts on the shipped cluster paper-mixed-8, each on one GPU; a GPU holds as many as its memory does, or 8. HiGHS solves
Aurora's Eq. 1 as a mixed-integer program for up to 60 s on one core; `plan` uses its local search on the same counts (aim own).
Slow compute makes experts a tenth as fast, so that they and not the ports decide.
"""

import time
from dataclasses import replace
from itertools import product

import numpy as np
from machine import machine
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, kron
from tables import Table, today, write

from aurora import SyntheticOptions, synthetic_profile
from aurora.algorithms.placement.cost_model import LayerCosts, layer_costs
from aurora.io import load_cluster, shipped
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions

SHAPE = {"num_experts": 64, "num_hidden_layers": 1, "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 1024}
SKEWS = ("uniform", "zipf:0.6", "zipf:1.2")
SEEDS = range(2)
LIMIT_S = 60.0


def solved(costs: LayerCosts, slots: int) -> tuple[float, float]:
    """(Seconds of HiGHS' best placement, its bound) for Eq. 1: the largest first phase, the largest second, the aggregation."""
    (own_GE,), (expert_s_GE,) = costs.own_WGE, costs.expert_s_WGE
    gpus, experts = own_GE.shape
    out_there, in_there, out_back, in_back = costs.port_s_XG[:, :, None]
    arriving_GE, sent_G1 = own_GE.sum(axis=0) - own_GE, own_GE.sum(axis=1, keepdims=True)
    gate_G1 = costs.gate_s_WG[0][:, None]
    rows = [  # of each GPU: which phase, what an expert adds, what there is without experts
        (0, -own_GE * out_there, gate_G1 + sent_G1 * out_there),
        (0, arriving_GE * in_there, gate_G1),
        (1, expert_s_GE + arriving_GE * out_back, np.zeros((gpus, 1))),
        (1, expert_s_GE - own_GE * in_back, sent_G1 * in_back),
    ]
    unit_s = max(float(fixed_G1.max()) for _, _, fixed_G1 in rows)
    limits = []
    for phase, part_GE, fixed_G1 in rows:
        own = csr_array((part_GE.ravel() / unit_s, (np.repeat(np.arange(gpus), experts), np.arange(gpus * experts))))
        longest = csr_array(np.tile(-np.eye(2)[phase], (gpus, 1)))
        limits.append(LinearConstraint(hstack([own, longest]), -np.inf, -fixed_G1.ravel() / unit_s))
    once = hstack([kron(np.ones((1, gpus)), eye_array(experts)), csr_array((experts, 2))])
    held = hstack([kron(eye_array(gpus), np.ones((1, experts))), csr_array((gpus, 2))])
    cost = np.concatenate([np.zeros(gpus * experts), np.ones(2)])
    found = milp(
        cost,
        integrality=1 - cost,
        bounds=Bounds(0, np.where(cost, np.inf, 1)),
        constraints=[*limits, LinearConstraint(once, 1, 1), LinearConstraint(held, 0, slots)],
        options={"time_limit": LIMIT_S, "mip_rel_gap": 0},
    )
    aggregate_s = float(costs.aggregate_s_WG.max())
    return found.fun * unit_s + aggregate_s, found.mip_dual_bound * unit_s + aggregate_s


def main() -> None:
    table = Table(
        "Eq. 1 of a layer",
        "compute | slots | traffic | seed | HiGHS, ms | proved by HiGHS | HiGHS, s | plan / HiGHS | plan's gap | plan, s",
        "Proved: how far HiGHS' placement may be above HiGHS' own bound. Gap: the plan's, to its bound over all placements.",
    )
    over = []
    for compute, factor in (("fast", 1.0), ("slow", 0.1)):
        shipped_cluster = load_cluster(shipped("clusters/paper-mixed-8.toml"))
        cluster = replace(shipped_cluster, gpus=tuple(replace(gpu, speed=gpu.speed * factor) for gpu in shipped_cluster.gpus))
        for slots, skew, seed in product((None, 8), SKEWS, SEEDS):
            profile = synthetic_profile(skew, SHAPE, SyntheticOptions(sources=8, seed=seed))
            options = PlanOptions("swap-search", slots_per_gpu=slots, aim="own")
            make_plan(cluster, [profile], options)  # compiles
            began = time.perf_counter()
            plan = make_plan(cluster, [profile], options)
            planned = time.perf_counter()
            best_s, bound_s = solved(layer_costs(cluster, profile, 0), slots or profile.experts)
            took = time.perf_counter() - planned
            over.append(plan.objective_s / best_s - 1)
            cells = f"{best_s * 1e3:.3f}", f"{best_s / bound_s - 1:.2%}", f"{took:.1f}"
            table.add(
                compute, slots or "memory", skew, seed, *cells, f"{over[-1]:+.2%}", f"{plan.gap:.2%}", f"{planned - began:.2f}"
            )
    title = f"# One model on mixed GPUs beside HiGHS, {today()}"
    ends = f"Plan over HiGHS, {len(over)} cases: mean {np.mean(over):+.2%}, at most {max(over):+.2%}."
    write("mixed", [title, "", f"`python bench/mixed.py` on {machine()}."], table.lines, [ends])


if __name__ == "__main__":
    main()
