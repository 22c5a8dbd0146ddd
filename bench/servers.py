"""Rows that cross between servers: `python bench/servers.py [--quick]` writes bench/results/servers-DATE.md.

Placements are made from one half of a recorded task's sequences, and their rows are counted on the other half.
"""

import argparse
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from machine import machine
from routed_tasks import ROOT, Source, Traffic, deepseek
from tables import Table, write

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows
from aurora.algorithms.network.routes import route
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import place
from aurora.algorithms.workload.serving_gpus import serving_gpus
from aurora.algorithms.workload.traffic import exchange_bytes, exchange_rows, expected_tokens
from aurora.planner.scenarios.exclusive import Exclusive
from aurora.planner.scenarios.servers import OverServers
from aurora.types import Cluster, Gpu, GpuSlots, Hierarchy, Placement, PlanOptions, Profile, Servers

SERVERS = 4
GPUS = (1, 2, 4, 8)  # of a server
INSIDE_Bps, NIC_Bps = 400e9, 50e9
TARGET, SERVER_LOAD, GPU_LOAD = 0.72, 1.05, 1.02
METHODS = ("contiguous", "EPLB", "flat plan", "over servers")
SPARE_SLOTS = 1.25
OURS, OWN_ROWS = METHODS[-1], "on its own half"
Figures = dict[tuple[str, str], list[float]]  # by method and figure, one for each layer


def halves(task: Traffic) -> list[Traffic]:
    """The first and the last half of a task's sequences."""
    middle = (int(task.sequence_U[-1]) + 1) // 2
    return [task.at(task.sequence_U < middle), task.at(task.sequence_U >= middle)]


def cluster_of(gpus: int) -> Cluster:
    """Servers of equal GPUs, each with a NIC of its own."""
    node_G = np.repeat(np.arange(SERVERS), gpus).tolist()
    made = tuple(Gpu(f"gpu{g}", "x", node, INSIDE_Bps, INSIDE_Bps, 10**12) for g, node in enumerate(node_G))
    return Cluster("servers", made, Servers.of(node_G, NIC_Bps))


def placements(source: Source, profile: Profile, load_LE: np.ndarray, cluster: Cluster) -> dict[str, list[np.ndarray]]:
    """(E,) the GPU of each expert in each layer, by method."""
    ranks, slots = len(cluster), source.experts // len(cluster)
    options = PlanOptions("swap-search", "exact", aim="own", slots_per_gpu=slots)
    start = Exclusive(replace(cluster, servers=None), [profile], options).place(np.random.default_rng(0))
    assert cluster.servers is not None
    hierarchy = Hierarchy(np.array(cluster.servers.server_G))
    found = OverServers(cluster, [profile], options).improve_on_servers(start.placements_M, [hierarchy])[0]
    packed = place(load_LE, GpuSlots.equal(ranks, slots, SERVERS, source.experts), "eplb").placement
    even_J, rng = np.full(ranks, slots), np.random.default_rng(0)
    return {
        "contiguous": [PLACE["contiguous"](load_E, even_J, rng) for load_E in load_LE],
        "EPLB": [packed.holds_EG(layer).argmax(axis=1) for layer in range(len(load_LE))],
        "flat plan": [start.placements_M[0].gpu_E(layer) for layer in range(len(load_LE))],
        "over servers": [found.gpu_E(layer) for layer in range(len(load_LE))],
    }


def with_replicas(source: Source, profile: Profile, load_LE: np.ndarray, cluster: Cluster) -> dict[str, Placement]:
    """Placements by method, with SPARE_SLOTS times the slots that experts need once."""
    slots = int(np.ceil(SPARE_SLOTS * source.experts / len(cluster)))
    options = PlanOptions("equal-split", "exact", aim="own", slots_per_gpu=slots)
    start = Exclusive(replace(cluster, servers=None), [profile], options).place(np.random.default_rng(0))
    assert cluster.servers is not None
    found = OverServers(cluster, [profile], options).improve_on_servers(
        start.placements_M, [Hierarchy(np.array(cluster.servers.server_G))]
    )[0]
    packed = place(load_LE, GpuSlots.equal(len(cluster), slots, SERVERS, source.experts), "eplb").placement
    return dict(zip(METHODS[1:], (packed, start.placements_M[0], found), strict=True))


def measure(source: Source, planned: Traffic, served: Traffic, gpus: int) -> Figures:
    """The figures of one half that is planned from and one that is served, on servers of some GPUs each."""
    cluster = cluster_of(gpus)
    ranks = len(cluster)
    server_G = np.repeat(np.arange(SERVERS), gpus)
    hierarchy = Hierarchy(server_G)
    load_LE, served_LE = planned.loads_LE(source.experts), served.loads_LE(source.experts)
    profile = source.routed(planned, ranks)
    made, replicated = (make(source, profile, load_LE, cluster) for make in (placements, with_replicas))
    even_J, rng = np.full(SERVERS, source.experts // SERVERS), np.random.default_rng(0)
    figures: Figures = defaultdict(list)

    def needed(traffic: Traffic, layer: int, gpu_E: np.ndarray) -> np.ndarray:
        return hierarchical_rows(gpu_E[traffic.experts_ULK[:, layer]], traffic.sequence_U % ranks, hierarchy).sent_GN

    def crossing(traffic: Traffic, layer: int, gpu_E: np.ndarray) -> int:
        sent_GN = needed(traffic, layer, gpu_E)
        return int(sent_GN.sum() - sent_GN[np.arange(ranks), server_G].sum())

    known, routes = source.routed(served, ranks), route(cluster.network)
    counted = replace(known, routing=None)
    tokens_LSE = known.tokens_TLSE[0]

    def dispatch_s(traffic: Profile, layer: int, gpu_E: np.ndarray) -> float:
        rows_SGG = exchange_rows(traffic, layer, np.eye(ranks)[gpu_E], deduplicated=True, hierarchy=hierarchy)
        return sum(map(routes.seconds, exchange_bytes(rows_SGG, traffic, "dispatch", True)))

    for layer in served.layers:
        experts_UK = served.experts_ULK[:, layer]
        balanced_E = PLACE["balanced"](load_LE[layer], even_J, rng) * gpus
        balanced = crossing(served, layer, balanced_E)
        for method, gpu_LE in made.items():
            gpu_E = gpu_LE[layer]
            figures[method, "rows"].append(crossing(served, layer, gpu_E) / balanced)
            figures[method, OWN_ROWS].append(crossing(planned, layer, gpu_E) / crossing(planned, layer, balanced_E))
            true_GN = needed(served, layer, gpu_E)
            found_GN = expected_tokens(tokens_LSE[layer], server_G[gpu_E], SERVERS, experts_UK.shape[1])
            figures[method, "sum"].append(found_GN.sum() / true_GN.sum())
            figures[method, "error"].append(np.median(np.abs(found_GN / true_GN - 1)))
            figures[method, "dispatch"].append(dispatch_s(counted, layer, gpu_E) / dispatch_s(known, layer, gpu_E))
            every = (server_G[gpu_E[experts_UK]] != server_G[served.sequence_U % ranks][:, None]).sum()
            figures[method, "without deduplication"].append(every / balanced)
            for name, load_E in (("planned", load_LE[layer]), ("served", served_LE[layer])):
                for what, at_E, number in (("server", server_G[gpu_E], SERVERS), ("GPU", gpu_E, ranks)):
                    full = np.bincount(at_E, weights=load_E, minlength=number)
                    figures[method, f"{what} {name}"].append(full.max() / full.mean())
        for method, placement in replicated.items():
            split_EG = placement.split_EG(layer)
            flat_G = load_LE[layer] @ replicated["flat plan"].split_EG(layer)
            for name, traffic in (("planned", planned), ("served", served)):
                source_U = traffic.sequence_U % ranks
                gpu_UK = serving_gpus(traffic.experts_ULK[:, layer], source_U, split_EG, server_G)
                sent_GN = hierarchical_rows(gpu_UK, source_U, hierarchy).sent_GN
                rows = sent_GN.sum() - sent_GN[np.arange(ranks), server_G].sum()
                figures[f"{method} +", f"rows {name}"].append(rows / crossing(traffic, layer, balanced_E))
                for what, at_UK, number in (("server", server_G[gpu_UK], SERVERS), ("GPU", gpu_UK, ranks)):
                    full = np.bincount(at_UK.ravel(), minlength=number)
                    figures[f"{method} +", f"{what} {name}"].append(full.max() / full.mean())
                    if what == "GPU" and name == "planned":
                        figures[f"{method} +", "beside flat"].append(full.max() / flat_G.max())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every fifth layer")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, help="of a server")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    source = deepseek(list(range(0, 26, 5 if args.quick else 1)))
    if source is None:
        raise SystemExit("expected recorded routing under $AURORA_DATA, found none")
    began_s = time.perf_counter()
    jobs, names = [], []
    for gpus in args.gpus:
        for task, traffic in source.tasks.items():
            first, last = halves(traffic)
            for direction, pair in (("first half", (first, last)), ("last half", (last, first))):
                jobs.append((source, *pair, gpus))
                names.append((gpus, task, direction))
    with ProcessPoolExecutor(args.processes) as pool:
        results = list(zip(names, pool.map(measure, *zip(*jobs, strict=True)), strict=True))
    rows = Table("Rows that cross", " | ".join(("servers x GPUs", "task", "made from its", *METHODS, OWN_ROWS)), ROWS)
    loads = Table(
        "Load", "servers x GPUs | method | server, planned | served | GPU, planned | served | GPU beside flat plan", LOADS
    )
    counts = Table("From counts alone", COUNTS_COLUMNS, COUNTS)
    spare = Table("With spare slots", f"{SPARE_COLUMNS} | GPU beside flat plan", SPARE)
    goals = Table("Targets", "servers x GPUs | rows | server | GPU beside flat plan, worst layer | met")
    for (gpus, task, direction), found in results:
        means = [*(np.mean(found[method, "rows"]) for method in METHODS), np.mean(found[OURS, OWN_ROWS])]
        rows.add(f"{SERVERS} x {gpus}", task, direction, *(f"{mean:.3f}" for mean in means))
    for gpus in args.gpus:
        here = [found for (each, _, _), found in results if each == gpus]

        def over(method: str, what: str, here: list[Figures] = here) -> np.ndarray:
            return np.concatenate([found[method, what] for found in here])

        means = [*(over(method, "rows").mean() for method in METHODS), over(OURS, OWN_ROWS).mean()]
        rows.add(f"{SERVERS} x {gpus}", "all", "", *(f"**{mean:.3f}**" for mean in means))
        for method in METHODS:
            total, error, took = (over(method, what).mean() for what in ("sum", "error", "dispatch"))
            cells = [f"{total:.3f}", f"{error:.1%}", f"{took:.3f}"]
            counts.add(f"{SERVERS} x {gpus}", method, *cells)
            beside = over(method, "GPU planned") / over("flat plan", "GPU planned")
            cells = [over(method, f"{what} {half}").mean() for what in ("server", "GPU") for half in ("planned", "served")]
            loads.add(f"{SERVERS} x {gpus}", method, *(f"{cell:.3f}" for cell in cells), f"{beside.mean():.3f}")
        for method in METHODS[1:]:
            names = [f"{what} {half}" for what in ("rows", "server", "GPU") for half in ("planned", "served")]
            cells = [over(f"{method} +", name).mean() for name in (*names, "beside flat")]
            spare.add(f"{SERVERS} x {gpus}", method, *(f"{cell:.3f}" for cell in cells))
        ours, server = over(OURS, "rows").mean(), over(OURS, "server planned")
        beside = over(OURS, "GPU planned") / over("flat plan", "GPU planned")
        met = ours <= TARGET and server.mean() <= SERVER_LOAD and beside.max() <= GPU_LOAD
        goals.add(
            f"{SERVERS} x {gpus}",
            f"{ours:.3f} (without deduplication {over(OURS, 'without deduplication').mean():.2f})",
            f"{server.mean():.3f}, {np.mean(server <= SERVER_LOAD):.0%} of layers <= {SERVER_LOAD}",
            f"{beside.max():.3f}",
            "yes" if met else "no",
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = [
        "# Rows that cross between servers",
        "",
        f"`python bench/servers.py{' --quick' if args.quick else ''} --gpus {' '.join(map(str, args.gpus))}` at commit "
        f"{commit} on {machine()}: "
        f"{time.perf_counter() - began_s:.0f} s with {args.processes} processes.",
        "",
        ABOUT,
    ]
    write("servers-quick" if args.quick else "servers", about, goals.lines, rows.lines, loads.lines, spare.lines, counts.lines)


ABOUT = """DeepSeek-V2-Lite's recorded tokens, top-6 of 64 experts, 26 layers, on four servers of 16 experts. A plan is made
from one half of a task's sequences, and its rows are counted on the other half. Sequences go to the GPUs in turn; a token
crosses once to each server that holds experts of it, but not to its own. Targets: the mean of the rows over layers, tasks and
directions at most 0.72 of a load-balanced placement's, a server's load at most 1.05 of the mean, and the fullest GPU's load at
most 1.02 of the flat plan's. Where one expert alone exceeds a server's share, no placement of single experts keeps that."""
ROWS = """Beside a load-balanced placement (heaviest expert first, onto the lightest server), mean over layers. EPLB is its
hierarchical mode, every expert a group of its own. The last column is of placements over servers, counted on the half that
they are made from."""
COUNTS = """Tokens that need each server, from the counts of experts on each source rank: the estimate's sum beside the true
one, its median error for a rank and a server, and the seconds of a dispatch beside those of the tokens."""
COUNTS_COLUMNS = "servers x GPUs | method | estimate | error | dispatch"
SPARE_COLUMNS = "servers x GPUs | method | rows, planned | served | server, planned | served | GPU, planned | served"
SPARE = f"""With {SPARE_SLOTS} times the slots that experts need once. Rows are beside the load-balanced placement without
replicas, loads over the mean, each on the half that the plan was made from and on the half that it serves; means over layers,
tasks and directions. A server that holds an expert serves its own tokens. EPLB is its hierarchical mode, which replicates
inside a server. The last column is the fullest GPU beside what it takes in the flat plan."""
LOADS = "Of the fullest server or GPU, over the mean: on the half that the plan was made from, and on the half that it serves."


if __name__ == "__main__":
    main()
