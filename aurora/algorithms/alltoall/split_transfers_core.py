"""The optimum of few ranks, and transfers worth cutting, compiled by Cython; see `split_transfers`."""

import cython
import numpy as np
from cython import cclass, cfunc, declare, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import ConstFloats2, ConstInts2, Float, Floats1, Floats2, Index, Ints2
else:
    from aurora.algorithms.core_arrays import ConstFloats2, ConstInts2, Float, Floats1, Floats2, Index, Ints2

INF = declare(Float, float("inf"))


@final
@cclass
class Tree:
    """A branch of the search for the shortest schedule, and the best one so far. Ports are numbered senders first."""

    n: Index
    took_GG: Floats2  # seconds of each transfer that has not begun
    free_s: Floats1  # (2 n,) when each port is free
    left_s: Floats1  # (2 n,) what each port still has to carry
    pairs_X2: Ints2
    start_s_X: Floats1
    best_X2: Ints2
    best_start_s_X: Floats1
    best_s: Float

    def __init__(self, took_GG: Floats2, known_s: Float):
        seconds_GG = np.asarray(took_GG)
        rows = np.count_nonzero(seconds_GG)
        self.n, self.took_GG, self.best_s = len(seconds_GG), took_GG, known_s
        self.free_s = np.zeros(2 * self.n)
        self.left_s = np.concatenate([seconds_GG.sum(axis=1), seconds_GG.sum(axis=0)])
        self.pairs_X2, self.best_X2 = np.zeros((rows, 2), np.int64), np.zeros((rows, 2), np.int64)
        self.start_s_X, self.best_start_s_X = np.zeros(rows), np.zeros(rows)


def shortest_active(took_GG: Floats2, known_s: Float):
    """Returns the pairs, their starts and the makespan of the shortest schedule; known_s and zeros if none is shorter.

    took_GG (n, n), the seconds of each transfer, is working memory.
    """
    tree = Tree(took_GG, known_s)
    with nogil:
        _branch(tree, 0)
    return np.asarray(tree.best_X2), np.asarray(tree.best_start_s_X), tree.best_s


@cfunc
@nogil
@exceptval(check=False)
def _branch(tree: Tree, depth: Index) -> cython.void:
    """Extends the first `depth` transfers in every way."""
    n: Index = tree.n
    src: Index = -1
    dst: Index = -1
    took: Float
    start_s: Float
    lower_s: Float = 0.0
    first_s: Float = INF
    for port in range(2 * n):
        lower_s = max(lower_s, tree.free_s[port] + tree.left_s[port])
    if lower_s >= tree.best_s * (1 - 1e-12):
        return
    if depth == tree.pairs_X2.shape[0]:
        tree.best_X2[:, :] = tree.pairs_X2
        tree.best_start_s_X[:] = tree.start_s_X
        tree.best_s = lower_s
        return
    for i in range(n):
        for j in range(n):
            took = tree.took_GG[i, j]
            if took > 0.0 and max(tree.free_s[i], tree.free_s[n + j]) + took < first_s:
                first_s = max(tree.free_s[i], tree.free_s[n + j]) + took
                src, dst = i, j
    for i in range(n):
        for j in range(n):
            took = tree.took_GG[i, j]
            start_s = max(tree.free_s[i], tree.free_s[n + j])
            if took > 0.0 and (i == src or j == dst) and start_s < first_s:  # conflicts with the transfer that ends first
                free_out_s, free_in_s = tree.free_s[i], tree.free_s[n + j]
                left_out_s, left_in_s = tree.left_s[i], tree.left_s[n + j]
                tree.pairs_X2[depth, 0], tree.pairs_X2[depth, 1] = i, j
                tree.start_s_X[depth] = start_s
                tree.took_GG[i, j] = 0.0
                tree.free_s[i] = tree.free_s[n + j] = start_s + took
                tree.left_s[i] -= took
                tree.left_s[n + j] -= took
                _branch(tree, depth + 1)
                tree.took_GG[i, j] = took
                tree.free_s[i], tree.free_s[n + j] = free_out_s, free_in_s
                tree.left_s[i], tree.left_s[n + j] = left_out_s, left_in_s


def blocking_transfers(n: Index, pairs_X2: ConstInts2, span_s_X2: ConstFloats2, least_s: Float):
    """Returns the transfers that make the last ports to end wait for least_s or longer.

    Each is (source, destination, seconds into the transfer at which the wait begins).
    """
    free_s: Float
    port: Index
    blocking = []
    latest_s: Floats1 = np.empty(n)  # when the port begins its last transfer with each partner
    last: Index = np.argmax(np.asarray(span_s_X2)[:, 1])
    for side in range(2):
        port = pairs_X2[last, side]
        latest_s[:] = -1.0
        for row in range(pairs_X2.shape[0]):
            if pairs_X2[row, side] == port:
                latest_s[pairs_X2[row, 1 - side]] = span_s_X2[row, 0]
        free_s = 0.0
        for row in range(pairs_X2.shape[0]):
            if pairs_X2[row, side] != port:
                continue
            for busy in range(row if span_s_X2[row, 0] - free_s > least_s else 0):
                if (
                    span_s_X2[busy, 0] < free_s < span_s_X2[busy, 1]
                    and pairs_X2[busy, side] != port
                    and latest_s[pairs_X2[busy, 1 - side]] > free_s
                ):
                    blocking.append((pairs_X2[busy, 0], pairs_X2[busy, 1], free_s - span_s_X2[busy, 0]))
            free_s = span_s_X2[row, 1]
    return blocking
