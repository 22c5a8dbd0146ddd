"""Tokens split over replicas, one after the other: what the runtime's local-first rule must equal."""

import numpy as np


def capacities(load_E, rule):
    """(E, M) int64: the tokens that each replica takes of load_E (E,): its share, rounded up or down."""
    upto_EM, phase_E1 = rule.upto_EM.numpy(), rule.phase_E.numpy()[:, None]
    return np.diff((load_E[:, None] * upto_EM + phase_E1) // upto_EM[:, -1:], axis=1, prepend=0)


def local_first(tokens_SE, rule):
    """(S, E, M) int64: how many tokens of each rank go to each replica, given those of all ranks, tokens_SE (S, E) int64.

    A rank's own tokens first fill its own replicas' shares; what is over goes, source after source, to what is left of the
    shares, replica after replica.
    """
    left_EM, left_SE = capacities(tokens_SE.sum(axis=0), rule), tokens_SE.copy()
    rows_SEM = np.zeros((len(tokens_SE), *left_EM.shape), dtype=np.int64)
    holders = [(holder, *at) for at, holder in np.ndenumerate(rule.rank_EM.numpy())]
    others = [(source, *at) for source in range(len(tokens_SE)) for at in np.ndindex(left_EM.shape)]
    for source, expert, replica in (*holders, *others):
        taken = min(left_SE[source, expert], left_EM[expert, replica])
        rows_SEM[source, expert, replica] += taken
        left_SE[source, expert] -= taken
        left_EM[expert, replica] -= taken
    return rows_SEM
