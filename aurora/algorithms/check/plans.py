"""Checkers of plans, orders, schedules and replica placements: replay them from first principles; they call no planner."""

from itertools import combinations
from math import comb

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import (
    FailureDomains,
    GpuSlots,
    ModelPlan,
    Network,
    Order,
    Plan,
    ReplicaPlacement,
    ResilientPlacement,
    Schedule,
)
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # relative, for sums of float seconds and loads; bytes are compared exactly
LISTED = 20_000  # sets of failures that are tried one by one, at most
EPS = float(np.finfo(np.float64).eps)


def check_order(order: Order, gpus: int) -> None:
    """Checks that an order carries every byte of every ordered pair of ranks exactly once.

    Args:
        order: the order.
        gpus: number of ranks.

    Raises:
        BrokenPlan: if a pair is missing, repeated, not fully covered or in two tiers.
    """
    name = f"order {order.method}"
    src_X, dst_X = order.pairs_X2.T
    if order.share_X2 is None and (order.pairs_X2 < gpus).all():
        count_P = np.bincount(src_X * gpus + dst_X, minlength=gpus * gpus)
        if (count_P == 1 - np.eye(gpus, dtype=np.int64).ravel()).all():
            return
    if (foreign_X := (src_X == dst_X) | (order.pairs_X2 >= gpus).any(axis=1)).any():
        src, dst = order.pairs_X2[np.argmax(foreign_X)]
        raise BrokenPlan(f"{name}: {src} -> {dst} is no pair of {gpus} ranks")
    share_X2 = np.tile([0.0, 1.0], (len(src_X), 1)) if order.share_X2 is None else order.share_X2
    by_part = np.lexsort((share_X2[:, 1], share_X2[:, 0], src_X * gpus + dst_X))
    pair_X, (begin_X, end_X) = (src_X * gpus + dst_X)[by_part], share_X2[by_part].T
    first_X = np.diff(pair_X, prepend=-1) != 0
    if first_X.sum() != gpus * (gpus - 1):
        raise BrokenPlan(f"{name}: expected each of {gpus * (gpus - 1)} ordered pairs once, found {first_X.sum()}")
    last_X = np.append(first_X[1:], True)
    wrong_X = (begin_X != np.where(first_X, 0.0, np.roll(end_X, 1))) | (end_X < begin_X) | (last_X & (end_X != 1.0))
    if wrong_X.any():
        own_X = pair_X == pair_X[np.argmax(wrong_X)]
        src, dst = divmod(int(pair_X[own_X][0]), gpus)
        raise BrokenPlan(f"{name}: expected {src} -> {dst} once, found the parts {share_X2[by_part][own_X].tolist()}")
    if order.tier_X is not None and (torn_X := ~first_X & (np.diff(order.tier_X[by_part], prepend=0) != 0)).any():
        src, dst = divmod(int(pair_X[np.argmax(torn_X)]), gpus)
        raise BrokenPlan(f"{name}: expected the parts of {src} -> {dst} in one tier, found them in several")


def check_schedule(schedule: Schedule, bytes_GG: IntArray, network: Network) -> None:
    """Checks that a schedule carries every byte once and that no port or NIC is above its rate at any instant.

    The bytes of each pair must sum to bytes_GG exactly. Each row's rate times its duration must equal its bytes, up to one byte
    and the precision of floats. If the schedule is `one_to_one`, no two transfers of a port in one tier may overlap. Transfers
    between servers use the NICs of both GPUs.

    Args:
        schedule: the schedule.
        bytes_GG: (G, G) int64, bytes from each rank to each other.
        network: port rates, servers and NICs.

    Raises:
        BrokenPlan: if any of this fails.
    """
    name = f"schedule {schedule.method}"
    n = len(bytes_GG)
    src, dst = schedule.src_X, schedule.dst_X
    start, end = schedule.start_s_X, schedule.end_s_X
    rate_Bps = schedule.rate_Bps_X
    if max(src.max(initial=-1), dst.max(initial=-1)) >= n:
        raise BrokenPlan(f"{name}: names a rank beyond the {n} that there are")
    carried_GG = np.zeros((n, n), dtype=np.int64)
    np.add.at(carried_GG.ravel(), src * n + dst, schedule.bytes_X)
    if (wrong_GG := carried_GG != bytes_GG).any():
        i, j = np.argwhere(wrong_GG)[0].tolist()
        raise BrokenPlan(f"{name}: {i} -> {j} carries {carried_GG[i, j]} bytes, expected {bytes_GG[i, j]}")
    if ((start < 0) | (end < start)).any():
        raise BrokenPlan(f"{name}: a transfer ends before it starts, or starts before zero")
    moved = rate_Bps * (end - start)
    unsure = 1 + SLACK * schedule.bytes_X + rate_Bps * 4 * EPS * end  # a byte, and what floats resolve
    if (wrong_X := abs(moved - schedule.bytes_X) > unsure).any():
        row = np.argmax(wrong_X)
        raise BrokenPlan(f"{name}: row {row} carries {schedule.bytes_X[row]} bytes, but its rate moves {moved[row]:.0f}")
    by_verb = ("sends", src, network.out_Bps_G), ("receives", dst, network.in_Bps_G)
    alone = bool((rate_Bps <= np.minimum(network.out_Bps_G[src], network.in_Bps_G[dst])).all())
    alone = alone and max(_shared_port(port_X, start, end, 0.0) for port_X in (src, dst)) < 0
    for verb, port_X, most_Bps_G in () if alone else by_verb:
        port, at_s, total_Bps = _overload(port_X, start, end, rate_Bps, most_Bps_G)
        if port >= 0:
            overload = f"rank {port} {verb} {total_Bps:.6g} B/s at {at_s:.6g} s"
            raise BrokenPlan(f"{name}: {overload}, its port carries {most_Bps_G[port]:.6g}")
        tiered_X = port_X if schedule.tier_X is None else port_X + n * schedule.tier_X
        if schedule.one_to_one and (port := _shared_port(tiered_X, start, end, SLACK)) >= 0:
            raise BrokenPlan(f"{name}: rank {port % n} {verb} to or from two partners at once")
    if network.servers is not None:
        server_G, nic_G, nic_Bps = np.array(network.servers.server_G), np.array(network.servers.nic_G), network.servers.nic_Bps
        far_X = server_G[src] != server_G[dst]
        within = alone and not network.servers.shared and bool((rate_Bps[far_X] <= nic_Bps).all())
        for verb, rank_X in () if within else (("sends", src[far_X]), ("receives", dst[far_X])):
            spans = start[far_X], end[far_X], rate_Bps[far_X]
            nic, at_s, total_Bps = _overload(nic_G[rank_X], *spans, np.full(len(nic_G), nic_Bps))
            if nic >= 0:
                ranks = np.flatnonzero(nic_G == nic).tolist()
                overload = f"NIC of ranks {ranks} {verb} {total_Bps:.6g} B/s at {at_s:.6g} s"
                raise BrokenPlan(f"{name}: {overload}, it carries {nic_Bps:.6g}")


def _overload(
    at_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, rate_Bps_X: FloatArray, most_Bps_R: FloatArray
) -> tuple[int, float, float]:
    """The number, seconds and B/s of the first of the ports or NICs that is above its rate, just after a start or an end.

    At one instant, ends count before starts. The number is -1 if there is none.
    """
    at_Y, at_s_Y, use_X = np.tile(at_X, 2), np.concatenate([end_s_X, start_s_X]), rate_Bps_X / most_Bps_R[at_X]
    in_sequence = _by_port(at_Y, at_s_Y)
    use_Y = np.concatenate([-use_X, use_X])[in_sequence].cumsum()
    row = np.argmax(use_Y > 1 + SLACK) if len(use_Y) else 0
    if not len(use_Y) or use_Y[row] <= 1 + SLACK:
        return -1, 0.0, 0.0
    at = int(at_Y[in_sequence[row]])
    return at, float(at_s_Y[in_sequence[row]]), float(use_Y[row] * most_Bps_R[at])


def _shared_port(port_X: IntArray, start_s_X: FloatArray, end_s_X: FloatArray, slack: float) -> int:
    """The first port with a transfer that starts before another has ended; -1 if there is none."""
    in_sequence = _by_port(port_X, start_s_X)
    port_X = port_X[in_sequence]
    early_X = start_s_X[in_sequence[1:]] < end_s_X[in_sequence[:-1]] * (1 - slack)
    shared_X = port_X[1:][early_X & (port_X[1:] == port_X[:-1])]
    return int(shared_X[0]) if len(shared_X) else -1


def _by_port(port_X: IntArray, seconds_X: FloatArray) -> IntArray:
    """The sequence of rows by port, then by time."""
    few_bits = np.min_scalar_type(int(port_X.max(initial=0)))  # which are sorted in a quarter of the time
    return np.lexsort((seconds_X, port_X.astype(few_bits)))


def check_steps(schedule: Schedule, bytes_SGG: IntArray, network: Network) -> None:
    """Checks the schedule of an all-to-all as `check_schedule` does, and its steps if there are several.

    Each step must carry its own bytes, and a rank must not begin a step before its transfers of earlier steps have ended.

    Args:
        schedule: a schedule, with `step_X` if there are several steps.
        bytes_SGG: (S, G, G) int64, bytes from each rank to each other in each step.
        network: port rates, servers and NICs.

    Raises:
        BrokenPlan: if any of this fails.
    """
    name = f"schedule {schedule.method}"
    check_schedule(schedule, bytes_SGG.sum(axis=0), network)
    if len(bytes_SGG) == 1:
        return
    step_X, ends_2X = schedule.step_X, (schedule.src_X, schedule.dst_X)
    if step_X is None or step_X.max(initial=0) >= len(bytes_SGG):
        raise BrokenPlan(f"{name}: expected the step of each transfer, of {len(bytes_SGG)} steps")
    carried_SGG = np.zeros_like(bytes_SGG)
    np.add.at(carried_SGG, (step_X, *ends_2X), schedule.bytes_X)
    if (wrong_X3 := np.argwhere(carried_SGG != bytes_SGG)).size:
        step, src, dst = wrong_X3[0].tolist()
        carried, expected = carried_SGG[step, src, dst], bytes_SGG[step, src, dst]
        raise BrokenPlan(f"{name}, step {step}: {src} -> {dst} carries {carried} bytes, expected {expected}")
    ended_s_G = np.zeros(network.gpus)
    for step in range(len(bytes_SGG)):
        own_X = step_X == step
        for rank_X in ends_2X:
            early_X = own_X & (schedule.start_s_X < ended_s_G[rank_X] * (1 - SLACK))
            if early_X.any():
                rank = rank_X[np.argmax(early_X)]
                raise BrokenPlan(f"{name}: rank {rank} begins step {step} before its transfers of earlier steps have ended")
        for rank_X in ends_2X:
            np.maximum.at(ended_s_G, rank_X[own_X], schedule.end_s_X[own_X])


def check_plan(plan: Plan) -> None:
    """Checks that a plan is consistent; its placements check themselves when they are made.

    Every order must cover each pair once. Hierarchical all-to-alls must go over the cluster's servers. No layer's dispatch may
    be predicted faster than its fluid bound or cut. Every GPU's memory must hold the weights that the models place there. The
    objective must not be below its bounds. With `min_replicas`, every expert must be on enough GPUs and nodes.

    Raises:
        BrokenPlan: if any of this fails.
    """
    gpus = len(plan.cluster.gpus)
    for model in plan.models:
        name = f"plan of {model.model!r}"
        if len(model.cut_L) != (0 if plan.cluster.servers is None else len(model.dispatch_L)):
            raise BrokenPlan(f"{name}: expected a cut for each layer between servers only, found {len(model.cut_L)}")
        _check_servers(plan, model)
        for layer, bound_s in enumerate(model.bound_s_L.tolist()):
            for order in (model.dispatch_L[layer], model.combine_L[layer]):
                check_order(order, gpus)
            if not 0 <= bound_s * (1 - 1e-6) <= model.dispatch_s_L[layer] < np.inf:
                fault = f"dispatch of {model.dispatch_s_L[layer]:.6g} s is below the fluid bound or cut of {bound_s:.6g} s"
                raise BrokenPlan(f"{name}, layer {layer}: {fault}")
    _check_memory(plan)
    for bound_s in (plan.bound_s, plan.assignment_bound_s or 0.0):
        if not 0 <= bound_s * (1 - 1e-6) <= plan.objective_s < np.inf:
            raise BrokenPlan(f"plan: objective {plan.objective_s:.6g} s is below its bound {bound_s:.6g} s")
    if plan.options.min_replicas is not None and plan.survival_LK is not None:
        _check_min_replicas(plan, plan.options.min_replicas, plan.survival_LK)


def _check_servers(plan: Plan, model: ModelPlan) -> None:
    """Raises BrokenPlan if hierarchical all-to-alls go over other servers than the cluster's."""
    if model.hierarchy is None or plan.cluster.servers is None:
        return
    planned_G, real_G = model.hierarchy.server_G, np.array(plan.cluster.servers.server_G)
    if not np.array_equal(planned_G[:, None] == planned_G, real_G[:, None] == real_G):
        raise BrokenPlan(
            f"plan of {model.model!r}: expected all-to-alls over the cluster's servers {real_G.tolist()}, found "
            f"{planned_G.tolist()}"
        )


def _check_memory(plan: Plan) -> None:
    """Raises BrokenPlan if the weights on a GPU, those of all models, exceed its memory."""
    for rank, gpu in enumerate(plan.cluster.gpus):
        held_M = [sum(len(layer[rank]) for layer in model.placement.slots_LG) for model in plan.models]
        need = sum(m.other_bytes + experts * m.expert_bytes for m, experts in zip(plan.models, held_M, strict=True))
        if need > gpu.memory_bytes:
            raise BrokenPlan(
                f"plan: gpu {gpu.name!r} has {gpu.memory_bytes} bytes of memory, but the {sum(held_M)} experts of all layers "
                f"and the other weights on it need {need}"
            )


def _check_min_replicas(plan: Plan, min_replicas: int, survival_LK: FloatArray) -> None:
    """Raises BrokenPlan if an expert is on fewer GPUs or nodes than min_replicas, or min_replicas - 1 failures may lose one."""
    placement = plan.models[0].placement
    node_G = [gpu.node for gpu in plan.cluster.gpus]
    nodes = len(set(node_G))
    if survival_LK.shape != (len(placement.slots_LG), nodes - 1) or ((survival_LK < 0) | (survival_LK > 1)).any():
        raise BrokenPlan(f"plan: expected probabilities of surviving 1 to {nodes - 1} failures, found {survival_LK.tolist()}")
    if (survival_LK[:, : min_replicas - 1] < 1).any():
        raise BrokenPlan(
            f"plan: expected {min_replicas - 1} failures survived for certain, found {survival_LK[:, : min_replicas - 1].min()}"
        )
    for layer in range(len(placement.slots_LG)):
        fewest = zip(placement.fewest_replicas(layer, node_G), (len(node_G), nodes), ("GPUs", "nodes"), strict=True)
        for least, most, places in fewest:
            if least < min(min_replicas, most):
                raise BrokenPlan(f"plan, layer {layer}: an expert is on {least} {places}, expected {min_replicas} or all")


def check_layout(layout: ReplicaPlacement, load_LE: FloatArray, slots: GpuSlots) -> None:
    """Checks a replica placement against the loads that it was made for; experts and shares check themselves when it is made.

    No GPU may hold more experts than its slots. The largest and the mean load must be as the placement states, with the bound
    between them.

    Args:
        layout: the placement.
        load_LE: (L, E) float64, the load of each expert.
        slots: the slots of each GPU, and the cost of load there.

    Raises:
        BrokenPlan: if any of this fails.
    """
    name, placement = f"layout {layout.method}", layout.placement
    sizes = (len(placement.slots_LG), placement.experts, placement.gpus)
    if sizes != (expected := (*load_LE.shape, slots.gpus)):
        raise BrokenPlan(f"{name}: expected (layers, experts, GPUs) {expected}, found {sizes}")
    for layer, load_E in enumerate(load_LE):
        where = f"{name}, layer {layer}"
        for gpu, experts in enumerate(placement.slots_LG[layer]):
            if len(experts) > slots.slots_G[gpu]:
                raise BrokenPlan(f"{where}: GPU {gpu} holds {len(experts)} experts in {slots.slots_G[gpu]} slots")
        load_G = load_E @ placement.split_EG(layer)
        largest = float((load_G * slots.cost_G).max())
        if abs(largest - layout.max_load_L[layer]) > SLACK * largest:
            raise BrokenPlan(f"{where}: claims a largest load of {layout.max_load_L[layer]:.9g}, its shares give {largest:.9g}")
        mean = float(load_E.sum() / (1 / slots.cost_G).sum())
        if abs(mean - layout.mean_load_L[layer]) > SLACK * mean:
            raise BrokenPlan(f"{where}: claims a mean load of {layout.mean_load_L[layer]:.9g}, found {mean:.9g}")
        if not mean * (1 - SLACK) <= layout.bound_L[layer] * (1 + SLACK) <= largest * (1 + 3 * SLACK):
            raise BrokenPlan(
                f"{where}: expected mean {mean:.9g} <= bound <= largest load {largest:.9g}, found {layout.bound_L[layer]:.9g}"
            )


def check_resilient(placement: ResilientPlacement, failure_domains: FailureDomains, guaranteed: bool) -> None:
    """Checks a failure-resilient placement and its survival probabilities.

    Every expert is held, and no node holds more experts than its slots. Each probability is between zero and one and not above
    its bound. Exact probabilities equal what trying every set of failures gives, if there are at most LISTED sets.

    Args:
        made: the placement.
        failure_domains: nodes, their slots and the odds that they fail.
        guaranteed: check also that every expert is on `min_replicas` nodes and failure domains, or on all if fewer exist.

    Raises:
        BrokenPlan: if any of this fails.
    """
    for layer, (slots_N, survival) in enumerate(zip(placement.slots_LN, placement.survival_L, strict=True)):
        where = f"placement {placement.method}, layer {layer}"
        if len(slots_N) != failure_domains.nodes or any(
            len(node_experts) > slots for node_experts, slots in zip(slots_N, failure_domains.slots_N, strict=True)
        ):
            raise BrokenPlan(f"{where}: expected at most {failure_domains.slots_N.tolist()} experts on nodes, found {slots_N}")
        experts = 1 + max(expert for node_experts in slots_N for expert in node_experts)
        held_NE = np.zeros((failure_domains.nodes, experts), dtype=bool)
        for node, node_experts in enumerate(slots_N):
            held_NE[node, list(node_experts)] = True
        held_DE = np.array([held_NE[failure_domains.domain_N == d].any(axis=0) for d in range(failure_domains.domains)])
        levels = ((held_NE, failure_domains.nodes, "nodes"), (held_DE, failure_domains.domains, "failure domains"))
        for held_XE, most, places in levels:
            least = int(held_XE.sum(axis=0).min())
            if least < (min(placement.min_replicas, most) if guaranteed else 1):
                raise BrokenPlan(
                    f"{where}: expected every expert on {min(placement.min_replicas, most)} {places}, found one on {least}"
                )
        for failures, (p, half, most_p) in enumerate(
            zip(survival.p_K, survival.half_width_K, survival.bound_K, strict=True), 1
        ):
            if not -SLACK <= p - half <= min(1, most_p) + SLACK or p + half > 1 + SLACK:
                raise BrokenPlan(f"{where}: claims to survive {failures} failures with {p:.9g} of at most {most_p:.9g}")
            if half == 0 and comb(failure_domains.domains, failures) <= LISTED:
                sets = list(combinations(range(failure_domains.domains), failures))
                odds_X = np.prod(failure_domains.odds_D[sets], axis=1)
                survives_X = [bool(np.delete(held_DE, failed, axis=0).any(axis=0).all()) for failed in sets]
                if abs(float(odds_X @ survives_X / odds_X.sum()) - p) > SLACK:
                    raise BrokenPlan(f"{where}: claims to survive {failures} failures with {p:.9g}, its slots do not")
