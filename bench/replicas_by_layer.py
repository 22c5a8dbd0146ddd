"""Replicas where they help: a number of replicas in all, divided over layers by what windows of traffic gain from them.

Layers differ in how uneven they are, and in how well whole experts balance. With the same number of replicas in each layer,
some have more than they can use. Here each layer has candidates: placements with other numbers of replicas, each for the mean
loads or for loads that count as larger where they vary. Recorded windows judge them, and replicas go where they save most.

An engine that allocates equally many slots in every layer saves no memory by it.

Source: replicas by layer as in CRAFT (arXiv:2603.28768); candidates, and their judgement by windows, are ours.
"""

import numpy as np

from aurora.advisor.balancers import BalancingCase, Served
from aurora.advisor.ceiling import SlotMap
from aurora.algorithms.layers_in_threads import map_layers
from aurora.algorithms.replicas.registry import SlotTables, equal_split
from aurora.errors import InfeasiblePlan
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.placement import EMPTY

FEWER = 0.6  # of the replicas of the other methods
CAUTION = (0.0, 0.75)  # standard deviations that experts of one GPU count above their load, those of more GPUs the less
SEEDS = 2  # of candidates
COUNTS = 33  # numbers of replicas that are tried in a layer, up to twice the mean
MOST_PLANS = 4000  # fewer numbers are tried where all layers together would have more candidates
FEWEST_COUNTS = 9


def replicas_by_layer(load_TLE: FloatArray, gpus: int, replicas: int, seed: int = 0) -> list[SlotTables]:
    """Places experts with so many replicas beyond one each, all layers together, on equal GPUs.

    Args:
        load_TLE: (T, L, E) float64, loads of each window that was recorded.
        gpus: how many.
        replicas: in all layers together.
        seed: for the placements.

    Returns:
        The slots of each layer and the parts of loads that they take, as of `registry.slot_tables`. The GPUs that have a
        slot more than others in a layer take turns.

    Raises:
        InfeasiblePlan: if `replicas` is below zero, or there are more GPUs than experts.
    """
    if replicas < 0:
        raise InfeasiblePlan(f"replicas by layer: expected zero or more, found {replicas}")
    _, layers, experts = load_TLE.shape
    if gpus > experts:
        raise InfeasiblePlan(f"replicas by layer: expected at most {experts} GPUs, one for each expert, found {gpus}")
    most = min(2 * -(-replicas // layers), experts * (gpus - 1))
    tries = max(FEWEST_COUNTS, min(COUNTS, MOST_PLANS // (layers * SEEDS * len(CAUTION))))
    count_K = np.unique(np.linspace(0, most, tries).astype(np.int64))
    mean_LE = load_TLE.mean(axis=0)
    spread_LE = load_TLE.std(axis=0, ddof=1) if len(load_TLE) > 1 else np.zeros_like(mean_LE)

    def candidates(layer: int) -> list[tuple[float, SlotTables]]:
        """For each number of replicas, the sum of the windows' largest loads with the best placement, and that placement."""
        best = []
        for count in count_K.tolist():
            slots = GpuSlots((experts + count) // gpus + (np.arange(gpus) < (experts + count) % gpus), np.ones(gpus))
            tables = []
            for caution in CAUTION:
                load_E = mean_LE[layer] + caution / np.sqrt((experts + count) / gpus) * spread_LE[layer]
                tables += [equal_split(load_E, slots, None, np.random.default_rng(seed + more)) for more in range(SEEDS)]
            best.append(min(((_largest(load_TLE[:, layer], *table), table) for table in tables), key=lambda each: each[0]))
        return best

    by_layer = map_layers(candidates, layers, "replicas by layer")
    at_L = _most_saved(np.array([[largest for largest, _ in row] for row in by_layer]), count_K, replicas)
    found, first = [], 0
    for row, at in zip(by_layer, at_L.tolist(), strict=True):
        held_GP, part_GP = row[at][1]
        found.append((np.roll(held_GP, first, axis=0), np.roll(part_GP, first, axis=0)))
        first = (first + int(experts + count_K[at])) % gpus
    return found


def _largest(load_TE: FloatArray, held_GP: IntArray, part_GP: FloatArray) -> float:
    """The sum over windows of the largest load of a GPU."""
    load_TG = (np.where(held_GP != EMPTY, load_TE[:, np.maximum(held_GP, 0)], 0.0) * part_GP).sum(axis=2)
    return float(load_TG.max(axis=1).sum())


def _most_saved(largest_LK: FloatArray, count_K: IntArray, replicas: int) -> IntArray:
    """(L,): which number of replicas each layer has, so that few save most: steps that save most for a replica come first."""
    at_L, left = np.zeros(len(largest_LK), dtype=np.int64), replicas
    least_LK = np.minimum.accumulate(largest_LK, axis=1)
    while True:
        saved_LK = least_LK[np.arange(len(at_L)), at_L][:, None] - least_LK
        more_LK = count_K - count_K[at_L][:, None]
        worth_LK = np.where((more_LK > 0) & (more_LK <= left), saved_LK / np.maximum(more_LK, 1), 0.0)
        layer, at = np.unravel_index(int(worth_LK.argmax()), worth_LK.shape)
        if worth_LK[layer, at] <= 0:
            break
        left -= int(more_LK[layer, at])
        at_L[layer] = at
    return np.array([row[: at + 1].argmin() for row, at in zip(largest_LK, at_L.tolist(), strict=True)])


def balanced_by_layer(case: BalancingCase) -> Served:
    """aurora's replicas, with a part FEWER of those of the other methods, where they help most."""
    if case.gpus > case.experts:  # where each expert needs replicas
        return case.once("equal-split", case.slots)
    traffic, blocks = case.traffic, range(int(case.traffic.block_T[-1]) + 1)
    replicas = int(FEWER * (case.slots * case.gpus - case.experts) * case.layers)
    maps = []
    for block in blocks:
        tables = replicas_by_layer(traffic.load_TLE[traffic.block_T != block], case.gpus, replicas, case.seed)
        width = max(held_GP.shape[1] for held_GP, _ in tables)
        wider = [((0, 0), (0, width - held_GP.shape[1])) for held_GP, _ in tables]
        held = [np.pad(held_GP, more, constant_values=-1) for (held_GP, _), more in zip(tables, wider, strict=True)]
        part = [np.pad(part_GP, more) for (_, part_GP), more in zip(tables, wider, strict=True)]
        maps.append(SlotMap(np.stack(held), np.stack(part)))
    slots = max(case.fewest, (case.experts + replicas / case.layers) / case.gpus)
    return Served(traffic.seconds_D(maps, traffic.block_T, case.curve), 0.0, slots)
