"""Fast Mixture-of-Experts models: where experts sit and in which order tokens travel.

The functions of `aurora.api` and the value types of `aurora.types` are the public interface; both are reached from here:

    import aurora

    cluster = aurora.load("demo-4")
    profile = aurora.load("profile.npz")
    plan = aurora.plan(cluster, profile)

Importing aurora imports neither torch nor anything slow: each name is fetched on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aurora.api import (
        all_to_all as all_to_all,
    )
    from aurora.api import (
        drift as drift,
    )
    from aurora.api import (
        evaluate as evaluate,
    )
    from aurora.api import (
        load as load,
    )
    from aurora.api import (
        migrate as migrate,
    )
    from aurora.api import (
        order as order,
    )
    from aurora.api import (
        place as place,
    )
    from aurora.api import (
        place_for_failures as place_for_failures,
    )
    from aurora.api import (
        plan as plan,
    )
    from aurora.api import (
        profile as profile,
    )
    from aurora.api import (
        report as report,
    )
    from aurora.api import (
        run as run,
    )
    from aurora.api import (
        save as save,
    )
    from aurora.api import (
        simulate as simulate,
    )
    from aurora.api import (
        synthetic_profile as synthetic_profile,
    )
    from aurora.errors import (
        AuroraError as AuroraError,
    )
    from aurora.errors import (
        BadInput as BadInput,
    )
    from aurora.errors import (
        BrokenPlan as BrokenPlan,
    )
    from aurora.errors import (
        InfeasiblePlan as InfeasiblePlan,
    )
    from aurora.errors import (
        MissingDependency as MissingDependency,
    )
    from aurora.errors import (
        RankFailed as RankFailed,
    )
    from aurora.types import (
        Cluster as Cluster,
    )
    from aurora.types import (
        CoActivation as CoActivation,
    )
    from aurora.types import (
        ComputeCurves as ComputeCurves,
    )
    from aurora.types import (
        Curve as Curve,
    )
    from aurora.types import (
        DriftOptions as DriftOptions,
    )
    from aurora.types import (
        Fabric as Fabric,
    )
    from aurora.types import (
        FailureDomains as FailureDomains,
    )
    from aurora.types import (
        Gpu as Gpu,
    )
    from aurora.types import (
        GpuSlots as GpuSlots,
    )
    from aurora.types import (
        ModelPlan as ModelPlan,
    )
    from aurora.types import (
        Order as Order,
    )
    from aurora.types import (
        Placement as Placement,
    )
    from aurora.types import (
        Plan as Plan,
    )
    from aurora.types import (
        PlanOptions as PlanOptions,
    )
    from aurora.types import (
        Profile as Profile,
    )
    from aurora.types import (
        ProfileOptions as ProfileOptions,
    )
    from aurora.types import (
        Program as Program,
    )
    from aurora.types import (
        ReplicaPlacement as ReplicaPlacement,
    )
    from aurora.types import (
        ResilientPlacement as ResilientPlacement,
    )
    from aurora.types import (
        RunOptions as RunOptions,
    )
    from aurora.types import (
        Schedule as Schedule,
    )
    from aurora.types import (
        SyntheticOptions as SyntheticOptions,
    )
    from aurora.types import (
        TokenRouting as TokenRouting,
    )
    from aurora.types import (
        Trace as Trace,
    )

_FUNCTIONS = (
    "all_to_all",
    "drift",
    "evaluate",
    "load",
    "migrate",
    "order",
    "place",
    "place_for_failures",
    "plan",
    "profile",
    "report",
    "run",
    "save",
    "simulate",
    "synthetic_profile",
)
_ERRORS = ("AuroraError", "BadInput", "BrokenPlan", "InfeasiblePlan", "MissingDependency", "RankFailed")
_TYPES = (
    "Cluster",
    "CoActivation",
    "ComputeCurves",
    "Curve",
    "DriftOptions",
    "Fabric",
    "FailureDomains",
    "Gpu",
    "GpuSlots",
    "ModelPlan",
    "Order",
    "Placement",
    "Plan",
    "PlanOptions",
    "Profile",
    "ProfileOptions",
    "Program",
    "ReplicaPlacement",
    "ResilientPlacement",
    "RunOptions",
    "Schedule",
    "SyntheticOptions",
    "TokenRouting",
    "Trace",
)
_MODULES = {
    **dict.fromkeys(_FUNCTIONS, "aurora.api"),
    **dict.fromkeys(_ERRORS, "aurora.errors"),
    **dict.fromkeys(_TYPES, "aurora.types"),
}
__all__ = [*_FUNCTIONS, *_ERRORS, *_TYPES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aurora' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
