"""How a placement in force follows its loads: `python bench/rebalance.py` writes bench/results/rebalance-DATE.md.

A placement is made by `aurora.place` for Zipf (0.8) or lognormal loads; then each expert's load drifts by a lognormal factor.
`aurora.rebalance` changes slots; `aurora.place` and EPLB place anew, without regard to what is held, on GPUs relabelled to move
least. Figures are means over layers; seconds are medians of five calls, the time that the processor worked beside them.
"""

import statistics
import time

import numpy as np
from machine import machine
from scipy.optimize import linear_sum_assignment
from tables import Table, today, write

import aurora
from aurora.types import GpuSlots, Placement

SHAPES = ((58, 256, 32, 9), (58, 256, 64, 5), (27, 64, 8, 10), (8, 256, 144, 2))  # layers, experts, GPUs, slots per GPU
DRIFTS = (0.1, 0.3)
REPEATS = 5


def drawn(name: str, layers: int, experts: int, drift: float) -> tuple[np.ndarray, np.ndarray]:
    """Loads (L, E) that a placement is made for, and those that it serves."""
    rng = np.random.default_rng(0)
    ranked_E = (1.0 + np.arange(experts)) ** -0.8
    before_LE = np.array([rng.permutation(ranked_E) if name == "zipf" else rng.lognormal(0, 1, experts) for _ in range(layers)])
    after_LE = before_LE * rng.lognormal(0, drift, before_LE.shape)
    return before_LE, after_LE / after_LE.sum(axis=1, keepdims=True)


def moves(held: Placement, after: Placement) -> float:
    """How many experts a layer's GPUs fetch on average, if GPUs take each other's places so that they fetch least."""
    fetched = 0
    for layer in range(len(held.slots_LG)):
        old_EG, new_EG = held.holds_EG(layer).astype(np.int64), after.holds_EG(layer).astype(np.int64)
        new_GG = new_EG.sum(axis=0)[:, None] - new_EG.T @ old_EG
        fetched += new_GG[linear_sum_assignment(new_GG)].sum()
    return fetched / len(held.slots_LG)


def rows(table: Table, name: str, shape: tuple[int, int, int, int], drift: float) -> None:
    layers, experts, gpus, per_gpu = shape
    before_LE, load_LE = drawn(name, layers, experts, drift)
    slots = GpuSlots.equal(gpus, per_gpu)
    held = aurora.place(before_LE, slots).placement
    case = f"{layers} x {experts} on {gpus} x {per_gpu}, {name}, drift {drift}"
    for what, options in (("1 %", {}), ("0", {"enough": 0.0}), ("8 moves", {"max_moves": 8})):
        wall_s, busy_s = [], []
        for _ in range(REPEATS):
            began, worked = time.perf_counter(), time.process_time()
            made = aurora.rebalance(load_LE, held, **options)
            wall_s.append(time.perf_counter() - began)
            busy_s.append(time.process_time() - worked)
        if what == "1 %":
            table.add(case, "as it is", 0, f"{(made.before_L / made.mean_load_L).mean():.4f}", "")
        ratio = (made.max_load_L / made.mean_load_L).mean()
        took = f"{statistics.median(wall_s) * 1e3:.0f} / {statistics.median(busy_s) * 1e3:.0f}"
        table.add(case, f"rebalance, {what}", f"{made.moves_L.mean():.1f}", f"{ratio:.4f}", took)
    for method in ("equal-split", "eplb"):
        placed = aurora.place(load_LE, slots, method)
        ratio = (placed.max_load_L / placed.mean_load_L).mean()
        table.add(
            case, f"place, {method}", f"{moves(held, placed.placement):.1f}", f"{ratio:.4f}", f"{placed.seconds * 1e3:.0f}"
        )


def main() -> None:
    table = Table(
        f"A placement in force that follows its loads, {today()} ({machine()})",
        "layers x experts on GPUs x slots | method | moves a layer | largest load / mean | ms, wall / processor",
        "`1 %`, `0`: good enough at this much above the mean load. `8 moves`: at most, in a layer.",
    )
    for shape in SHAPES:
        for name in ("zipf", "lognormal"):
            for drift in DRIFTS:
                rows(table, name, shape, drift)
    write("rebalance", table.lines)


if __name__ == "__main__":
    main()
