"""Replicas by layer, and balancing of single batches: what one placement of equally many slots in each layer is compared with.

Layers differ in how uneven they are, and in how well whole experts balance. With the same number of replicas in each layer,
some have more than they can use. `replicas_by_layer` has candidates for each layer: placements with other numbers of replicas,
each for the mean loads or for loads that count as larger where they vary. Recorded windows judge them, and replicas go where
they save most. An engine that allocates equally many slots in every layer saves no memory by it.

Balancing of single batches decides what tokens of a batch go to which replica, or which experts GPUs fetch for it. The
placement in force was planned before; these functions see the batch's own counts, and take the batches of one layer. Without
numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python.

Source: replicas by layer as in CRAFT (arXiv:2603.28768); candidates, and their judgement by windows, are ours.
"""

import numpy as np

from aurora.errors import InfeasiblePlan
from aurora.planner.layers_in_threads import of_layers
from aurora.planner.replication.free_split import minimise_max_time
from aurora.planner.replication.registry import SlotTables, equal_split
from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY


@njit(cache=True, nogil=True)
def split_least_largest(load_DE, held_GP):
    """Divides each batch's tokens over replicas so that the fullest GPU has as few as possible.

    It is the linear program of LPLB with any number of replicas of an expert: min t, where the parts x of expert e sum to its
    tokens and those of a GPU to t at most. Solved exactly as a flow (`minimise_max_time`).

    Args:
        load_DE: (D, E) float64, tokens of each expert in each batch.
        held_GP: (G, P) int64, the expert in each slot, -1 for none.

    Returns:
        (D, G, P) float64, the tokens of each slot.

    Source:
        github.com/deepseek-ai/LPLB; SGLang's `--ep-dispatch-algorithm lp` (pull request 24515).
    """
    gpus, width = held_GP.shape
    held_X = held_GP.ravel()
    count_E = np.bincount(held_X[held_X >= 0], minlength=load_DE.shape[1])
    cost_G, tokens_DGP = np.ones(gpus), np.zeros((len(load_DE), gpus, width))
    for d in range(len(load_DE)):
        for g in range(gpus):
            for p in range(width):
                if held_GP[g, p] != EMPTY:
                    tokens_DGP[d, g, p] = load_DE[d, held_GP[g, p]] / count_E[held_GP[g, p]]
        if load_DE[d].sum() > 0:
            minimise_max_time(held_GP, cost_G, tokens_DGP[d])
    return tokens_DGP


@njit(cache=True, nogil=True)
def fewest_active(load_DE, held_GP):
    """Sends all of an expert's tokens to one of its replicas, so that GPUs have few active experts each.

    Experts with fewest replicas choose first; each takes the GPU with fewest active experts, and of these with fewest tokens.

    Args and returns: as in `split_least_largest`.

    Source:
        METRO (arXiv:2512.09277): balances activated experts, not tokens, where reading weights takes the time.
    """
    gpus, width = held_GP.shape
    slot_GE = np.full((gpus, load_DE.shape[1]), EMPTY)
    for g in range(gpus):
        for p in range(width):
            if held_GP[g, p] != EMPTY:
                slot_GE[g, held_GP[g, p]] = p
    count_E = (slot_GE != EMPTY).sum(axis=0)
    tokens_DGP = np.zeros((len(load_DE), gpus, width))
    for d in range(len(load_DE)):
        active_G, total_G = np.zeros(gpus, dtype=np.int64), np.zeros(gpus)
        for e in np.argsort(count_E, kind="mergesort"):
            if load_DE[d, e] <= 0:
                continue
            best = -1
            for g in range(gpus):
                if slot_GE[g, e] != EMPTY and (
                    best < 0 or active_G[g] < active_G[best] or (active_G[g] == active_G[best] and total_G[g] < total_G[best])
                ):
                    best = g
            active_G[best] += 1
            total_G[best] += load_DE[d, e]
            tokens_DGP[d, best, slot_GE[best, e]] = load_DE[d, e]
    return tokens_DGP


@njit(cache=True, nogil=True)
def spill(load_DE, home_E, gpus, factor, threshold, least, fetched_most):
    """Lets overloaded GPUs spill tokens to the least loaded ones, which fetch the experts' weights for this batch.

    Experts with most tokens come first. A GPU counts with what it was given and with its own experts that are still to come.

    Args:
        load_DE: (D, E) float64, whole tokens of each expert in each batch.
        home_E: (E,) int64, the GPU that holds each expert.
        gpus: how many.
        factor: times the mean load that a GPU takes at most.
        threshold: batches whose largest load is at most this times the mean stay as they are.
        least: tokens that are worth a fetch, unless no more are left.
        fetched_most: experts that a GPU fetches at most; what no GPU takes then stays at home. Below zero: no limit, and what
            is left goes to the least loaded GPU.

    Returns:
        (tokens_DG, active_DG, fetched_D): tokens and active experts of each GPU, and the experts fetched in all.

    Source:
        LLEP (arXiv:2601.17111), algorithm LLA; with a limit as UltraEP's (arXiv:2606.04101) slots for replicas.
    """
    tokens_DG, active_DG = np.zeros((len(load_DE), gpus)), np.zeros((len(load_DE), gpus))
    fetched_D = np.zeros(len(load_DE))
    for d in range(len(load_DE)):
        given_G, fetched_G, coming_G = np.zeros(gpus), np.zeros(gpus, dtype=np.int64), np.zeros(gpus)
        for e in range(len(home_E)):
            coming_G[home_E[e]] += load_DE[d, e]
        mean = coming_G.sum() / gpus
        stays = coming_G.max() <= threshold * mean
        most = max(np.floor(factor * np.floor(mean)), 1.0) if mean >= 1 else mean * gpus
        for e in np.argsort(-load_DE[d], kind="mergesort"):
            left, home = load_DE[d, e], home_E[e]
            if left <= 0:
                break
            coming_G[home] -= left
            at_home = left if stays else min(left, max(most - given_G[home] - coming_G[home], 0.0))
            left -= at_home
            while left > 0:
                best, least_loaded = -1, -1
                for g in range(gpus):
                    if g == home or (fetched_most >= 0 and fetched_G[g] >= fetched_most):
                        continue
                    full = given_G[g] + coming_G[g]
                    if least_loaded < 0 or full < given_G[least_loaded] + coming_G[least_loaded]:
                        least_loaded = g
                    chunk = min(left, most - full)
                    worth = chunk > 0 and (chunk >= least or chunk == left)
                    if worth and (best < 0 or full < given_G[best] + coming_G[best]):
                        best = g
                if best < 0 and (fetched_most >= 0 or least_loaded < 0):
                    at_home += left
                    break
                to = best if best >= 0 else least_loaded
                chunk = min(left, most - given_G[to] - coming_G[to]) if best >= 0 else left
                given_G[to] += chunk
                active_DG[d, to] += 1
                fetched_G[to] += 1
                left -= chunk
            if at_home > 0:
                given_G[home] += at_home
                active_DG[d, home] += 1
        tokens_DG[d] = given_G
        fetched_D[d] = fetched_G.sum()
    return tokens_DG, active_DG, fetched_D


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

    by_layer = of_layers(candidates, layers, "replicas by layer")
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
