"""Driver of the slot search that also takes changes for the worse: simulated annealing, compiled by Cython.

Its price are rows between servers, with limits (`server_rows_core`).
"""

import cython
import numpy as np
from cython import cast, cclass, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.search.server_rows_core import *
    from cython.cimports.aurora.algorithms.search.slots_core import *
    from cython.cimports.libc.math import exp
else:
    from math import exp

    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.server_rows_core import *
    from aurora.algorithms.search.slots_core import *


@final
@cclass
class Annealing:
    """A placement that is annealed, its price, and the best placement so far."""

    layer: Layer
    slots: Slots
    rows: ServerRows
    best_GP: Ints2
    slack_s: Float  # seconds above limits that do not count
    tiny_s: Float  # a difference that sums of floats may have
    best_over_s: Float
    best: Int

    def __init__(self, sums, held_GP: Ints2, tokens, limits, slack_s: Float, tiny_s: Float):
        self.layer = Layer(sums)
        self.slots, self.best_GP = Slots(self.layer, held_GP), np.array(held_GP)
        self.rows = ServerRows(self.layer, self.slots, *tokens, limits)
        self.slack_s, self.tiny_s = slack_s, tiny_s
        self.best, self.best_over_s = 0, max(self.rows.over_s, slack_s)

    @property
    def now(self):
        """(held_GP, seconds above limits, rows that cross more than at the start) of the placement as it is."""
        return np.asarray(self.slots.held_GP), self.rows.over_s, self.rows.rows


@cython.locals(
    a=Index, b=Index, g=Index, h=Index, m=Index, n=Index, q=Index, experts=Index, empty=Index, rows=Int, over_s=Float,
    cost=Float
)  # fmt: skip
def anneal(annealing: Annealing, draws_S3: ConstFloats2, heat: Float, cooler: Float, price: Float, dearer: Float):
    """Makes a step for each row of draws, which are from 0 to 1: swaps two experts, or moves one to an empty slot.

    Args:
        annealing: the placement, which is changed.
        draws_S3: (S, 3) float64.
        heat, cooler: the temperature in rows, and the factor by which it falls in each step.
        price, dearer: the rows that a second above a limit counts as, and the factor by which they rise.

    Returns:
        (held_GP, (seconds, rows)): of the best placement so far the expert in each slot, the seconds above limits beside
        slack_s, and the rows that cross more than at the start.
    """
    layer, slots, table = annealing.layer, annealing.slots, annealing.rows
    experts = layer.experts
    empty = layer.gpus if np.sum(layer.slots_G) > experts else 0
    with nogil:
        for step in range(draws_S3.shape[0]):
            heat, price = heat * cooler, price * dearer
            a, b = cast(Index, draws_S3[step, 0] * experts), cast(Index, draws_S3[step, 1] * (experts + empty))
            g, h = slots.gpu_EG[a, 0], slots.gpu_EG[b, 0] if b < experts else b - experts
            b = b if b < experts else EMPTY
            if g == h:
                continue
            q = slot_of(layer, slots, h, b)
            if q == EMPTY:
                continue
            rows = peek_rows(table, a, table.server_G[g], b, table.server_G[h])
            over_s = peek_over(table, layer, slots, a, g, b, h)
            cost = rows + price * over_s
            if cost > 0 and draws_S3[step, 2] >= exp(-cost / heat):
                continue
            swap(layer, slots, g, slot_of(layer, slots, g, a), h, q)
            m, n = table.server_G[g], table.server_G[h]
            if m != n:
                remove(table, m, a)
                add(table, n, a)
                if b != EMPTY:
                    remove(table, n, b)
                    add(table, m, b)
            table.rows += rows
            table.over_s += over_s
            if table.over_s < annealing.best_over_s - annealing.tiny_s or (
                table.rows < annealing.best and table.over_s <= annealing.best_over_s
            ):
                annealing.best, annealing.best_over_s = table.rows, larger(table.over_s, annealing.slack_s)
                annealing.best_GP[:, :] = slots.held_GP
    return np.array(annealing.best_GP), (annealing.best_over_s - annealing.slack_s, annealing.best)
