"""Checks of orders and schedules, compiled by Cython; `plans` calls them, and says in words what they find.

They share nothing with what makes orders and times them. A row that is found is -1 if there is none.
"""

import cython
import numpy as np
from cython import declare, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *

SLACK = declare(Float, 1e-9)  # relative, for sums of float seconds and loads; bytes are compared exactly
EPS = declare(Float, 2.0**-52)


@cython.locals(src=Index, dst=Index, row=Index, begin=Float, end=Float, foreign=Index, wrong=Index, torn=Index)
def faults_of_order(
    pairs_X2: ConstInts2, n: Index, share_X2: ConstFloats2 = None, by_part_X: ConstInts1 = None, tier_X: ConstInts1 = None
):
    """Finds a row between ranks that do not exist, a pair that is not carried once, and one with parts in several tiers.

    Args:
        pairs_X2: (X, 2) source and destination of each row.
        n: number of ranks.
        share_X2, tier_X: as in Order.
        by_part_X: (X,) the rows by their shares; None if share_X2 is.

    Returns:
        The row and the two pairs; a pair is source * n + destination.
    """
    end_GG: Floats2 = np.zeros((n, n))  # of the parts of each pair so far
    tier_GG: Ints2 = None if tier_X is None else np.full((n, n), EMPTY)
    foreign = wrong = torn = -1
    with nogil:
        for x in range(pairs_X2.shape[0]):
            row = x if share_X2 is None else by_part_X[x]
            src, dst = pairs_X2[row, 0], pairs_X2[row, 1]
            if not (0 <= src < n and 0 <= dst < n and src != dst):
                foreign = row
                break
            begin, end = 0.0, 1.0
            if share_X2 is not None:
                begin, end = share_X2[row, 0], share_X2[row, 1]
            if wrong < 0 and not begin == end_GG[src, dst] <= end:
                wrong = src * n + dst
            end_GG[src, dst] = end
            if tier_X is not None:
                if torn < 0 and tier_GG[src, dst] not in (EMPTY, tier_X[row]):
                    torn = src * n + dst
                tier_GG[src, dst] = tier_X[row]
        for src in range(n if foreign < 0 and wrong < 0 else 0):
            for dst in range(n):
                if src != dst and end_GG[src, dst] != 1.0:
                    wrong = src * n + dst
    return foreign, wrong, torn


@cython.locals(step=Index, src=Index, dst=Index, start_s=Float, end_s=Float, rate_Bps=Float, last_s=Float, moved=Float)
@cython.locals(foreign=Index, unsent=Index, untimed=Index, unmoved=Index, hasty=Index, late=Index, alone=cython.bint)
def faults_of_rows(
    src_X: ConstInts1,
    dst_X: ConstInts1,
    bytes_X: ConstInts1,
    start_s_X: ConstFloats1,
    end_s_X: ConstFloats1,
    rate_Bps_X: ConstFloats1,
    bytes_SGG: ConstInts3,
    out_Bps_G: ConstFloats1,
    in_Bps_G: ConstFloats1,
    step_X: ConstInts1 = None,
):
    """Finds what is wrong with single rows of a schedule, and with their bytes; arguments as in Schedule and `check_steps`.

    Returns:
        A row between ranks, or of a step, that do not exist; a step and pair whose bytes are wrong, as an index of bytes_SGG; a
        row that does not end after its start; a row whose rate does not carry its bytes; a step, and a rank, that begins it
        before its earlier steps have ended. Last, whether each row starts after all rows before it at its ports have ended, and
        keeps to their rates.
    """
    steps: Index = bytes_SGG.shape[0]
    n: Index = bytes_SGG.shape[1]
    carried_SGG: Ints3 = np.zeros((steps, n, n), np.int64)
    ended_s_SP: Floats2 = np.zeros((steps, 2 * n))
    foreign = unsent = untimed = unmoved = hasty = late = -1
    alone = True
    with nogil:
        for row in range(src_X.shape[0]):
            step = 0 if step_X is None else step_X[row]
            src, dst = src_X[row], dst_X[row]
            if not (0 <= src < n and 0 <= dst < n and 0 <= step < steps):
                foreign = row
                break
            carried_SGG[step, src, dst] += bytes_X[row]
            start_s, end_s, rate_Bps = start_s_X[row], end_s_X[row], rate_Bps_X[row]
            if not 0 <= start_s <= end_s:
                untimed = row
            moved = rate_Bps * (end_s - start_s)  # up to a byte, and what floats resolve
            if not abs(moved - bytes_X[row]) <= 1 + SLACK * bytes_X[row] + rate_Bps * 4 * EPS * end_s:
                unmoved = row
            alone = alone and rate_Bps <= out_Bps_G[src] and rate_Bps <= in_Bps_G[dst]
            alone = alone and ended_s_SP[step, src] <= start_s and ended_s_SP[step, n + dst] <= start_s
            ended_s_SP[step, src] = max(ended_s_SP[step, src], end_s)
            ended_s_SP[step, n + dst] = max(ended_s_SP[step, n + dst], end_s)
        if foreign < 0:
            for step in range(steps):
                for src in range(n):
                    for dst in range(n):
                        if carried_SGG[step, src, dst] != bytes_SGG[step, src, dst]:
                            unsent = (step * n + src) * n + dst
        if steps > 1 and foreign < 0:
            for rank in range(n):  # a rank sends and receives in a step
                last_s = 0.0
                for step in range(steps):
                    ended_s_SP[step, n + rank] = max(ended_s_SP[step, rank], ended_s_SP[step, n + rank])
                    ended_s_SP[step, rank] = last_s  # now of all earlier steps
                    last_s = max(last_s, ended_s_SP[step, n + rank])
            for row in range(src_X.shape[0]):
                step = step_X[row]
                src, dst = src_X[row], dst_X[row]
                rank = src if ended_s_SP[step, src] > ended_s_SP[step, dst] else dst
                if start_s_X[row] < ended_s_SP[step, rank] * (1 - SLACK):
                    hasty, late = step, rank
    return foreign, unsent, untimed, unmoved, hasty, late, alone and steps == 1


@cython.locals(row=Index, ended=Index, at=Index, port=Index, over=Index, over_row=Index, twice=Index)
def faults_of_ports(
    use_XK: ConstInts2,
    most_Bps_R: ConstFloats1,
    start_s_X: ConstFloats1,
    end_s_X: ConstFloats1,
    rate_Bps_X: ConstFloats1,
    by_start_X: ConstInts1,
    by_end_X: ConstInts1,
    tier_X: ConstInts1,
):
    """Finds a port or NIC above its rate just after a row starts, and a port with two rows of a tier at a time.

    At one instant, ends count before starts.

    Args:
        use_XK: (X, 2 or 4) the ports, and then the NICs, that each row uses; -1: none.
        most_Bps_R: (R,) the rate of each.
        start_s_X, end_s_X, rate_Bps_X: as in Schedule.
        by_start_X, by_end_X: the rows by start and by end.
        tier_X: (X,) the tier of each row.

    Returns:
        The port or NIC above its rate, the row by which it is, and its part of the rate in use; the port with two rows.
    """
    tiers: Index = 1 + np.max(tier_X, initial=0)
    use_R: Floats1 = np.zeros(len(most_Bps_R))
    ended_s_TR: Floats2 = np.zeros((tiers, len(most_Bps_R)))
    used: Float = 0.0
    ended = 0
    over = over_row = twice = -1
    with nogil:
        for x in range(use_XK.shape[0]):
            row = by_start_X[x]
            while ended < use_XK.shape[0] and end_s_X[by_end_X[ended]] <= start_s_X[row]:
                at = by_end_X[ended]
                for k in range(use_XK.shape[1]):
                    if use_XK[at, k] >= 0:
                        use_R[use_XK[at, k]] -= rate_Bps_X[at] / most_Bps_R[use_XK[at, k]]
                ended += 1
            for k in range(use_XK.shape[1]):
                port = use_XK[row, k]
                if port >= 0:
                    use_R[port] += rate_Bps_X[row] / most_Bps_R[port]
                    if over < 0 and use_R[port] > 1 + SLACK:
                        over, over_row, used = port, row, use_R[port]
                    if k < 2 and start_s_X[row] < ended_s_TR[tier_X[row], port] * (1 - SLACK):
                        twice = port
                    ended_s_TR[tier_X[row], port] = max(ended_s_TR[tier_X[row], port], end_s_X[row])
    return over, over_row, used, twice
