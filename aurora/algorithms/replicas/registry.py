"""REPLICAS: replica placements by name. Each decides how many replicas an expert has, which GPUs hold them, and the load split.

The function of a strategy takes (load_E, slots, count_E, rng): the loads, (E,) float64; the slots of the GPUs; the number of
replicas of each expert, (E,) int64, or None to choose it; and a random generator. It returns the expert in each slot, (G, P)
int64 with -1 for an empty slot, and the load split: the part of its expert's load that each slot takes, (G, P) float64. All
replicas of an expert take equal parts, as engines divide tokens; two that EPLB puts on one GPU become one with both parts. If a
function chooses the counts, it leaves a slot empty only if any further replica there would make the slowest GPU slower.

A new placement takes one such function and one line in REPLICAS.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.layers_in_threads import map_layers
from aurora.algorithms.replicas import load_bounds
from aurora.algorithms.replicas.eplb import eplb
from aurora.algorithms.replicas.failure_resilient import checked_counts
from aurora.algorithms.replicas.packing_core import counts_by_size, eplb_counts, packed
from aurora.algorithms.replicas.rebalance import change_layers
from aurora.algorithms.search.phase_sums import PhaseSums
from aurora.algorithms.search.slot_search import slot_search
from aurora.errors import BadInput, InfeasiblePlan, check_one_of
from aurora.types import GpuSlots, Placement, PlanOptions, ReplicaPlacement
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import expert_loads

SlotTables = tuple[IntArray, FloatArray]  # the expert in each slot and the part of its load there, (G, P) each
Grouping = Callable[[FloatArray, IntArray, np.random.Generator], ArrayLike]  # the GPU of each expert
ReplicaStrategy = Callable[[FloatArray, GpuSlots, IntArray | None, np.random.Generator], SlotTables]

ENOUGH = 1e-3  # relative: a search stops this close to the mean load, and no further one that could bring less begins
SIZES = (0.7, 0.8, 0.9, 0.95)  # of replicas at most, over a GPU's mean load
SMALL = 0.6  # largest of EPLB's replicas over a GPU's mean load, up to which they fit well
TINY = 1e-300  # in place of a mean load of zero
KICKS = 400  # restarts of a search from the best start, if none is close enough
EFFORT = 50_000  # changes that these price at most


def equal_split(load_E: FloatArray, slots: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> SlotTables:
    """Places replicas that each take the same part of their expert's load.

    If count_E is None, replica counts come from several rules, which all fill the slots: spare replicas are of hot experts, as
    loads to come differ from those given. Replicas are packed, longest processing time first; then slots change as in
    `rebalance`. Where no start is close enough to the mean load, a slot search goes on from the best one.

    Args:
        load_E: (E,) float64, the load of each expert.
        slots: the slots of the GPUs.
        count_E: (E,) int64, the number of replicas of each expert; None: the function chooses it.
        rng: for the search.

    Returns:
        (held_GP, part_GP): the expert in each slot, (G, P) int64 with -1 for none, and the part of its load there, (G, P).

    Raises:
        InfeasiblePlan: if given counts do not fit into the slots.
    """
    useful_G, mean = slots.useful_G(len(load_E)), load_bounds.mean_load(load_E, slots)
    close, top, held_GP = (1 + 2 * ENOUGH) * mean, np.inf, np.zeros((0, 0), dtype=np.int64)
    if count_E is not None:
        held_GP = packed(load_E, count_E, useful_G, slots.cost_G)
        held_GP = held_GP if (held_GP >= 0).sum() == count_E.sum() else _dealt(count_E, useful_G)
    else:
        for start_E in _starts(load_E, slots):
            start_LGP = packed(load_E, start_E, useful_G, slots.cost_G)[None]
            *_, (found,) = change_layers(load_E[None], start_LGP, useful_G, slots.cost_G, ENOUGH)
            if found < top:
                (held_GP,), top = start_LGP, found
            if top <= close:
                break
    if top > close:
        layer = PhaseSums.of_times(np.multiply.outer(slots.cost_G, load_E), useful_G, np.zeros(slots.gpus))
        held_GP, _ = slot_search(layer, held_GP, rng, KICKS, count_E is None, EFFORT, (1 + ENOUGH) * mean)
    now_E = np.bincount(held_GP[held_GP >= 0], minlength=len(load_E))
    if count_E is None:
        _fill(load_E, useful_G, slots.cost_G, now_E, held_GP)
    elif (now_E != count_E).any():
        raise InfeasiblePlan(
            f"{int(count_E.sum())} replicas on distinct GPUs: no place found for {int((count_E - now_E).sum())} "
            f"of them in {int(useful_G.sum())} slots"
        )
    return held_GP, np.where(held_GP >= 0, 1 / now_E[held_GP], 0.0)


def _starts(load_E: FloatArray, slots: GpuSlots) -> Iterator[IntArray]:
    """Replica counts to start from: EPLB's; no replica larger than a part of a GPU's mean load; few experts divided often.

    EPLB's, which suit loads to come best, are first only where all replicas are SMALL. The last are for equal experts: the
    coldest whole, equally many on each GPU, the others divided over all other slots. 128 on 6 GPUs of 22 slots: 21 whole on
    each, and 2 with 3 replicas. 256 on 72 of 5: 3 whole, and 40 with 3 or 4 replicas.
    """
    experts, gpus, slots_in_all = len(load_E), slots.gpus, int(slots.useful_G(len(load_E)).sum())
    mean = max(load_bounds.mean_load(load_E, slots) / slots.cost_G.min(), TINY)
    eplb_E = eplb_counts(load_E, slots_in_all, gpus)
    small = (load_E / eplb_E).max() <= SMALL * mean
    if small:
        yield eplb_E
    for size in SIZES:
        count_E = counts_by_size(load_E, size * mean, slots_in_all, gpus)
        if count_E is not None:
            yield count_E
    if not small:
        yield eplb_E
    rank_E = np.argsort(np.argsort(-load_E, kind="stable"))
    for whole in range(experts // gpus, max(0, experts // gpus - 2), -1):
        divided, left = experts - whole * gpus, slots_in_all - whole * gpus
        if 0 < divided <= left <= divided * gpus:
            yield np.where(rank_E < divided, left // divided + (rank_E < left % divided), 1)


def _dealt(count_E: IntArray, slots_G: IntArray) -> IntArray:
    """(G, P) the expert in each slot: experts with the most replicas first, to the GPUs with the most empty slots.

    This places all of them if any placement on distinct GPUs does (Gale and Ryser).
    """
    held_GP, left_G = np.full((len(slots_G), slots_G.max()), -1, dtype=np.int64), slots_G.copy()
    for expert in np.argsort(-count_E, kind="stable"):
        gpu_X = np.argsort(-left_G, kind="stable")[: count_E[expert]]
        gpu_X = gpu_X[left_G[gpu_X] > 0]
        left_G[gpu_X] -= 1
        held_GP[gpu_X, left_G[gpu_X]] = expert
    return held_GP


def _fill(load_E: FloatArray, slots_G: IntArray, cost_G: FloatArray, count_E: IntArray, held_GP: IntArray) -> None:
    """Fills each empty slot with the expert of the largest load per replica that does not raise the largest time."""
    for gpu, slot in np.argwhere((held_GP < 0) & (np.arange(held_GP.shape[1]) < slots_G[:, None])):
        time_GP = np.where(held_GP >= 0, (load_E / count_E)[held_GP], 0.0) * cost_G[:, None]
        after_E = time_GP[gpu].sum() + load_E / (count_E + 1) * cost_G[gpu]
        fits_E = after_E <= time_GP.sum(axis=1).max()
        fits_E[held_GP[gpu, held_GP[gpu] >= 0]] = False
        if fits_E.any():
            held_GP[gpu, slot] = expert = int(np.where(fits_E, load_E / count_E, -1.0).argmax())
            count_E[expert] += 1


REPLICAS: dict[str, ReplicaStrategy] = {"equal-split": equal_split, "eplb": eplb}
REGISTERED: dict[str, ReplicaStrategy] = {}  # users' groupings of experts, which hold each once


def of_groups(name: str, group: Grouping) -> ReplicaStrategy:
    """Returns the strategy that holds each expert once, in the slots of the GPU of its group.

    Args:
        name: the strategy's name.
        group: function (load_E, slots_G, rng) -> (E,) integers, the GPU of each expert.
    """

    def placed(load_E: FloatArray, slots: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> SlotTables:
        gpu_E = np.asarray(group(load_E, slots.slots_G, rng))
        right = gpu_E.shape == load_E.shape and gpu_E.dtype.kind in "iu" and ((gpu_E >= 0) & (gpu_E < slots.gpus)).all()
        held_G = np.bincount(gpu_E, minlength=slots.gpus) if right else slots.slots_G + 1
        if (held_G > slots.slots_G).any():
            found = held_G.tolist() if right else f"{gpu_E.dtype} of shape {gpu_E.shape}"
            raise BadInput(f"`method` {name}: expected at most {slots.slots_G.tolist()} experts on GPUs, found {found}")
        if count_E is not None and (count_E != 1).any():
            raise BadInput(f"`replicas`: expected one of each expert with `method` {name}, found {int(count_E.max())}")
        held_GP = np.full((slots.gpus, int(slots.slots_G.max())), -1)
        for gpu in range(slots.gpus):
            held_GP[gpu, : held_G[gpu]] = np.flatnonzero(gpu_E == gpu)
        return held_GP, np.where(held_GP >= 0, 1.0, 0.0)

    return placed


def place(
    loads: ArrayLike,
    slots: GpuSlots,
    method: str | Grouping = "equal-split",
    replicas: Sequence[int] | None = None,
    seed: int = 0,
) -> ReplicaPlacement:
    """Places experts and their replicas on GPUs so that the largest load of a GPU is small; like EPLB, from loads alone.

    It decides how many replicas each expert has, which GPUs hold them, and the part of the expert's load that each takes.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        slots: how many experts fit on each GPU; `GpuSlots.equal(gpus, slots)` for equal GPUs.
        method: "equal-split", "eplb", a name that `aurora.register` knows, or a function as it takes for "place".
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
    if not callable(method):
        check_one_of("method", method, REPLICAS | REGISTERED)
    PlanOptions(seed=seed)  # refuses what no seed can be
    count_E = None if replicas is None else checked_counts(replicas, load_LE.shape[1], 1, slots.slots_G, "GPUs")
    if count_E is not None and (count_E > slots.gpus).any():
        raise InfeasiblePlan(
            f"expert {count_E.argmax()} has {count_E.max()} replicas for {slots.gpus} GPUs, one on each at most"
        )
    began = time.perf_counter()
    tables = slot_tables(load_LE, slots, method, count_E, seed)
    seconds = time.perf_counter() - began
    top_L = [_max_time(split_GP * load_E[held_GP], slots) for (held_GP, split_GP), load_E in zip(tables, load_LE, strict=True)]
    if count_E is None:
        bound_L = [load_bounds.any_split(load_E, slots, top) for load_E, top in zip(load_LE, top_L, strict=True)]
    else:
        bound_L = [load_bounds.given_counts(load_E, slots, count_E) for load_E in load_LE]
    return ReplicaPlacement(
        method.__name__ if callable(method) else method,
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
    load_LE: FloatArray, slots: GpuSlots, method: str | Grouping, count_E: IntArray | None = None, seed: int = 0
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
    strategy = of_groups(method.__name__, method) if callable(method) else (REPLICAS | REGISTERED)[method]

    def placed(layer: int) -> SlotTables:
        return strategy(load_LE[layer], slots, count_E, np.random.default_rng(seed))

    return map_layers(placed, len(load_LE), "placing replicas")


def _placement(tables: Sequence[SlotTables]) -> Placement:
    return Placement.of_slots(*(np.stack(table) for table in zip(*tables, strict=True)))


def _max_time(part_GP: FloatArray, slots: GpuSlots) -> float:
    """The largest time of a GPU, its load times its cost, whose slots carry the loads part_GP."""
    return float((part_GP.sum(axis=1) * slots.cost_G).max())
