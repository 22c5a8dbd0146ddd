"""From the placement in force to a new one: which GPU takes which part, so that the fewest bytes move, and what moves."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp

from aurora.types.arrays import FloatArray, IntArray

Held = Sequence[Sequence[int]]  # of one layer: the experts on each GPU


def holds(held_G: Held, experts: int) -> IntArray:
    """(G, E) int64: 1 where GPU g holds expert e."""
    holds_GE = np.zeros((len(held_G), experts), dtype=np.int64)
    for gpu, held in enumerate(held_G):
        holds_GE[gpu, list(held)] = 1
    return holds_GE


def fewest_moves(
    old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray, alike_G: IntArray, node_G: IntArray | None = None
) -> IntArray:
    """(G,) int64: the GPU that takes what the new placement gave to GPU g, such that the fewest bytes arrive anywhere.

    old_GE, new_GE (G, E) int64: 1 where a GPU holds an expert; bytes_E (E,) int64: an expert's weights (the columns of two
    models that share GPUs stand side by side). alike_G (G,) int64: GPUs of one number may stand in for each other. node_G (G,)
    int64: GPUs of one number stay together, for nodes as a whole take each other's places; None: each by itself. Exact: a
    minimum-cost assignment, of nodes by those of their GPUs. Ties leave GPUs where they are.
    """
    arriving_GG = (new_GE * bytes_E) @ (1 - old_GE).T  # what GPU h lacks of the new GPU g's experts
    n = len(old_GE)
    stays_GG = arriving_GG * (n + 1) + (1 - np.eye(n, dtype=np.int64))
    cost_GG = np.where(alike_G[:, None] == alike_G[None, :], stays_GG, np.inf)
    if node_G is None:
        return np.asarray(linear_sum_assignment(cost_GG)[1], dtype=np.int64)
    gpus_N = [np.flatnonzero(node_G == node) for node in np.unique(node_G)]
    kinds_N = [sorted(alike_G[own].tolist()) for own in gpus_N]
    cost_NN = np.full((len(gpus_N),) * 2, np.inf)
    inner: dict[tuple[int, int], IntArray] = {}
    for a, b in product(range(len(gpus_N)), repeat=2):
        if kinds_N[a] == kinds_N[b]:
            part = cost_GG[np.ix_(gpus_N[a], gpus_N[b])]
            rows, inner[a, b] = linear_sum_assignment(part)
            cost_NN[a, b] = part[rows, inner[a, b]].sum()
    taker_G = np.empty(n, dtype=np.int64)
    for a, b in enumerate(linear_sum_assignment(cost_NN)[1].tolist()):
        taker_G[gpus_N[a]] = gpus_N[b][inner[a, b]]
    return taker_G


def greedy_moves(old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray, alike_G: IntArray) -> IntArray:
    """As `fewest_moves`, GPU after GPU the one of the new placement that brings it fewest bytes: the baseline of Lazarus
    §4.3."""
    arriving_GG = (new_GE * bytes_E) @ (1 - old_GE).T
    taker_G = np.full(len(old_GE), -1, dtype=np.int64)
    for gpu in range(len(old_GE)):
        open_G = np.flatnonzero((taker_G < 0) & (alike_G == alike_G[gpu]))
        taker_G[open_G[arriving_GG[open_G, gpu].argmin()]] = gpu
    return taker_G


def moved_bytes(old_GE: IntArray, new_GE: IntArray, bytes_E: IntArray) -> IntArray:
    """(G, G) int64: expert weights that travel from GPU to GPU; an expert with several owners is drawn from all of them.

    Owners' shares of each arrival are equal, and the odd bytes go to the owners that have sent least. Experts that no GPU held
    before come from elsewhere and are not counted.
    """
    n = len(old_GE)
    moved_GG = np.zeros((n, n), dtype=np.int64)
    for gpu, expert in np.argwhere((new_GE == 1) & (old_GE == 0)).tolist():
        owners = np.flatnonzero(old_GE[:, expert])
        if not len(owners):
            continue
        owners = owners[np.argsort(moved_GG[owners].sum(axis=1), kind="stable")]
        share, odd = divmod(int(bytes_E[expert]), len(owners))
        moved_GG[owners, gpu] += share + (np.arange(len(owners)) < odd)
    return moved_GG


def worth_moving(saved_s_L: FloatArray, bytes_L: IntArray, most_bytes: int) -> IntArray:
    """(L,) 0 or 1: which layers move, such that they save the most seconds and move at most `most_bytes` (a knapsack, exact).

    saved_s_L (L,) float64: what a layer's new placement saves over the one in force; bytes_L (L,) int64: what it moves.
    """
    gains = (saved_s_L > 0) & (bytes_L <= most_bytes)
    if bytes_L[gains].sum() <= most_bytes:
        return gains.astype(np.int64)
    rows = np.flatnonzero(gains)
    scale = float(saved_s_L[rows].max())
    room = LinearConstraint((bytes_L[rows] / most_bytes)[None, :], -np.inf, 1.0)
    found = milp(
        -saved_s_L[rows] / scale,
        constraints=room,
        integrality=np.ones(len(rows), dtype=np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, "moving nothing is always possible"
    chosen = np.zeros(len(bytes_L), dtype=np.int64)
    chosen[rows] = np.rint(found.x).astype(np.int64)
    return chosen
