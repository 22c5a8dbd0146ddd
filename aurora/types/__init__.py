"""Frozen values that the rooms hand to each other."""

from aurora.types.choices import Choices
from aurora.types.cluster import Cluster, Gpu
from aurora.types.collected import Collected, Share
from aurora.types.curves import Curves
from aurora.types.fabric import Cut, Fabric, Link, leaf_spine, servers
from aurora.types.gpus import GpuKind
from aurora.types.hosts import Hosts, Resilient, Survival
from aurora.types.layout import Layout, Room
from aurora.types.options import (
    BccOptions,
    DriftOptions,
    FleetOptions,
    PlanOptions,
    ProfileOptions,
    ReproduceOptions,
    RunOptions,
    SyntheticOptions,
)
from aurora.types.pairs import Pairs
from aurora.types.plan import Lanes, ModelPlan, Order, Placement, Plan, Schedule
from aurora.types.profile import PHASES, STAGES, Curve, Profile
from aurora.types.program import BARRIERS, PART_S, TURNS, Barrier, Compute, Exchange, Op, Program, is_turn
from aurora.types.trace import TRACE_PHASES, Recorder, Trace

__all__ = [
    "BARRIERS",
    "PART_S",
    "PHASES",
    "STAGES",
    "TRACE_PHASES",
    "TURNS",
    "Barrier",
    "BccOptions",
    "Choices",
    "Cluster",
    "Collected",
    "Compute",
    "Curve",
    "Curves",
    "Cut",
    "DriftOptions",
    "Exchange",
    "Fabric",
    "FleetOptions",
    "Gpu",
    "GpuKind",
    "Hosts",
    "Lanes",
    "Layout",
    "Link",
    "ModelPlan",
    "Op",
    "Order",
    "Pairs",
    "Placement",
    "Plan",
    "PlanOptions",
    "Profile",
    "ProfileOptions",
    "Program",
    "Recorder",
    "ReproduceOptions",
    "Resilient",
    "Room",
    "RunOptions",
    "Schedule",
    "Share",
    "Survival",
    "SyntheticOptions",
    "Trace",
    "is_turn",
    "leaf_spine",
    "servers",
]
