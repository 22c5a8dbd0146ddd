"""The controller of a plan in force: what it takes from the plan and its cluster."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from aurora.planner.check.fit import check_traffic
from aurora.planner.control.controller import Controller
from aurora.planner.placement.slot_counts import failure_domains
from aurora.types import Cluster, ControlOptions, GpuSlots, Hierarchy, Placement, Plan, Profile
from aurora.types.arrays import FloatArray

_COMPILING = threading.Lock()


def slots_in_use(placement: Placement, cost_G: ArrayLike) -> GpuSlots:
    """Returns as many slots of each GPU as it uses in any layer of a placement; `cost_G` (G,) is what load costs there."""
    held_G = (placement.held_LGP() >= 0).sum(axis=2).max(axis=0)
    return GpuSlots(np.maximum(held_G, 1), np.array(cost_G))


def load_cost_G(cluster: Cluster, profile: Profile | None = None) -> FloatArray:
    """Returns (G,) what a unit of load costs on each GPU.

    Args:
        cluster: the GPUs.
        profile: tells by its compute curves what load costs on each kind of GPU; None: the GPUs' speeds tell.
    """
    cost_G = np.array([1 / gpu.speed for gpu in cluster.gpus])
    if profile is not None:
        tokens = profile.tokens_TLSE.sum(axis=2).mean()  # of an expert in a window
        found_G = np.array([float(profile.seconds("expert", gpu, tokens)) for gpu in cluster.gpus])
        cost_G = found_G if found_G.all() else cost_G
    return cost_G


def load_cost_MG(plan: Plan, profiles: Sequence[Profile]) -> FloatArray:
    """Returns (M, G) what a unit of each model's load costs on each GPU, by one profile for each model of a plan.

    Raises:
        BadInput: as of `check_traffic`.
    """
    check_traffic(plan, profiles)
    return np.stack([load_cost_G(plan.cluster, profile) for profile in profiles])


def slowest_port_Bps(cluster: Cluster, inside: bool = False) -> float:
    """Returns the bytes per second of the slowest port, or of a GPU's part of a NIC where that is less and not `inside`."""
    network, fabric = cluster.network, cluster.fabric
    port_Bps = float(min(network.out_Bps_G.min(), network.in_Bps_G.min()))
    if not inside and fabric is not None and fabric.nic_Bps is not None:
        sharing = max(map(fabric.server_G.count, fabric.server_G)) if fabric.shared_nic else 1
        port_Bps = min(port_Bps, fabric.nic_Bps / sharing)
    return port_Bps


def compile_decisions() -> None:
    """Compiles what decisions call, so that the first one does not take seconds beside serving; numba caches it on disk."""
    with _COMPILING:
        _compile_decisions()


def begin_to_compile_decisions() -> None:
    """Begins what `compile_decisions` does, and then waits for, in a thread of its own: beside what takes long anyway."""
    threading.Thread(target=compile_decisions, name="aurora-compile", daemon=True).start()


@cache
def _compile_decisions() -> None:
    controller = Controller(np.array([[[0, 1], [2, 3]]]), expert_bytes=1)
    while controller.window([[900, 800, 100, 200]]).action == "keep":
        pass


def plan_controller(
    placement: Placement,
    cluster: Cluster,
    expert_bytes: int,
    options: ControlOptions = ControlOptions(),
    clock: Callable[[], float] = time.monotonic,
    min_replicas: int = 1,
    cost_G: ArrayLike | None = None,
    hierarchy: Hierarchy | None = None,
) -> Controller:
    """Returns the controller of a model's placement.

    Args:
        placement: the placement in force.
        cluster: its GPUs.
        expert_bytes: bytes of an expert's weights as they are in memory.
        options: what users may set.
        clock: returns seconds.
        min_replicas: of each expert, on different nodes, that moves keep.
        cost_G: (G,) what a unit of load costs on each GPU; None: the GPUs' speeds tell.
        hierarchy: of the model's all-to-alls; None: they are flat.
    """
    server_G = None if hierarchy is None else hierarchy.server_G
    move_Bps = slowest_port_Bps(cluster, inside=hierarchy is not None) * len(cluster)
    slots = slots_in_use(placement, load_cost_G(cluster) if cost_G is None else cost_G)
    domain_G = failure_domains(cluster, slots.slots_G).domain_N
    return Controller(
        placement,
        expert_bytes,
        options,
        slots,
        move_Bps,
        clock,
        min_replicas=min_replicas,
        domain_G=domain_G,
        server_G=server_G,
    )
