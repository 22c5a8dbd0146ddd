"""How a layer's tokens divide over replicas: by their shares, a rank's own first. Every rank computes it apart and all agree.

Whole tokens throughout: shares and what is left over are laid on one line and cut. Source: Lazarus Alg. 1 (arXiv:2407.04656);
what is left over divides by all residual shares, of which the printed sum leaves one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from aurora.planner.migration.relabelling import Held
from aurora.types.arrays import FloatArray, IntArray

WHOLE = 1 << 20  # what uneven shares are whole parts of


@dataclass(frozen=True)
class Holders:
    """The replicas of a layer by expert, then by rank. expert_X, rank_X (X,) int64; from_X, upto_X (X,) int64: the part of its
    expert's whole that each takes. first_E (E,): where each expert's begin; whole_E, phase_E (E,) int64: parts in all, and what
    is added before cutting, so that single tokens of different experts do not all go to the same rank."""

    expert_X: IntArray
    rank_X: IntArray
    from_X: IntArray
    upto_X: IntArray
    first_E: IntArray
    whole_E: IntArray
    phase_E: IntArray


def holders(held_G: Held, share_G: Sequence[Sequence[float]] | None = None) -> Holders:
    """held_G: the experts in each rank's slots; one that is there twice takes twice as much. share_G: which part of its
    expert's load each slot takes instead."""
    parts: dict[tuple[int, int], float] = {}
    for rank, held in enumerate(held_G):
        for slot, expert in enumerate(held):
            parts[expert, rank] = parts.get((expert, rank), 0) + (1 if share_G is None else share_G[rank][slot])
    expert_X, rank_X = np.array(sorted(parts)).T
    part_X = np.array([parts[pair] for pair in sorted(parts)])
    first_E = np.flatnonzero(np.diff(expert_X, prepend=-1))
    count_E = np.diff(first_E, append=len(expert_X))
    upto_X = part_X.cumsum()
    upto_X -= np.repeat(upto_X[first_E] - part_X[first_E], count_E)
    if share_G is not None:
        even_E = np.maximum.reduceat(part_X, first_E) == np.minimum.reduceat(part_X, first_E)
        nth_X = np.arange(len(expert_X)) - np.repeat(first_E, count_E) + 1
        last_X = np.repeat(upto_X[first_E + count_E - 1], count_E)
        upto_X = np.where(np.repeat(even_E, count_E), nth_X, np.rint(upto_X / last_X * WHOLE))
    upto_X = upto_X.astype(np.int64)
    from_X = np.where(np.diff(expert_X, prepend=-1) > 0, 0, np.roll(upto_X, 1))
    whole_E = upto_X[first_E + count_E - 1]
    phase_E = whole_E * (np.arange(len(first_E)) % count_E) // count_E
    return Holders(expert_X, rank_X, from_X, upto_X, first_E, whole_E, phase_E)


def capacities(load_E: IntArray, held: Holders) -> IntArray:
    """(X,) int64: the tokens that each replica takes of load_E (E,): its share, rounded up or down."""
    load_X, whole_X, phase_X = load_E[held.expert_X], held.whole_E[held.expert_X], held.phase_E[held.expert_X]
    upto_X = (load_X * held.upto_X + phase_X) // whole_X
    return np.asarray(upto_X - (load_X * held.from_X + phase_X) // whole_X)


def dispatch(tokens_SE: IntArray, held: Holders, rank: int) -> IntArray:
    """(X,) int64: how many of `rank`'s tokens go to each replica, given those of all, tokens_SE (S, E) int64.

    A rank's own tokens first fill its own replicas' shares; what is over goes, source after source, to what is left of the
    shares, replica after replica.
    """
    expert_X, here_X = held.expert_X, held.rank_X == rank
    room_X = capacities(tokens_SE.sum(axis=0), held)
    local_X = np.minimum(room_X, tokens_SE[held.rank_X, expert_X])
    room_X -= local_X
    until_X = room_X.cumsum()
    begin_E = until_X[held.first_E] - room_X[held.first_E]
    own_X = local_X * here_X
    over_E = tokens_SE[rank] - np.add.reduceat(own_X, held.first_E)
    begin_E += tokens_SE[:rank].sum(axis=0) - np.add.reduceat(local_X * (held.rank_X < rank), held.first_E)
    from_X = begin_E[expert_X]
    upto_X = from_X + over_E[expert_X]
    shared_X: IntArray = np.maximum(np.minimum(until_X, upto_X) - np.maximum(until_X - room_X, from_X), 0)
    return np.asarray(own_X + shared_X)


def exchanged(rows_SX: IntArray, held: Holders) -> IntArray:
    """(S, G) int64: tokens from each rank to each, of what every rank sends to every replica."""
    tokens_SG = np.zeros((len(rows_SX), len(rows_SX)), dtype=np.int64)
    np.add.at(tokens_SG.T, held.rank_X, rows_SX.T)
    return tokens_SG


@dataclass(frozen=True)
class Routed:
    """rows_SX (S, X) int64: tokens from each rank to each replica. seconds: of the layer; bound_s: below what no division of
    the tokens takes, whole or not."""

    rows_SX: IntArray
    seconds: float
    bound_s: float


def routed(
    tokens_SE: IntArray, held: Holders, token_s_G: FloatArray, send_s_G: FloatArray, recv_s_G: FloatArray, back: float = 1.0
) -> Routed:
    """The division that takes least time on ports and GPUs, shares or not: dispatch, experts and combine one after another,
    each as long as its busiest GPU.

    token_s_G (G,) seconds to compute a token; send_s_G, recv_s_G (G,) to send and receive one; back: the bytes of an answer
    over those of a token. A linear program, then rounded to whole tokens; for as many ranks as a server has.
    """
    source_V, at_V = np.nonzero(tokens_SE[:, held.expert_X])  # a variable for each rank and replica of what it has
    expert_V, rank_V = held.expert_X[at_V], held.rank_X[at_V]
    variables, ranks = len(source_V), len(tokens_SE)
    row_V, away_V = np.arange(variables), (source_V != rank_V).astype(np.float64)
    limits = [  # (which phase, the GPU it loads, seconds a token)
        (0, source_V, away_V * send_s_G[source_V]),
        (0, rank_V, away_V * recv_s_G[rank_V]),
        (1, rank_V, token_s_G[rank_V]),
        (2, rank_V, away_V * back * send_s_G[rank_V]),
        (2, source_V, away_V * back * recv_s_G[source_V]),
    ]
    rows = []
    for phase, gpu_V, cost_V in limits:
        loads = coo_array((cost_V, (gpu_V, row_V)), shape=(ranks, variables + 3))
        longest = coo_array((-np.ones(ranks), (np.arange(ranks), np.full(ranks, variables + phase))), shape=loads.shape)
        rows.append(loads + longest)
    pair_V = source_V * tokens_SE.shape[1] + expert_V
    pair_P, nth_V = np.unique(pair_V, return_inverse=True)
    sums = coo_array((np.ones(variables), (nth_V, row_V)), shape=(len(pair_P), variables + 3))
    tokens_P = tokens_SE.flat[pair_P].astype(np.float64)
    held_to = LinearConstraint(vstack(rows).tocsr(), -np.inf, 0.0), LinearConstraint(sums.tocsr(), tokens_P, tokens_P)
    found = milp(np.append(np.zeros(variables), np.ones(3)), constraints=held_to)
    assert found.x is not None, "sending every token anywhere is always possible"
    rows_SX = np.zeros((ranks, len(held.expert_X)), dtype=np.int64)
    rows_SX[source_V, at_V] = _whole(found.x[:variables], nth_V, tokens_P)
    return Routed(rows_SX, _seconds(rows_SX, held, token_s_G, send_s_G, recv_s_G, back), float(found.fun))


def _whole(part_V: FloatArray, pair_V: IntArray, tokens_P: FloatArray) -> IntArray:
    """Parts of each pair's tokens as whole tokens, cut at their running sum."""
    upto_V = np.maximum(part_V, 0).cumsum()
    first_P = np.flatnonzero(np.diff(pair_V, prepend=-1))
    count_P = np.diff(first_P, append=len(part_V))
    upto_V -= np.repeat(upto_V[first_P] - np.maximum(part_V, 0)[first_P], count_P)
    upto_V *= np.repeat(tokens_P / upto_V[first_P + count_P - 1], count_P)
    cut_V = np.rint(upto_V).astype(np.int64)
    begins_V = np.diff(pair_V, prepend=-1) > 0
    return np.asarray(cut_V - np.where(begins_V, 0, np.roll(cut_V, 1)))


def _seconds(
    rows_SX: IntArray, held: Holders, token_s_G: FloatArray, send_s_G: FloatArray, recv_s_G: FloatArray, back: float
) -> float:
    tokens_GG = exchanged(rows_SX, held)
    loads_G = tokens_GG.sum(axis=0)
    np.fill_diagonal(tokens_GG, 0)
    out_G, in_G = tokens_GG.sum(axis=1), tokens_GG.sum(axis=0)
    there = max((out_G * send_s_G).max(), (in_G * recv_s_G).max())
    return float(there + (loads_G * token_s_G).max() + back * max((in_G * send_s_G).max(), (out_G * recv_s_G).max()))
