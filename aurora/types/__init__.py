"""Frozen values that the packages pass to each other. Each name is imported when it is first used."""

from typing import TYPE_CHECKING

from aurora.lazy_names import fetcher

NAMES = {  # those that each module defines
    "cluster": "Cluster Gpu GpuKind",
    "network": "Cut Network Servers",
    "options": "ControlOptions PlanOptions ProfileOptions SyntheticOptions",
    "placement": "FailureDomains GpuSlots Placement Rebalanced ReplicaPlacement ResilientPlacement SurvivalProbability",
    "plan": "ModelPlan Plan",
    "profile": "OVERHEAD PHASES STAGES ComputeCurves Curve Profile",
    "program": "BARRIERS PREEMPTION_INTERVAL_S PRIORITIES TIME_SLICES Barrier Compute Exchange Op Program "
    "SlicePolicy has_next_slice",
    "requests": "RequestLoad RequestOptions Requests",
    "run_options": "RunOptions TrainOptions",
    "schedule": "Hierarchy Order Schedule",
    "token_routing": "TokenRouting",
    "trace": "TRACE_PHASES Trace TraceRecorder",
}

if TYPE_CHECKING:
    from aurora.types.cluster import *
    from aurora.types.network import *
    from aurora.types.options import *
    from aurora.types.placement import *
    from aurora.types.plan import *
    from aurora.types.profile import *
    from aurora.types.program import *
    from aurora.types.requests import *
    from aurora.types.run_options import *
    from aurora.types.schedule import *
    from aurora.types.token_routing import *
    from aurora.types.trace import *
else:
    __all__, __getattr__ = fetcher(__name__, NAMES)
