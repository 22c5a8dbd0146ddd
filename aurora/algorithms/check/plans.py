"""Checkers of plans, orders, schedules and replica placements: replay them from first principles; they call no planner."""

from itertools import combinations
from math import comb

import numpy as np

from aurora.algorithms.check import plans_core as core
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


def check_order(order: Order, gpus: int) -> None:
    """Checks that an order carries every byte of every ordered pair of ranks exactly once.

    Args:
        order: the order.
        gpus: number of ranks.

    Raises:
        BrokenPlan: if a pair is missing, repeated, not fully covered or in two tiers.
    """
    pairs_X2, share_X2, by_part_X = np.ascontiguousarray(order.pairs_X2), order.share_X2, None
    if share_X2 is not None:
        share_X2 = np.ascontiguousarray(share_X2)
        by_part_X = np.lexsort(share_X2.T[::-1])
    foreign, wrong, torn = core.faults_of_order(pairs_X2, gpus, share_X2, by_part_X, order.tier_X)
    if foreign < 0 and wrong < 0 and torn < 0:
        return
    name, pair_X = f"order {order.method}", pairs_X2 @ (gpus, 1)
    if foreign >= 0:
        raise BrokenPlan(f"{name}: {pairs_X2[foreign, 0]} -> {pairs_X2[foreign, 1]} is no pair of {gpus} ranks")
    if (pairs := len(np.unique(pair_X))) != gpus * (gpus - 1):
        raise BrokenPlan(f"{name}: expected each of {gpus * (gpus - 1)} ordered pairs once, found {pairs}")
    if wrong >= 0:
        parts = [[0.0, 1.0]] * int((pair_X == wrong).sum())
        if share_X2 is not None:
            parts = share_X2[by_part_X][pair_X[by_part_X] == wrong].tolist()
        raise BrokenPlan(f"{name}: expected {wrong // gpus} -> {wrong % gpus} once, found the parts {parts}")
    raise BrokenPlan(f"{name}: expected the parts of {torn // gpus} -> {torn % gpus} in one tier, found them in several")


def check_schedule(schedule: Schedule, bytes_GG: IntArray, network: Network) -> None:
    """Checks a flat all-to-all's schedule as `check_steps` does; bytes_GG (G, G) int64 goes from each rank to each other."""
    check_steps(schedule, bytes_GG[None], network)


def check_steps(schedule: Schedule, bytes_SGG: IntArray, network: Network) -> None:
    """Checks that a schedule carries every byte once and that no port or NIC is above its rate at any instant.

    The bytes of each pair must sum to those of each step exactly. Each row's rate times its duration must equal its bytes, up
    to one byte and the precision of floats. If the schedule is `one_to_one`, no two transfers of a port in one tier may
    overlap. Transfers between servers use the NICs of both GPUs. A rank must not begin a step before its transfers of earlier
    steps have ended.

    Args:
        schedule: a schedule, with `step_X` if there are several steps.
        bytes_SGG: (S, G, G) int64, bytes from each rank to each other in each step.
        network: port rates, servers and NICs.

    Raises:
        BrokenPlan: if any of this fails.
    """
    name, (steps, n, _) = f"schedule {schedule.method}", bytes_SGG.shape
    src_X, dst_X, step_X = schedule.src_X, schedule.dst_X, schedule.step_X if steps > 1 else None
    if steps > 1 and (step_X is None or step_X.max(initial=0) >= steps):
        raise BrokenPlan(f"{name}: expected the step of each transfer, of {steps} steps")
    spans = start_s_X, end_s_X, rate_Bps_X = schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X
    bytes_SGG = np.ascontiguousarray(bytes_SGG, np.int64)
    found = core.faults_of_rows(src_X, dst_X, schedule.bytes_X, *spans, bytes_SGG, network.out_Bps_G, network.in_Bps_G, step_X)
    foreign, unsent, untimed, unmoved, hasty, rank, alone = found
    if foreign >= 0:
        raise BrokenPlan(f"{name}: names a rank beyond the {n} that there are")
    if unsent >= 0:
        step, src, dst = map(int, np.unravel_index(unsent, bytes_SGG.shape))
        own_X = (src_X == src) & (dst_X == dst) & (step == (0 if step_X is None else step_X))
        carried = f"{src} -> {dst} carries {schedule.bytes_X[own_X].sum()} bytes, expected {bytes_SGG[step, src, dst]}"
        raise BrokenPlan(f"{name}{f', step {step}' if steps > 1 else ''}: {carried}")
    if untimed >= 0:
        raise BrokenPlan(f"{name}: a transfer ends before it starts, or starts before zero")
    if unmoved >= 0:
        moved = rate_Bps_X[unmoved] * (end_s_X[unmoved] - start_s_X[unmoved])
        raise BrokenPlan(f"{name}: row {unmoved} carries {schedule.bytes_X[unmoved]} bytes, but its rate moves {moved:.0f}")
    if not alone or network.servers is not None:
        _check_ports(schedule, network)
    if hasty >= 0:
        raise BrokenPlan(f"{name}: rank {rank} begins step {hasty} before its transfers of earlier steps have ended")


def _check_ports(schedule: Schedule, network: Network) -> None:
    """Raises BrokenPlan if a port or NIC is above its rate, or a port that has one partner at a time has two."""
    name, n, servers = f"schedule {schedule.method}", network.gpus, network.servers
    src_X, dst_X, start_s_X, end_s_X = schedule.src_X, schedule.dst_X, schedule.start_s_X, schedule.end_s_X
    use_KX, most_Bps_R = [src_X, n + dst_X], np.concatenate([network.out_Bps_G, network.in_Bps_G])
    if servers is not None:
        server_G, nic_G = np.array(servers.server_G), np.array(servers.nic_G)
        far_X = server_G[src_X] != server_G[dst_X]
        use_KX += [np.where(far_X, 2 * n + nic_G[src_X], -1), np.where(far_X, 3 * n + nic_G[dst_X], -1)]
        most_Bps_R = np.concatenate([most_Bps_R, np.full(2 * n, servers.nic_Bps)])
    tier_X = np.zeros_like(src_X) if schedule.tier_X is None else schedule.tier_X
    by_start_X, by_end_X = (np.argsort(seconds_X, kind="stable") for seconds_X in (start_s_X, end_s_X))
    rows = start_s_X, end_s_X, schedule.rate_Bps_X, by_start_X, by_end_X, tier_X
    over, row, used, twice = core.faults_of_ports(np.stack(use_KX, axis=1), most_Bps_R, *rows)
    verbs = ("sends", "receives")
    if over >= 0:
        flow = f"{verbs[over // n % 2]} {used * most_Bps_R[over]:.6g} B/s at {start_s_X[row]:.6g} s"
        if over < 2 * n:
            raise BrokenPlan(f"{name}: rank {over % n} {flow}, its port carries {most_Bps_R[over]:.6g}")
        ranks = np.flatnonzero(nic_G == over % n).tolist()
        raise BrokenPlan(f"{name}: NIC of ranks {ranks} {flow}, it carries {most_Bps_R[over]:.6g}")
    if schedule.one_to_one and twice >= 0:
        raise BrokenPlan(f"{name}: rank {twice % n} {verbs[twice // n]} to or from two partners at once")


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
