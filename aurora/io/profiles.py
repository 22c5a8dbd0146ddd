"""Reads and writes profiles (npz, schema 2) and compute curves (npz, schema 1)."""

from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.files import Arrays, load_npz, save_npz
from aurora.types import OVERHEAD, PHASES, ComputeCurves, Curve, Profile, TokenRouting
from aurora.types.profile import CurvesByKind, check_counts

PROFILE_FORMAT = "aurora profile"
_SCALARS = ("model", "fingerprint", "top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")
_ROUTING = ("experts_ULK", "source_U", "window_U")


def load_profile(path: str | Path) -> Profile:
    """Read a profile. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {PROFILE_FORMAT: profile_from_arrays})


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to exactly `path`."""
    about = {name: getattr(profile, name) for name in _SCALARS}
    about |= {"provenance": dict(profile.provenance), "kinds": list(profile.curves)}
    about["dense_layers"] = list(profile.dense_layers)
    if profile.expert_groups != (1, 1):
        about["expert_groups"] = list(profile.expert_groups)
    if profile.kv_bytes is not None:
        about["kv_bytes"] = profile.kv_bytes
    if profile.stage_T is not None:
        about["stage_T"] = list(profile.stage_T)
    arrays: dict[str, Any] = {"tokens_TLSE": profile.tokens_TLSE}
    if profile.routing is not None:
        arrays |= {name: getattr(profile.routing, name) for name in _ROUTING}
        if profile.routing.sequence_U is not None:
            arrays["sequence_U"] = profile.routing.sequence_U
    save_npz(path, PROFILE_FORMAT, about, arrays | kinds_to_arrays(profile.curves))


def profile_from_arrays(about: dict[str, Any], arrays: Arrays) -> Profile:
    """Returns the profile in a file's header `about` and arrays."""
    if not (tokens_TLSE := arrays.pop("tokens_TLSE")).any():
        raise BadInput("expected traffic, found no token")
    curves = kinds_from_arrays(about.pop("kinds"), arrays)
    routing = None
    if any(name in arrays for name in _ROUTING):
        experts_ULK, source_U, window_U = (arrays.pop(name) for name in _ROUTING)
        routing = TokenRouting(experts_ULK, source_U, window_U, arrays.pop("sequence_U", None))
    if "stage_T" in about:
        about["stage_T"] = tuple(about["stage_T"])
    profile = Profile(tokens_TLSE=tokens_TLSE, curves=curves, routing=routing, **about)
    check_counts(profile.load_LE, profile.top_k)
    return profile


CURVES_FORMAT = "aurora curves"
_CURVES_SCALARS = ("model", "fingerprint", "top_k", "row_bytes", "expert_bytes")


def load_curves(path: str | Path) -> ComputeCurves:
    """Read compute curves. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {CURVES_FORMAT: curves_from_arrays})


def save_curves(curves: ComputeCurves, path: Path) -> None:
    """Write compute curves to exactly `path`."""
    about = {name: getattr(curves, name) for name in _CURVES_SCALARS}
    about |= {"provenance": dict(curves.provenance), "kinds": list(curves.kinds)}
    save_npz(path, CURVES_FORMAT, about, kinds_to_arrays(curves.kinds))


def curves_from_arrays(about: dict[str, Any], arrays: Arrays) -> ComputeCurves:
    """Returns the compute curves in a file's header `about` and arrays."""
    return ComputeCurves(kinds=kinds_from_arrays(about.pop("kinds"), arrays), **about)


def kinds_to_arrays(kinds: CurvesByKind) -> dict[str, Any]:
    """Converts curves to (2, X) arrays (tokens, seconds), by the name "curve_<index of the GPU kind>_<phase>".

    Args:
        kinds: curves by kind of GPU and phase.
    """
    return {
        f"curve_{index}_{phase}": np.stack([curve.tokens_X, curve.seconds_X])
        for index, phases in enumerate(kinds.values())
        for phase, curve in phases.items()
    }


def kinds_from_arrays(kinds: list[str], arrays: Arrays) -> CurvesByKind:
    """Returns the curves of arrays that `kinds_to_arrays` made.

    Args:
        kinds: the kinds of GPUs, in the order of their indices.
        arrays: arrays by name, from which the curves are taken.
    """
    return {
        kind: {
            phase: Curve(*arrays.pop(f"curve_{index}_{phase}"))
            for phase in (*PHASES, OVERHEAD)
            if f"curve_{index}_{phase}" in arrays
        }
        for index, kind in enumerate(kinds)
    }
