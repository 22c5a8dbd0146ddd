"""Who wins where, on real sockets: ways of using four hosts, measured and simulated. `python bench/network/colocate_ways.py`

Root only (namespaces, token buckets). Writes bench/results/colocate-ways-DATE.md. Every cell is a batch (tokens of a rank in
a step), a bandwidth and a skew: prompts of their own for each request, or one prompt for all, whose experts are then the hot
ones. Each step is a prefill of two prompts on each rank. All ways serve the same requests; the third model is the first one
again, with prompts of its own. Gains are over the same requests one model after the other, each under a plan of its own.

Two cores carry four ranks, so experts' compute is a stand-in: it is done, and then waited for until TOKEN_S a row are over, as
a GPU's time takes no time of the host's; all else (attention, routing, permutation, TCP) is real. With `--real` further cells
follow, of REAL_BATCHES, in which nothing waits: there the two cores are what is shared.
Simulated: the plans on the routing, the network and the compute as measured with one model at a time (colocate_cells.py).
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from colocate_cells import RANKS, SKEWS, STEPS, Cell, cells_at, measure  # noqa: E402
from interleave import profiles  # noqa: E402
from machine import machine  # noqa: E402
from net import network, refusal  # noqa: E402
from protocol import DEEP  # noqa: E402
from serving import TOKEN_S  # noqa: E402
from tables import Table, today, write  # noqa: E402
from ways import IN_SEQUENCE, MICRO_BATCHES, WAYS, winners  # noqa: E402

from aurora.planner.choice import TIE  # noqa: E402
from aurora.types import Curve  # noqa: E402

BATCHES, REAL_BATCHES, PORTS_bps = (32, 128, 512), (128,), (17e6, 50e6)
MEASURED = WAYS
HALF = 0.1  # how far from half the share of the network may be
SMALL = 32  # tokens of a small batch


def row(table: Table, cell: Cell) -> tuple[bool, float]:
    """Adds a cell's row. Returns whether the way that the simulator names is as fast as the fastest, and what it loses."""
    gains, says = cell.gains(), cell.gains(simulated=True)
    named, fastest = winners(says)[0], winners(gains)
    loss = max(gains.values()) / gains[named] - 1
    load_LE = cell.traffic_M[0].load_LE
    alone = cell.ways[False][IN_SEQUENCE]
    table.add(
        *setting(cell),
        f"{(load_LE.max(axis=1) / load_LE.mean(axis=1)).mean():.2f}",
        f"{alone.seconds:.2f} / {cell.ways[True][IN_SEQUENCE].seconds:.2f}",
        f"{cell.network:.0%}",
        *(f"{gains[way]:.2f} / {says[way]:.2f}" for way in MEASURED[1:]),
        fastest[0],
        named,
        f"{loss:.1%}",
    )
    return named in fastest, loss


def setting(cell: Cell) -> tuple[str, ...]:
    """A cell's first columns."""
    experts = f"{cell.token_s * 1e6:g} us a row" if cell.token_s else "on the CPU"
    return str(cell.batch), f"{cell.port_bps / 1e6:g}", cell.skew, experts


def summary(cells: Sequence[Cell], right: Sequence[tuple[bool, float]], what: str) -> str:
    """What the targets ask of cells with one kind of experts, in sentences."""
    if not cells:
        return ""
    wrong = [loss for ok, loss in right if not ok]
    ok, errors = sum(ok for ok, _ in right), errors_of(cells)
    lines = [
        f"{what}: the simulator names a way within {TIE - 1:.0%} of the fastest in {ok} of {len(right)} cells; elsewhere what "
        f"it names is slower than the fastest by {max(wrong, default=0.0):.1%} at most. Gains are simulated with an error of "
        f"{np.median(errors):.1%} (median; worst {max(errors):.1%})."
    ]
    if half := [cell for cell in cells if abs(cell.network - 0.5) <= HALF]:
        gains = [cell.gains() for cell in half]
        told = (
            f"{way} {min(each[way] for each in gains):.2f} to {max(each[way] for each in gains):.2f}" for way in MEASURED[1:]
        )
        lines.append(f"Where the network takes {0.5 - HALF:.0%} to {0.5 + HALF:.0%} of the time: {', '.join(told)}.")
    over = []
    for cell in [cell for cell in cells if cell.batch <= SMALL]:
        gains_of = cell.gains()
        best = max((way for way in gains_of if way != MICRO_BATCHES), key=gains_of.__getitem__)
        over.append((gains_of[best] / gains_of[MICRO_BATCHES], best, cell))
    if over:
        by, best, cell = max(over, key=lambda each: each[0])
        lines.append(
            f"Up to {SMALL} tokens: at best {best} is {by:.2f} times micro-batches, with {cell.batch} tokens, ports of "
            f"{cell.port_bps / 1e6:g} Mbit/s, {cell.skew}; 1.2 times or more in {sum(each[0] >= 1.2 for each in over)} of "
            f"{len(over)} cells."
        )
    return "\n\n".join(lines)


def errors_of(cells: Sequence[Cell]) -> list[float]:
    """How far simulated gains are from those measured."""
    pairs = [(cell.gains(), cell.gains(simulated=True)) for cell in cells]
    return [abs(says[way] / gains[way] - 1) for gains, says in pairs for way in MEASURED[1:]]


def times(cells: Sequence[Cell]) -> Table:
    """Times per step, and what ranks do meanwhile, of each way."""
    table = Table(
        "What ranks do in each way",
        "batch | Mbit/s | skew | experts | way | ms between two steps, p50 / p99 by model | seconds | utilisation "
        "| seconds of a rank: experts | other compute | exchanges of counts",
        "Measured / simulated. An exchange of counts takes as long as on the rank that comes to it last.",
    )
    for cell in cells:
        for way in MEASURED:
            one, says = (each[way] for each in cell.ways)
            tpot = ", ".join(f"{a * 1e3:.0f} / {b * 1e3:.0f}" for a, b in one.tpot_s_M)
            used = " / ".join(f"{each.compute_s / RANKS / each.seconds:.0%}" for each in (one, says))
            phases = zip(*(each[way] for each in cell.phases if way in each), strict=True)
            did = (" / ".join(f"{seconds:.2f}" for seconds in each) for each in phases)
            table.add(*setting(cell), way, tpot, f"{one.seconds:.2f} / {says.seconds:.2f}", used, *did)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, choices=STEPS)
    parser.add_argument("--mbps", type=float, nargs="+", default=[port / 1e6 for port in PORTS_bps], help="of each port")
    parser.add_argument("--skew", nargs="+", default=SKEWS, choices=SKEWS)
    parser.add_argument("--real", action="store_true", help="also cells in which experts take what they take on the CPU")
    parser.add_argument("--out", type=Path, help="a file instead of the one in bench/results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    if (why := refusal()) is not None:
        sys.exit(f"colocate_ways: {why}")
    began_s, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        real = profiles(RANKS, Path(folder), share=RANKS)
    line = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
    waits = [replace(each, curves={"cpu": {**each.curves["cpu"], "expert": line}}) for each in real]
    kinds = [(TOKEN_S, waits, given.batch), *([(0.0, real, REAL_BATCHES)] if given.real else [])]
    cells: list[Cell] = []
    for (token_s, known, batches), mbps in itertools.product(kinds, given.mbps):
        own = cells_at(mbps, batches, given.skew, known, token_s)
        with network([mbps * 1e6] * RANKS, DEEP) as hosts:
            measure(hosts, own, known)
        cells += own
    table = Table(
        "Gains, measured / simulated",
        "batch | Mbit/s | skew | experts | max/mean load | s, one after the other | network | "
        f"{' | '.join(MEASURED[1:])} | fastest | named | loss",
        "Network: what one after the other would save without it, simulated. Named: the simplest way within 2 % of the best.",
    )
    right = [row(table, cell) for cell in cells]
    heading = [
        f"# Who wins where, on real sockets, {today()}",
        "",
        f"`python bench/network/colocate_ways.py {' '.join(sys.argv[1:])}` on {machine()}; load average {load:.1f} before; "
        f"{time.perf_counter() - began_s:.0f} s.",
        "Four hosts as network namespaces. A step has two prompts of half the batch on each rank.",
    ]
    said = []
    for what, kind in (("Experts that wait in place of a GPU's work", True), ("Experts on the CPU", False)):
        own_X = [number for number, cell in enumerate(cells) if bool(cell.token_s) == kind]
        said.append(summary([cells[number] for number in own_X], [right[number] for number in own_X], what))
    write("colocate-ways", heading, [each for each in said if each], table.lines, times(cells).lines, out=given.out)


if __name__ == "__main__":
    main()
