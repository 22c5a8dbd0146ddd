"""Who wins where, on real sockets: ways of using four hosts, measured and simulated. `python bench/network/colocate_ways.py`

Root only (namespaces, token buckets). Writes bench/results/colocate-ways-DATE.md. Every cell is a batch (tokens of a rank in
a step), a bandwidth and a skew: prompts of their own for each request, or one prompt for all, whose experts are then the hot
ones. Each step is a prefill of two prompts on each rank. All ways serve the same requests; the third model is the first one
again, with prompts of its own. Gains are over the same requests one model after the other, each under a plan of its own.

Two cores carry four ranks, so experts' compute is a stand-in: it is done, and then waited for until TOKEN_S a row are over, as
a GPU's time takes no time of the host's; all else (attention, routing, permutation, TCP) is real. `--real` does not wait.
Simulated: the plans on the routing of the runs of one model after the other, on the network as measured before them.
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from interleave import MODELS, cluster, known_texts, profiles  # noqa: E402
from machine import machine  # noqa: E402
from net import PAYLOAD, network, refusal  # noqa: E402
from protocol import DEEP  # noqa: E402
from serving import TOKEN_S, served_jobs  # noqa: E402
from tables import Table, today, write  # noqa: E402

from aurora.advisor.colocation_ways import faster, overlapped  # noqa: E402
from aurora.advisor.served_steps import ServedSteps, one_after_the_other, served_steps  # noqa: E402
from aurora.advisor.ways import BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, TIE, TIME_SLICED, WAYS, winners  # noqa: E402
from aurora.io import shipped  # noqa: E402
from aurora.planner.make_plan import make_plan  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.result import RunResult, merge_results  # noqa: E402
from aurora.simulator.interpreter import simulate_plan  # noqa: E402
from aurora.types import Cluster, Curve, Plan, Profile, RunOptions  # noqa: E402

RANKS, REQUESTS, PARTS = 4, 2, 2  # prompts of a rank in a step, and its micro-batches
OF = (0, 1, 0)  # which of MODELS each model is
BATCHES, SKEWS = (4, 32, 128), ("own prompts", "one prompt")
PORTS_bps = (6e6, 17e6, 50e6)
HALF = 17e6  # where the network takes half of the time with large batches
STEPS = {4: 8, 32: 6, 128: 3}
Served = dict[str, ServedSteps]


TOGETHER = {TIME_SLICED: ((0, 1), "step"), BY_EXCHANGE: ((0, 1), "exchange"), BY_LAYER: ((0, 1), "layer")}


@dataclass
class Cell:
    """A setting: its models' prompts and plans, and what was measured and simulated there.

    Attributes:
        plan_M: a plan of each model by itself.
        two, three: plans of two models and of three at once.
        seen: the cluster with the network as measured.
        slice_of: the time slice that the simulator finds faster, by way.
        alone_M, ways: (measured, simulated), of each model by itself, and by way.
    """

    batch: int
    port_bps: float
    skew: str
    prompts_M: list[list[list[int]]]
    plan_M: list[Plan]
    two: Plan
    three: Plan
    traffic_M: list[Profile] = field(default_factory=list)
    seen: Cluster | None = None
    slice_of: dict[str, str] = field(default_factory=dict)
    alone_M: tuple[list[ServedSteps], list[ServedSteps]] = field(default_factory=lambda: ([], []))
    ways: tuple[Served, Served] = field(default_factory=lambda: ({}, {}))

    def gains(self, simulated: bool = False) -> dict[str, float]:
        """By way, the time that its requests take one model after the other over its own."""
        alone_M = self.alone_M[simulated]
        return {
            way: sum(alone.seconds for alone in alone_M[: len(each.ends_M)]) / each.seconds
            for way, each in self.ways[simulated].items()
        }


@dataclass(frozen=True)
class Job:
    """A run: some models of a cell under a plan."""

    cell: Cell
    way: str
    models: tuple[int, ...]
    plan: Plan
    predictable: bool = False


def prompts(batch: int, skew: str) -> list[list[list[int]]]:
    """For each of OF as many prompts as its steps take, from the end of what it knows; the third's lie before the first's."""
    length, count = batch // REQUESTS, RANKS * REQUESTS * STEPS[batch]
    known, found = known_texts(), []
    for number, model in enumerate(OF):
        text = known[model][: len(known[model]) - (length * count if number >= len(known) else 0)]
        ids = [3 + byte for byte in text[-length * count :]]
        own = [ids[i * length : (i + 1) * length] for i in range(count)]
        found.append(own if skew == SKEWS[0] else own[:1] * count)
    return found


def perform(hosts: Sequence[str], jobs: Sequence[Job], token_s: float) -> list[RunResult]:
    """Runs jobs one after the other, in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        given = [
            (
                job.plan,
                [str(shipped(f"models/{MODELS[OF[model]]}")) for model in job.models],
                [job.cell.prompts_M[model] for model in job.models],
                RunOptions(1, REQUESTS, "gloo", predictable=job.predictable),
            )
            for job in jobs
        ]
        shares = launch(served_jobs, RANKS, list(hosts), folder, given, token_s)
    return [
        merge_results([result for share in shares for result in share[n]], [MODELS[OF[model]] for model in job.models])
        for n, job in enumerate(jobs)
    ]


def sliced(plan: Plan, time_slice: str) -> Plan:
    return replace(plan, options=replace(plan.options, time_slice=time_slice))


def measure(hosts: Sequence[str], cells: Sequence[Cell], known: Sequence[Profile], token_s: float) -> None:
    """Runs all cells of one bandwidth: each model alone, whose routing and network the simulator is given, then the ways."""
    alone = [Job(cell, IN_SEQUENCE, (model,), cell.plan_M[model], True) for cell in cells for model in range(len(OF))]
    for job, result in zip(alone, perform(hosts, alone, token_s), strict=True):
        assert result.conditions is not None
        job.cell.traffic_M += result.conditions.traffic([known[OF[job.models[0]]]])
        job.cell.seen = result.conditions.cluster
        job.cell.alone_M[False].append(served_steps(result.trace))
    for cell in cells:
        cell.ways[False][IN_SEQUENCE] = one_after_the_other(cell.alone_M[False][:2])
        simulate_ways(cell)
    jobs = [job for cell in cells for job in ways_of(cell)]
    for job, result in zip(jobs, perform(hosts, jobs, token_s), strict=True):
        before = [job.cell.ways[False][job.way]] if job.way in job.cell.ways[False] else []
        own = served_steps(result.trace, [0] * PARTS if job.way == MICRO_BATCHES else None)
        job.cell.ways[False][job.way] = one_after_the_other([*before, own])


def ways_of(cell: Cell) -> list[Job]:
    """The runs of a cell in each way; those with micro-batches are of one model each."""
    micro, three = cell.slice_of[MICRO_BATCHES], cell.slice_of[THREE_MODELS]
    return [
        *(Job(cell, way, models, sliced(cell.two, of)) for way, (models, of) in TOGETHER.items()),
        *(Job(cell, MICRO_BATCHES, (m,), sliced(cell.plan_M[m].with_micro_batches(PARTS), micro)) for m in range(2)),
        Job(cell, THREE_MODELS, (0, 1, 2), sliced(cell.three, three)),
    ]


def simulate_ways(cell: Cell) -> None:
    """Simulates each way on the traffic and the network as measured with one model alone."""
    assert cell.seen is not None
    plan_M = [replace(plan, cluster=cell.seen) for plan in cell.plan_M]
    two, three = (replace(plan, cluster=cell.seen) for plan in (cell.two, cell.three))
    pairs = list(zip(plan_M, cell.traffic_M, strict=True))
    cell.alone_M[True].extend(served_steps(simulate_plan(plan, [traffic])) for plan, traffic in pairs)
    found = cell.ways[True]
    found[IN_SEQUENCE] = one_after_the_other(cell.alone_M[True][:2])
    for way, (models, of) in TOGETHER.items():
        found[way] = served_steps(simulate_plan(sliced(two, of), cell.traffic_M[: len(models)]))
    found[MICRO_BATCHES], cell.slice_of[MICRO_BATCHES] = faster(
        lambda of: one_after_the_other([overlapped(plan, traffic, PARTS, of) for plan, traffic in pairs[:2]])
    )
    found[THREE_MODELS], cell.slice_of[THREE_MODELS] = faster(
        lambda of: served_steps(simulate_plan(sliced(three, of), cell.traffic_M))
    )


def row(table: Table, cell: Cell) -> tuple[bool, float]:
    """Adds a cell's row. Returns whether the way that the simulator names is as fast as the fastest, and what it loses."""
    gains, says = cell.gains(), cell.gains(simulated=True)
    named, fastest = winners(says)[0], winners(gains)
    loss = max(gains.values()) / gains[named] - 1
    load_LE = cell.traffic_M[0].load_LE
    cells = [f"{gains[way]:.2f} / {says[way]:.2f}" if way in gains else "-" for way in WAYS]
    alone = cell.ways[False][IN_SEQUENCE]
    table.add(
        cell.batch,
        f"{cell.port_bps / 1e6:g}",
        cell.skew,
        f"{(load_LE.max(axis=1) / load_LE.mean(axis=1)).mean():.2f}",
        f"{alone.seconds:.2f}",
        f"{alone.compute_s / RANKS / alone.seconds:.0%}",
        *cells,
        fastest[0],
        named,
        f"{loss:.1%}",
    )
    return named in fastest, loss


def summary(cells: Sequence[Cell], right: Sequence[tuple[bool, float]]) -> list[str]:
    """What the targets ask, in sentences."""
    wrong = [loss for ok, loss in right if not ok]
    lines = [
        f"The simulator names a way within {TIE - 1:.0%} of the fastest in {sum(ok for ok, _ in right)} of {len(right)} cells; "
        f"elsewhere what it names is slower than the fastest by {max(wrong, default=0.0):.1%} at most.",
    ]
    for way in cells[0].ways[False]:
        at = [cell.gains()[way] for cell in cells if cell.port_bps == HALF and cell.batch == max(BATCHES)]
        if at:
            lines.append(
                f"{way.capitalize()}, ports of {HALF / 1e6:g} Mbit/s and {max(BATCHES)} tokens: {min(at):.2f} to {max(at):.2f}."
            )
    small = []
    for cell in cells:
        if cell.batch <= 32:
            gains = cell.gains()
            best = max((way for way in gains if way != MICRO_BATCHES), key=gains.__getitem__)
            small.append((gains[best] / gains[MICRO_BATCHES], best, cell))
    if small:
        over, best, cell = max(small, key=lambda each: each[0])
        lines.append(
            f"Small batches (up to 32): at best {best} is {over:.2f} times micro-batches, with {cell.batch} tokens, ports of "
            f"{cell.port_bps / 1e6:g} Mbit/s, {cell.skew}; 1.2 times or more in {sum(each[0] >= 1.2 for each in small)} of "
            f"{len(small)} cells."
        )
    return ["\n\n".join(lines)]


def times(cells: Sequence[Cell]) -> Table:
    """Times per step and utilisation of each way."""
    table = Table(
        "Seconds between two steps of a model, utilisation",
        "batch | Mbit/s | skew | way | p50 / p99 by model, ms | utilisation, measured / simulated",
    )
    for cell in cells:
        for way in [way for way in WAYS if way in cell.ways[False]]:
            one, says = (each[way] for each in cell.ways)
            tpot = ", ".join(f"{a * 1e3:.0f} / {b * 1e3:.0f}" for a, b in one.tpot_s_M)
            used = " / ".join(f"{each.compute_s / RANKS / each.seconds:.0%}" for each in (one, says))
            table.add(cell.batch, f"{cell.port_bps / 1e6:g}", cell.skew, way, tpot, used)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--mbps", type=float, nargs="+", default=[port / 1e6 for port in PORTS_bps], help="of each port")
    parser.add_argument("--real", action="store_true", help="experts take what they take on the CPU")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    if (why := refusal()) is not None:
        sys.exit(f"colocate_ways: {why}")
    began_s, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        known = profiles(RANKS, Path(folder))
    if not given.real:
        waits = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
        known = [replace(each, curves={"cpu": {**each.curves["cpu"], "expert": waits}}) for each in known]
    cells = []
    for mbps in given.mbps:
        ports = cluster(RANKS, mbps * 1e6 / 8 * PAYLOAD)
        models = [known[number] for number in OF]
        plans = [make_plan(ports, [each]) for each in models], make_plan(ports, models[:2]), make_plan(ports, models)
        own = [
            Cell(batch, mbps * 1e6, skew, prompts(batch, skew), *plans) for batch, skew in itertools.product(given.batch, SKEWS)
        ]
        with network([mbps * 1e6] * RANKS, DEEP) as hosts:
            measure(hosts, own, known, 0.0 if given.real else TOKEN_S)
        cells += own
    table = Table(
        "Gains, measured / simulated",
        "batch | Mbit/s | skew | max/mean load | s, one after the other | utilisation | "
        f"{' | '.join(WAYS)} | fastest | named | loss",
    )
    right = [row(table, cell) for cell in cells]
    heading = [
        f"# Who wins where, on real sockets, {today()}",
        "",
        f"`python bench/network/colocate_ways.py {' '.join(sys.argv[1:])}` on {machine()}; load average {load:.1f} before; "
        f"{time.perf_counter() - began_s:.0f} s.",
        "Four hosts as network namespaces; "
        + (
            "experts as they are on the CPU."
            if given.real
            else f"experts' compute lasts {TOKEN_S * 1e6:g} us a row, waiting in place of a GPU's."
        ),
        "A step has two prompts of half the batch on each rank. Named: the simplest way within 2 % of the fastest, simulated.",
    ]
    write("colocate-ways", heading, summary(cells, right), table.lines, times(cells).lines)


if __name__ == "__main__":
    main()
