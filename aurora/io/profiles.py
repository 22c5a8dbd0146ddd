"""Reads and writes profiles (npz, schema 2) and compute curves (npz, schema 1)."""

from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.files import Arrays, load_npz, save_npz
from aurora.io.schema import shared, table_of
from aurora.types import OVERHEAD, PHASES, ComputeCurves, Curve, Profile, TokenRouting
from aurora.types.profile import CurvesByKind, check_counts

PROFILE_FORMAT, CURVES_FORMAT = "aurora profile", "aurora curves"
ProfileHeader: Any = table_of(Profile, leave=("tokens_TLSE", "curves", "routing", "step_tokens"), kinds=list[str])
CurvesHeader: Any = table_of(ComputeCurves, leave=("kinds",), kinds=list[str])
_ROUTING = ("experts_ULK", "source_U", "window_U")


def load_profile(path: str | Path) -> Profile:
    """Reads a profile. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), PROFILES)


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile to exactly `path`."""
    arrays: dict[str, Any] = {"tokens_TLSE": profile.tokens_TLSE, **_curve_arrays(profile.curves)}
    if profile.routing is not None:
        arrays |= {name: array for name, array in vars(profile.routing).items() if array is not None}
    save_npz(path, PROFILE_FORMAT, ProfileHeader(**shared(profile, ProfileHeader), kinds=list(profile.curves)), arrays)


def _profile(header: Any, arrays: Arrays) -> Profile:
    if not (tokens_TLSE := arrays.pop("tokens_TLSE")).any():
        raise BadInput("expected traffic, found no token")
    curves, routing = _curves(header.kinds, arrays), None
    if any(name in arrays for name in _ROUTING):
        columns = {name: arrays.pop(name) for name in _ROUTING}
        routing = TokenRouting(**columns, sequence_U=arrays.pop("sequence_U", None))
    profile = Profile(tokens_TLSE=tokens_TLSE, curves=curves, routing=routing, **shared(header, Profile))
    check_counts(profile.load_LE, profile.top_k)
    return profile


def load_curves(path: str | Path) -> ComputeCurves:
    """Reads compute curves. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), CURVES)


def save_curves(curves: ComputeCurves, path: Path) -> None:
    """Writes compute curves to exactly `path`."""
    header = CurvesHeader(**shared(curves, CurvesHeader, "kinds"), kinds=list(curves.kinds))
    save_npz(path, CURVES_FORMAT, header, _curve_arrays(curves.kinds))


def _compute_curves(header: Any, arrays: Arrays) -> ComputeCurves:
    return ComputeCurves(**shared(header, ComputeCurves, "kinds"), kinds=_curves(header.kinds, arrays))


def _curve_arrays(kinds: CurvesByKind) -> dict[str, Any]:
    """Converts curves to (2, X) arrays (tokens, seconds), by the name "curve_<index of the GPU kind>_<phase>"."""
    return {
        f"curve_{index}_{phase}": np.stack([curve.tokens_X, curve.seconds_X])
        for index, phases in enumerate(kinds.values())
        for phase, curve in phases.items()
    }


def _curves(kinds: list[str], arrays: Arrays) -> CurvesByKind:
    """Returns the curves of arrays that `_curve_arrays` made, which are taken out, by kind of GPU and phase."""
    return {
        kind: {phase: Curve(*arrays.pop(name)) for phase in (*PHASES, OVERHEAD) if (name := f"curve_{index}_{phase}") in arrays}
        for index, kind in enumerate(kinds)
    }


PROFILES = {PROFILE_FORMAT: (ProfileHeader, _profile)}
CURVES = {CURVES_FORMAT: (CurvesHeader, _compute_curves)}
