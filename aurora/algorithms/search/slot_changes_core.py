"""Changes of one GPU's slots that a slot search tries: swaps, moves, further replicas, replacements; each by its objective.

Compiled by Cython. See slots_core for the state.
"""

import cython
from cython import cfunc, declare, exceptval, inline, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.aurora.algorithms.search.slots_core import *
else:
    from aurora.algorithms.core_arrays import *
    from aurora.algorithms.search.slots_core import *

if not cython.compiled:
    SwapFound = cython.struct(value_s=Float, p=Index, h=Index, q=Index, priced=Int)
    CountFound = cython.struct(value_s=Float, to=Index, place=Index, come=Index, priced=Int)

ENOUGH_GPUS = declare(Index, 8)  # a change that helps is taken when it is the best of this many GPUs' slots


@cfunc
@inline
@nogil
@exceptval(check=False)
def with_share(layer: Layer, row_GXW: Floats3, at: Index, g: Index, e: Index, share: Float, y: Index, w: Index) -> Float:
    """The seconds of phase y in case w for row_GXW[at] plus `share` of expert e's seconds on GPU g."""
    one_s: Float = row_GXW[at, 2 * y, w] + share * layer.part_s_GEXW[g, e, 2 * y, w]
    return larger(one_s, row_GXW[at, 2 * y + 1, w] + share * layer.part_s_GEXW[g, e, 2 * y + 1, w])


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    h=Index, a=Index, b=Index, share_a=Float, share_b=Float, least_s=Float, value_s=Float,
    moved=cython.bint
)  # fmt: skip
def best_swap(layer: Layer, slots: Slots, g: Index, best_s: Float) -> SwapFound:
    """Finds the best swap of an expert of GPU g with another GPU's, or move to another GPU's empty slot."""
    found = declare(SwapFound)
    found.p = found.h = found.q = EMPTY
    found.priced = 0
    for p in range(layer.slots_G[g]):
        if slots.held_GP[g, p] != EMPTY:
            a = slots.held_GP[g, p]
            copy_with_share(layer, slots.sum_s_GXW, slots.ours_PXW, p, g, a, -slots.share_E[a])
    for step in range(1, layer.gpus):
        h = (g + step) % layer.gpus
        if step > ENOUGH_GPUS and found.p != EMPTY:
            break
        slots.row_G[g] = slots.row_G[h] = 0
        find_rest(slots)
        slots.row_G[g] = slots.row_G[h] = EMPTY
        least_s = slots.fixed_s
        for y in range(2):
            for w in range(layer.cases):
                least_s += slots.weight_YW[y, w] * slots.rest_YW[y, w]
        if least_s >= best_s:
            continue
        moved = False
        for q in range(layer.slots_G[h]):
            b, share_b = slots.held_GP[h, q], 0.0
            if b == EMPTY:
                if moved:
                    continue
                moved = True
                b = 0  # nothing of some expert comes back
            elif slots.holds_GE[g, b]:
                continue
            else:
                share_b = slots.share_E[b]
            copy_with_share(layer, slots.sum_s_GXW, slots.theirs_QXW, q, h, b, -share_b)
            for p in range(layer.slots_G[g]):
                a = slots.held_GP[g, p]
                if a == EMPTY or slots.holds_GE[h, a] or (p != q and layer.alike < layer.experts):
                    continue
                share_a = slots.share_E[a]
                found.priced += 1
                for y in range(2):
                    for w in range(layer.cases):
                        slots.most_YW[y, w] = larger(
                            slots.rest_YW[y, w],
                            larger(
                                with_share(layer, slots.ours_PXW, p, g, b, share_b, y, w),
                                with_share(layer, slots.theirs_QXW, q, h, a, share_a, y, w),
                            ),
                        )
                value_s = objective(layer, slots, best_s)
                if value_s < best_s:
                    best_s, found.p, found.h, found.q = value_s, p, h, q
    found.value_s = best_s
    return found


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(a=Index, e=Index, value_s=Float)
def best_count_change(layer: Layer, slots: Slots, g: Index, best_s: Float) -> CountFound:
    """Finds the change of replica counts that lowers the objective most by taking load from GPU g."""
    found = declare(CountFound)
    place = declare(SwapFound)
    found.to = found.place = found.come = EMPTY
    found.priced = 0
    for p in range(layer.slots_G[g]):
        a = slots.held_GP[g, p]
        if a == EMPTY:
            continue
        found.priced += 2
        if slots.count_E[a] < layer.gpus and count_changed(layer, slots, EMPTY, EMPTY, a, best_s) < best_s:
            place = best_place(layer, slots, a, best_s, False)
            best_s = place.value_s
            found.priced += place.priced
            if place.h != EMPTY:
                found.to, found.place, found.come = place.h, place.q, a
        if slots.count_E[a] > 1:
            value_s = count_changed(layer, slots, g, a, EMPTY, best_s)
            if value_s < best_s:
                best_s, found.to, found.place, found.come = value_s, g, p, EMPTY
                for h in range(layer.gpus):
                    for q in range(layer.slots_G[h]):
                        e = slots.held_GP[h, q]
                        if e == EMPTY or slots.holds_GE[g, e]:
                            continue
                        found.priced += 1
                        value_s = count_changed(layer, slots, g, a, e, best_s)
                        if value_s < best_s:
                            best_s, found.to, found.place, found.come = value_s, g, p, e
    found.value_s = best_s
    return found


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(g=Index, share=Float, more=Float)
def count_changed(layer: Layer, slots: Slots, h: Index, x: Index, e: Index, best_s: Float) -> Float:
    """The objective if GPU h loses its replica of expert x and gets a replica of expert e; see slot_search."""
    rows: Index = 0
    if e != EMPTY:
        share = 1.0 / (slots.count_E[e] + 1)
        for at in range(slots.count_E[e]):
            g = slots.gpu_EG[e, at]
            rows = _change_row(layer, slots, rows, g, e, share - 1.0 / slots.count_E[e])
        if h != EMPTY:
            rows = _change_row(layer, slots, rows, h, e, share)
    if x != EMPTY:
        share = 1.0 / slots.count_E[x]
        more = 1.0 / (slots.count_E[x] - 1) - share
        for at in range(slots.count_E[x]):
            g = slots.gpu_EG[x, at]
            rows = _change_row(layer, slots, rows, g, x, -share if g == h else more)
    find_rest(slots)
    for at in range(rows):
        slots.row_G[slots.gpu_G[at]] = EMPTY
        for y in range(2):
            for w in range(layer.cases):
                slots.rest_YW[y, w] = larger(
                    slots.rest_YW[y, w], larger(slots.row_GXW[at, 2 * y, w], slots.row_GXW[at, 2 * y + 1, w])
                )
    slots.most_YW[:, :] = slots.rest_YW
    return objective(layer, slots, best_s)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(
    gone=Float, more=Float, relief=Float, value_s=Float, h=Index, x=Index, k=Index, emptied=cython.bint, copied=cython.bint
)
def best_place(layer: Layer, slots: Slots, a: Index, best_s: Float, filling: cython.bint) -> SwapFound:
    """The best place of a further replica of expert a: (objective, GPU h, slot q, changes priced), if below best_s.

    `count_changed` for that replica, without a place, has to come before. `filling`: only empty slots, but of all GPUs.
    """
    found = declare(SwapFound)
    found.p = found.h = found.q = EMPTY
    found.priced = 0
    share: Float = 1.0 / (slots.count_E[a] + 1)
    for step in range(layer.gpus):
        h = step if filling else (slots.gpu_EG[a, 0] + step) % layer.gpus
        if step > ENOUGH_GPUS and found.h != EMPTY and not filling:
            break
        if slots.holds_GE[h, a]:
            continue
        emptied, copied = False, False
        for q in range(layer.slots_G[h]):
            x, gone = slots.held_GP[h, q], 0.0
            if x == EMPTY:
                if emptied:
                    continue
                emptied = True
                x = a
            elif filling or slots.count_E[x] < 2:
                continue
            else:
                gone = 1.0 / slots.count_E[x]
            if not copied:
                copied = True
                copy_with_share(layer, slots.sum_s_GXW, slots.theirs_QXW, 0, h, a, share)
            found.priced += 1
            for y in range(2):
                for w in range(layer.cases):
                    slots.most_YW[y, w] = larger(slots.rest_YW[y, w], with_share(layer, slots.theirs_QXW, 0, h, x, -gone, y, w))
            if x != a:
                more = 1.0 / (slots.count_E[x] - 1) - gone
                for at in range(slots.count_E[x]):
                    k = slots.gpu_EG[x, at]
                    if k != h:
                        relief = share - 1.0 / slots.count_E[a] if slots.holds_GE[k, a] else 0.0
                        copy_with_share(layer, slots.sum_s_GXW, slots.row_GXW, 0, k, a, relief)
                        for y in range(2):
                            for w in range(layer.cases):
                                slots.most_YW[y, w] = larger(
                                    slots.most_YW[y, w], with_share(layer, slots.row_GXW, 0, k, x, more, y, w)
                                )
            value_s = objective(layer, slots, best_s)
            if value_s < best_s:
                best_s, found.h, found.q = value_s, h, q
    found.value_s = best_s
    return found


@cfunc
@nogil
@exceptval(check=False)
def _change_row(layer: Layer, slots: Slots, rows: Index, g: Index, e: Index, share: Float) -> Index:
    """Adds a share of expert e to the row of GPU g, a new one unless it has one; returns the number of rows."""
    if slots.row_G[g] != EMPTY:
        add_share(layer, slots.row_GXW, slots.row_G[g], g, e, share)
        return rows
    slots.row_G[g], slots.gpu_G[rows] = rows, g
    copy_with_share(layer, slots.sum_s_GXW, slots.row_GXW, rows, g, e, share)
    return rows + 1
