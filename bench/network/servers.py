"""Dispatch and combine over servers on real sockets: one row a choice, one a GPU, or one a server (hierarchical), side by side.

    python bench/network/servers.py [--shape 2x4] [--nic each] [--traffic recorded] [--repetitions 9] [--seconds 0.25]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. A server's ranks have ports of 1 Gbit/s to each
other. NICs of 100 Mbit/s lead to other servers: one for each rank, or one for each server (shared). Switch buffers are deep,
TCP is reno. Tokens are recorded: DeepSeek-V2-Lite's middle layer, top-6 of 64 experts, hidden 2048 in bfloat16; each sequence
goes to the rank that has the fewest tokens. They are read from AURORA_DATA (default ../shared/data) and left out where that is
absent. Drawn tokens choose by a Zipf popularity, each on its own. As many tokens are sent as take --seconds by the bound.

The bound: NICs carry a token once to each server that needs it, in equal parts where a server has several. A method's start-up
is what it takes for a few tokens of 8 elements. What arrives is the runtime's: rows are packed, forwarded by gateways, and
summed on the way back. Methods are interleaved. Everything is removed at the end, also after an error or an interrupt. Results:
bench/results/servers-network-DATE.md.
"""

import argparse
import datetime
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from net import PAYLOAD, refusal, servers
from routed import WAYS, Method, RoutedTokens, measure_routed, together
from run import DEEP, HERE, TORCH, machine

from aurora.planner.alltoall.hierarchical import hierarchical_rows
from aurora.runtime.distributed.launcher import launch
from aurora.types import Cluster, Gpu, Hierarchy
from aurora.types import servers as fabric_of_servers
from aurora.types.arrays import IntArray

from routed_tasks import RECORDED, deepseek  # bench/  # isort: skip

SHAPES = ("2x4", "4x2", "2x2")  # servers x ranks of each
WIDTH, EXPERTS, TOP_K, MIDDLE = 2048, 64, 6, 13
FEW, NARROW = 8, 8  # tokens of each rank, and elements of each, whose exchange is nothing but start-ups
CHUNKS = (1, 2, 4, 8)
RARE = 3  # of so many repetitions one is of methods that are not deduplicated, which take longest
STARTUP = "start-up"


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
        gpus = [Gpu(f"rank-{r}", "cpu", server, inside_Bps, inside_Bps, 1) for r, server in enumerate(self.server_G)]
        ports = [inside_Bps] * len(gpus)
        return Cluster("servers", tuple(gpus), fabric_of_servers(self.server_G, ports, ports, nic_Bps, self.shared_nic))

    def __str__(self) -> str:
        rates = f"{self.inside_bps / 1e6:g} Mbit/s inside, {self.nic_bps / 1e6:g} between"
        return f"{self.shape} ranks, {'one NIC a server' if self.shared_nic else 'a NIC each'}, {rates}"


def recorded() -> IntArray | None:
    """(U, K) recorded choices, and in the last column the number of each token's sequence; None where they are absent."""
    source = deepseek([MIDDLE])
    if source is None:
        return None
    traffic = source.tasks["intent"]
    return np.column_stack([traffic.experts_ULK[:, 0], traffic.sequence_U]).astype(np.int64)


def drawn() -> IntArray:
    """As `recorded`: popularity is Zipf 0.6, every token chooses on its own, sequences have 64 tokens."""
    rng = np.random.default_rng(0)
    luck_UE = -0.6 * np.log1p(rng.permutation(EXPERTS)) + rng.gumbel(size=(8192, EXPERTS))
    return np.column_stack([np.argpartition(-luck_UE, TOP_K, axis=1)[:, :TOP_K], np.arange(8192) // 64])


def dealt(found_UX: IntArray, ranks: int, tokens: int) -> tuple[IntArray, IntArray]:
    """(U, K) experts and (U,) source of the first tokens of each rank: a sequence goes to the rank with the fewest tokens."""
    source_U, held_G = np.empty(len(found_UX), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for sequence in np.unique(found_UX[:, -1]):
        own_U = found_UX[:, -1] == sequence
        source_U[own_U] = held_G.argmin()
        held_G[held_G.argmin()] += own_U.sum()
    kept = np.sort(np.concatenate([np.flatnonzero(source_U == rank)[:tokens] for rank in range(ranks)]))
    return found_UX[kept, :-1], source_U[kept]


def contiguous(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Experts of each rank, in the sequence of their numbers."""
    return tuple(tuple(map(int, part)) for part in np.array_split(np.arange(EXPERTS), ranks))


def bound_s(setting: Setting, tokens: RoutedTokens) -> float:
    """No dispatch of deduplicated tokens takes less: each crosses once to each server, over NICs in equal parts."""
    server_G = np.array(setting.server_G)
    hierarchy = Hierarchy(server_G, 1)
    sent_GN = hierarchical_rows(tokens.rank_UK, tokens.source_U, hierarchy).sent_GN.copy()
    sent_GN[np.arange(len(server_G)), server_G] = 0
    crossing_NN = np.stack([sent_GN[server_G == server].sum(axis=0) for server in range(hierarchy.servers)])
    nics = 1 if setting.shared_nic else len(server_G) // hierarchy.servers
    busiest = max(crossing_NN.sum(axis=0).max(), crossing_NN.sum(axis=1).max())
    return float(busiest * 2 * tokens.width / (nics * setting.nic_bps / 8 * PAYLOAD))


def sized(setting: Setting, found_UX: IntArray, seconds: float) -> RoutedTokens:
    """As many tokens a rank as take so long by the bound, or all."""
    ranks, most = len(setting.server_G), len(found_UX)
    for _ in range(4):
        tokens = RoutedTokens(*dealt(found_UX, ranks, most), contiguous(ranks), WIDTH)
        most = max(FEW, round(min(most, len(tokens.source_U) // ranks) * min(1.0, seconds / bound_s(setting, tokens))))
    return tokens


def methods(setting: Setting) -> list[Method]:
    server_G = np.array(setting.server_G)
    flat = [Method(order, once) for once in (False, True) for order in (TORCH, "all-at-once", "openshop")]
    return [*flat, *(Method("all-at-once", True, Hierarchy(server_G, chunks)) for chunks in CHUNKS)]


def table(setting: Setting, traffic: str, found_UX: IntArray, seconds: float, repetitions: int) -> list[str]:
    """Measured on a network of its own."""
    began, load, ranks = time.perf_counter(), os.getloadavg()[0], len(setting.server_G)
    tokens = sized(setting, found_UX, seconds)
    few = RoutedTokens(*dealt(found_UX, ranks, FEW), tokens.slots_G, NARROW)
    compared = methods(setting)
    with (
        servers(setting.server_G, setting.inside_bps, setting.nic_bps, setting.shared_nic, DEEP) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        meeting, cases = os.path.join(folder, "meeting"), {traffic: tokens, STARTUP: few}
        spans_R = launch(measure_routed, ranks, hosts, meeting, cases, compared, setting.cluster, repetitions, RARE)
    took = {key: statistics.median(each) for key, each in together(spans_R).items()}
    bound, worst = bound_s(setting, tokens), {key: max(each) for key, each in together(spans_R).items()}
    lines = [
        f"## {setting}, {traffic}: seconds, median / worst",
        "",
        "| method | NIC MB | dispatch s | / bound | / (bound + start-up) | combine s | / bound | / (bound + start-up) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    server_G = np.array(setting.server_G)
    apart_GG = np.not_equal.outer(server_G, server_G)
    for method in compared:
        crossing = int((method.rows_SGG(tokens) * apart_GG).sum()) * 2 * WIDTH
        cells = []
        for way in WAYS:
            key = (traffic, str(method), way)
            startup = took[STARTUP, str(method), way]
            cells += [
                f"{took[key]:.3f} / {worst[key]:.2f}",
                f"{took[key] / bound:.3f}",
                f"{took[key] / (bound + startup):.3f} ({startup * 1e3:.0f} ms)",
            ]
        lines.append(f"| {method} | {crossing / 1e6:.1f} | {' | '.join(cells)} |")
    flat, hierarchical = (
        [method for method in compared if (method.hierarchy is not None) == wanted] for wanted in (False, True)
    )
    for way in WAYS:
        best, ours = (min(each, key=lambda m: took[traffic, str(m), way]) for each in (flat, hierarchical))
        gain = took[traffic, str(best), way] / took[traffic, str(ours), way]
        lines += ["", f"{way.capitalize()}: {ours} is {gain:.2f} x as fast as the best flat method ({best})."]
    return [
        *lines,
        "",
        f"Bound {bound:.3f} s of {len(tokens.source_U)} tokens; {repetitions} repetitions; load average {load:.1f} before; "
        f"took {time.perf_counter() - began:.0f} s.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeat for several; default all")
    parser.add_argument("--nic", action="append", choices=("each", "shared"), help="repeat for several; default all")
    parser.add_argument("--traffic", action="append", choices=("recorded", "drawn"), help="default recorded; drawn on 2x4 too")
    parser.add_argument("--inside-mbps", type=float, default=1000, help="of a rank's port to its server, each way")
    parser.add_argument("--nic-mbps", type=float, default=100, help="of a NIC, each way")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.25, help="the bound of every dispatch")
    parser.add_argument("--out", type=Path, help="a file instead of bench/results/servers-network-DATE.md")
    chosen = parser.parse_args()
    if reason := refusal():
        print(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    traffics = {"recorded": recorded(), "drawn": drawn()}
    if traffics["recorded"] is None:
        print(f"recorded tokens are left out: none in {RECORDED}")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = chosen.out or HERE.parent / "results" / f"servers-network-{today}.md"
    _, *parts = out.read_text().rstrip().split("\n\n## ") if out.exists() else [""]
    sections = {part.split(":")[0]: f"## {part}" for part in parts}
    title = f"# Servers on real sockets, {today}\n\n`python bench/network/servers.py` on {machine()}."
    rates_bps = 1e6 * chosen.inside_mbps, 1e6 * chosen.nic_mbps
    for shape, nic in product(chosen.shape or SHAPES, chosen.nic or ("each", "shared")):
        setting = Setting(shape, nic == "shared", *rates_bps)
        both = (shape, nic) == ("2x4", "each")
        for traffic in chosen.traffic or (("recorded", "drawn") if both else ("recorded",)):
            found_UX = traffics[traffic]
            if found_UX is None:
                continue
            lines = table(setting, traffic, found_UX, chosen.seconds, chosen.repetitions)
            print("\n".join(lines), flush=True)
            sections[f"{setting}, {traffic}"] = "\n".join(lines)
            out.write_text("\n\n".join([title, *(sections[name] for name in sorted(sections))]) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
