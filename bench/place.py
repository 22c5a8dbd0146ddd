"""How well experts are placed, and how fast: `python bench/place.py` writes bench/results/place-DATE.md.

With replicas: loads are Zipf, each layer's times a lognormal of 0.2 (seed 0); times are the processor's, medians of five,
without bounds. Without: plans for some domains, serving another. `python bench/place.py domains` writes these rows alone anew,
and keeps the rest of the day's file. Recorded counts are read as bench/order.py reads them; without them the rows are left
out.
"""

import datetime
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine
from order import recorded_counts

from aurora.algorithms.check.plans import check_layout
from aurora.algorithms.replicas import load_bounds
from aurora.algorithms.replicas.registry import REPLICAS, place, place_unbounded
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_cluster, shipped
from aurora.planner.plan import layer_seconds, make_plan
from aurora.types import GpuSlots, Plan, PlanOptions, Profile, SyntheticOptions

SKEWED = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
REPEATS = 5


def zipf(experts: int, exponent: float) -> np.ndarray:
    return (1.0 + np.arange(experts)) ** -exponent * 1e4


def slots_needed(load_E: np.ndarray, slots: GpuSlots, utilisation: float) -> tuple[int, int]:
    """Returns how many slots on equal GPUs bring a layer to a target mean load / largest load.

    Returns:
        (a lower bound by counting slots; the smallest number at which equal split reaches it, with slots added evenly to all
        GPUs).
    """
    most, wider = load_bounds.mean_load(load_E, slots) / utilisation, slots
    while wider.slots_G.min() < len(load_E) and place(load_E, wider).max_load_L[0] > most:
        wider = GpuSlots(wider.slots_G + 1, slots.cost_G)
    counted_E = np.minimum(np.ceil(load_E / most * (1 - load_bounds.SLACK)), slots.gpus)
    return int(counted_E.sum()), int(wider.slots_G.sum())


def rows(name: str, load_LE: np.ndarray, slots: GpuSlots) -> list[str]:
    lines = []
    eplb = place(load_LE, slots, "eplb")
    for method in REPLICAS:
        made, took_s = place(load_LE, slots, method), []
        check_layout(made, load_LE, slots)
        for _ in range(REPEATS):
            began_s = time.process_time()
            place_unbounded(load_LE, slots, method)
            took_s.append(time.process_time() - began_s)
        ratio_L = made.max_load_L / made.mean_load_L
        no_worse = int((made.max_load_L <= eplb.max_load_L * (1 + 1e-12)).sum())
        took_ms = statistics.median(took_s) * 1e3
        lines.append(
            f"| {name} | {method} | {made.max_load_L.max():.2f} | {ratio_L.mean():.5f} / {ratio_L.max():.5f} | "
            f"{(1 / ratio_L).mean():.4f} | {(made.mean_load_L / made.bound_L).mean():.4f} | {made.gap_L.max():.2%} | "
            f"{no_worse} of {len(load_LE)} | {took_ms:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


OLMOE = {"num_experts": 64, "num_hidden_layers": 1, "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 1024}
TOKENS = 1024  # that each of 8 ranks holds
PLANS = {  # made for four domains, or one of them
    "cvar": PlanOptions("swap-search", aim="cvar"),
    "worst": PlanOptions("swap-search", aim="worst"),
    "mean": PlanOptions("swap-search", aim="mean"),
    "sum": PlanOptions("swap-search"),
    "contiguous": PlanOptions("contiguous", "contiguous"),
}


def recorded_profiles(domains: list[str], layers: list[str], counts: dict) -> dict[tuple[str, str], Profile]:
    """OLMoE's shape and curves; every rank's tokens choose experts as the recorded ones of that domain and layer did."""
    shape = draw_profile("uniform", OLMOE, SyntheticOptions(sources=8, window_tokens=TOKENS))
    made = {}
    for row, domain in enumerate(domains):
        for column, layer in enumerate(layers):
            share_E = counts[domain, layer] / counts[domain, layer].sum()
            tokens_SE = np.random.default_rng([row, column]).multinomial(TOKENS * 8, share_E, 8)
            made[domain, layer] = replace(shape, tokens_TLSE=tokens_SE[None, None])
    return made


def domain_rows() -> list[str]:
    """Every domain in turn is left out of the plan and served by it; loss against the plan made for it alone."""
    counts = recorded_counts()
    domains, layers = (sorted({key[i] for key in counts}) for i in (0, 1))
    profiles = recorded_profiles(domains, layers, counts)
    lines = [
        "| cluster | served | " + " | ".join(PLANS) + " |",
        "|---|---|" + "---|" * len(PLANS),
    ]
    for name in ("paper-equal-8", "paper-mixed-8"):
        cluster = load_cluster(shipped(f"clusters/{name}.toml"))
        own_s = {key: make_plan(cluster, [profile], PLANS["sum"]).objective_s for key, profile in profiles.items()}
        left_out: list[list[float]] = []
        planned_for: list[list[float]] = []
        for domain in domains:
            others = [each for each in domains if each != domain]
            for layer in layers:
                first, *rest = (profiles[each, layer] for each in others)
                plans = [make_plan(cluster, [first], options, domains=rest) for options in PLANS.values()]
                for served in domains:
                    losses = [loss(plan, profiles[served, layer], own_s[served, layer]) for plan in plans]
                    (left_out if served == domain else planned_for).append(losses)
            lines.append(loss_row(name, domain, left_out[-len(layers) :]))
        lines.append(loss_row(name, f"each left out, {len(left_out)} plans", left_out))
        lines.append(loss_row(name, "the four planned for", planned_for))
    return lines


def loss(plan: Plan, served: Profile, own_s: float) -> float:
    return float(layer_seconds(plan, [plan.models[0].placement], [served]).sum()) / own_s - 1


def loss_row(cluster: str, served: str, losses: list[list[float]]) -> str:
    cells = " | ".join(f"{np.mean(column):.1%} / {max(column):.1%}" for column in zip(*losses, strict=True))
    line = f"| {cluster} | {served} | {cells} |"
    print(line, flush=True)
    return line


def domains_section() -> list[str]:
    if not recorded_counts():
        return []
    return [
        DOMAINS,
        "",
        f"Plans for four domains serve the fifth, in OLMoE layers 0, 7 and 15: 64 experts, top 8, {TOKENS} tokens on each of 8 "
        "ranks, drawn from the recorded counts. Loss: time of the layer (Eq. 1) over that of a plan made for what is served "
        "alone, less one; mean / worst. Columns: how the four domains count, `cvar` the worse two; and contiguous experts.",
        "",
        *domain_rows(),
    ]


DOMAINS = "## Domains that the plan was not made for"


def main() -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = Path(__file__).parent / "results" / f"place-{today}.md"
    if sys.argv[1:] == ["domains"]:
        before = (
            out.read_text().split(DOMAINS)[0].rstrip()
            if out.exists()
            else f"# Experts placed, {today}\n\n`python bench/place.py domains` on {machine()}."
        )
        text = [before, "", *domains_section()]
    else:
        text = [*replica_section(today), "", *domains_section()]
    out.write_text("\n".join(text).rstrip() + "\n")
    print(f"wrote {out}")


def replica_section(today: str) -> list[str]:
    rng = np.random.default_rng(0)
    lines = [
        "| loads | method | largest load | max/mean, mean / worst layer | mean/max | mean/bound | worst gap | "
        "no worse than EPLB | ms of processor, all layers |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows("8 skewed, 8 GPUs x 2", SKEWED, GpuSlots.equal(8, 2)),
    ]
    for exponent in (0.8, 1.2):
        load_LE = zipf(256, exponent) * rng.lognormal(0.0, 0.2, (58, 256))
        lines += rows(f"58 x 256 Zipf {exponent}, 64 GPUs x 5", load_LE, GpuSlots.equal(64, 5))
    load_E, slots = zipf(256, 0.8), GpuSlots.equal(144, 2)
    lines += rows("256 Zipf 0.8, 144 GPUs x 2", load_E[None], slots)
    counted = load_bounds.mean_load(load_E, slots) / load_bounds.by_counting(load_E, slots)
    fewest, enough = slots_needed(load_E, slots, 0.95)
    return [
        f"# Experts with replicas, {today}",
        "",
        f"`python bench/place.py` on {machine()}. `eplb` is our own writing of EPLB's published greedy, in Python.",
        "",
        *lines,
        "",
        f"144 GPUs x 2: counting slots alone bounds mean/max by {counted:.4f}; none reaches that, as the bound above proves.",
        f"A mean/max of 0.95 takes at least {fewest} slots; equal split reaches it with {enough}.",
    ]


if __name__ == "__main__":
    main()
