"""Dispatch and combine over servers on real sockets: one row a choice, one a GPU, or one a server (hierarchical), side by side.

    python bench/network/servers.py [--shape 2x4] [--nic each] [--traffic recorded] [--repetitions 9] [--seconds 0.2]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. A server's ranks have ports of 1 Gbit/s to each
other. NICs of 100 Mbit/s lead to other servers: one for each rank, or one for each server (shared). Switch buffers are deep,
TCP is reno. Tokens are recorded: DeepSeek-V2-Lite's middle layer, top-6 of 64 experts, hidden 2048 in bfloat16; each sequence
goes to the rank that has the fewest tokens. They are read from AURORA_DATA (default ../shared/data) and left out where that is
absent. Experts are placed in the sequence of their numbers, or planned over the servers from the other half of the sequences.
Drawn tokens choose by a Zipf popularity, each on its own. As many tokens are sent as take --seconds by the bound. Uneven ones
are recorded, and every fourth rank has sixteen times as many as each other: a prompt beside decoding. NICs are levelled there
too.

The bound is `deduplicated_two_tier_bound` at the configured rates. A method's start-up is what it takes for a few tokens of 8
elements. Predictions are the simulator's, of the network as measured before by `measured_network`. What arrives is the
runtime's: rows are packed, forwarded by gateways, and summed on the way back. Methods are interleaved; those that take longest
are repeated less often. All of it takes about ten minutes; a section that is measured anew replaces the one in the file.
Everything is removed at the end, also after an error or an interrupt. Results: bench/results/servers-network-DATE.md.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from hosts import TORCH
from net import PAYLOAD, servers
from protocol import DEEP, Results, options
from routed import HIERARCHICAL, WAYS, Method, RoutedTokens, compile_kernels, measure_routed, together

from aurora.planner.scenarios.exclusive import Exclusive
from aurora.planner.scenarios.servers import OverServers
from aurora.runtime.distributed.launcher import launch
from aurora.types import Cluster, Gpu, Hierarchy, PlanOptions, Servers
from aurora.types.arrays import FloatArray

from routed_tasks import RECORDED, Traffic, deepseek  # bench/  # isort: skip

Slots = tuple[tuple[int, ...], ...]
TASK = "intent"
SHAPES = ("2x4", "4x2", "2x2")  # servers x ranks of each
WIDTH, EXPERTS, TOP_K, MIDDLE = 2048, 64, 6, 13
FEW, NARROW = 8, 8  # tokens of each rank, and elements of each, whose exchange is nothing but start-ups
CHUNKS = (1, 2, 4, 8)
STARTUP = "start-up"
UNEVEN, DECODING = "uneven", 1 / 16  # the tokens of a rank that decodes, beside those of one that reads a prompt


@dataclass(frozen=True)
class Setting:
    """One network."""

    shape: str
    shared_nic: bool
    inside_bps: float
    nic_bps: float

    @property
    def server_G(self) -> list[int]:
        count, ranks = map(int, self.shape.split("x"))
        return [server for server in range(count) for _ in range(ranks)]

    @property
    def cluster(self) -> Cluster:
        inside_Bps, nic_Bps = self.inside_bps / 8 * PAYLOAD, self.nic_bps / 8 * PAYLOAD
        gpus = [Gpu(f"rank-{r}", "cpu", server, inside_Bps, inside_Bps, 1 << 36) for r, server in enumerate(self.server_G)]
        return Cluster("servers", tuple(gpus), Servers.of(self.server_G, nic_Bps, self.shared_nic))

    def __str__(self) -> str:
        rates = f"{self.inside_bps / 1e6:g} Mbit/s inside, {self.nic_bps / 1e6:g} between"
        return f"{self.shape} ranks, {'one NIC a server' if self.shared_nic else 'a NIC each'}, {rates}"


def recorded(setting: Setting) -> tuple[Traffic, Slots] | None:
    """A recorded task, experts in the sequence of their numbers; None where it is absent."""
    source = deepseek([MIDDLE])
    return None if source is None else (source.tasks[TASK], _contiguous(setting))


def planned(setting: Setting) -> tuple[Traffic, Slots] | None:
    """The last half of the task's sequences, experts placed over the servers by the first half."""
    source = deepseek([MIDDLE])
    if source is None:
        return None
    task, cluster = source.tasks[TASK], setting.cluster
    first = task.sequence_U < (int(task.sequence_U[-1]) + 1) // 2
    profile, ranks = source.routed(task.at(first), len(cluster)), len(cluster)
    options = PlanOptions("swap-search", "exact", aim="own", slots_per_gpu=EXPERTS // ranks)
    start = Exclusive(replace(cluster, servers=None), [profile], options).place(np.random.default_rng(0))
    placed = OverServers(cluster, [profile], options).improve_on_servers(
        start.placements_M, [Hierarchy(np.array(setting.server_G))]
    )[0]
    gpu_E = placed.gpu_E(0)
    return task.at(~first), tuple(tuple(np.flatnonzero(gpu_E == rank).tolist()) for rank in range(ranks))


def drawn(setting: Setting) -> tuple[Traffic, Slots]:
    """Popularity is Zipf 0.6, every token chooses on its own, sequences have 64 tokens."""
    rng = np.random.default_rng(0)
    luck_UE = -0.6 * np.log1p(rng.permutation(EXPERTS)) + rng.gumbel(size=(8192, EXPERTS))
    chosen_UK = np.argpartition(-luck_UE, TOP_K, axis=1)[:, :TOP_K]
    return Traffic(chosen_UK[:, None], np.arange(8192) // 64), _contiguous(setting)


TRAFFICS: dict[str, Callable[[Setting], tuple[Traffic, Slots] | None]] = {
    "recorded": recorded,
    "planned": planned,
    "drawn": drawn,
    UNEVEN: recorded,
}


def _contiguous(setting: Setting) -> Slots:
    return tuple(tuple(map(int, part)) for part in np.array_split(np.arange(EXPERTS), len(setting.server_G)))


def parts(name: str, ranks: int) -> FloatArray:
    """(G,) tokens of each rank, beside those of the rank with most."""
    return np.where((np.arange(ranks) % 4 == 0) | (name != UNEVEN), 1.0, DECODING)


def dealt(traffic: Traffic, slots_G: Slots, tokens: int, width: int, part_G: FloatArray) -> RoutedTokens:
    """The first tokens of each rank: a sequence goes to the rank with the fewest tokens."""
    source_U, held_G = np.empty(len(traffic), dtype=np.int64), np.zeros(len(slots_G), dtype=np.int64)
    for sequence in np.unique(traffic.sequence_U):
        own_U = traffic.sequence_U == sequence
        source_U[own_U] = held_G.argmin()
        held_G[held_G.argmin()] += own_U.sum()
    most_G = np.maximum(1, np.rint(tokens * part_G).astype(np.int64))
    kept = np.sort(np.concatenate([np.flatnonzero(source_U == rank)[:most] for rank, most in enumerate(most_G)]))
    return RoutedTokens(traffic.experts_ULK[kept, 0].astype(np.int64), source_U[kept], slots_G, width)


def sized(setting: Setting, traffic: Traffic, slots_G: Slots, seconds: float, part_G: FloatArray) -> RoutedTokens:
    """As many tokens a rank as take so long by the bound of a dispatch, or all."""
    most = len(traffic)
    for _ in range(4):
        tokens = dealt(traffic, slots_G, most, WIDTH, part_G)
        held = min(most, round(len(tokens.source_U) / part_G.sum()))
        most = max(FEW, round(held * min(1.0, seconds / tokens.bound_s(setting.cluster, "dispatch"))))
    return tokens


def methods(setting: Setting, only: str, name: str) -> list[Method]:
    """All methods for tokens of this name whose own names have `only` in them."""
    server_G = np.array(setting.server_G)
    flat = [Method(order, once) for once in (False, True) for order in (TORCH, "all-at-once", "openshop")]
    over = [Method(HIERARCHICAL, True, Hierarchy(server_G, chunks)) for chunks in CHUNKS]
    over.append(Method("all-at-once", True, Hierarchy(server_G, 4)))
    if name == UNEVEN:
        over += [Method(HIERARCHICAL, True, Hierarchy(server_G, chunks, 1)) for chunks in CHUNKS]
        over.append(Method("all-at-once", True, Hierarchy(server_G, 4, 1)))
    return [method for method in (*flat, *over) if only in str(method)]


def table(
    setting: Setting, name: str, traffic: Traffic, slots_G: Slots, only: str, seconds: float, repetitions: int
) -> list[str]:
    """Measured on a network of its own."""
    ranks = len(setting.server_G)
    part_G = parts(name, ranks)
    tokens, few = sized(setting, traffic, slots_G, seconds, part_G), dealt(traffic, slots_G, FEW, NARROW, part_G)
    compared = methods(setting, only, name)
    compile_kernels(few, compared, setting.cluster)
    with (
        servers(setting.server_G, setting.inside_bps, setting.nic_bps, setting.shared_nic, DEEP) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        meeting, cases = os.path.join(folder, "meeting"), {name: tokens, STARTUP: few}
        found_R = launch(measure_routed, ranks, hosts, meeting, cases, compared, setting.cluster, repetitions)
    seconds_of, (before, after) = together([spans for spans, _ in found_R]), found_R[0][1]
    took = {key: statistics.median(each) for key, each in seconds_of.items()}
    bound_s = {way: tokens.bound_s(setting.cluster, way) for way in WAYS}
    lines = [
        "Seconds, median / worst:",
        "",
        f"| method | NIC MB | {' | '.join(f'{way} s | / bound | / (bound + start-up) | predicted' for way in WAYS)} |",
        "|---|---|" + 4 * len(WAYS) * "---|",
    ]
    apart_GG = np.not_equal.outer(setting.server_G, setting.server_G)
    errors: list[float] = []
    for method in compared:
        crossing = int((method.rows_SGG(tokens) * apart_GG).sum()) * 2 * WIDTH
        cells = []
        for way in WAYS:
            key, startup_s = (name, str(method), way), took[STARTUP, str(method), way]
            predicted_s = method.predicted_s(tokens, way, setting.cluster, before.network)
            cells += [
                f"{took[key]:.3f} / {max(seconds_of[key]):.2f}",
                f"{took[key] / bound_s[way]:.3f}",
                f"{took[key] / (bound_s[way] + startup_s):.3f} ({startup_s * 1e3:.0f} ms)",
                "" if predicted_s is None else f"{predicted_s / took[key] - 1:+.1%}",
            ]
            if predicted_s is not None and method.hierarchy is not None:
                errors.append(abs(predicted_s / took[key] - 1))
        lines.append(f"| {method} | {crossing / 1e6:.1f} | {' | '.join(cells)} |")
    flat, over = ([m for m in compared if (m.hierarchy is None) == wanted] for wanted in (True, False))
    for way in WAYS if flat and over else ():
        best, ours = (min(each, key=lambda m: took[name, str(m), way]) for each in (flat, over))
        gain = took[name, str(best), way] / took[name, str(ours), way]
        lines += ["", f"{way.capitalize()}: {ours} is {gain:.2f} x as fast as the best flat method ({best})."]
    port_Bps = setting.cluster.gpus[0].out_Bps
    startups = " and ".join(
        f"{each.startup_s_G[0] * 1e3:.2f} ms a message and {each.out_Bps_G[0] / port_Bps:.0%} of ports' rates {when}"
        for when, each in (("before", before), ("after", after))
    )
    lines += [
        "",
        f"Predictions of hierarchical all-to-alls: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
        f"measured {startups}. Bounds {', '.join(f'{bound_s[way]:.3f}' for way in WAYS)} s of {len(tokens.source_U)} tokens; "
        f"{repetitions} repetitions.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeat for several; default all")
    parser.add_argument("--nic", action="append", choices=("each", "shared"), help="repeat for several; default all")
    parser.add_argument("--traffic", action="append", choices=tuple(TRAFFICS), help="default recorded; all on 2x4")
    parser.add_argument("--inside-mbps", type=float, default=1000, help="of a rank's port to its server, each way")
    parser.add_argument("--nic-mbps", type=float, default=100, help="of a NIC, each way")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="the bound of every dispatch")
    parser.add_argument("--only", default="", help="a part of the names of the methods that are compared")
    chosen = options(parser)
    results = Results("servers-network", "Servers on real sockets", chosen.out)
    rates_bps = 1e6 * chosen.inside_mbps, 1e6 * chosen.nic_mbps
    for shape, nic in product(chosen.shape or SHAPES, chosen.nic or ("each", "shared")):
        setting = Setting(shape, nic == "shared", *rates_bps)
        these = tuple(TRAFFICS) if (shape, nic) == (SHAPES[0], "each") else ("recorded",)
        for name in chosen.traffic or these:
            if (sent := TRAFFICS[name](setting)) is None:
                print(f"{name} tokens are left out: none in {RECORDED}")
                continue
            lines = table(setting, name, *sent, chosen.only, chosen.seconds, chosen.repetitions)
            results.add(f"{setting}, {name}", *lines)


if __name__ == "__main__":
    main()
