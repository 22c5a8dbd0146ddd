"""What placing experts that tokens choose together saves: `python bench/affinity.py` writes bench/results/affinity-DATE.md."""

import datetime
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine

from aurora.algorithms.placement.cost_model import exclusive_s, layer_costs
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.io import load_cluster, shipped
from aurora.planner.scenarios.exclusive import Exclusive
from aurora.profiler.profile_model import profile_model
from aurora.types import Cluster, Placement, PlanOptions, Profile, ProfileOptions, SyntheticOptions, TokenRouting


def affinity_rows(name: str, cluster: Cluster, profile: Profile, later: Profile, room: int | None) -> list[str]:
    """Swap search with a row for every choice, the same deduplicated, and co-activation; `later` is other traffic."""
    began_s = time.perf_counter()
    rng = np.random.default_rng(0)
    scenario = Exclusive(cluster, [profile], PlanOptions("swap-search", "exact", slots_per_gpu=room, aim="own"))
    start = scenario.place(rng)
    near = scenario.place_deduplicated(start.placements_M[0], rng)
    took_s = time.perf_counter() - began_s

    def moved(placement: Placement, deduplicated: bool) -> int:
        rows = sum(layer_traffic(profile, l, placement.split_EG(l), deduplicated).sum() for l in range(profile.layers))
        return int(rows * (profile.row_bytes(deduplicated) + profile.combine_bytes))

    def seconds(source: Profile, placement: Placement) -> float:
        costs = (
            layer_costs(cluster, source, layer, deduplicated=True).grouped(placement.gpu_E(layer))
            for layer in range(source.layers)
        )
        return sum(exclusive_s(each.phase_times()) for each in costs)

    before, after = start.placements_M[0], near.placements_M[0]
    every, dedup, together = moved(before, False), moved(before, True), moved(after, True)
    dedup_s, later_s, later_near_s = seconds(profile, before), seconds(later, before), seconds(later, after)
    print(name, flush=True)
    return [
        f"| {name} | {dedup / every:.3f} | {together / every:.3f} | {start.objective_s * 1e3:.3f} | {dedup_s * 1e3:.3f} | "
        f"{near.objective_s * 1e3:.3f} | {1 - near.objective_s / dedup_s:.1%} | {1 - later_near_s / later_s:.1%} | "
        f"{near.objective_s / near.bound_s - 1:.0%} | {took_s:.2f} |"
    ]


def one_window(profile: Profile, window: int) -> Profile:
    experts_ULK, keep_U = profile.required_routing.experts_ULK, profile.required_routing.window_U == window
    routing = TokenRouting(
        experts_ULK[keep_U], profile.required_routing.source_U[keep_U], np.zeros(keep_U.sum(), dtype=np.int64)
    )
    return replace(profile, tokens_TLSE=profile.tokens_TLSE[window : window + 1], routing=routing)


def section() -> list[str]:
    root = Path(__file__).parents[1]
    lines = [
        "| model, cluster | bytes of swap search | of co-activation | swap search, all rows, ms | deduplicated, ms "
        "| co-activation, ms | co-activation saves | on other traffic | above the free bound | planned in, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, texts, other in (
        ("mixtral-topics", ["LICENSE", "README.md"], "CHANGELOG.md"),
        (
            "qwen3moe-stdlib",
            ["aurora/planner/plan.py", "aurora/algorithms/network/switch.py"],
            "aurora/algorithms/alltoall/registry.py",
        ),
    ):
        options = ProfileOptions(sources=4, limit=32, token_level=True)
        made, later = (
            profile_model(shipped(f"models/{model}"), [root / text for text in read], options) for read in (texts, [other])
        )
        for slots in (2, 8):
            lines += affinity_rows(
                f"{model}, demo-4, {slots} experts a GPU at most",
                load_cluster(shipped("clusters/demo-4.toml")),
                made,
                later,
                slots,
            )
    shape = {"num_experts": 64, "num_hidden_layers": 4, "num_experts_per_tok": 8, "hidden_size": 2048}
    for name in ("paper-equal-8", "h100-nvlink-8"):
        for skew in ("uniform", "zipf:0.8"):
            for correlation in (0.0, 0.5, 0.9):
                drawn = draw_profile(
                    skew, shape | {"moe_intermediate_size": 1024}, SyntheticOptions(8, 1024, 2, 0, True, correlation)
                )
                lines += affinity_rows(
                    f"top-8 of 64, {skew}, correlation {correlation:g}, {name}",
                    load_cluster(shipped(f"clusters/{name}.toml")),
                    *(one_window(drawn, window) for window in (0, 1)),
                    16,
                )
    return [
        f"# Experts that tokens choose together, {datetime.datetime.now(datetime.UTC).date().isoformat()}",
        "",
        f"`python bench/affinity.py` on {machine()}. Bytes there and back, beside a row for every choice of swap search's",
        "placement; milliseconds of Eq. 1, all layers. The shipped models are profiled as in the README, their compute times",
        "on this machine, their other traffic another text; synthetic ones have two windows, one to plan and one to judge,",
        "at most 16 experts a GPU. What co-activation saves is against swap search, deduplicated. `aurora plan",
        "--co-activation` keeps a row for every choice where that is shorter.",
        "",
        *lines,
    ]


def main() -> None:
    lines = section()
    out = Path(__file__).parent / "results" / f"affinity-{datetime.datetime.now(datetime.UTC).date().isoformat()}.md"
    out.write_text("\n".join(lines) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
