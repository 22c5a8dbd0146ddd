"""The one reader and writer of every file format. Files are written whole or not at all."""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from aurora.errors import AuroraError, BadInput
from aurora.plan.check import check_plan
from aurora.types import Cluster, Curve, Gpu, ModelPlan, Order, Placement, Plan, Profile, Trace

SCHEMA = 1
Storable = Plan | Profile | Trace


def load(path: str | Path) -> Cluster | Profile | Plan | Trace:
    """Read a cluster (.toml), a plan (.json), a profile or a trace (.npz). Raises BadInput for anything else."""
    path = Path(path)
    match path.suffix:
        case ".toml":
            return load_cluster(path)
        case ".json":
            return load_plan(path)
        case ".npz":
            return _load_npz(path, None)
    raise BadInput(f"{path}: expected a .toml, .json or .npz file, found {path.suffix or 'no suffix'}")


def save(value: Storable, path: str | Path) -> None:
    """Write a plan as JSON, a profile or trace as npz, to exactly `path`."""
    path = Path(path)
    if isinstance(value, Plan):
        write_text(path, _compact(json.dumps(_plan_to_json(value), indent=1, allow_nan=False)) + "\n")
        return
    if not isinstance(value, Profile | Trace):
        raise BadInput(f"save: expected a Plan, Profile or Trace, found {type(value).__name__}")
    arrays = _profile_arrays(value) if isinstance(value, Profile) else _trace_arrays(value)
    _write_whole(path, lambda file: np.savez_compressed(file, **arrays))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all. Raises BadInput where the folder does not allow it."""
    _write_whole(path, lambda file: file.write(text.encode()))


def shipped(name: str) -> Path:
    """A file or folder of `profiles/`, which travels with the package."""
    inside = Path(__file__).parent / "profiles"
    return (inside if inside.is_dir() else Path(__file__).parents[1] / "profiles") / name


def load_json(path: str | Path) -> dict[str, Any]:
    """Any JSON object, or BadInput."""
    try:
        found = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


# Clusters


def load_cluster(path: str | Path) -> Cluster:
    """A cluster TOML (schema 1). Raises BadInput with the key that is wrong."""
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    _schema(path, table)
    if "fabric" in table:
        raise BadInput(f"{path}: [fabric] is not supported: plans price one switch that never blocks; remove the table")
    _keys(path, "the file", table, {"schema", "name", "gpu"})
    rows = table.get("gpu")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{path}: expected one [[gpu]] table or more, found none")
    gpus: list[Gpu] = []
    for row in rows:
        gpus.extend(_gpus(str(path), row, len(gpus)))
    try:
        return Cluster(str(table.get("name", path.stem)), tuple(gpus))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _gpus(path: str, row: Any, index: int) -> list[Gpu]:
    """One table of a cluster, repeated `count` times."""
    if not isinstance(row, dict):
        raise BadInput(f"{path}: expected a table for GPU {index}, found {row!r}")
    where = f"[[gpu]] {row.get('name', index)!r}"
    known = {field.name: field for field in fields(Gpu)}
    _keys(path, where, row, {*known, "count"})
    count = row.get("count", 1)
    if not isinstance(count, int) or count < 1:
        raise BadInput(f"{path}: {where}: count must be a whole number above zero, found {count!r}")
    values: dict[str, Any] = {}
    for name in known:
        if name not in row:
            continue
        value, wants = row[name], _GPU_TYPES.get(name, float)
        if isinstance(value, bool) or not isinstance(value, (int, float) if wants is float else wants):
            raise BadInput(f"{path}: {where}: {name} must be a {_SPOKEN[wants]}, found {value!r}")
        try:
            values[name] = wants(value)
        except OverflowError:
            raise BadInput(f"{path}: {where}: {name} is too large") from None
    required = ("name", "kind", "node", "out_Bps", "in_Bps", "memory_bytes")
    if missing := [name for name in required if name not in values]:
        raise BadInput(f"{path}: {where}: lacks {', '.join(missing)}")
    name = values.pop("name")
    names = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
    try:
        return [Gpu(name=name, **values) for name in names]
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


_GPU_TYPES: dict[str, type] = {"name": str, "kind": str, "rack": str, "node": int, "memory_bytes": int}
_SPOKEN = {str: "text", int: "whole number", float: "number"}


# Plans


def load_plan(path: str | Path) -> Plan:
    """A plan JSON (schema 1), checked. Raises BadInput or BrokenPlan."""
    path = Path(path)
    found = load_json(path)
    _schema(path, found)
    if found.get("format") != "aurora plan":
        raise BadInput(f"{path}: expected an aurora plan, found format {found.get('format')!r}")
    try:
        plan = _plan_from_json(found)
    except AuroraError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: not a whole aurora plan: {type(error).__name__}: {error}") from None
    try:
        check_plan(plan)
    except AuroraError as error:
        raise type(error)(f"{path}: {error}") from None
    return plan


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "format": "aurora plan",
        "scenario": plan.scenario,
        "methods": dict(plan.methods),
        "seed": plan.seed,
        "epoch": plan.epoch,
        "objective_s": plan.objective_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap if plan.gap < float("inf") else None,
        "cluster": {
            "name": plan.cluster.name,
            "gpu": [{k: v for k, v in vars(gpu).items() if v is not None} for gpu in plan.cluster.gpus],
        },
        "models": [
            {
                "model": m.model,
                "fingerprint": m.fingerprint,
                "profile": {"path": m.profile_path, "digest": m.profile_digest},
                "layers": [
                    {
                        "slots": [list(held) for held in m.placement.slots_LG[layer]],
                        "dispatch_s": float(m.dispatch_s_L[layer]),
                        "fluid_bound_s": float(m.fluid_bound_s_L[layer]),
                        "one_to_one_bound_s": float(m.one_to_one_bound_s_L[layer]),
                        "dispatch": _order_to_json(m.dispatch_L[layer]),
                        "combine": _order_to_json(m.combine_L[layer]),
                    }
                    for layer in range(len(m.dispatch_L))
                ],
            }
            for m in plan.models
        ],
    }


def _plan_from_json(found: Mapping[str, Any]) -> Plan:
    models = []
    for m in found["models"]:
        layers = m["layers"]
        models.append(
            ModelPlan(
                str(m["model"]),
                str(m["fingerprint"]),
                str(m["profile"]["path"]),
                str(m["profile"]["digest"]),
                Placement(tuple(tuple(tuple(held) for held in layer["slots"]) for layer in layers)),
                tuple(_order_from_json(layer["dispatch"]) for layer in layers),
                tuple(_order_from_json(layer["combine"]) for layer in layers),
                np.array([float(layer["dispatch_s"]) for layer in layers]),
                np.array([float(layer["fluid_bound_s"]) for layer in layers]),
                np.array([float(layer["one_to_one_bound_s"]) for layer in layers]),
            )
        )
    rows = found["cluster"]["gpu"]
    gpus = tuple(gpu for index, row in enumerate(rows) for gpu in _gpus("cluster", row, index))
    cluster = Cluster(str(found["cluster"]["name"]), gpus)
    return Plan(
        cluster,
        tuple(models),
        str(found["scenario"]),
        dict(found["methods"]),
        int(found["seed"]),
        float(found["objective_s"]),
        float(found["bound_s"]),
        int(found["epoch"]),
    )


def _order_to_json(order: Order) -> dict[str, Any]:
    return {
        "method": order.method,
        "sends_open": order.sends_open,
        "recvs_open": order.recvs_open,
        "pairs": " ".join(f"{src}>{dst}" for src, dst in order.pairs_X2.tolist()),
    }


def _order_from_json(found: Mapping[str, Any]) -> Order:
    pairs = [[int(end) for end in pair.split(">")] for pair in found["pairs"].split()]
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Order(str(found["method"]), array, int(found["sends_open"]), int(found["recvs_open"]))


# Profiles and traces


def load_profile(path: str | Path) -> Profile:
    """A profile npz (schema 1), or BadInput."""
    found = _load_npz(Path(path), "aurora profile")
    assert isinstance(found, Profile)
    return found


def load_trace(path: str | Path) -> Trace:
    """A trace npz (schema 1), or BadInput."""
    found = _load_npz(Path(path), "aurora trace")
    assert isinstance(found, Trace)
    return found


def _profile_arrays(profile: Profile) -> dict[str, Any]:
    scalars = ("model", "fingerprint", "top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes")
    about = {name: getattr(profile, name) for name in scalars}
    about |= {"provenance": dict(profile.provenance), "kinds": list(profile.curves)}
    arrays: dict[str, Any] = {"about": _about("aurora profile", about), "tokens_TLSE": profile.tokens_TLSE}
    for index, phases in enumerate(profile.curves.values()):
        for phase, curve in phases.items():
            arrays[f"curve_{index}_{phase}"] = np.stack([curve.tokens_X, curve.seconds_X])
    return arrays


def _profile_from(about: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Profile:
    curves = {}
    for index, kind in enumerate(about.pop("kinds")):
        prefix = f"curve_{index}_"
        curves[kind] = {k.removeprefix(prefix): Curve(*arrays[k]) for k in arrays if k.startswith(prefix)}
    return Profile(tokens_TLSE=arrays["tokens_TLSE"], curves=curves, **about)


def _trace_arrays(trace: Trace) -> dict[str, Any]:
    about = {"kind": trace.kind, "names_M": list(trace.names_M), "ranks": trace.ranks}
    return {"about": _about("aurora trace", about)} | {name: getattr(trace, name) for name in Trace.COLUMNS}


def _trace_from(about: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Trace:
    columns = {name: arrays[name] for name in Trace.COLUMNS}
    return Trace(str(about["kind"]), tuple(about["names_M"]), int(about["ranks"]), **columns)


_READERS: dict[str, Callable[[dict[str, Any], Mapping[str, np.ndarray[Any, Any]]], Profile | Trace]] = {
    "aurora profile": _profile_from,
    "aurora trace": _trace_from,
}


def _about(form: str, values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return np.array(json.dumps({"schema": SCHEMA, "format": form, **values}))


def _load_npz(path: Path, expected: str | None) -> Profile | Trace:
    what = expected or "aurora profile or trace"
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays["about"]))
        form = about.pop("format")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Exception as error:  # zip, zlib, json and numpy raise many kinds for a file that is not theirs
        raise BadInput(f"{path}: not an {what}, or cut short: {error}") from None
    _schema(path, about)
    about.pop("schema")
    if str(form) not in _READERS or expected not in (None, form):
        raise BadInput(f"{path}: expected an {what}, found format {form!r}")
    try:
        return _READERS[form](about, arrays)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: not a whole {form}: {type(error).__name__}: {error}") from None


# Shared


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write to a temporary name beside `path` and rename; a link keeps pointing to what it points to."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: cannot be written: not a regular file")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def read_text(path: Path) -> str:
    """A UTF-8 file as text, or BadInput."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def _schema(path: Path, found: Mapping[str, Any]) -> None:
    if found.get("schema") != SCHEMA or isinstance(found["schema"], bool):
        raise BadInput(f"{path}: expected schema = {SCHEMA}, found {found.get('schema')!r}")


def _keys(path: Path | str, where: str, found: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(found) - known):
        raise BadInput(f"{path}: {where}: unknown {', '.join(unknown)}; expected {', '.join(sorted(known))}")


def _compact(text: str) -> str:
    """Lists of plain numbers on one line each, as people write them."""
    return re.sub(r"\[[\s\d,]*\]", lambda m: re.sub(r"\s+", "", m[0]).replace(",", ", "), text)
