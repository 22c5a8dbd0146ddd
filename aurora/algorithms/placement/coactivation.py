"""Co-activation: counts how often tokens choose two experts together, groups such experts, and improves placements by it."""

from itertools import product
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit


def distinct_tokens(experts_UK: IntArray, source_U: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Merges the U tokens that have the same experts and the same source rank into V distinct tokens.

    Args:
        experts_UK: (U, K) int64, the experts of each token.
        source_U: (U,) int64, its source rank.

    Returns:
        (experts_VK, source_V, count_V), int64: (V, K) the experts of each distinct token in rising order, (V,) its source rank
        and (V,) the number of tokens merged into it.
    """
    ranked_UX = np.column_stack([source_U, np.sort(experts_UK.astype(np.int64), axis=1)])
    rows_VX, count_V = np.unique(ranked_UX, axis=0, return_counts=True)
    return rows_VX[:, 1:], rows_VX[:, 0], count_V


def coactivation_counts(experts_VK: IntArray, source_V: IntArray, count_V: IntArray, experts: int, gpus: int) -> IntArray:
    """Returns (S, E, E) int64: tokens of each source that choose both experts; the diagonal counts the tokens of each expert.

    experts_VK, source_V, count_V: as `distinct_tokens` returns them.
    """
    counts_SX = np.zeros((gpus, experts * experts), dtype=np.int64)
    for source in range(gpus):
        own_V = source_V == source
        for a_V, b_V in product(experts_VK[own_V].T, repeat=2):
            pairs = np.bincount(a_V * experts + b_V, weights=count_V[own_V], minlength=experts * experts)
            counts_SX[source] += pairs.astype(np.int64)
    return counts_SX.reshape(gpus, experts, experts)


def coactivation_groups(counts_EE: IntArray, slots_G: IntArray) -> IntArray:
    """Groups experts that the same tokens choose, one group per GPU.

    Each group starts with the busiest expert that is left. It then takes the expert whose tokens most often also choose
    experts of the group, until its slots are full or its load would pass an equal share of the load that is left.

    Args:
        counts_EE: (E, E) int64, tokens that choose both experts, as `coactivation_counts` summed over sources.
        slots_G: (G,) int64, how many experts each GPU can hold; at least E in all.

    Returns:
        (E,) int64, the GPU of each expert.
    """
    experts, load_E = len(counts_EE), np.diag(counts_EE)
    gpu_E = np.full(experts, -1, dtype=np.int64)
    for gpu, slots in enumerate(slots_G.tolist()):
        later = int(slots_G[gpu + 1 :].sum())
        near_E, size, load = np.zeros(experts, dtype=np.int64), 0, 0
        fair = load_E[gpu_E < 0].sum() / (len(slots_G) - gpu)
        while size < slots and (expert_X := np.flatnonzero(gpu_E < 0)).size:
            must = expert_X.size > later
            if size:
                expert_X = expert_X[np.argsort(-(near_E[expert_X] / np.maximum(load_E[expert_X], 1)), kind="stable")]
                if not must and load + load_E[expert_X[0]] / 2 > fair:
                    break
            else:
                expert_X = expert_X[np.argsort(-load_E[expert_X], kind="stable")]
            chosen = int(expert_X[0])
            gpu_E[chosen] = gpu
            near_E += counts_EE[chosen]
            size, load = size + 1, load + int(load_E[chosen])
    return gpu_E


KICKS = 32  # restarts from the best placement, each after a few random moves and swaps
SHAKES = 3
NONE = -1


class Tokens(NamedTuple):
    """Distinct tokens of a layer: tokens with the same experts and source rank are merged into one.

    Attributes:
        experts_VK: (V, K) int64, the experts of each distinct token.
        source_V: (V,) int64, the source rank of each distinct token.
        count_V: (V,) int64, number of tokens merged into it.
        of_expert_X: (V * K,) int64, distinct tokens by expert: those of expert e are of_expert_X[start_E[e] : start_E[e + 1]].
        start_E: (E + 1,) int64, the index in of_expert_X at which each expert's tokens begin.
    """

    experts_VK: IntArray
    source_V: IntArray
    count_V: IntArray
    of_expert_X: IntArray
    start_E: IntArray

    @classmethod
    def of(cls, experts_VK: IntArray, source_V: IntArray, count_V: IntArray, experts: int) -> Self:
        """Returns Tokens made from the result of `distinct_tokens`, for a layer of `experts` experts."""
        of_expert_X = np.argsort(experts_VK.ravel(), kind="stable") // experts_VK.shape[1]
        ends_E = np.cumsum(np.bincount(experts_VK.ravel(), minlength=experts))
        known = np.ascontiguousarray(experts_VK), np.ascontiguousarray(source_V)
        return cls(*known, count_V, of_expert_X, np.append(0, ends_E))


class Costs(NamedTuple):
    """Seconds and slots of a layer that are the same for all placements.

    Attributes:
        expert_s_GE: (G, E) seconds of each expert on each GPU.
        gate_s_G: (G,) seconds of the gate.
        port_s_XG: (4, G) seconds per token: sent and received in the dispatch, sent and received in the combine.
        slots_G: (G,) int64, how many experts each GPU can hold.
    """

    expert_s_GE: FloatArray
    gate_s_G: FloatArray
    port_s_XG: FloatArray
    slots_G: IntArray


class Tables(NamedTuple):
    """Counts that follow from the placement, kept up to date so that a move or swap is priced in O(G).

    Attributes:
        gpu_E: (E,) int64, the GPU of each expert.
        held_G: (G,) int64, how many experts each GPU holds.
        work_s_G: (G,) seconds of the experts on each GPU.
        total_ES: (E, S) int64, tokens of each expert by source.
        hits_VG: (V, G) uint8, how many experts of each distinct token (see `Tokens`) sit on each GPU.
        rows_SG: (S, G) int64, deduplicated tokens from each source to each GPU.
        joint_ESG: (E, S, G) int64, tokens of an expert for which the GPU holds another of the token's experts.
        sole_EES: (E, E, S) int64, tokens that choose both experts and have no other expert on the first one's GPU.
    """

    gpu_E: IntArray
    held_G: IntArray
    work_s_G: FloatArray
    total_ES: IntArray
    hits_VG: NDArray[np.uint8]
    rows_SG: IntArray
    joint_ESG: IntArray
    sole_EES: IntArray


def coactivation_search(
    tokens: Tokens, costs: Costs, gpu_E: IntArray, rng: np.random.Generator, kicks: int = KICKS
) -> IntArray:
    """Moves and swaps single experts to lower the layer's seconds by Aurora's Eq. 1 with deduplicated tokens.

    It takes the change that saves the most seconds or, among equal ones, the most of the sum of all ports' seconds, until none
    saves any. Then it restarts `kicks` times, from the best placement after a few random moves and swaps. Deterministic for a
    given `rng`.

    It is separate from the annealing of `server_search`, because that gave worse results here: in about the same time, layers
    0.3 % longer in the mean of five, and 0.7 to 0.9 % longer with 128 experts on 16 GPUs.

    Args:
        tokens: the layer's tokens.
        costs: seconds and slots that no move changes.
        gpu_E: (E,) int64, the GPU of each expert to start from.
        rng: for the restarts.
        kicks: number of restarts.

    Returns:
        (E,) int64, the GPU of each expert; never worse than gpu_E.
    """
    experts, gpus = len(gpu_E), len(costs.slots_G)
    shakes_XX2 = np.stack([rng.integers(0, experts, (kicks, SHAKES)), rng.integers(0, experts + gpus, (kicks, SHAKES))], axis=2)
    best_E = gpu_E.copy()
    _search(tokens, costs, best_E, shakes_XX2)
    return best_E


@njit(cache=True)
def _search(tokens: Tokens, costs: Costs, gpu_E: IntArray, shakes: IntArray) -> None:
    """Runs the descent and its restarts; writes the best placement into gpu_E."""
    tables = _tables(tokens, costs, gpu_E)
    best_s, best_ports = _descend(tokens, costs, tables)
    best_E = gpu_E.copy()
    for kick in range(len(shakes)):
        _shake(tokens, costs, tables, shakes[kick])
        now_s, now_ports = _descend(tokens, costs, tables)
        if _less(now_s, now_ports, best_s, best_ports):
            best_s, best_ports = now_s, now_ports
            best_E[:] = gpu_E
        else:
            for e in range(len(gpu_E)):
                _shift(tokens, costs, tables, e, best_E[e])


@njit(cache=True)
def _tables(tokens: Tokens, costs: Costs, gpu_E: IntArray) -> Tables:
    """The tables of a placement, counted from its tokens."""
    experts, gpus = len(gpu_E), len(costs.slots_G)
    experts_VK, source_V, count_V, _, _ = tokens
    hits_VG = np.zeros((len(experts_VK), gpus), dtype=np.uint8)
    rows_SG = np.zeros((gpus, gpus), dtype=np.int64)
    total_ES = np.zeros((experts, gpus), dtype=np.int64)
    joint_ESG = np.zeros((experts, gpus, gpus), dtype=np.int64)
    sole_EES = np.zeros((experts, experts, gpus), dtype=np.int64)
    held_G = np.zeros(gpus, dtype=np.int64)
    work_s_G = np.zeros(gpus)
    for e in range(experts):
        held_G[gpu_E[e]] += 1
        work_s_G[gpu_E[e]] += costs.expert_s_GE[gpu_E[e], e]
    for v in range(len(experts_VK)):
        s, many = source_V[v], count_V[v]
        for e in experts_VK[v]:
            hits_VG[v, gpu_E[e]] += 1
            total_ES[e, s] += many
        for g in range(gpus):
            if hits_VG[v, g]:
                rows_SG[s, g] += many
                for e in experts_VK[v]:
                    if hits_VG[v, g] > (gpu_E[e] == g):
                        joint_ESG[e, s, g] += many
        for e in experts_VK[v]:
            if hits_VG[v, gpu_E[e]] == 1:
                for f in experts_VK[v]:
                    sole_EES[e, f, s] += many
    return Tables(gpu_E, held_G, work_s_G, total_ES, hits_VG, rows_SG, joint_ESG, sole_EES)


@njit(cache=True)
def _shake(tokens: Tokens, costs: Costs, tables: Tables, pairs: IntArray) -> None:
    """Swaps the experts of each pair; a second number E + g is GPU g, to which the first expert moves if it has a free slot."""
    gpu_E, experts = tables.gpu_E, len(tables.gpu_E)
    for a, b in pairs:
        if b < experts:
            g, h = gpu_E[a], gpu_E[b]
            _shift(tokens, costs, tables, a, h)
            _shift(tokens, costs, tables, b, g)
        elif tables.held_G[b - experts] < costs.slots_G[b - experts]:
            _shift(tokens, costs, tables, a, b - experts)


@njit(cache=True)
def _less(s, ports, than_s, than_ports):
    """Returns whether (s, ports) is shorter than (than_s, than_ports), or as short with fewer seconds summed over all ports."""
    return s < than_s * (1 - 1e-9) or (s <= than_s * (1 + 1e-12) and ports < than_ports * (1 - 1e-9))


@njit(cache=True)
def _descend(tokens: Tokens, costs: Costs, tables: Tables) -> tuple[float, float]:
    """Takes the best move or swap until none helps, in place. First only experts on the slowest GPUs move, then all experts.

    Returns the seconds of Eq. 1 without aggregation, and the seconds summed over all ports.
    """
    everywhere = False
    while True:
        now_s, now_ports, a, b, to_gpu = _best_step(costs, tables, everywhere)
        if a == NONE:
            if everywhere:
                return now_s, now_ports
            everywhere = True
            continue
        everywhere = False
        from_gpu = tables.gpu_E[a]
        _shift(tokens, costs, tables, a, to_gpu)
        if b != NONE:
            _shift(tokens, costs, tables, b, from_gpu)


@njit(cache=True)
def _best_step(costs: Costs, tables: Tables, everywhere: bool) -> tuple[float, float, int, int, int]:
    """Finds the best move or swap that helps.

    Returns (seconds now, port seconds now, expert, the expert it swaps with or NONE, its new GPU); the last three are NONE if
    no step helps. everywhere: try all experts, not only those of the slowest GPUs.
    """
    expert_s_GE, gate_s_G, port_s_XG, slots_G = costs
    gpu_E, held_G, work_s_G, total_ES, _, rows_SG, joint_ESG, sole_EES = tables
    experts, gpus = len(gpu_E), len(slots_G)
    stay_G = np.diag(rows_SG)
    send_G, recv_G = rows_SG.sum(axis=1) - stay_G, rows_SG.sum(axis=0) - stay_G  # tokens to other GPUs, and from them
    sent_G, received_G, busy_s_G = send_G.copy(), recv_G.copy(), work_s_G.copy()
    now_s, now_ports, slow_first, slow_second = _price(send_G, recv_G, work_s_G, gate_s_G, port_s_XG)
    best_s, best_ports, best_a, best_b, best_gpu = now_s, now_ports, NONE, NONE, NONE
    for a in range(experts):
        g = gpu_E[a]
        if not everywhere and g != slow_first and g != slow_second:
            continue
        for to in range(experts + gpus):  # the place of another expert, or a free slot of a GPU
            b, h = (to, gpu_E[to]) if to < experts else (NONE, to - experts)
            if h == g or (b == NONE and held_G[h] >= slots_G[h]) or (b != NONE and everywhere and b < a):
                continue
            sent_G[:] = send_G
            received_G[:] = recv_G
            _change_traffic(sent_G, received_G, a, g, b, h, total_ES, joint_ESG, sole_EES)
            busy_s_G[g] -= expert_s_GE[g, a]
            busy_s_G[h] += expert_s_GE[h, a]
            if b != NONE:
                busy_s_G[g] += expert_s_GE[g, b]
                busy_s_G[h] -= expert_s_GE[h, b]
            step_s, step_ports, _, _ = _price(sent_G, received_G, busy_s_G, gate_s_G, port_s_XG)
            busy_s_G[g], busy_s_G[h] = work_s_G[g], work_s_G[h]
            if _less(step_s, step_ports, best_s, best_ports):
                best_s, best_ports, best_a, best_b, best_gpu = step_s, step_ports, a, b, h
    return now_s, now_ports, best_a, best_b, best_gpu


@njit(cache=True, inline="always")
def _change_traffic(sent_G, received_G, a, g, b, h, total_ES, joint_ESG, sole_EES):
    """Adds the change of traffic when expert a moves from GPU g to h and expert b, unless NONE, from h to g."""
    for s in range(len(sent_G)):
        at_g = joint_ESG[a, s, g] - total_ES[a, s]
        at_h = total_ES[a, s] - joint_ESG[a, s, h]
        if b != NONE:
            at_g += total_ES[b, s] - joint_ESG[b, s, g] + sole_EES[a, b, s]
            at_h += joint_ESG[b, s, h] - total_ES[b, s] + sole_EES[b, a, s]
        if s != g:
            sent_G[s] += at_g
            received_G[g] += at_g
        if s != h:
            sent_G[s] += at_h
            received_G[h] += at_h


@njit(cache=True)
def _price(send_G, recv_G, work_s_G, gate_s_G, port_s_XG):
    """Seconds of Eq. 1 without aggregation, seconds summed over all ports, and the GPUs that attain the two maxima of Eq. 1."""
    ports = 0.0
    first, second, at_first, at_second = -1.0, -1.0, 0, 0
    for g in range(len(send_G)):
        out, into = send_G[g] * port_s_XG[0, g], recv_G[g] * port_s_XG[1, g]
        back, home = recv_G[g] * port_s_XG[2, g], send_G[g] * port_s_XG[3, g]
        ports += out + into + back + home
        if gate_s_G[g] + max(out, into) > first:
            first, at_first = gate_s_G[g] + max(out, into), g
        if work_s_G[g] + max(back, home) > second:
            second, at_second = work_s_G[g] + max(back, home), g
    return first + second, ports, at_first, at_second


@njit(cache=True)
def _shift(tokens: Tokens, costs: Costs, tables: Tables, a: int, h: int) -> None:
    """Moves expert a to GPU h and updates all tables."""
    experts_VK, source_V, count_V, of_expert_X, start_E = tokens
    gpu_E, held_G, work_s_G, _, hits_VG, rows_SG, joint_ESG, sole_EES = tables
    g = gpu_E[a]
    if g == h:
        return
    for v in of_expert_X[start_E[a] : start_E[a + 1]]:
        s, many = source_V[v], count_V[v]
        hits_g, hits_h = hits_VG[v, g] - 1, hits_VG[v, h]
        if hits_g == 0:
            rows_SG[s, g] -= many
        if hits_h == 0:
            rows_SG[s, h] += many
        turned = (hits_h == 0) * many - (hits_g == 0) * many  # whether a is the only one of the token's experts on its GPU
        for e in experts_VK[v]:
            if e == a:
                continue
            sole_EES[a, e, s] += turned
            if hits_g == (gpu_E[e] == g):
                joint_ESG[e, s, g] -= many
            if hits_h == (gpu_E[e] == h):
                joint_ESG[e, s, h] += many
            becomes = many if gpu_E[e] == g and hits_g == 1 else -many if gpu_E[e] == h and hits_h == 1 else 0
            if becomes:
                for f in experts_VK[v]:
                    sole_EES[e, f, s] += becomes
        hits_VG[v, g] = hits_g
        hits_VG[v, h] = hits_h + 1
    gpu_E[a] = h
    held_G[g] -= 1
    held_G[h] += 1
    work_s_G[g] -= costs.expert_s_GE[g, a]
    work_s_G[h] += costs.expert_s_GE[h, a]
