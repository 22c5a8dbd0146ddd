"""Frozen values that the packages hand to each other."""

from aurora.types.aggregation import AggregationResult, WorkerReport
from aurora.types.cluster import Cluster, Gpu
from aurora.types.coactivation import CoActivation
from aurora.types.compute_curves import ComputeCurves
from aurora.types.control import ControlReport, ControlWindow, PlacementChange
from aurora.types.fabric import Cut, Fabric, Link, leaf_spine, servers
from aurora.types.failure_domains import FailureDomains, ResilientPlacement, SurvivalProbability
from aurora.types.gpu_kind import GpuKind
from aurora.types.hierarchy import Hierarchy
from aurora.types.network import Network
from aurora.types.options import (
    BccOptions,
    ControlOptions,
    CountingOptions,
    DriftOptions,
    PlanOptions,
    ProfileOptions,
    ReproduceOptions,
    SyntheticOptions,
)
from aurora.types.placement import Placement
from aurora.types.plan import ModelPlan, Plan
from aurora.types.profile import OVERHEAD, PHASES, STAGES, TOKEN_SPREADS, Curve, Profile
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
from aurora.types.replica_placement import GpuSlots, Rebalanced, ReplicaPlacement
from aurora.types.requests import RequestOptions, Requests
from aurora.types.run_options import RunOptions
from aurora.types.schedule import Order, Schedule, SubChannels
from aurora.types.token_routing import TokenRouting
from aurora.types.trace import TRACE_PHASES, Trace, TraceRecorder
from aurora.types.train_options import TrainOptions
from aurora.types.transfer_curve import TransferCurve

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
    "BccOptions",
    "Cluster",
    "CoActivation",
    "Compute",
    "ComputeCurves",
    "ControlOptions",
    "ControlReport",
    "ControlWindow",
    "CountingOptions",
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
    "ReproduceOptions",
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
