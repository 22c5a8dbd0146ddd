"""The judge: replays plans and schedules from first principles. It calls none of the makers."""

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import Order, Plan, Schedule
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # relative, for sums of float seconds; bytes are compared exactly


def check_order(order: Order, gpus: int) -> None:
    """Every ordered pair of `gpus` ranks exactly once, or BrokenPlan."""
    found = order.pairs_X2
    expected = gpus * (gpus - 1)
    if len(found) != expected or len({(s, d) for s, d in found.tolist() if s != d and max(s, d) < gpus}) != expected:
        raise BrokenPlan(f"order {order.method}: expected each of {expected} ordered pairs once, found {len(found)} rows")


def check_schedule(schedule: Schedule, bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray) -> None:
    """BrokenPlan unless the schedule carries every byte once and no port is ever asked for more than its rate.

    Bytes match bytes_GG (G, G) exactly. For every port and every interval between a start and an end, the transfers that
    lie wholly inside fit into rate x length (which is also enough for rates to exist that never exceed the port). Where
    the schedule claims one partner at a time, no two transfers of a port overlap.
    """
    what = f"schedule {schedule.method}"
    n = len(bytes_GG)
    src, dst = schedule.src_X, schedule.dst_X
    start, end = schedule.start_s_X, schedule.end_s_X
    if len(src) and max(int(src.max()), int(dst.max())) >= n:
        raise BrokenPlan(f"{what}: names a rank beyond the {n} that there are")
    carried = np.zeros((n, n), dtype=np.int64)
    np.add.at(carried, (src, dst), schedule.bytes_X)
    if not np.array_equal(carried, bytes_GG):
        i, j = np.argwhere(carried != bytes_GG)[0]
        raise BrokenPlan(f"{what}: {i} -> {j} carries {carried[i, j]} bytes, expected {bytes_GG[i, j]}")
    if (start < 0).any() or (end < start).any():
        raise BrokenPlan(f"{what}: a transfer ends before it starts, or starts before zero")
    for side, ports, rates in (("sends", src, out_Bps), ("receives", dst, in_Bps)):
        for port in range(n):
            rows = np.flatnonzero(ports == port)
            rows = rows[np.argsort(start[rows], kind="stable")]
            if schedule.one_to_one and (start[rows][1:] < end[rows][:-1] * (1 - SLACK)).any():
                raise BrokenPlan(f"{what}: rank {port} {side} to or from two partners at once")
            _check_rate(what, f"rank {port} {side}", schedule.bytes_X[rows], start[rows], end[rows], float(rates[port]))


def _check_rate(what: str, who: str, size_X: IntArray, start_X: FloatArray, end_X: FloatArray, rate: float) -> None:
    ends = np.sort(end_X)
    rank = np.searchsorted(ends, end_X, side="right") - 1
    late_X = np.zeros(len(ends))  # bytes, by end, of the transfers that start no earlier than the current one
    for row in np.argsort(-start_X, kind="stable"):
        late_X[rank[row]] += size_X[row]
        inside = np.cumsum(late_X)
        room = rate * (ends - start_X[row])
        over = inside > room * (1 + SLACK) + 1e-6
        if (over & (ends >= start_X[row])).any():
            at = int(np.argmax(over & (ends >= start_X[row])))
            raise BrokenPlan(
                f"{what}: {who} {inside[at]:.0f} bytes between {start_X[row]:.6g} s and {ends[at]:.6g} s, "
                f"its port carries {room[at]:.0f}"
            )


def check_plan(plan: Plan) -> None:
    """BrokenPlan unless the plan can be what it says (placements check themselves).

    Every order names each pair once, no layer is predicted faster than the fluid bound, the objective not below its bound.
    """
    gpus = len(plan.cluster)
    for model in plan.models:
        for layer, orders in enumerate(zip(model.dispatch_L, model.combine_L, strict=True)):
            for order in orders:
                check_order(order, gpus)
            floor_s = float(model.fluid_bound_s_L[layer])
            if not 0 <= floor_s * (1 - 1e-6) <= model.dispatch_s_L[layer] < np.inf:
                raise BrokenPlan(
                    f"plan of {model.model!r}, layer {layer}: dispatch of {model.dispatch_s_L[layer]:.6g} s is below "
                    f"the fluid bound of {floor_s:.6g} s"
                )
    if not 0 <= plan.bound_s * (1 - 1e-6) <= plan.objective_s < np.inf:
        raise BrokenPlan(f"plan: objective {plan.objective_s:.6g} s is below its bound {plan.bound_s:.6g} s")
