"""Changes of one GPU's slots that a slot search tries: swaps, moves, further replicas, replacements; each by its objective."""

from aurora.algorithms.search.slot_state import (
    FIRST,
    add_share,
    copy_with_share,
    find_rest,
    find_rest_of_two,
    larger,
    objective,
    with_share,
)
from aurora.types.compiled import njit
from aurora.types.placement import EMPTY_INT64 as EMPTY

ENOUGH_GPUS = 8  # a change that helps is taken when it is the best of this many GPUs' slots


@njit(cache=True, nogil=True)
def best_swap(layer, slots, scratch, g, best_s):
    """Finds the best swap of an expert of GPU g with another GPU's, or move to another GPU's empty slot.

    Returns (objective in seconds, slot, other GPU, its slot, number of changes evaluated). Slots and GPU are EMPTY if no change
    brings the objective below best_s.
    """
    held_GP, share_GP, holds_GE, weight_W = slots.held_GP, slots.share_GP, slots.holds_GE, slots.weight_W
    part_s_GEXW, aggregate_s_W, sum_s_GXW = layer.part_s_GEXW, layer.aggregate_s_W, slots.sum_s_GXW
    ours_PXW, theirs_QXW, rest_YW = scratch.ours_PXW, scratch.theirs_QXW, scratch.rest_YW
    seconds_W, ranked_W, top_YWR, top_s_YWR = scratch.seconds_W, scratch.ranked_W, slots.top_YWR, slots.top_s_YWR
    cases = len(weight_W)
    best_p, best_h, best_q, priced = EMPTY, EMPTY, EMPTY, 0
    for p in range(layer.slots_G[g]):
        if held_GP[g, p] != EMPTY:
            copy_with_share(part_s_GEXW, sum_s_GXW, ours_PXW, p, g, held_GP[g, p], -share_GP[g, p])
    for step in range(1, len(layer.slots_G)):
        h = (g + step) % len(layer.slots_G)
        if step > ENOUGH_GPUS and best_p != EMPTY:
            break
        find_rest_of_two(top_YWR, top_s_YWR, g, h, rest_YW)
        least_s = 0.0
        for w in range(cases):
            least_s += weight_W[w] * (rest_YW[0, w] + rest_YW[1, w] + aggregate_s_W[w])
        if least_s >= best_s:
            continue
        moved = False
        for q in range(layer.slots_G[h]):
            b, share_b = held_GP[h, q], share_GP[h, q]
            if b == EMPTY:
                if moved:
                    continue
                moved = True
                b, share_b = 0, 0.0  # nothing of some expert comes back
            elif holds_GE[g, b]:
                continue
            copy_with_share(part_s_GEXW, sum_s_GXW, theirs_QXW, q, h, b, -share_b)
            for p in range(layer.slots_G[g]):
                a, share_a = held_GP[g, p], share_GP[g, p]
                if a == EMPTY or holds_GE[h, a]:
                    continue
                priced += 1
                for w in range(cases):
                    first_s = larger(
                        with_share(ours_PXW, p, part_s_GEXW, g, b, share_b, 0, w),
                        with_share(theirs_QXW, q, part_s_GEXW, h, a, share_a, 0, w),
                    )
                    second_s = larger(
                        with_share(ours_PXW, p, part_s_GEXW, g, b, share_b, 1, w),
                        with_share(theirs_QXW, q, part_s_GEXW, h, a, share_a, 1, w),
                    )
                    seconds_W[w] = larger(rest_YW[0, w], first_s) + larger(rest_YW[1, w], second_s) + aggregate_s_W[w]
                value_s = objective(seconds_W, weight_W, ranked_W, layer.worst, best_s)
                if value_s < best_s:
                    best_s, best_p, best_h, best_q = value_s, p, h, q
    return best_s, best_p, best_h, best_q, priced


@njit(cache=True, nogil=True)
def best_exchange(layer, slots, scratch, g, best_s):
    """Finds the best GPU with which GPU g could exchange all experts.

    Returns (GPU, number of changes evaluated). The GPU is EMPTY if no exchange brings the objective below best_s.
    """
    held_GP, slots_G, base_s_GXW, row_GXW = slots.held_GP, layer.slots_G, layer.base_s_GXW, scratch.row_GXW
    rest_YW, seconds_W = scratch.rest_YW, scratch.seconds_W
    best_gpu, priced = EMPTY, 0
    for h in range(len(slots_G)):
        if h == g or experts_held(held_GP, g) > slots_G[h] or experts_held(held_GP, h) > slots_G[g]:
            continue
        priced += 1
        for at, gpu, source in ((0, g, h), (1, h, g)):
            copy_with_share(layer.part_s_GEXW, base_s_GXW, row_GXW, at, gpu, FIRST, 0.0)
            for p in range(slots_G[source]):
                if held_GP[source, p] != EMPTY:
                    add_share(layer.part_s_GEXW, row_GXW, at, gpu, held_GP[source, p], slots.share_GP[source, p])
        find_rest_of_two(slots.top_YWR, slots.top_s_YWR, g, h, rest_YW)
        for w in range(len(seconds_W)):
            seconds_W[w] = layer.aggregate_s_W[w]
            for y in range(2):
                ours_s = larger(row_GXW[0, 2 * y, w], row_GXW[0, 2 * y + 1, w])
                theirs_s = larger(row_GXW[1, 2 * y, w], row_GXW[1, 2 * y + 1, w])
                seconds_W[w] += larger(rest_YW[y, w], larger(ours_s, theirs_s))
        value_s = objective(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)
        if value_s < best_s:
            best_s, best_gpu = value_s, h
    return best_gpu, priced


@njit(cache=True, nogil=True)
def best_count_change(layer, slots, scratch, gain_G, g, best_s):
    """Finds the change of replica counts that lowers the objective most by taking load from GPU g.

    Either an expert of g gets a further replica elsewhere, in an empty slot or in place of another replica; or a replica on g
    is replaced by an expert of a critical GPU, or removed. The search for a place or an expert is skipped if taking the load
    from g alone does not bring the objective below best_s.

    Returns (objective in seconds, GPU, slot, expert to put there, number of changes evaluated).
    """
    held_GP, count_E, holds_GE = slots.held_GP, slots.count_E, slots.holds_GE
    to, place, come, priced = EMPTY, EMPTY, EMPTY, 0
    for p in range(layer.slots_G[g]):
        a = held_GP[g, p]
        if a == EMPTY:
            continue
        priced += 2
        if count_E[a] < len(holds_GE) and count_changed(layer, slots, scratch, EMPTY, EMPTY, a, best_s) < best_s:
            best_s, h, q, more = _best_place(layer, slots, scratch, a, best_s)
            priced += more
            if h != EMPTY:
                to, place, come = h, q, a
        if count_E[a] > 1:
            value_s = count_changed(layer, slots, scratch, g, a, EMPTY, best_s)
            if value_s < best_s:
                best_s, to, place, come = value_s, g, p, EMPTY
                for h in range(len(gain_G)):
                    for q in range(layer.slots_G[h]):
                        e = held_GP[h, q]
                        if e == EMPTY or holds_GE[g, e]:
                            continue
                        priced += 1
                        value_s = count_changed(layer, slots, scratch, g, a, e, best_s)
                        if value_s < best_s:
                            best_s, to, place, come = value_s, g, p, e
    return best_s, to, place, come, priced


@njit(cache=True, nogil=True)
def count_changed(layer, slots, scratch, h, x, e, best_s):
    """Returns the objective if GPU h loses its replica of expert x and gets a replica of expert e.

    A value of best_s or more is only a lower bound on the objective. x EMPTY: no replica leaves. e EMPTY: none comes. h EMPTY:
    the other replicas of e give up a share for a new one, whose own cost is left out.
    """
    part_s_GEXW, sum_s_GXW, count_E, gpu_EG = layer.part_s_GEXW, slots.sum_s_GXW, slots.count_E, slots.gpu_EG
    row_GXW, row_G, gpu_G, rest_YW = scratch.row_GXW, scratch.row_G, scratch.gpu_G, scratch.rest_YW
    seconds_W, rows = scratch.seconds_W, FIRST
    if e != EMPTY:
        share = 1.0 / (count_E[e] + 1)
        for at in range(count_E[e]):
            g = gpu_EG[e, at]
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, e, share - 1.0 / count_E[e])
        if h != EMPTY:
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, h, e, share)
    if x != EMPTY:
        share = 1.0 / count_E[x]
        more = 1.0 / (count_E[x] - 1) - share
        for at in range(count_E[x]):
            g = gpu_EG[x, at]
            rows = _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, x, -share if g == h else more)
    find_rest(sum_s_GXW, slots.top_YWR, slots.top_s_YWR, row_G, rest_YW)
    for at in range(rows):
        row_G[gpu_G[at]] = EMPTY
        for y in range(2):
            for w in range(len(seconds_W)):
                rest_YW[y, w] = larger(rest_YW[y, w], larger(row_GXW[at, 2 * y, w], row_GXW[at, 2 * y + 1, w]))
    for w in range(len(seconds_W)):
        seconds_W[w] = rest_YW[0, w] + rest_YW[1, w] + layer.aggregate_s_W[w]
    return objective(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)


@njit(cache=True, nogil=True)
def _best_place(layer, slots, scratch, a, best_s):
    """The best place of a further replica of expert a: (objective, GPU, slot, changes priced), if below best_s.

    It follows `count_changed` for the relief of a: rest_YW has the slowest GPUs after that, and where the changed GPU is one
    of them, its seconds count as if it kept all that it holds.
    """
    held_GP, count_E, gpu_EG, sum_s_GXW = slots.held_GP, slots.count_E, slots.gpu_EG, slots.sum_s_GXW
    part_s_GEXW, theirs_QXW, row_GXW = layer.part_s_GEXW, scratch.theirs_QXW, scratch.row_GXW
    rest_YW, most_YW, seconds_W = scratch.rest_YW, scratch.most_YW, scratch.seconds_W
    share, cases = 1.0 / (count_E[a] + 1), len(seconds_W)
    to, place, priced = EMPTY, EMPTY, 0
    for step in range(len(layer.slots_G)):
        h = (gpu_EG[a, 0] + step) % len(layer.slots_G)
        if step > ENOUGH_GPUS and to != EMPTY:
            break
        if slots.holds_GE[h, a]:
            continue
        emptied, copied = False, False
        for q in range(layer.slots_G[h]):
            x, gone = held_GP[h, q], 0.0
            if x == EMPTY:
                if emptied:
                    continue
                emptied = True
                x = a
            elif count_E[x] < 2:
                continue
            else:
                gone = 1.0 / count_E[x]
            if not copied:
                copied = True
                copy_with_share(part_s_GEXW, sum_s_GXW, theirs_QXW, FIRST, h, a, share)
            priced += 1
            for y in range(2):
                for w in range(cases):
                    most_YW[y, w] = larger(rest_YW[y, w], with_share(theirs_QXW, FIRST, part_s_GEXW, h, x, -gone, y, w))
            if x != a:
                more = 1.0 / (count_E[x] - 1) - gone
                for at in range(count_E[x]):
                    k = gpu_EG[x, at]
                    if k != h:
                        relief = share - 1.0 / count_E[a] if slots.holds_GE[k, a] else 0.0
                        copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, FIRST, k, a, relief)
                        for y in range(2):
                            for w in range(cases):
                                changed_s = with_share(row_GXW, FIRST, part_s_GEXW, k, x, more, y, w)
                                most_YW[y, w] = larger(most_YW[y, w], changed_s)
            for w in range(cases):
                seconds_W[w] = most_YW[0, w] + most_YW[1, w] + layer.aggregate_s_W[w]
            value_s = objective(seconds_W, slots.weight_W, scratch.ranked_W, layer.worst, best_s)
            if value_s < best_s:
                best_s, to, place = value_s, h, q
    return best_s, to, place, priced


@njit(cache=True, nogil=True)
def _change_row(part_s_GEXW, sum_s_GXW, row_GXW, row_G, gpu_G, rows, g, e, share):
    """Adds a share of expert e to the row of GPU g, a new one unless it has one; returns the number of rows."""
    if row_G[g] != EMPTY:
        add_share(part_s_GEXW, row_GXW, row_G[g], g, e, share)
        return rows
    row_G[g], gpu_G[rows] = rows, g
    copy_with_share(part_s_GEXW, sum_s_GXW, row_GXW, rows, g, e, share)
    return rows + 1


@njit(cache=True, nogil=True)
def experts_held(held_GP, g):
    """Number of experts on GPU g."""
    experts = 0
    for e in held_GP[g]:
        experts += e != EMPTY
    return experts
