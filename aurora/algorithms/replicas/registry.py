"""REPLICAS: replica placements by name. Each decides how many replicas an expert has, which GPUs hold them, and the load split.

The function of a strategy takes (load_E, slots, count_E, rng): the loads, (E,) float64; the slots of the GPUs; the number of
replicas of each expert, (E,) int64, or None to choose it; and a random generator. It returns the expert in each slot, (G, P)
int64 with -1 for an empty slot, and the load split: the part of its expert's load that each slot takes, (G, P) float64. All
replicas of an expert take equal parts, as engines divide tokens; two that EPLB puts on one GPU become one with both parts. If a
function chooses the counts, it leaves a slot empty only if any further replica there would make the slowest GPU slower.

A new placement takes one such function and one line in REPLICAS.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.replicas import load_bounds
from aurora.algorithms.replicas.eplb import eplb
from aurora.algorithms.replicas.failure_resilient import checked_counts
from aurora.algorithms.replicas.slot_packing import fill_slots, greedy_max_time, pack, pack_with_best_counts
from aurora.errors import InfeasiblePlan, check_one_of
from aurora.types import GpuSlots, Placement, PlanOptions, ReplicaPlacement
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY, expert_loads

SlotTables = tuple[IntArray, FloatArray]  # the expert in each slot and the part of its load there, (G, P) each
ReplicaStrategy = Callable[[FloatArray, GpuSlots, IntArray | None, np.random.Generator], SlotTables]

ENOUGH = 1e-3  # relative: a search stops when it is this close to the mean load
SIZES = np.array([0.65, 0.8, 0.7, 0.75, 0.85, 0.6, 0.9, 0.5, 0.95])  # replica loads over a GPU's mean load, best first
WALK_OPERATIONS = 4e5  # budget of a walk over counts: steps x slots x GPUs
MOST_STEPS = 3000  # of a walk over counts


def equal_split(load_E: FloatArray, slots: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> SlotTables:
    """Places replicas that each take the same part of their expert's load.

    If count_E is None, replica counts come from several rules and a random walk over counts. Replicas with each of these counts
    are packed into slots and improved by swaps; the best packing is kept.

    Args:
        load_E: (E,) float64, the load of each expert.
        slots: the slots of the GPUs.
        count_E: (E,) int64, the number of replicas of each expert; None: the function chooses it.
        rng: for the random walk.

    Returns:
        (held_GP, part_GP): the expert in each slot, (G, P) int64 with -1 for none, and the part of its load there, (G, P).

    Raises:
        InfeasiblePlan: if given counts do not fit into the slots.
    """
    useful_G = slots.useful_G(len(load_E))
    held_GP = np.full((slots.gpus, int(useful_G.max())), EMPTY, dtype=np.int64)
    enough = (1 + ENOUGH) * load_bounds.mean_load(load_E, slots)
    if count_E is None:
        enough = min(enough, greedy_max_time(load_E, slots.slots_G, slots.cost_G)) if slots.alike else enough
        count_E = np.ones(len(load_E), dtype=np.int64)
        draws_X3 = rng.random((int(min(MOST_STEPS, WALK_OPERATIONS / (useful_G.sum() * slots.gpus))), 3))
        sizes_X = SIZES * (load_E.sum() / slots.gpus)
        top = pack_with_best_counts(load_E, useful_G, slots.cost_G, sizes_X, draws_X3, enough, count_E, held_GP)
        fill_slots(load_E, useful_G, slots.cost_G, top, count_E, held_GP)
    else:
        target_E, count_E = count_E, count_E.copy()
        pack(load_E, count_E, useful_G, slots.cost_G, enough, held_GP)
        if (target_E != count_E).any():
            raise InfeasiblePlan(
                f"{int(target_E.sum())} replicas on distinct GPUs: no place found for {int((target_E - count_E).sum())} "
                f"of them in {int(useful_G.sum())} slots"
            )
    return held_GP, np.where(held_GP >= 0, 1 / count_E[held_GP], 0.0)


REPLICAS: dict[str, ReplicaStrategy] = {"equal-split": equal_split, "eplb": eplb}


def place(
    loads: ArrayLike, slots: GpuSlots, method: str = "equal-split", replicas: Sequence[int] | None = None, seed: int = 0
) -> ReplicaPlacement:
    """Places experts and their replicas on GPUs so that the largest load of a GPU is small; like EPLB, from loads alone.

    It decides how many replicas each expert has, which GPUs hold them, and the part of the expert's load that each takes.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        slots: how many experts fit on each GPU; `GpuSlots.equal(gpus, slots)` for equal GPUs.
        method: "equal-split" or "eplb".
        replicas: (E,) number of replicas of each expert; None: the method decides.
        seed: random seed of strategies that draw.

    Returns:
        The placement, with its largest load and a lower bound on that for every layer.

    Raises:
        BadInput: if an argument is out of range.
        InfeasiblePlan: if the slots do not suffice.

    Example:
        >>> import aurora
        >>> placed = aurora.place([600, 560, 120, 120, 20, 10, 10, 10], aurora.GpuSlots.equal(gpus=8, slots=2))
        >>> round(float(placed.max_load_L[0]), 2)
        196.67
    """
    load_LE = expert_loads("loads", loads)
    check_one_of("method", method, REPLICAS)
    PlanOptions(seed=seed)  # refuses what no seed can be
    count_E = None if replicas is None else checked_counts(replicas, load_LE.shape[1], 1, slots.slots_G, "GPUs")
    if count_E is not None and (count_E > slots.gpus).any():
        raise InfeasiblePlan(
            f"expert {count_E.argmax()} has {count_E.max()} replicas for {slots.gpus} GPUs, one on each at most"
        )
    warm_up(method)
    began = time.perf_counter()
    tables = slot_tables(load_LE, slots, method, count_E, seed)
    seconds = time.perf_counter() - began
    top_L = [_max_time(split_GP * load_E[held_GP], slots) for (held_GP, split_GP), load_E in zip(tables, load_LE, strict=True)]
    if count_E is None:
        bound_L = [load_bounds.any_split(load_E, slots, top) for load_E, top in zip(load_LE, top_L, strict=True)]
    else:
        bound_L = [load_bounds.given_counts(load_E, slots, count_E) for load_E in load_LE]
    return ReplicaPlacement(
        method,
        _placement(tables),
        np.array(top_L),
        np.array([load_bounds.mean_load(load_E, slots) for load_E in load_LE]),
        np.minimum(bound_L, top_L),  # apart only by rounding
        seconds,
    )


def place_unbounded(load_LE: FloatArray, slots: GpuSlots, method: str = "equal-split", seed: int = 0) -> Placement:
    """Returns the placement of `place` without its bounds, which can take a hundred times as long.

    Args:
        load_LE: (L, E) float64, the load of each expert in each layer.
        slots, method, seed: as in `place`.

    Raises:
        InfeasiblePlan: if the slots are too few.
    """
    return _placement(slot_tables(load_LE, slots, method, seed=seed))


def slot_tables(
    load_LE: FloatArray, slots: GpuSlots, method: str, count_E: IntArray | None = None, seed: int = 0
) -> list[SlotTables]:
    """Returns, for each layer, the expert in each slot and the part of its load there, as `equal_split` returns them.

    Args:
        load_LE: (L, E) float64, the load of each expert in each layer.
        slots, method, seed: as in `place`.
        count_E: (E,) int64, the replicas of each expert; None: the method decides.

    Raises:
        InfeasiblePlan: if the slots are too few.
    """
    experts = load_LE.shape[1]
    if experts > slots.slots_G.sum():
        raise InfeasiblePlan(f"{experts} experts need {experts} slots; {slots.gpus} GPUs have {slots.slots_G.sum()}")
    # Copies, since locked arrays would compile a second version of the code.
    return [REPLICAS[method](load_E.copy(), slots, count_E, np.random.default_rng(seed)) for load_E in load_LE]


def _placement(tables: Sequence[SlotTables]) -> Placement:
    return Placement.of_slots(*(np.stack(table) for table in zip(*tables, strict=True)))


@cache
def warm_up(method: str) -> None:
    """Compiles the code of `method`, a name of REPLICAS, now rather than in its first placement; numba caches it on disk."""
    REPLICAS[method](np.array([3.0, 1.0, 1.0, 1.0]), GpuSlots.equal(2, 2), None, np.random.default_rng(0))


def _max_time(part_GP: FloatArray, slots: GpuSlots) -> float:
    """The largest time of a GPU, its load times its cost, whose slots carry the loads part_GP."""
    return float((part_GP.sum(axis=1) * slots.cost_G).max())
