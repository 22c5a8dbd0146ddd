"""Frozen values that the rooms hand to each other."""

from aurora.types.aggregation import AggregationResult, WorkerReport
from aurora.types.cluster import Cluster, Gpu
from aurora.types.coactivation import CoActivation
from aurora.types.compute_curves import ComputeCurves
from aurora.types.fabric import Cut, Fabric, Link, leaf_spine, servers
from aurora.types.failure_domains import FailureDomains, ResilientPlacement, SurvivalProbability
from aurora.types.gpu_kind import GpuKind
from aurora.types.options import (
    BccOptions,
    CountingOptions,
    DriftOptions,
    PlanOptions,
    ProfileOptions,
    ReproduceOptions,
    RunOptions,
    SyntheticOptions,
)
from aurora.types.plan import ModelPlan, Order, Placement, Plan, Schedule, SubChannels
from aurora.types.profile import PHASES, STAGES, Curve, Profile
from aurora.types.program import BARRIERS, PART_S, TIME_SLICES, Barrier, Compute, Exchange, Op, Program, is_turn
from aurora.types.replica_placement import GpuSlots, ReplicaPlacement
from aurora.types.token_routing import TokenRouting
from aurora.types.trace import TRACE_PHASES, Trace, TraceRecorder

__all__ = [
    "BARRIERS",
    "PART_S",
    "PHASES",
    "STAGES",
    "TRACE_PHASES",
    "TIME_SLICES",
    "Barrier",
    "BccOptions",
    "TokenRouting",
    "Cluster",
    "AggregationResult",
    "Compute",
    "Curve",
    "ComputeCurves",
    "Cut",
    "DriftOptions",
    "Exchange",
    "Fabric",
    "CountingOptions",
    "Gpu",
    "GpuKind",
    "FailureDomains",
    "SubChannels",
    "ReplicaPlacement",
    "Link",
    "ModelPlan",
    "Op",
    "Order",
    "CoActivation",
    "Placement",
    "Plan",
    "PlanOptions",
    "Profile",
    "ProfileOptions",
    "Program",
    "TraceRecorder",
    "ReproduceOptions",
    "ResilientPlacement",
    "GpuSlots",
    "RunOptions",
    "Schedule",
    "WorkerReport",
    "SurvivalProbability",
    "SyntheticOptions",
    "Trace",
    "is_turn",
    "leaf_spine",
    "servers",
]
