"""Frozen values that the packages hand to each other."""

from aurora.types.aggregation import AggregationResult, WorkerReport
from aurora.types.cluster import Cluster, Gpu, GpuKind
from aurora.types.control import ControlReport, ControlWindow, PlacementChange
from aurora.types.network import Cut, Fabric, Link, Network, TransferCurve, leaf_spine, servers
from aurora.types.options import (
    ControlOptions,
    DriftOptions,
    PlanOptions,
    ProfileOptions,
    SyntheticOptions,
)
from aurora.types.placement import (
    FailureDomains,
    GpuSlots,
    Placement,
    Rebalanced,
    ReplicaPlacement,
    ResilientPlacement,
    SurvivalProbability,
)
from aurora.types.plan import ModelPlan, Plan
from aurora.types.profile import OVERHEAD, PHASES, STAGES, TOKEN_SPREADS, ComputeCurves, Curve, Profile
from aurora.types.program import (
    BARRIERS,
    PREEMPTION_INTERVAL_S,
    PRIORITIES,
    TIME_SLICES,
    Barrier,
    Compute,
    Exchange,
    Op,
    Program,
    SlicePolicy,
    has_next_slice,
)
from aurora.types.requests import RequestOptions, Requests
from aurora.types.run_options import RunOptions
from aurora.types.schedule import Hierarchy, Order, Schedule, SubChannels
from aurora.types.token_routing import CoActivation, TokenRouting
from aurora.types.trace import TRACE_PHASES, Trace, TraceRecorder
from aurora.types.train_options import TrainOptions

__all__ = [
    "BARRIERS",
    "OVERHEAD",
    "PHASES",
    "PREEMPTION_INTERVAL_S",
    "PRIORITIES",
    "STAGES",
    "TIME_SLICES",
    "TOKEN_SPREADS",
    "TRACE_PHASES",
    "AggregationResult",
    "Barrier",
    "Cluster",
    "CoActivation",
    "Compute",
    "ComputeCurves",
    "ControlOptions",
    "ControlReport",
    "ControlWindow",
    "Curve",
    "Cut",
    "DriftOptions",
    "Exchange",
    "Fabric",
    "FailureDomains",
    "Gpu",
    "GpuKind",
    "GpuSlots",
    "Hierarchy",
    "Link",
    "ModelPlan",
    "Network",
    "Op",
    "Order",
    "Placement",
    "PlacementChange",
    "Plan",
    "PlanOptions",
    "Profile",
    "ProfileOptions",
    "Program",
    "Rebalanced",
    "ReplicaPlacement",
    "RequestOptions",
    "Requests",
    "ResilientPlacement",
    "RunOptions",
    "Schedule",
    "SlicePolicy",
    "SubChannels",
    "SurvivalProbability",
    "SyntheticOptions",
    "TokenRouting",
    "Trace",
    "TraceRecorder",
    "TrainOptions",
    "TransferCurve",
    "WorkerReport",
    "has_next_slice",
    "leaf_spine",
    "servers",
]
