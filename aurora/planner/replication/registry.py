"""REPLICAS: how many replicas each expert of a layer has, where they are, and how its load divides over them, by name.

Each maker takes (load_E, room, count_E, rng): loads (E,) float64; the room of the GPUs; how many replicas each expert must
have, (E,) int64, or None to choose; and gives the expert in each slot, (G, P) int64 with -1 where there is none, and the part
of its expert's load that each slot takes, (G, P) float64. None puts an expert twice on a GPU. Where counts are chosen, a slot
stays empty only if no further replica fits there without making the slowest GPU slower; free-split's last may take nothing.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.replication import load_bounds as share_bounds
from aurora.planner.replication.eplb import eplb as eplb_packs
from aurora.planner.replication.load_split import even_out
from aurora.planner.replication.mcnaughton import lay, wrap
from aurora.planner.replication.packing import EMPTY, fill_spare, fill_unharmed, pack, pack_counting
from aurora.types import GpuSlots, Placement, ReplicaPlacement
from aurora.types.arrays import FloatArray, IntArray, counts
from aurora.types.replica_placement import expert_loads

Slots = tuple[IntArray, FloatArray]
Maker = Callable[[FloatArray, GpuSlots, IntArray | None, np.random.Generator], Slots]
Bound = Callable[[FloatArray, GpuSlots, float], float]

ENOUGH = 1e-3  # relative: a search stops this close to the bound
SIZES = np.array([0.65, 0.8, 0.7, 0.75, 0.85, 0.6, 0.9, 0.5, 0.95])  # of replicas, over the mean load of a GPU, best first
WALK_OPERATIONS = 4e5  # what a walk over counts may spend, in slots x GPUs
MOST_STEPS = 3000


class Strategy(NamedTuple):
    make: Maker
    bound: Bound
    divided_evenly: bool


def equal_split(load_E: FloatArray, room: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> Slots:
    """Every replica takes the same part of its expert's load: counts by several rules and a walk, packed, then
    improved by swaps."""
    useful_G = room.useful_G(len(load_E))
    held_GP = np.full((room.gpus, int(useful_G.max())), EMPTY, dtype=np.int64)
    enough = (1 + ENOUGH) * share_bounds.mean_load(load_E, room)
    if count_E is None:
        count_E = np.ones(len(load_E), dtype=np.int64)
        steps = int(min(MOST_STEPS, WALK_OPERATIONS / (useful_G.sum() * room.gpus)))
        share = load_E.sum() / room.gpus
        top = pack_counting(load_E, useful_G, room.cost_G, share, SIZES, rng.random((steps, 3)), enough, count_E, held_GP)
        fill_unharmed(load_E, useful_G, room.cost_G, top, count_E, held_GP)
    else:
        wanted, count_E = count_E, count_E.copy()
        pack(load_E, count_E, useful_G, room.cost_G, enough, held_GP)
        if (wanted != count_E).any():
            raise InfeasiblePlan(
                f"{int(wanted.sum())} replicas on distinct GPUs: no place found for {int((wanted - count_E).sum())} of them "
                f"in {int(useful_G.sum())} slots"
            )
    return held_GP, np.where(held_GP >= 0, 1 / count_E[held_GP], 0.0)


def free_split(load_E: FloatArray, room: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> Slots:
    """Loads divide as is best: the better of `equal_split`'s places and of loads laid over the GPUs like a line cut where each
    is full, either with the best shares for its places (`shares.even_out`)."""
    if not load_E.any():
        return equal_split(load_E, room, count_E, rng)
    laid = _laid(load_E, room) if count_E is None else None
    top = even_out(laid[0], room.cost_G, laid[1]) if laid else np.inf
    if laid and top <= (1 + ENOUGH) * share_bounds.mean_load(load_E, room):
        return laid[0], _shares(*laid, load_E)
    held_GP, share_GP = equal_split(load_E, room, count_E, rng)
    part_GP = share_GP * load_E[held_GP]
    if even_out(held_GP, room.cost_G, part_GP) < top or laid is None:
        return held_GP, _shares(held_GP, part_GP, load_E)
    return laid[0], _shares(*laid, load_E)


def eplb(load_E: FloatArray, room: GpuSlots, count_E: IntArray | None, rng: np.random.Generator) -> Slots:
    """DeepSeek's EPLB, see `aurora.planner.replication.eplb`; its slots stay empty where it puts an expert twice on a GPU."""
    return eplb_packs(load_E, room, count_E)


REPLICAS: dict[str, Strategy] = {
    "equal-split": Strategy(equal_split, share_bounds.equal_split, True),
    "free-split": Strategy(free_split, share_bounds.free_split, False),
    "eplb": Strategy(eplb, share_bounds.equal_split, True),
}


def place(
    load_LE: FloatArray | IntArray,
    room: GpuSlots,
    method: str = "equal-split",
    replicas: Sequence[int] | None = None,
    seed: int = 0,
) -> ReplicaPlacement:
    """Each layer's experts and replicas in `room`, with bounds. load_LE (L, E), or (E,) for one layer: numbers >= 0.

    replicas: how many each expert has, in every layer; by default the method chooses. Raises BadInput, or InfeasiblePlan
    where the slots do not suffice.
    """
    load_LE = expert_loads("loads", load_LE).copy()  # as compiled code has other versions for locked arrays
    experts = load_LE.shape[1]
    if method not in REPLICAS:
        raise BadInput(f"`method`: expected one of {', '.join(REPLICAS)}, found {method!r}")
    if seed < 0:
        raise BadInput(f"`seed`: expected zero or more, found {seed}")
    count_E = _given(replicas, experts, room)
    if experts > room.slots_G.sum():
        raise InfeasiblePlan(f"{experts} experts need {experts} slots; {room.gpus} GPUs have {room.slots_G.sum()}")
    strategy = REPLICAS[method]
    warm_up(method)
    began = time.perf_counter()
    tables = [strategy.make(load_E, room, count_E, np.random.default_rng(seed)) for load_E in load_LE]
    seconds = time.perf_counter() - began
    top_L = [_slowest(share * load[held], room) for (held, share), load in zip(tables, load_LE, strict=True)]
    if count_E is None:
        bound_L = [strategy.bound(load_E, room, top) for load_E, top in zip(load_LE, top_L, strict=True)]
    else:
        bound_L = [share_bounds.fixed(load_E, room, count_E, strategy.divided_evenly) for load_E in load_LE]
    return ReplicaPlacement(
        method,
        _placement(tables),
        np.array(top_L),
        np.array([share_bounds.mean_load(load_E, room) for load_E in load_LE]),
        np.minimum(bound_L, top_L),  # apart only by rounding
        seconds,
    )


def best_divided(held_GE: IntArray, load_E: FloatArray, cost_G: FloatArray) -> Placement:
    """One layer whose experts sit where held_GE (G, E) says, above zero, their loads divided so that the GPU that is slowest
    has least."""
    width = max(1, int((held_GE > 0).sum(axis=1).max()))
    held_GP = np.full((len(held_GE), width), EMPTY, dtype=np.int64)
    for gpu, count_E in enumerate(held_GE):
        own = np.flatnonzero(count_E)
        held_GP[gpu, : len(own)] = own
    count_E = (held_GE > 0).sum(axis=0)
    part_GP = np.where(held_GP >= 0, (load_E / count_E)[held_GP], 0.0)
    if load_E.any():
        even_out(held_GP, cost_G, part_GP)
    return _placement([(held_GP, _shares(held_GP, part_GP, load_E))])


def slots_needed(load_E: FloatArray, room: GpuSlots, utilisation: float, seed: int = 0) -> tuple[int, int]:
    """How many slots bring mean / largest load of one layer to `utilisation`: a number below which no placement does, by
    counting, and the first at which `free-split` does when every GPU gets equally many more."""
    load_E = load_E.copy()
    most = share_bounds.mean_load(load_E, room) / utilisation
    wider = room
    while wider.slots_G.min() < len(load_E):
        held_GP, share_GP = free_split(load_E, wider, None, np.random.default_rng(seed))
        if _slowest(share_GP * load_E[held_GP], wider) <= most:
            break
        wider = GpuSlots(wider.slots_G + 1, room.cost_G)
    return share_bounds.counted_slots(load_E, room, most), int(wider.slots_G.sum())


@cache
def warm_up(method: str) -> None:
    """Compile the method now (up to half a minute, once on a machine) instead of in its first placement."""
    REPLICAS[method].make(np.array([3.0, 1.0, 1.0, 1.0]), GpuSlots.equal(2, 2), None, np.random.default_rng(0))


def _given(replicas: Sequence[int] | None, experts: int, room: GpuSlots) -> IntArray | None:
    if replicas is None:
        return None
    count_E = counts("`replicas`", replicas, 1)
    if len(count_E) != experts or (count_E < 1).any():
        raise BadInput(f"`replicas`: expected {experts} counts of one or more, found {count_E.tolist()}")
    if (count_E > room.gpus).any():
        raise InfeasiblePlan(
            f"expert {count_E.argmax()} has {count_E.max()} replicas for {room.gpus} GPUs, one on each at most"
        )
    if count_E.sum() > room.slots_G.sum():
        raise InfeasiblePlan(f"{count_E.sum()} replicas need as many slots; {room.gpus} GPUs have {room.slots_G.sum()}")
    return count_E


def _laid(load_E: FloatArray, room: GpuSlots) -> Slots | None:
    """Loads laid over the GPUs; None where the slots do not allow it. Spare slots hold replicas that take nothing yet."""
    useful_G = room.useful_G(len(load_E))
    held_GP = np.full((room.gpus, int(useful_G.max())), EMPTY, dtype=np.int64)
    part_GP = np.zeros(held_GP.shape)
    if room.alike:
        bound = max(share_bounds.mean_load(load_E, room), share_bounds.counted(load_E, room)) / room.cost_G[0]
        done = np.isfinite(wrap(load_E, room.gpus, int(useful_G[0]), bound, held_GP, part_GP))
    else:
        caps_G = share_bounds.mean_load(load_E, room) / room.cost_G
        done = lay(load_E, np.arange(len(load_E)), caps_G, useful_G, np.argsort(caps_G, kind="stable"), held_GP, part_GP)
    if not done:
        return None
    fill_spare(load_E, useful_G, held_GP)
    return held_GP, part_GP


def _slowest(part_GP: FloatArray, room: GpuSlots) -> float:
    """The largest load times cost of a GPU whose slots carry part_GP, empty ones zero."""
    return float((part_GP.sum(axis=1) * room.cost_G).max())


def _shares(held_GP: IntArray, part_GP: FloatArray, load_E: FloatArray) -> FloatArray:
    """Parts of each expert's own sum, evenly where it has no load; the largest takes what rounding left over."""
    used_X = np.flatnonzero(held_GP >= 0)
    expert_X, part_X = held_GP.flat[used_X], np.maximum(part_GP.flat[used_X], 0.0)
    count_E = np.bincount(expert_X)
    total_E = np.bincount(expert_X, weights=part_X)
    share_X = np.where(load_E[expert_X] > 0, part_X / np.where(total_E > 0, total_E, 1.0)[expert_X], 1 / count_E[expert_X])
    largest_E = np.zeros(len(load_E), dtype=np.int64)
    rising_X = np.argsort(share_X, kind="stable")
    largest_E[expert_X[rising_X]] = rising_X
    share_X[largest_E] += 1 - np.bincount(expert_X, weights=share_X)
    share_GP = np.zeros(held_GP.shape)
    share_GP.flat[used_X] = share_X
    return share_GP


def _placement(tables: list[Slots]) -> Placement:
    slots, split = [], []
    for held_GP, share_GP in tables:
        used_GP = held_GP >= 0
        slots.append(tuple(tuple(row[own].tolist()) for row, own in zip(held_GP, used_GP, strict=True)))
        split.append(tuple(tuple(row[own].tolist()) for row, own in zip(share_GP, used_GP, strict=True)))
    return Placement(tuple(slots), tuple(split))
