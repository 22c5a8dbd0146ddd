"""Frozen values that the rooms hand to each other."""

from aurora.types.cluster import Cluster, Gpu
from aurora.types.layout import Layout, Room
from aurora.types.options import PlanOptions, ProfileOptions, RunOptions, SyntheticOptions
from aurora.types.plan import ModelPlan, Order, Placement, Plan, Schedule
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
    "Layout",
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
    "Room",
    "RunOptions",
    "Schedule",
    "SyntheticOptions",
    "Trace",
]
