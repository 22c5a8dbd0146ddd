"""Compute curves (npz, schema 1): seconds of each phase by token count, for each kind of GPU."""

from pathlib import Path
from typing import Any

import numpy as np

from aurora.io.npz import Arrays, load_npz, save_npz
from aurora.types import OVERHEAD, PHASES, ComputeCurves, Curve
from aurora.types.profile import CurvesByKind

FORMAT = "aurora curves"
_SCALARS = ("model", "fingerprint", "top_k", "row_bytes", "expert_bytes")


def load_curves(path: str | Path) -> ComputeCurves:
    """Read compute curves. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {FORMAT: curves_from_arrays})


def save_curves(curves: ComputeCurves, path: Path) -> None:
    """Write compute curves to exactly `path`."""
    about = {name: getattr(curves, name) for name in _SCALARS}
    about |= {"provenance": dict(curves.provenance), "kinds": list(curves.kinds)}
    save_npz(path, FORMAT, about, kinds_to_arrays(curves.kinds))


def curves_from_arrays(about: dict[str, Any], arrays: Arrays) -> ComputeCurves:
    """Returns the compute curves in a file's header `about` and arrays."""
    return ComputeCurves(kinds=kinds_from_arrays(about.pop("kinds"), arrays), **about)


def kinds_to_arrays(kinds: CurvesByKind) -> dict[str, Any]:
    """Returns one array (2, X) per curve, token counts above seconds, by the name "curve_<index of the kind>_<phase>".

    Args:
        kinds: curves by kind of GPU and phase.
    """
    return {
        f"curve_{index}_{phase}": np.stack([curve.tokens_X, curve.seconds_X])
        for index, phases in enumerate(kinds.values())
        for phase, curve in phases.items()
    }


def kinds_from_arrays(kinds: list[str], arrays: Arrays) -> CurvesByKind:
    """Returns the curves that `kinds_to_arrays` made into arrays.

    Args:
        kinds: the kinds of GPUs, in the order of their indices.
        arrays: arrays by name; others are not read.
    """
    return {
        kind: {
            phase: Curve(*arrays[f"curve_{index}_{phase}"])
            for phase in (*PHASES, OVERHEAD)
            if f"curve_{index}_{phase}" in arrays
        }
        for index, kind in enumerate(kinds)
    }
