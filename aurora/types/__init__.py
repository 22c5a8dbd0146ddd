"""Frozen values that the rooms hand to each other."""

from aurora.types.cluster import Cluster, Gpu
from aurora.types.options import PlanOptions, ProfileOptions, ReproduceOptions, RunOptions, SyntheticOptions
from aurora.types.plan import Lanes, ModelPlan, Order, Placement, Plan, Schedule
from aurora.types.profile import PHASES, Curve, Profile
from aurora.types.program import Barrier, Compute, Exchange, Op, Program
from aurora.types.trace import TRACE_PHASES, Recorder, Trace

__all__ = [
    "PHASES",
    "TRACE_PHASES",
    "Barrier",
    "Cluster",
    "Compute",
    "Curve",
    "Exchange",
    "Gpu",
    "Lanes",
    "ModelPlan",
    "Op",
    "Order",
    "Placement",
    "Plan",
    "PlanOptions",
    "Profile",
    "ProfileOptions",
    "Program",
    "Recorder",
    "ReproduceOptions",
    "RunOptions",
    "Schedule",
    "SyntheticOptions",
    "Trace",
]
