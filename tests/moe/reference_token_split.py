"""Tokens split over replicas in numpy, rank by rank: what the runtime's kernels must equal."""

import numpy as np


def capacities(load_E, split):
    """(X,) int64: the tokens that each replica takes of load_E (E,): its share, rounded up or down."""
    load_X, whole_X, phase_X = load_E[split.expert_X], split.whole_E[split.expert_X], split.phase_E[split.expert_X]
    return (load_X * split.stop_X + phase_X) // whole_X - (load_X * split.start_X + phase_X) // whole_X


def local_first(tokens_SE, split, rank):
    """(X,) int64: how many of `rank`'s tokens go to each replica, given those of all ranks, tokens_SE (S, E) int64.

    A rank's own tokens first fill its own replicas' shares; what is over goes, source after source, to what is left of the
    shares, replica after replica.
    """
    expert_X, here_X = split.expert_X, split.rank_X == rank
    capacity_X = capacities(tokens_SE.sum(axis=0), split)
    local_X = np.minimum(capacity_X, tokens_SE[split.rank_X, expert_X])
    capacity_X -= local_X
    until_X = capacity_X.cumsum()
    begin_E = until_X[split.first_E] - capacity_X[split.first_E]
    own_X = local_X * here_X
    over_E = tokens_SE[rank] - np.add.reduceat(own_X, split.first_E)
    begin_E += tokens_SE[:rank].sum(axis=0) - np.add.reduceat(local_X * (split.rank_X < rank), split.first_E)
    start_X = begin_E[expert_X]
    stop_X = start_X + over_E[expert_X]
    return own_X + np.maximum(np.minimum(until_X, stop_X) - np.maximum(until_X - capacity_X, start_X), 0)


def tokens_to_ranks(rows_SX, split):
    """(S, G) int64: tokens from each rank to each, of what every rank sends to every replica."""
    tokens_SG = np.zeros((len(rows_SX), len(rows_SX)), dtype=np.int64)
    np.add.at(tokens_SG.T, split.rank_X, rows_SX.T)
    return tokens_SG
