"""How good orders are and how long they take to find: `python bench/order.py` writes bench/results/order-DATE.md.

`python bench/order.py calls` measures what calls cost and how near nearly equal traffic comes; it writes order-calls-DATE.md.

Ratios are makespan over the bound, mean and worst over MATRICES matrices a row; times are medians after a warm-up, on one core.
Recorded traffic is read from AURORA_DATA (default ../shared/data) and its rows are left out where that folder is absent.
"""

import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from machine import machine
from papers.algorithm_1 import aurora_alg1
from tables import Table, today, write

import aurora
from aurora.algorithms.alltoall.decomposition import slots
from aurora.algorithms.alltoall.hierarchical_order import RAILS, hierarchical_order
from aurora.algorithms.alltoall.open_shop import SMALL, SMALL_TRIES, search
from aurora.algorithms.alltoall.registry import ORDER, birkhoff
from aurora.algorithms.alltoall.schedule import DEFAULT_BPS
from aurora.algorithms.network.port_bounds import fluid_bound, one_to_one_bound, pair_seconds
from aurora.algorithms.network.switch import timed
from aurora.types import Hierarchy, Network, Order

ROOT = Path(__file__).parents[1]
RECORDED = Path(os.environ.get("AURORA_DATA", ROOT.parent / "shared" / "data")) / "olmoe_mixtral_domains" / "counts_dev.csv"
MATRICES = 50
CALLS = 400
Maker = Callable[[int, np.random.Generator], np.ndarray]


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, 10**6, (n, n))


def zipf(exponent: float) -> Maker:
    def make(n: int, rng: np.random.Generator) -> np.ndarray:
        share = rng.permutation((1.0 + np.arange(n)) ** -exponent)
        return (rng.uniform(0.5, 1.0, (n, 1)) * share[None, :] * 1e6).astype(np.int64)

    return make


def nearly_equal(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(950_000, 1_050_000, (n, n))


def between(part: float) -> Maker:
    """Entries within a part of their mean."""
    return lambda n, rng: (1e6 * rng.uniform(1 - part, 1 + part, (n, n))).astype(np.int64)


def lognormal(n: int, rng: np.random.Generator) -> np.ndarray:
    return (rng.lognormal(0.0, 1.0, (n, n)) * 1e5).astype(np.int64) + 1


def recorded_counts() -> dict[tuple[str, str], np.ndarray]:
    """OLMoE's (64,) top-8 counts by domain and layer; empty where the recording is absent."""
    counts: dict[tuple[str, str], np.ndarray] = {}
    if RECORDED.exists():
        with RECORDED.open() as file:
            for row in csv.DictReader(file):
                if "olmoe" in row["model"].lower() and row["selection"] == "topk":
                    load = counts.setdefault((row["domain"], row["layer"]), np.zeros(64))
                    load[int(row["expert"])] = float(row["count"])
    return counts


def drawn_bytes(rows: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(n, n) bytes: source s draws 4096 x 8 choices by rows[s], 64 experts contiguous on n GPUs, 4096 bytes each."""
    n = len(rows)
    drawn = np.stack([rng.multinomial(4096 * 8, row / row.sum()) for row in rows])
    return drawn.reshape(n, n, 64 // n).sum(axis=2) * 4096


def recorded() -> Maker | None:
    """Recorded OLMoE traffic: source s draws from domain s mod 5; layer 0, 7 or 15."""
    counts = recorded_counts()
    if not counts:
        return None
    domains, layers = (sorted({key[i] for key in counts}) for i in (0, 1))

    def make(n: int, rng: np.random.Generator) -> np.ndarray:
        layer = layers[rng.integers(len(layers))]
        return drawn_bytes([counts[domains[s % len(domains)], layer] for s in range(n)], rng)

    return make


def kinds() -> dict[str, Maker]:
    made: dict[str, Maker] = {
        "uniform": uniform,
        "zipf 0.8": zipf(0.8),
        "zipf 1.2": zipf(1.2),
        "lognormal": lognormal,
        "nearly equal": nearly_equal,
    }
    if (olmoe := recorded()) is not None:
        made["recorded OLMoE"] = olmoe
    return made


def matrices(make: Maker, n: int, count: int = MATRICES) -> Iterator[np.ndarray]:
    for seed in range(count):
        bytes_GG = make(n, np.random.default_rng(seed))
        np.fill_diagonal(bytes_GG, 0)
        yield bytes_GG


def ratios(values: list[float]) -> str:
    return f"{np.mean(values):.4f} / {max(values):.4f}"


def equal_ports() -> list[str]:
    table = Table(
        "Equal ports: makespan / bound, mean / worst",
        "n | traffic | openshop | openshop-best | seconds of openshop-best, median / worst",
    )
    for n in (4, 8, 16, 32, 40, 64):
        ones = Network.equal(n)
        for name, make in kinds().items():
            if name.startswith("recorded") and 64 % n:
                continue
            found: dict[str, list[float]] = {"openshop": [], "openshop-best": []}
            took = []
            for bytes_GG in matrices(make, n):
                bound_s = one_to_one_bound(bytes_GG, ones)
                for method, values in found.items():
                    began = time.perf_counter()
                    order = ORDER[method](bytes_GG, ones, rng=np.random.default_rng(0))
                    seconds = time.perf_counter() - began
                    values.append(timed(order, bytes_GG, ones).makespan_s / bound_s)
                took.append(seconds)  # of openshop-best, the last
            cells = " | ".join(ratios(values) for values in found.values())
            table.add(n, name, cells, f"{statistics.median(took):.4f} / {max(took):.4f}")
    return table.lines


def baselines() -> list[str]:
    ways = {**ORDER, "aurora-alg1": aurora_alg1}
    methods = ("birkhoff", "aurora-alg1", "sjf", "random", "spread-out", "all-at-once")
    table = Table(
        "Equal ports, the others on the same switch (10 matrices a row)",
        f"n | traffic | {' | '.join(methods)} | birkhoff's slots",
    )
    for n in (4, 8, 16):
        ones = Network.equal(n)
        for name, make in kinds().items():
            found: dict[str, list[float]] = {method: [] for method in methods}
            parts = []
            for bytes_GG in matrices(make, n, 10):
                for method in methods:
                    order = ways[method](bytes_GG, ones, rng=np.random.default_rng(0))
                    made = timed(order, bytes_GG, ones)
                    found[method].append(made.makespan_s / made.fluid_bound_s)
                    if method == "birkhoff":
                        parts.append(len(slots(bytes_GG, 10**6)[0]))
            cells = " | ".join(ratios(found[method]) for method in methods)
            table.add(n, name, cells, f"{np.mean(parts):.0f}")
    return table.lines


def mixed(n: int) -> Network:
    """Ports of four rates, a quarter of the GPUs each."""
    rates_Bps = np.array([100.0, 80.0, 50.0, 40.0])[np.arange(n) * 4 // n]
    return Network(rates_Bps, rates_Bps)


def mixed_ports() -> list[str]:
    methods = ("openshop", "openshop-best", "paced", "all-at-once")
    table = Table(
        "Mixed ports 100/80/50/40, uniform traffic: makespan / fluid bound (10 matrices a row)",
        f"n | one-to-one bound | {' | '.join(methods)}",
    )
    for n in (4, 8, 16, 32):
        network = mixed(n)
        bounds: list[float] = []
        found: dict[str, list[float]] = {method: [] for method in methods}
        for bytes_GG in matrices(uniform, n, 10 if n < 32 else 3):
            bound_s = fluid_bound(bytes_GG, network)
            bounds.append(one_to_one_bound(bytes_GG, network) / bound_s)
            for method in methods:
                order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
                found[method].append(timed(order, bytes_GG, network).makespan_s / bound_s)
        table.add(n, ratios(bounds), " | ".join(ratios(found[m]) for m in methods))
    return table.lines


NIC_BPS = 50e9  # of an H100 server: 400 Gbps a GPU


def startups() -> list[str]:
    table = Table(
        "Equal ports with a start-up: makespan / bound that counts start-ups, uniform traffic (10 matrices a row)",
        "n | start-up / mean transfer | openshop | openshop-best | birkhoff",
    )
    for n in (8, 16):
        for share in (0.01, 0.05, 0.20):
            found: dict[str, list[float]] = {m: [] for m in ("openshop", "openshop-best", "birkhoff")}
            for bytes_GG in matrices(uniform, n, 10):
                network = Network.equal(n, startup_s=share * bytes_GG[bytes_GG > 0].mean())
                bound_s = one_to_one_bound(bytes_GG, network)
                for method, values in found.items():
                    order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
                    values.append(timed(order, bytes_GG, network).makespan_s / bound_s)
            table.add(n, f"{share:.0%}", " | ".join(ratios(v) for v in found.values()))
    return table.lines


def priced(order: Order, matrices: Sequence[np.ndarray], network: Network) -> np.ndarray:
    """(len(matrices),) seconds of `order` on each traffic matrix: each rank keeps its peers' order, sizes are the real ones."""
    return np.array([timed(order, bytes_GG, network).makespan_s for bytes_GG in matrices])


def order_for_many(matrices: Sequence[np.ndarray], network: Network) -> Order:
    """The order of one of the matrices, or of their sum, whose mean over all of them is nearest to their bounds."""
    candidates = [
        ORDER["openshop-best"](bytes_GG, network, rng=np.random.default_rng(0))
        for bytes_GG in (np.sum(matrices, axis=0), *matrices)
    ]
    bounds = np.array([fluid_bound(bytes_GG, network) for bytes_GG in matrices])
    return min(candidates, key=lambda order: float(np.mean(priced(order, matrices, network) / bounds)))


def reuse() -> list[str]:
    """Planned on one recorded domain, serving another: what is lost against re-ordering every batch."""
    counts = recorded_counts()
    if not counts:
        return ["Order reuse: the recording is absent."]
    table = Table(
        "Order reuse: openshop-best planned on one recorded domain, serving another (all pairs, layers 0, 7, 15)",
        "n | reused / re-ordered, mean / worst | one order for all domains (`order_for_many`) / re-ordered",
    )
    domains, layers = (sorted({key[i] for key in counts}) for i in (0, 1))
    for n in (8, 16):
        ones, foreign, shared = Network.equal(n), [], []
        for layer in layers:
            batches = []
            for seed, domain in enumerate(domains):
                bytes_GG = drawn_bytes([counts[domain, layer]] * n, np.random.default_rng(seed))
                np.fill_diagonal(bytes_GG, 0)
                batches.append(bytes_GG)
            orders = [ORDER["openshop-best"](bytes_GG, ones, rng=np.random.default_rng(0)) for bytes_GG in batches]
            own = [priced(order, [bytes_GG], ones)[0] for order, bytes_GG in zip(orders, batches, strict=True)]
            for served, best in enumerate(own):
                foreign += [priced(order, [batches[served]], ones)[0] / best for k, order in enumerate(orders) if k != served]
            common = order_for_many(batches, ones)
            shared += list(priced(common, batches, ones) / own)
        table.add(n, ratios(foreign), ratios(shared))
    return table.lines


def times() -> list[str]:
    names = ("uniform", "zipf 0.8", "recorded OLMoE")
    title = "Time of a search without draws (`open_shop.search`; each matrix over and over)"
    table = Table(title, f"n | {' | '.join(names)}")
    medians: dict[str, dict[int, float]] = {name: {} for name in names}
    rng = np.random.default_rng(0)
    for n in (8, 16, 32, 64, 128, 320, 1024):
        cells = []
        for name in names:
            make = kinds().get(name)
            if make is None or (name.startswith("recorded") and 64 % n):
                cells.append("-")
                continue
            took = []
            for bytes_GG in matrices(make, n, 9 if n < 500 else 3):
                seconds_GG = pair_seconds(bytes_GG, Network.equal(n))
                search(seconds_GG, 0, rng)
                repeats = max(1, min(200, 200_000 // n**2))
                began = time.perf_counter()
                for _ in range(repeats):
                    search(seconds_GG, 0, rng)
                took.append((time.perf_counter() - began) / repeats)
            medians[name][n] = statistics.median(took)
            cells.append(f"{medians[name][n] * 1e6:.4g} us")
        table.add(n, *cells)
    table.lines += ["", f"Growth from n = 64 to 1024: {', '.join(growth(name, medians[name]) for name in names[:2])}."]
    print(table.lines[-1], flush=True)
    return table.lines


def medians_us(calls: Sequence[Callable[..., object]], cases: Sequence[tuple]) -> list[float]:
    """The median time of each warm call, another case every time; calls take turns, so that they share disturbances."""
    took: list[list[float]] = [[] for _ in calls]
    for case in (*cases[:5], *cases):
        for own, call in zip(took, calls, strict=True):
            began = time.perf_counter()
            call(*case)
            own.append(time.perf_counter() - began)
    return [statistics.median(own[5:]) * 1e6 for own in took]


def call_times(n: int) -> list[float]:
    """Microseconds of a search without draws, of `openshop`'s search, of `openshop` and of `aurora.order`."""
    network, rng = Network.equal(n, DEFAULT_BPS), np.random.default_rng(0)
    tries = SMALL_TRIES if n < SMALL else 0
    cases = []
    for bytes_GG in matrices(uniform, n, CALLS):
        cases.append((bytes_GG, pair_seconds(bytes_GG, network)))
    return medians_us(
        [
            lambda bytes_GG, seconds_GG: search(seconds_GG, 0, rng),
            lambda bytes_GG, seconds_GG: search(seconds_GG, tries, rng),
            lambda bytes_GG, seconds_GG: ORDER["openshop"](bytes_GG, network, rng=rng),
            lambda bytes_GG, seconds_GG: aurora.order(bytes_GG),
        ],
        cases,
    )


def calls() -> list[str]:
    about = (
        f"Uniform traffic, medians of {CALLS} warm calls, a new matrix every call. The core is the compiled search, from each "
        "pair's seconds to a schedule; below 12 ranks it draws priorities until the bound is met. `aurora.order` "
        "also checks the matrix, the order and the schedule."
    )
    title = "Calls: us, and what they take beside their core"
    table = Table(title, "n | without draws | core | `openshop` | more | `aurora.order` | more", about)
    for n in (8, 32, 64):
        one, core, openshop, order = call_times(n)
        table.add(n, *(f"{us:.0f}" for us in (one, core, openshop, openshop - core, order, order - core)))
    return table.lines


def birkhoff_calls() -> list[str]:
    table = Table("`birkhoff`: slots, and us a call (median, a new matrix every call)", "n | slots | messages a pair | us")
    rng = np.random.default_rng(0)
    for n in (8, 16, 32):
        ones = Network.equal(n)
        drawn = [(bytes_GG,) for bytes_GG in matrices(uniform, n, CALLS if n < 10 else MATRICES)]
        parts = [slots(bytes_GG, 10**6) for (bytes_GG,) in drawn[:MATRICES]]
        messages = np.mean([(units_XG > 0).sum() for _, _, units_XG in parts]) / (n * (n - 1))
        (took,) = medians_us([lambda bytes_GG, ones=ones: birkhoff(bytes_GG, ones, rng=rng)], drawn)
        table.add(n, f"{np.mean([len(length_X) for length_X, _, _ in parts]):.1f}", f"{messages:.2f}", f"{took:.0f}")
    return table.lines


def server_calls() -> list[str]:
    about = (
        "Entries within a fifth of their mean, a new matrix every call. Timed is the whole call, from the bytes between all "
        "ranks to an Order of all pairs: the sequence of servers is computed, and the rows of ranks come from a table that a "
        "layout of servers has once. The least of many calls stands beside the median, because the machine has other work. "
        "`FAST` is what its paper (arXiv:2505.09764) reports for its scheduler."
    )
    title = "Calls on servers of 8: `hierarchical_order`, us, least / median"
    table = Table(title, "servers | whole call | sequence of servers alone | rails / busiest NIC, mean / worst | FAST", about)
    for servers, published in ((8, "150-220 us"), (40, "64-77 ms")):
        n = servers * 8
        hierarchy, network, rng = Hierarchy(np.arange(n) // 8), Network.equal(n, NIC_BPS), np.random.default_rng(0)
        took, alone, ratio = [], [], []
        for bytes_GG in matrices(between(0.2), n, CALLS if servers < 40 else MATRICES):
            began = time.perf_counter()
            order = hierarchical_order(bytes_GG, hierarchy, network, rng=rng)
            took.append((time.perf_counter() - began) * 1e6)
            rails_X2 = order.pairs_X2[order.tier_X == RAILS]
            rails_GG = np.zeros_like(bytes_GG)
            rails_GG[*rails_X2.T] = bytes_GG[*rails_X2.T]
            busiest_NN = rails_GG.reshape(servers, 8, servers, 8).max(axis=(1, 3)) / NIC_BPS
            began = time.perf_counter()
            search(busiest_NN, 0, rng)
            alone.append((time.perf_counter() - began) * 1e6)
            if len(ratio) < 10:
                ratio.append(timed(order, rails_GG, network).makespan_s / fluid_bound(rails_GG, network))
        cells = (f"{min(each):.0f} / {statistics.median(each[5:]):.0f}" for each in (took, alone))
        table.add(servers, *cells, ratios(ratio), published)
    return table.lines


def near_equal_traffic() -> list[str]:
    table = Table(
        "Nearly equal traffic, one message a pair: makespan / bound, mean / worst (20 matrices a row)",
        "n | entries | openshop | openshop-best | openshop-best, CPU seconds, median / worst",
    )
    for n in (16, 24, 32, 48, 64):
        ones = Network.equal(n)
        ORDER["openshop-best"](next(matrices(between(0.2), n)), ones, rng=np.random.default_rng(0))  # compiles
        for part in (0.05, 0.1):
            found: dict[str, list[float]] = {"openshop": [], "openshop-best": []}
            took = []
            for bytes_GG in matrices(between(part), n, 20):
                for method, values in found.items():
                    began = time.process_time()
                    order = ORDER[method](bytes_GG, ones, rng=np.random.default_rng(0))
                    seconds = time.process_time() - began
                    assert len(order.pairs_X2) == n * (n - 1), "one message a pair"
                    values.append(timed(order, bytes_GG, ones).makespan_s / one_to_one_bound(bytes_GG, ones))
                took.append(seconds)  # of openshop-best, the last
            cells = " | ".join(ratios(values) for values in found.values())
            table.add(n, f"1 +- {part}", cells, f"{statistics.median(took):.3f} / {max(took):.3f}")
    return table.lines


def growth(name: str, seconds_by_n: dict[int, float]) -> str:
    """The exponent of time in n: least squares on logarithms, n of 64 and more."""
    large = {n: seconds for n, seconds in seconds_by_n.items() if n >= 64}
    exponent = np.polyfit(np.log(list(large)), np.log(list(large.values())), 1)[0]
    return f"n^{exponent:.2f} ({name})"


def main() -> None:
    heading = [
        f"# Orders, {today()}",
        "",
        f"`{' '.join(['python bench/order.py', *sys.argv[1:]])}` on {machine()}; {MATRICES} matrices a row unless said; "
        f"load average {os.getloadavg()[0]:.0f}.",
    ]
    ORDER["openshop-best"](next(matrices(uniform, 4)), Network.equal(4), rng=np.random.default_rng(0))  # compiles
    parts = (calls, server_calls, birkhoff_calls, near_equal_traffic)
    if sys.argv[1:] == ["calls"]:
        write("order-calls", heading, *(part() for part in parts))
        return
    parts += (times, equal_ports, baselines, mixed_ports, startups, reuse)
    write("order", heading, *(part() for part in parts))


if __name__ == "__main__":
    main()
