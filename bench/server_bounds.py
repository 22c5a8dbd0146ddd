"""Bounds over servers beside exact optima of small cases: `python bench/server_bounds.py` writes server-bounds-DATE.md.

Recorded tokens are read from AURORA_DATA (default ../shared/data) and left out without it.
"""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from machine import machine
from routed_tasks import deepseek
from server_program import exact_hierarchical_s
from tables import Table, today, write

from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.placement_bounds import hierarchical_bound_s
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Gpu, PlanOptions, Profile, Servers, SyntheticOptions, TokenRouting

CASES = ((2, 2, 6, 2, 2), (2, 2, 8, 2, 2), (2, 2, 8, 2, 3), (2, 2, 8, 3, 3), (3, 1, 6, 2, 3), (3, 1, 8, 2, 3))
RECORDED_LAYERS, SEEDS, TOKENS = [1, 12, 25], 3, 256
PORT_BPS, NIC_BPS = 450e9, 50e9
ABOUT = (
    "Servers of GPUs with ports of 450 and NICs of 50 GB/s, one layer (hidden size 2048, experts of 1024), 256 tokens on every "
    "rank. Exact: the optimum of experts and servers' NICs over all placements with replicas within the slots. Relaxed: the "
    "bound of larger layers. The plan's time also counts ports inside servers, chunks, and NICs of a server that carry "
    "unequally much, so that no plan may reach the optimum. Medians / worst of three seeds, or of three layers. Drawn: "
    "`zipf:0.8`, each expert independently. Recorded: of DeepSeek-V2-Lite's tokens that chose several of a layer's busiest "
    "experts, the first of these choices."
)


def config(experts: int, top_k: int) -> dict[str, object]:
    return {
        "model_type": "small", "num_hidden_layers": 1, "num_local_experts": experts, "num_experts_per_tok": top_k,
        "hidden_size": 2048, "intermediate_size": 1024,
    }  # fmt: skip


def cluster(many: int, members: int) -> Cluster:
    node_G = np.repeat(np.arange(many), members).tolist()
    gpus = tuple(Gpu(f"g{rank}", "NVIDIA H200", node, PORT_BPS, PORT_BPS, 10**12) for rank, node in enumerate(node_G))
    return Cluster("small", gpus, Servers.of(node_G, NIC_BPS))


def drawn(ranks: int, experts: int, top_k: int) -> Iterator[Profile]:
    for seed in range(SEEDS):
        yield draw_profile("zipf:0.8", config(experts, top_k), SyntheticOptions(ranks, TOKENS, seed=seed, token_level=True))


def recorded(ranks: int, experts: int, top_k: int) -> Iterator[Profile]:
    if (source := deepseek(RECORDED_LAYERS)) is None:
        return
    traffic = next(iter(source.tasks.values()))
    for layer in range(len(RECORDED_LAYERS)):
        experts_UK = traffic.experts_ULK[:, layer].astype(np.int64)
        number_E = np.full(source.experts, -1)
        number_E[np.argsort(-np.bincount(experts_UK.ravel(), minlength=source.experts))[:experts]] = np.arange(experts)
        kept_UK = number_E[experts_UK]
        tokens = np.flatnonzero((kept_UK >= 0).sum(axis=1) >= top_k)[: TOKENS * ranks]
        first_UK = np.argsort(kept_UK[tokens] < 0, axis=1, kind="stable")[:, :top_k]
        chosen_UK = np.take_along_axis(kept_UK[tokens], first_UK, axis=1)
        routing = TokenRouting(chosen_UK[:, None], traffic.sequence_U[tokens] % ranks, np.zeros(len(tokens), dtype=np.int64))
        curves = draw_profile("uniform", config(experts, top_k), SyntheticOptions(ranks, TOKENS)).curves
        made = Shape.of(config(experts, top_k)).profile(routing.tokens_TLSE(1, ranks, experts), {}, routing)
        yield replace(made, curves=curves)


def measured(case: tuple[int, int, int, int, int], profile: Profile) -> tuple[float, float, float, float] | None:
    """How far the relaxed bound is below the optimum, the plan above it and above that bound, and the solver's seconds.

    None if the solver gives up.
    """
    many, members, _, top_k, slots = case
    machines, slots_G = cluster(many, members), np.full(many * members, slots)
    costs = layer_costs(machines, profile, 0, True)
    known = costs, top_k, slots_G
    began = time.process_time()
    exact_s = exact_hierarchical_s(*known, True)
    took_s = time.process_time() - began
    if exact_s is None:
        return None
    relaxed_s = hierarchical_bound_s(*([each] for each in known), True)
    made = make_plan(machines, [profile], PlanOptions(all_to_all="hierarchical", slots_per_gpu=slots, aim="own"))
    return 1 - relaxed_s / exact_s, made.objective_s / exact_s - 1, made.objective_s / relaxed_s - 1, took_s


def main() -> None:
    gaps = "relaxed below exact | plan above exact | plan above relaxed"
    table = Table(
        "Small cases", f"traffic | servers x GPUs | experts, top k | slots a GPU | {gaps} | solver, s | solved", ABOUT
    )
    for name, profiles in (("drawn", drawn), ("recorded", recorded)):
        for case in CASES:
            many, members, experts, top_k, slots = case
            tried = [measured(case, each) for each in profiles(many * members, experts, top_k)]
            if found := [each for each in tried if each is not None]:
                *gaps_X, took_S = zip(*found, strict=True)
                cells = (f"{statistics.median(gap_S):.1%} / {max(gap_S):.1%}" for gap_S in gaps_X)
                took = f"{statistics.median(took_S):.1f}"
                table.add(
                    name, f"{many} x {members}", f"{experts}, {top_k}", slots, *cells, took, f"{len(found)} of {len(tried)}"
                )
    load = f"Load average of the machine at the end: {os.getloadavg()[0]:.1f}."
    command = f"`python bench/server_bounds.py` on {machine()}."
    write("server-bounds", [f"# Bounds over servers, {today()}", "", command, load], table.lines)


if __name__ == "__main__":
    main()
