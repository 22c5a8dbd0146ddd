"""Fewest slots with which every expert survives any k failures, and a balanced placement in so many.

Any k of D ranks or servers may fail if and only if each expert is on k + 1 of them: an expert on k or fewer is lost
when these fail, and k failures leave one of k + 1. So E experts need E * (k + 1) slots. So many are enough where k < D
and all have equally many slots: dealt in turn, the copies of an expert come to k + 1 consecutive ones, and none gets
more than its part, rounded up.
"""

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.replication import bounds
from aurora.planner.replication.rebalance import rebalance
from aurora.types import GpuSlots, ReplicaPlacement
from aurora.types.placement import EMPTY, expert_loads


def fewest_slots(experts: int, gpus: int, failures: int, servers: int | None = None) -> int:
    """Returns the fewest slots per GPU, equal on all, with which every expert survives any `failures` failures.

    Args:
        experts: number of experts of a layer.
        gpus: number of GPUs.
        failures: how many GPUs, or servers, may fail at the same time.
        servers: number of servers of equally many GPUs, which fail as a whole; None: each GPU fails by itself.

    Raises:
        BadInput: if a number is out of range or the servers do not divide the GPUs.
        InfeasiblePlan: if no GPU or server would be left.
    """
    domains = gpus if servers is None else servers
    if min(experts, gpus, domains) < 1 or gpus % domains:
        raise BadInput(
            f"expected experts, and servers of equally many GPUs, found {experts} on {gpus} GPUs in {domains} servers"
        )
    if failures < 0:
        raise BadInput(f"`failures`: expected zero or more, found {failures}")
    if failures >= domains:
        raise InfeasiblePlan(f"{failures} failures: expected more GPUs or servers, found {domains}")
    return -(-experts * (failures + 1) // gpus)


def place_to_survive(
    loads: ArrayLike, gpus: int, failures: int, servers: int | None = None, slots: int | None = None
) -> ReplicaPlacement:
    """Places experts so that all survive any `failures` failures, and balances the GPUs' loads.

    Args:
        loads: (L, E) or (E,) numbers of zero or more: the load of each expert in each layer.
        gpus, failures, servers: as of `fewest_slots`.
        slots: slots of each GPU; None: the fewest.

    Returns:
        The placement, with the largest load of a GPU in each layer and a lower bound on it.

    Raises:
        BadInput, InfeasiblePlan: as of `fewest_slots`; also if `slots` are too few.
    """
    load_LE = expert_loads("loads", loads)
    experts, domains, copies = load_LE.shape[1], gpus if servers is None else servers, failures + 1
    least = fewest_slots(experts, gpus, failures, servers)
    slots = least if slots is None else slots
    if slots < least:
        raise InfeasiblePlan(
            f"{failures} failures: {experts} experts x {copies} copies need {least} slots per GPU, found {slots}"
        )
    turn_X = np.arange(experts * copies)  # the copies of an expert in turn, experts by load
    gpu_X = turn_X % domains * (gpus // domains) + turn_X // domains % (gpus // domains)
    held_LGP = np.full((len(load_LE), gpus, slots), EMPTY, dtype=np.int64)
    held_LGP[:, gpu_X, turn_X // gpus] = np.repeat(np.argsort(-load_LE, axis=1, kind="stable"), copies, axis=1)
    domain_G = np.arange(gpus) // (gpus // domains)
    made = rebalance(load_LE, held_LGP, GpuSlots.equal(gpus, slots), enough=0.0, min_replicas=copies, domain_G=domain_G)
    bound_L, have = made.mean_load_L, GpuSlots.equal(gpus, slots)
    if experts * copies == gpus * slots:  # no expert can have a further copy
        bound_L = np.array([bounds.given_counts(load_E, have, np.full(experts, copies), True) for load_E in load_LE])
    return ReplicaPlacement(
        f"any {failures} of {domains} may fail",
        made.placement,
        made.max_load_L,
        made.mean_load_L,
        np.minimum(bound_L, made.max_load_L),  # apart only by rounding
        made.seconds,
    )
