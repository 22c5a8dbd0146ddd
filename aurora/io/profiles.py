"""Profiles (npz, schema 2): token counts, sizes, compute curves and, if recorded, every token's routing."""

from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.curves import kinds_from_arrays, kinds_to_arrays
from aurora.io.npz import Arrays, load_npz, save_npz
from aurora.types import CoActivation, Profile, TokenRouting

FORMAT = "aurora profile"
_SCALARS = ("model", "fingerprint", "top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")
_ROUTING = ("experts_ULK", "source_U", "window_U")
_COACTIVATION = ("together_LEE", "next_LEE")


def load_profile(path: str | Path) -> Profile:
    """Read a profile. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {FORMAT: profile_from_arrays})


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to exactly `path`."""
    about = {name: getattr(profile, name) for name in _SCALARS}
    about |= {"provenance": dict(profile.provenance), "kinds": list(profile.curves)}
    about["dense_layers"] = list(profile.dense_layers)
    if profile.expert_groups != (1, 1):
        about["expert_groups"] = list(profile.expert_groups)
    if profile.stage_T is not None:
        about["stage_T"] = list(profile.stage_T)
    arrays: dict[str, Any] = {"tokens_TLSE": profile.tokens_TLSE}
    if profile.routing is not None:
        arrays |= {name: getattr(profile.routing, name) for name in _ROUTING}
        if profile.routing.sequence_U is not None:
            arrays["sequence_U"] = profile.routing.sequence_U
    if profile.coactivation is not None:
        arrays |= {name: getattr(profile.coactivation, name) for name in _COACTIVATION}
    save_npz(path, FORMAT, about, arrays | kinds_to_arrays(profile.curves))


def profile_from_arrays(about: dict[str, Any], arrays: Arrays) -> Profile:
    """Returns the profile in a file's header `about` and arrays."""
    if not arrays["tokens_TLSE"].any():
        raise BadInput("expected traffic, found no token")
    curves = kinds_from_arrays(about.pop("kinds"), arrays)
    routing = coactivation = None
    if any(name in arrays for name in _ROUTING):
        experts_ULK, source_U, window_U = (arrays[name] for name in _ROUTING)
        routing = TokenRouting(experts_ULK, source_U, window_U, arrays.get("sequence_U"))
    if any(name in arrays for name in _COACTIVATION):
        coactivation = CoActivation(*(arrays[name] for name in _COACTIVATION))
    if "stage_T" in about:
        about["stage_T"] = tuple(about["stage_T"])
    return Profile(tokens_TLSE=arrays["tokens_TLSE"], curves=curves, routing=routing, coactivation=coactivation, **about)
