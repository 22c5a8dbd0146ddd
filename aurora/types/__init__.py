"""Frozen values that the rooms hand to each other."""

from aurora.types.choices import Choices
from aurora.types.cluster import Cluster, Gpu
from aurora.types.fabric import Cut, Fabric, Link, leaf_spine, servers
from aurora.types.layout import Layout, Room
from aurora.types.options import PlanOptions, ProfileOptions, ReproduceOptions, RunOptions, SyntheticOptions
from aurora.types.plan import Lanes, ModelPlan, Order, Placement, Plan, Schedule
from aurora.types.profile import PHASES, Curve, Profile
from aurora.types.program import BARRIERS, Barrier, Compute, Exchange, Op, Program
from aurora.types.trace import TRACE_PHASES, Recorder, Trace

__all__ = [
    "BARRIERS",
    "PHASES",
    "TRACE_PHASES",
    "Barrier",
    "Choices",
    "Cluster",
    "Compute",
    "Curve",
    "Cut",
    "Exchange",
    "Fabric",
    "Gpu",
    "Lanes",
    "Layout",
    "Link",
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
    "Room",
    "RunOptions",
    "Schedule",
    "SyntheticOptions",
    "Trace",
    "leaf_spine",
    "servers",
]
