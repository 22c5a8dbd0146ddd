"""Profiles and traces (npz), and bare matrices (.csv, .npy)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aurora.errors import AuroraError, BadInput
from aurora.io.files import SCHEMA, check_schema, read_text, write_whole
from aurora.types import CoActivation, ComputeCurves, Curve, Profile, TokenRouting, Trace
from aurora.types.arrays import FloatArray, IntArray, square_bytes
from aurora.types.profile import CurvesByKind
from aurora.types.replica_placement import expert_loads

_ROUTING = ("experts_ULK", "source_U", "window_U")
_COACTIVATION = ("together_LEE", "next_LEE")


def load_profile(path: str | Path) -> Profile:
    """A profile npz (schema 1), or BadInput."""
    found = load_npz(Path(path), "aurora profile")
    assert isinstance(found, Profile)
    return found


def load_trace(path: str | Path) -> Trace:
    """A trace npz (schema 1), or BadInput."""
    found = load_npz(Path(path), "aurora trace")
    assert isinstance(found, Trace)
    return found


def load_curves(path: str | Path) -> ComputeCurves:
    """Compute curves npz (schema 1), or BadInput."""
    found = load_npz(Path(path), "aurora curves")
    assert isinstance(found, ComputeCurves)
    return found


def save_npz(value: Profile | Trace | ComputeCurves, path: Path) -> None:
    """Write a profile, a trace or curves to exactly `path`."""
    if isinstance(value, Trace):
        arrays = _trace_arrays(value)
    else:
        arrays = _profile_arrays(value) if isinstance(value, Profile) else _curves_arrays(value)
    write_whole(path, lambda file: np.savez_compressed(file, **arrays))


def _profile_arrays(profile: Profile) -> dict[str, Any]:
    scalars = ("model", "fingerprint", "top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")
    about = {name: getattr(profile, name) for name in scalars}
    about |= {"provenance": dict(profile.provenance), "kinds": list(profile.curves)}
    if profile.stage_T is not None:
        about["stage_T"] = list(profile.stage_T)
    arrays: dict[str, Any] = {"about": _about("aurora profile", about), "tokens_TLSE": profile.tokens_TLSE}
    if profile.routing is not None:
        arrays |= {name: getattr(profile.routing, name) for name in _ROUTING}
        if profile.routing.sequence_U is not None:
            arrays["sequence_U"] = profile.routing.sequence_U
    if profile.coactivation is not None:
        arrays |= {name: getattr(profile.coactivation, name) for name in _COACTIVATION}
    return arrays | _kinds_arrays(profile.curves)


def _kinds_arrays(kinds: CurvesByKind) -> dict[str, Any]:
    return {
        f"curve_{index}_{phase}": np.stack([curve.tokens_X, curve.seconds_X])
        for index, phases in enumerate(kinds.values())
        for phase, curve in phases.items()
    }


def _kinds_from(kinds: list[str], arrays: Mapping[str, np.ndarray[Any, Any]]) -> CurvesByKind:
    curves = {}
    for index, kind in enumerate(kinds):
        prefix = f"curve_{index}_"
        curves[kind] = {k.removeprefix(prefix): Curve(*arrays[k]) for k in arrays if k.startswith(prefix)}
    return curves


def _curves_arrays(curves: ComputeCurves) -> dict[str, Any]:
    scalars = ("model", "fingerprint", "top_k", "row_bytes", "expert_bytes")
    about = {name: getattr(curves, name) for name in scalars}
    about |= {"provenance": dict(curves.provenance), "kinds": list(curves.kinds)}
    return {"about": _about("aurora curves", about)} | _kinds_arrays(curves.kinds)


def _curves_from(about: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> ComputeCurves:
    return ComputeCurves(kinds=_kinds_from(about.pop("kinds"), arrays), **about)


def _profile_from(about: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Profile:
    curves = _kinds_from(about.pop("kinds"), arrays)
    routing = coactivation = None
    if any(name in arrays for name in _ROUTING):
        experts_ULK, source_U, window_U = (arrays[name] for name in _ROUTING)
        routing = TokenRouting(experts_ULK, source_U, window_U, arrays.get("sequence_U"))
    if any(name in arrays for name in _COACTIVATION):
        coactivation = CoActivation(*(arrays[name] for name in _COACTIVATION))
    if "stage_T" in about:
        about["stage_T"] = tuple(about["stage_T"])
    return Profile(tokens_TLSE=arrays["tokens_TLSE"], curves=curves, routing=routing, coactivation=coactivation, **about)


def _trace_arrays(trace: Trace) -> dict[str, Any]:
    about = {"kind": trace.kind, "names_M": list(trace.names_M), "ranks": trace.ranks}
    return {"about": _about("aurora trace", about)} | {name: getattr(trace, name) for name in Trace.COLUMNS}


def _trace_from(about: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Trace:
    columns = {name: arrays[name] for name in Trace.COLUMNS}
    return Trace(str(about["kind"]), tuple(about["names_M"]), int(about["ranks"]), **columns)


_READERS: dict[str, Callable[[dict[str, Any], Mapping[str, np.ndarray[Any, Any]]], Profile | Trace | ComputeCurves]] = {
    "aurora curves": _curves_from,
    "aurora profile": _profile_from,
    "aurora trace": _trace_from,
}


def _about(form: str, values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return np.array(json.dumps({"schema": SCHEMA, "format": form, **values}))


def load_npz(path: Path, expected: str | None) -> Profile | Trace | ComputeCurves:
    what = expected or "aurora profile, trace or curves"
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays["about"]))
        form = about.pop("format")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Exception as error:  # zip, zlib, json and numpy raise many kinds for a file that is not theirs
        raise BadInput(f"{path}: not an {what}, or cut short: {error}") from None
    check_schema(path, about)
    about.pop("schema")
    if str(form) not in _READERS or expected not in (None, form):
        raise BadInput(f"{path}: expected an {what}, found format {form!r}")
    try:
        return _READERS[form](about, arrays)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: not a whole {form}: {type(error).__name__}: {error}") from None


def load_matrix(path: str | Path) -> IntArray:
    """A square matrix of whole numbers from .csv (no header) or .npy, as int64. Raises BadInput for anything else."""
    return _read_table(Path(path), ".csv, .npy, or a profile (.npz)", "a matrix of whole numbers", _whole, square_bytes)


def load_loads(path: str | Path) -> FloatArray:
    """Loads (L, E) float64, zero or more, from .csv (no header) or .npy; one row or axis is one layer. Raises BadInput."""
    return _read_table(Path(path), ".csv or .npy", "a table of loads", _number, expert_loads)


def load_failures(path: str | Path) -> list[tuple[float, str, str]]:
    """(time_s, "add" or "remove", node) of each row of a trace of membership: .csv with the columns time_ms, event and node."""
    header, *rows = [line.strip().split(",") for line in read_text(Path(path)).splitlines() if line.strip()] or [[]]
    if header != ["time_ms", "event", "node"]:
        raise BadInput(f"{path}: expected the columns time_ms,event,node, found {','.join(header) or 'nothing'}")
    for number, row in enumerate(rows, 2):
        if len(row) != 3 or not row[0].isdecimal():
            raise BadInput(f"{path}, line {number}: expected milliseconds, an event and a node, found {','.join(row)!r}")
    return [(int(time_ms) / 1e3, event, node) for time_ms, event, node in rows]


def _read_table(
    path: Path, suffixes: str, what: str, read: Callable[[Path, str], Any], check: Callable[[str, ArrayLike], NDArray[Any]]
) -> NDArray[Any]:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as raw:
                found = np.load(raw, allow_pickle=False)
        elif path.suffix == ".csv":
            rows = [line.split(",") for line in read_text(path).splitlines() if line.strip()]
            if len(lengths := {len(row) for row in rows}) > 1:
                raise BadInput(f"{path}: not {what}: expected rows of one length, found {min(lengths)} to {max(lengths)} cells")
            found = np.array([[read(path, cell) for cell in row] for row in rows], dtype=object)
            found = found.reshape(len(rows), -1) if rows else np.zeros((0, 0), dtype=np.int64)
            if found.dtype == object:
                found = found.astype(np.int64 if read is _whole else np.float64)
        else:
            raise BadInput(f"{path}: expected {suffixes}, found {path.suffix or 'no suffix'}")
        return check(str(path), found)
    except AuroraError:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Exception as error:  # numpy raises many kinds for a file that is not its own
        raise BadInput(f"{path}: not {what}: {error}") from None


def _whole(path: Path, cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        raise BadInput(f"{path}: expected whole numbers, found {cell.strip()!r}") from None


def _number(path: Path, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise BadInput(f"{path}: expected numbers, found {cell.strip()!r}") from None
