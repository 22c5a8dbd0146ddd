"""Names that a package fetches from its modules on first use, so that importing one of them does not load all (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def fetcher(package: str, names: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Returns `__all__` and a module's `__getattr__` that imports a name when it is first used (PEP 562).

    Args:
        package: the package's name.
        names: the names that each of its modules defines, with spaces between them.
    """
    home_of = {name: module for module, exports in names.items() for name in exports.split()}

    def fetch(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home_of), fetch
