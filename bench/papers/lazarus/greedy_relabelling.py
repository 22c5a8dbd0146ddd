"""Relabelling of nodes as in the paper, greedy; ours is `aurora.algorithms.recovery.fewest_moves`."""

import numpy as np

from aurora.types.arrays import IntArray


def greedy_moves(old_NE: IntArray, new_NE: IntArray, bytes_E: IntArray, alike_N: IntArray) -> IntArray:
    """Relabels nodes greedily: each node in turn takes the part of the new placement for which it receives the fewest bytes.

    Arguments are as in `fewest_moves`, for N nodes: old_NE and new_NE (N, E) say which node holds which expert, bytes_E (E,)
    are the weights of each expert, and nodes with equal numbers in alike_N (N,) may exchange their parts. Returns (N,) int64:
    entry n is the node that takes what the new placement gives to node n.

    Source:
        Lazarus (arXiv:2407.04656) §4.3.
    """
    arriving_NN = (new_NE * bytes_E) @ (1 - old_NE).T
    taker_N = np.full(len(old_NE), -1, dtype=np.int64)
    for node in range(len(old_NE)):
        open_N = np.flatnonzero((taker_N < 0) & (alike_N == alike_N[node]))
        taker_N[open_N[arriving_NN[open_N, node].argmin()]] = node
    return taker_N
