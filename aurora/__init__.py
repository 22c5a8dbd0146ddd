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

_PUBLIC = ("aurora.errors", "aurora.types", "aurora.api")  # all that their __all__ name is public here

if TYPE_CHECKING:
    from aurora.api import *
    from aurora.errors import *
    from aurora.types import *
else:

    def __getattr__(name: str) -> Any:
        for module in () if name.startswith("_") else _PUBLIC:
            home = importlib.import_module(module)
            if name in home.__all__:
                globals()[name] = getattr(home, name)
                return globals()[name]
        raise AttributeError(f"module 'aurora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for module in _PUBLIC for name in importlib.import_module(module).__all__)})
