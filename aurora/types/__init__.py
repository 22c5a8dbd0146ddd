"""Frozen values that the packages hand to each other. Each name is fetched on first use."""

from typing import TYPE_CHECKING

from aurora.lazy_names import fetcher

NAMES = {  # those that each module defines
    "cluster": "Cluster Gpu GpuKind",
    "control": "AggregationResult ControlReport ControlWindow PlacementChange WorkerReport",
    "network": "Cut Fabric Link Network TransferCurve leaf_spine servers",
    "options": "ControlOptions DriftOptions PlanOptions ProfileOptions SyntheticOptions",
    "placement": "FailureDomains GpuSlots Placement Rebalanced ReplicaPlacement ResilientPlacement SurvivalProbability",
    "plan": "ModelPlan Plan",
    "profile": "OVERHEAD PHASES STAGES TOKEN_SPREADS ComputeCurves Curve Profile",
    "program": "BARRIERS PREEMPTION_INTERVAL_S PRIORITIES TIME_SLICES Barrier Compute Exchange Op Program "
    "SlicePolicy has_next_slice",
    "requests": "RequestLoad RequestOptions Requests",
    "run_options": "RunOptions TrainOptions",
    "schedule": "Hierarchy Order Schedule SubChannels",
    "token_routing": "CoActivation TokenRouting",
    "trace": "TRACE_PHASES Trace TraceRecorder",
}

if TYPE_CHECKING:
    from aurora.types.cluster import Cluster as Cluster
    from aurora.types.cluster import Gpu as Gpu
    from aurora.types.cluster import GpuKind as GpuKind
    from aurora.types.control import AggregationResult as AggregationResult
    from aurora.types.control import ControlReport as ControlReport
    from aurora.types.control import ControlWindow as ControlWindow
    from aurora.types.control import PlacementChange as PlacementChange
    from aurora.types.control import WorkerReport as WorkerReport
    from aurora.types.network import Cut as Cut
    from aurora.types.network import Fabric as Fabric
    from aurora.types.network import Link as Link
    from aurora.types.network import Network as Network
    from aurora.types.network import TransferCurve as TransferCurve
    from aurora.types.network import leaf_spine as leaf_spine
    from aurora.types.network import servers as servers
    from aurora.types.options import ControlOptions as ControlOptions
    from aurora.types.options import DriftOptions as DriftOptions
    from aurora.types.options import PlanOptions as PlanOptions
    from aurora.types.options import ProfileOptions as ProfileOptions
    from aurora.types.options import SyntheticOptions as SyntheticOptions
    from aurora.types.placement import FailureDomains as FailureDomains
    from aurora.types.placement import GpuSlots as GpuSlots
    from aurora.types.placement import Placement as Placement
    from aurora.types.placement import Rebalanced as Rebalanced
    from aurora.types.placement import ReplicaPlacement as ReplicaPlacement
    from aurora.types.placement import ResilientPlacement as ResilientPlacement
    from aurora.types.placement import SurvivalProbability as SurvivalProbability
    from aurora.types.plan import ModelPlan as ModelPlan
    from aurora.types.plan import Plan as Plan
    from aurora.types.profile import OVERHEAD as OVERHEAD
    from aurora.types.profile import PHASES as PHASES
    from aurora.types.profile import STAGES as STAGES
    from aurora.types.profile import TOKEN_SPREADS as TOKEN_SPREADS
    from aurora.types.profile import ComputeCurves as ComputeCurves
    from aurora.types.profile import Curve as Curve
    from aurora.types.profile import Profile as Profile
    from aurora.types.program import BARRIERS as BARRIERS
    from aurora.types.program import PREEMPTION_INTERVAL_S as PREEMPTION_INTERVAL_S
    from aurora.types.program import PRIORITIES as PRIORITIES
    from aurora.types.program import TIME_SLICES as TIME_SLICES
    from aurora.types.program import Barrier as Barrier
    from aurora.types.program import Compute as Compute
    from aurora.types.program import Exchange as Exchange
    from aurora.types.program import Op as Op
    from aurora.types.program import Program as Program
    from aurora.types.program import SlicePolicy as SlicePolicy
    from aurora.types.program import has_next_slice as has_next_slice
    from aurora.types.requests import RequestLoad as RequestLoad
    from aurora.types.requests import RequestOptions as RequestOptions
    from aurora.types.requests import Requests as Requests
    from aurora.types.run_options import RunOptions as RunOptions
    from aurora.types.run_options import TrainOptions as TrainOptions
    from aurora.types.schedule import Hierarchy as Hierarchy
    from aurora.types.schedule import Order as Order
    from aurora.types.schedule import Schedule as Schedule
    from aurora.types.schedule import SubChannels as SubChannels
    from aurora.types.token_routing import CoActivation as CoActivation
    from aurora.types.token_routing import TokenRouting as TokenRouting
    from aurora.types.trace import TRACE_PHASES as TRACE_PHASES
    from aurora.types.trace import Trace as Trace
    from aurora.types.trace import TraceRecorder as TraceRecorder
else:
    __all__, __getattr__ = fetcher(__name__, NAMES)
