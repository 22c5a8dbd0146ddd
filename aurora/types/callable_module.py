"""A module that can be called, for rooms whose name is also a verb of the public API."""

import importlib
import sys
from types import ModuleType
from typing import Any


def make_callable(name: str, home: str, function: str) -> None:
    """Calling the module `name` calls `function` of the module `home`, which is imported then."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(home), function)(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
