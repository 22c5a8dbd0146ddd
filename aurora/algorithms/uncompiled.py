"""Chooses what `*_core` modules are imported from: their extensions, or the same code as plain Python, for debugging."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from aurora.errors import AuroraError

VARIABLE = "AURORA_UNCOMPILED"  # set: plain Python, a hundred times slower, which needs Cython to be installed


class CoreFinder:
    """Finds the plain Python of compiled modules if VARIABLE is set, and otherwise says which extension is missing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a `*_core` module's source, or None if another finder has to find the module.

        Raises:
            AuroraError: if the module's extension is missing.
        """
        if not (name.startswith("aurora.") and name.endswith("_core")):
            return None
        source = Path((path or [""])[0]) / f"{name.rpartition('.')[2]}.py"
        if VARIABLE in os.environ:
            return importlib.util.spec_from_file_location(name, source)
        if source.exists() and not source.with_suffix(".abi3.so").exists():
            raise AuroraError(f"{name} is not compiled: `pip install .`, or `python hatch_build.py` in a checkout, needs gcc")
        return None


sys.meta_path.insert(0, CoreFinder)
