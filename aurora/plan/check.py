"""The judge: replays plans and schedules from first principles. It calls none of the makers."""

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import Order, Plan, Schedule
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # relative, for sums of float seconds; bytes are compared exactly


def check_order(order: Order, gpus: int) -> None:
    """Every byte of every ordered pair of `gpus` ranks exactly once, or BrokenPlan."""
    what = f"order {order.method}"
    whole = [(0.0, 1.0)] * len(order.pairs_X2) if order.share_X2 is None else [tuple(row) for row in order.share_X2.tolist()]
    parts: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for (src, dst), part in zip(order.pairs_X2.tolist(), whole, strict=True):
        if src == dst or max(src, dst) >= gpus:
            raise BrokenPlan(f"{what}: {src} -> {dst} is no pair of {gpus} ranks")
        parts.setdefault((src, dst), []).append(part)
    if len(parts) != gpus * (gpus - 1):
        raise BrokenPlan(f"{what}: expected each of {gpus * (gpus - 1)} ordered pairs once, found {len(parts)}")
    for (src, dst), own in parts.items():
        own.sort()
        edges = [0.0, *(end for _, end in own)]
        if edges[-1] != 1.0 or any(begin != edge or end < begin for (begin, end), edge in zip(own, edges, strict=False)):
            raise BrokenPlan(f"{what}: expected {src} -> {dst} once, found the parts {own}")


def check_schedule(schedule: Schedule, bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray) -> None:
    """BrokenPlan unless the schedule carries every byte once and no port is above its rate at any instant.

    Bytes match bytes_GG (G, G) exactly in sum, and each row's rate and time within a byte. Where the schedule claims one
    partner at a time, no two transfers of a port overlap.
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
    moved_X = schedule.rate_Bps_X * (end - start)
    if (wrong := np.abs(moved_X - schedule.bytes_X) > 1 + SLACK * schedule.bytes_X).any():
        at = int(np.argmax(wrong))
        raise BrokenPlan(f"{what}: row {at} carries {schedule.bytes_X[at]} bytes, but its rate moves {moved_X[at]:.0f}")
    for side, ports, rates in (("sends", src, out_Bps), ("receives", dst, in_Bps)):
        for port in range(n):
            rows = np.flatnonzero(ports == port)
            who = f"{what}: rank {port} {side}"
            _check_rate(who, start[rows], end[rows], schedule.rate_Bps_X[rows], float(rates[port]))
            rows = rows[np.argsort(start[rows], kind="stable")]
            if schedule.one_to_one and (start[rows][1:] < end[rows][:-1] * (1 - SLACK)).any():
                raise BrokenPlan(f"{who} to or from two partners at once")


def _check_rate(who: str, start_X: FloatArray, end_X: FloatArray, rate_X: FloatArray, port_Bps: float) -> None:
    """The port's total rate just after every start and end."""
    at_s = np.concatenate([end_X, start_X])
    change = np.concatenate([-rate_X, rate_X])
    sequence = np.argsort(at_s, kind="stable")  # at one instant what ends makes room first
    total = np.cumsum(change[sequence])
    if (over := total > port_Bps * (1 + SLACK)).any():
        at = int(np.argmax(over))
        raise BrokenPlan(f"{who} {total[at]:.6g} B/s at {at_s[sequence][at]:.6g} s, its port carries {port_Bps:.6g}")


def check_plan(plan: Plan) -> None:
    """BrokenPlan unless the plan can be what it says (placements check themselves).

    Every order names each pair once, no layer is predicted faster than the fluid bound, the objective not below its bounds.
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
    if not 0 <= plan.free_bound_s * (1 - 1e-6) <= plan.bound_s:
        raise BrokenPlan(f"plan: bound {plan.bound_s:.6g} s is below that of all placements, {plan.free_bound_s:.6g} s")
    if not 0 <= plan.bound_s * (1 - 1e-6) <= plan.objective_s < np.inf:
        raise BrokenPlan(f"plan: objective {plan.objective_s:.6g} s is below its bound {plan.bound_s:.6g} s")
