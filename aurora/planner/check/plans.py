"""Checkers of plans, orders and schedules: replay them from first principles, without calling any planner."""

from functools import lru_cache

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import Fabric, Network, Order, Plan, Schedule
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # relative, for sums of float seconds; bytes are compared exactly


def check_order(order: Order, gpus: int) -> None:
    """Checks that an order carries every byte of every ordered pair of ranks exactly once.

    Args:
        order: the order.
        gpus: number of ranks.

    Raises:
        BrokenPlan: if a pair is missing, repeated or not fully covered, or a row takes more sub-channels than its ports have.
    """
    what = f"order {order.method}"
    if order.share_X2 is None and _each_once(order.pairs_X2, gpus):
        _check_sub_channels(order, gpus)
        return
    whole = [(0.0, 1.0)] * len(order.pairs_X2) if order.share_X2 is None else [tuple(row) for row in order.share_X2.tolist()]
    parts: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for (src, dst), part in zip(order.pairs_X2.tolist(), whole, strict=True):
        if src == dst or max(src, dst) >= gpus:
            raise BrokenPlan(f"{what}: {src} -> {dst} is no pair of {gpus} ranks")
        parts.setdefault((src, dst), []).append(part)
    if len(parts) != gpus * (gpus - 1):
        raise BrokenPlan(f"{what}: expected each of {gpus * (gpus - 1)} ordered pairs once, found {len(parts)}")
    _check_sub_channels(order, gpus)
    for (src, dst), own in parts.items():
        own.sort()
        edges = [0.0, *(end for _, end in own)]
        if edges[-1] != 1.0 or any(begin != edge or end < begin for (begin, end), edge in zip(own, edges, strict=False)):
            raise BrokenPlan(f"{what}: expected {src} -> {dst} once, found the parts {own}")


def _each_once(pairs_X2: IntArray, gpus: int) -> bool:
    """Whether the rows are the ordered pairs of `gpus` ranks, each once and nothing else."""
    src_X, dst_X = pairs_X2.T
    if len(src_X) != gpus * (gpus - 1) or (src_X == dst_X).any() or (pairs_X2 >= gpus).any():
        return False
    return bool((np.bincount(src_X * gpus + dst_X, minlength=1) <= 1).all())


def _check_sub_channels(order: Order, gpus: int) -> None:
    """Raises BrokenPlan unless every row's sub-channels fit into both of its ports."""
    sub_channels = order.sub_channels
    if sub_channels is None:
        return
    if len(sub_channels.out_G) != gpus:
        raise BrokenPlan(f"order {order.method}: expected the sub-channels of {gpus} ranks, found {len(sub_channels.out_G)}")
    for (src, dst), taken in zip(order.pairs_X2.tolist(), sub_channels.row_X.tolist(), strict=True):
        if not 1 <= taken <= min(sub_channels.out_G[src], sub_channels.in_G[dst]):
            raise BrokenPlan(f"order {order.method}: {src} -> {dst} takes {taken} sub-channels, its ports have fewer")


def check_schedule(schedule: Schedule, bytes_GG: IntArray, network: Network) -> None:
    """Checks that a schedule carries every byte once and that no port or link is above its rate at any instant.

    The bytes of each pair must sum to bytes_GG exactly; each row's rate times its duration must match its bytes to within one
    byte and what floats resolve. If the schedule claims one partner at a time, no two transfers of a port may overlap. On a
    fabric, each pair's rate is divided over its shortest paths.

    Args:
        schedule: the schedule.
        bytes_GG: (G, G) int64, bytes from each rank to each other.
        network: port rates and fabric.

    Raises:
        BrokenPlan: if any of this fails.
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
    unsure_X = 1 + SLACK * schedule.bytes_X + schedule.rate_Bps_X * 4 * np.spacing(end)
    if (wrong := np.abs(moved_X - schedule.bytes_X) > unsure_X).any():
        at = int(np.argmax(wrong))
        raise BrokenPlan(f"{what}: row {at} carries {schedule.bytes_X[at]} bytes, but its rate moves {moved_X[at]:.0f}")
    for side, ports, rates in (("sends", src, network.out_Bps_G), ("receives", dst, network.in_Bps_G)):
        for port in range(n):
            rows = np.flatnonzero(ports == port)
            subject = f"{what}: rank {port} {side}"
            _check_rate(subject, "port", start[rows], end[rows], schedule.rate_Bps_X[rows], float(rates[port]))
            rows = rows[np.argsort(start[rows], kind="stable")]
            if schedule.one_to_one and (start[rows][1:] < end[rows][:-1] * (1 - SLACK)).any():
                raise BrokenPlan(f"{subject} to or from two partners at once")
    if network.fabric is not None:
        for link, share_GG in zip(network.fabric.links, _link_shares(network.fabric), strict=True):
            rows = np.flatnonzero(share_GG[src, dst])
            rate_X = schedule.rate_Bps_X[rows] * share_GG[src[rows], dst[rows]]
            _check_rate(f"{what}: {link} takes", "link", start[rows], end[rows], rate_X, link.Bps)


@lru_cache(maxsize=8)
def _link_shares(fabric: Fabric) -> tuple[FloatArray, ...]:
    """For each link (G, G): the part of each pair's shortest paths that takes it.

    GPUs do not forward, so each is two vertices: one sends, one receives. Of the shortest paths from s to t, those over the
    link u -> v are the paths from s to u times those from v to t, if they are as short.
    """
    n = fabric.gpus
    switch_at = {name: 2 * n + number for number, name in enumerate(fabric.switches)}
    src_X = [link.src if isinstance(link.src, int) else switch_at[link.src] for link in fabric.links]
    dst_X = [n + link.dst if isinstance(link.dst, int) else switch_at[link.dst] for link in fabric.links]
    hops_VV, paths_VV = _shortest_paths(src_X, dst_X, 2 * n + len(switch_at))
    hops_GG, paths_GG = hops_VV[:n, n : 2 * n], np.maximum(paths_VV[:n, n : 2 * n], 1)
    np.fill_diagonal(hops_GG, np.nan)  # a GPU sends nothing to itself
    shares = []
    for u, v in zip(src_X, dst_X, strict=True):
        shortest_GG = hops_VV[:n, u, None] + 1 + hops_VV[v, None, n : 2 * n] == hops_GG
        shares.append(shortest_GG * (paths_VV[:n, u, None] * paths_VV[v, None, n : 2 * n] / paths_GG))
    return tuple(shares)


def _shortest_paths(src_X: list[int], dst_X: list[int], vertices: int) -> tuple[FloatArray, FloatArray]:
    """(V, V) links on the shortest paths between vertices, infinite if there is none, and (V, V) how many such paths there are.

    The paths of k links are the walks of k links to vertices that no shorter walk reaches.
    """
    linked_VV = np.zeros((vertices, vertices))
    linked_VV[src_X, dst_X] = 1.0
    walks_VV = paths_VV = np.eye(vertices)
    hops_VV = np.where(walks_VV, 0.0, np.inf)
    for hops in range(1, vertices):
        walks_VV = walks_VV @ linked_VV
        reached_VV = (walks_VV > 0) & np.isinf(hops_VV)
        if not reached_VV.any():
            break
        hops_VV[reached_VV] = hops
        paths_VV = paths_VV + np.where(reached_VV, walks_VV, 0.0)
    return hops_VV, paths_VV


def _check_rate(subject: str, what: str, start_X: FloatArray, end_X: FloatArray, rate_X: FloatArray, most_Bps: float) -> None:
    """Raises BrokenPlan if the total rate of a port or link exceeds its capacity just after any start or end."""
    at_s = np.concatenate([end_X, start_X])
    change = np.concatenate([-rate_X, rate_X])
    sequence = np.argsort(at_s, kind="stable")  # at one instant, ends count before starts
    total = np.cumsum(change[sequence])
    if (above := total > most_Bps * (1 + SLACK)).any():
        at = int(np.argmax(above))
        raise BrokenPlan(f"{subject} {total[at]:.6g} B/s at {at_s[sequence][at]:.6g} s, its {what} carries {most_Bps:.6g}")


def check_hops(schedule: Schedule, bytes_GG: IntArray, node_G: IntArray, nic_Bps_G: FloatArray, inside_Bps: float) -> None:
    """Checks that every byte goes from its source to its destination by hops that are possible.

    A GPU may send on only what has arrived whole. Between servers no NIC may be above its rate; inside a server no GPU may send
    or receive above inside_Bps.

    Args:
        schedule: a schedule with hops.
        bytes_GG: (G, G) int64, bytes from each GPU to each other.
        node_G: (G,) int64, the server of each GPU.
        nic_Bps_G: (G,) float64, bytes per second of each GPU's NIC.
        inside_Bps: bytes per second that a GPU sends, and receives, inside its server.

    Raises:
        BrokenPlan: if any of this fails.
    """
    what = f"schedule {schedule.method}"
    assert schedule.hop_X2 is not None
    start, end, rate = schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X
    unsure_X = 1 + SLACK * schedule.bytes_X + rate * 4 * np.spacing(end)
    if (np.abs(rate * (end - start) - schedule.bytes_X) > unsure_X).any() or (start < 0).any():
        raise BrokenPlan(f"{what}: a hop's rate and time do not give its bytes")
    inside_X = node_G[schedule.hop_X2[:, 0]] == node_G[schedule.hop_X2[:, 1]]
    for tier, name in ((inside_X, "inside its server"), (~inside_X, "by its NIC")):
        for side, verb in ((0, "sends"), (1, "receives")):
            for gpu in range(len(bytes_GG)):
                rows = np.flatnonzero(tier & (schedule.hop_X2[:, side] == gpu))
                port_Bps = inside_Bps if tier is inside_X else float(nic_Bps_G[gpu])
                _check_rate(f"{what}: rank {gpu} {verb} {name}", "port", start[rows], end[rows], rate[rows], port_Bps)
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, pair in enumerate(zip(schedule.src_X.tolist(), schedule.dst_X.tolist(), strict=True)):
        rows_of.setdefault(pair, []).append(row)
    for src, dst in sorted({*rows_of, *map(tuple, np.argwhere(bytes_GG).tolist())}):
        _check_pair_hops(what, schedule, rows_of.get((src, dst), []), src, dst, int(bytes_GG[src, dst]))


def _check_pair_hops(what: str, schedule: Schedule, rows: list[int], src: int, dst: int, size: int) -> None:
    """Replays all hops of one pair: a GPU has what it sends, and all bytes end up at dst."""
    assert schedule.hop_X2 is not None
    here: dict[int, int] = {src: size}
    events = [(float(schedule.start_s_X[row]), 1, row) for row in rows]
    events += [(float(schedule.end_s_X[row]) * (1 - SLACK), 0, row) for row in rows]
    for _, leaves, row in sorted(events):
        gpu, moved = int(schedule.hop_X2[row, 1 - leaves]), int(schedule.bytes_X[row])
        here[gpu] = here.get(gpu, 0) + (-moved if leaves else moved)
        if here[gpu] < 0:
            raise BrokenPlan(f"{what}: rank {gpu} sends bytes of {src} -> {dst} that it does not have")
    if {gpu: left for gpu, left in here.items() if left} != ({dst: size} if size else {}):
        raise BrokenPlan(f"{what}: {src} -> {dst}: expected {size} bytes at rank {dst}, found {here}")


def check_plan(plan: Plan) -> None:
    """Checks that a plan is consistent; its placements are checked when they are made.

    Every order names each pair once. No layer is predicted faster than the fluid bound or its cut. Every GPU's memory holds the
    weights that the models place there. The objective is not below its bounds. With `min_replicas`, every expert is on enough
    GPUs and nodes.

    Raises:
        BrokenPlan: if any of this fails.
    """
    gpus = len(plan.cluster)
    for model in plan.models:
        if len(model.cut_L) != (0 if plan.cluster.fabric is None else len(model.dispatch_L)):
            raise BrokenPlan(
                f"plan of {model.model!r}: expected a cut for each layer on a fabric only, found {len(model.cut_L)}"
            )
        for layer, orders in enumerate(zip(model.dispatch_L, model.combine_L, strict=True)):
            for order in orders:
                check_order(order, gpus)
            bound_s = float(model.bound_s_L[layer])
            if not 0 <= bound_s * (1 - 1e-6) <= model.dispatch_s_L[layer] < np.inf:
                raise BrokenPlan(
                    f"plan of {model.model!r}, layer {layer}: dispatch of {model.dispatch_s_L[layer]:.6g} s is below "
                    f"the fluid bound or cut of {bound_s:.6g} s"
                )
    _check_memory(plan)
    for bound_s in (plan.bound_s, plan.assignment_bound_s or 0.0):
        if not 0 <= bound_s * (1 - 1e-6) <= plan.objective_s < np.inf:
            raise BrokenPlan(f"plan: objective {plan.objective_s:.6g} s is below its bound {bound_s:.6g} s")
    if plan.options.min_replicas is not None and plan.survival_LK is not None:
        _check_min_replicas(plan, plan.options.min_replicas, plan.survival_LK)


def _check_memory(plan: Plan) -> None:
    """Raises BrokenPlan if the weights on a GPU, those of all models, exceed its memory."""
    for rank, gpu in enumerate(plan.cluster.gpus):
        held_M = [sum(len(layer[rank]) for layer in model.placement.slots_LG) for model in plan.models]
        need = sum(m.other_bytes + held * m.expert_bytes for m, held in zip(plan.models, held_M, strict=True))
        if need > gpu.memory_bytes:
            raise BrokenPlan(
                f"plan: gpu {gpu.name!r} has {gpu.memory_bytes} bytes of memory, but the {sum(held_M)} experts of all layers "
                f"and the other weights on it need {need}"
            )


def _check_min_replicas(plan: Plan, min_replicas: int, survival_LK: FloatArray) -> None:
    """Raises BrokenPlan if an expert is on fewer GPUs or nodes than min_replicas, or min_replicas - 1 failures may lose one."""
    placement = plan.models[0].placement
    node_G = np.unique([gpu.node for gpu in plan.cluster.gpus], return_inverse=True)[1]
    nodes = int(node_G.max()) + 1
    if survival_LK.shape != (len(placement.slots_LG), nodes - 1) or ((survival_LK < 0) | (survival_LK > 1)).any():
        raise BrokenPlan(f"plan: expected probabilities of surviving 1 to {nodes - 1} failures, found {survival_LK.tolist()}")
    if (survival_LK[:, : min_replicas - 1] < 1).any():
        raise BrokenPlan(
            f"plan: expected {min_replicas - 1} failures survived for certain, found {survival_LK[:, : min_replicas - 1].min()}"
        )
    for layer in range(len(placement.slots_LG)):
        held_EG = placement.holds_EG(layer)
        held_EN = np.array([held_EG[:, node_G == node].any(axis=1) for node in range(nodes)]).T
        for held_EX, what in ((held_EG, "GPUs"), (held_EN, "nodes")):
            least = int(held_EX.sum(axis=1).min())
            if least < min(min_replicas, held_EX.shape[1]):
                raise BrokenPlan(f"plan, layer {layer}: an expert is on {least} {what}, expected {min_replicas} or all")
