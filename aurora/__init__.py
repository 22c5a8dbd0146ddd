"""Fast Mixture-of-Experts inference: where experts sit and in which order tokens travel.

The public API is `load`, `save`, `plan`, `simulate`, `order`, `all_to_all` and `run`, with `PlanOptions` and `RunOptions` for
their choices; `aurora.types` holds what they take and give. Importing aurora imports neither torch nor anything slow: each
name is fetched on first use.
"""

import importlib
from typing import Any

__all__ = ["PlanOptions", "RunOptions", "all_to_all", "load", "order", "plan", "run", "save", "simulate"]

# `plan` and `simulate` are rooms of the package as well as functions: those modules are callable.
_HOMES = {
    "PlanOptions": ("aurora.types.options", "PlanOptions"),
    "RunOptions": ("aurora.types.options", "RunOptions"),
    "all_to_all": ("aurora.runtime.all_to_all", "all_to_all"),
    "load": ("aurora.io", "load"),
    "order": ("aurora.planner.alltoall.schedule", "order"),
    "plan": ("aurora.planner", None),
    "run": ("aurora.runtime.run", "run"),
    "save": ("aurora.io", "save"),
    "simulate": ("aurora.simulator", None),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aurora' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    home = importlib.import_module(module)
    return home if attribute is None else getattr(home, attribute)
