"""Datasheet figures of GPU kinds (TOML), by their names in NVML and torch."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.files import check_keys, check_schema, load_toml, shipped
from aurora.types import GpuKind

_TYPES: dict[str, type] = {"kind": str, "source": str, "memory_bytes": int, "pcie": int}  # others are numbers
_NAMES = [field.name for field in fields(GpuKind)]
_REQUIRED = ("kind", "memory_bytes", "memory_Bps", "half_flops", "pcie", "source")


def load_gpus(path: str | Path | None = None) -> dict[str, GpuKind]:
    """Read datasheet figures by kind of GPU.

    Args:
        path: the TOML file; None: the shipped one.

    Raises:
        BadInput: if the file cannot be read, or a key is unknown, missing or has a wrong value.
    """
    path = shipped("gpus.toml") if path is None else Path(path)
    table = load_toml(path)
    check_schema(path, table)
    check_keys(path, "the file", table, {"schema", "gpu"})
    rows = table.get("gpu")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{path}: expected one [[gpu]] table or more, found none")
    kinds: dict[str, GpuKind] = {}
    for index, row in enumerate(rows):
        found = _read_kind(path, index, row)
        if found.kind in kinds:
            raise BadInput(f"{path}: expected each kind once, found {found.kind!r} twice")
        kinds[found.kind] = found
    return kinds


def _read_kind(path: Path, index: int, row: Any) -> GpuKind:
    if not isinstance(row, dict):
        raise BadInput(f"{path}: expected a table for kind {index}, found {row!r}")
    where = f"[[gpu]] {row.get('kind', index)!r}"
    check_keys(path, where, row, set(_NAMES))
    if missing := [name for name in _REQUIRED if name not in row]:
        raise BadInput(f"{path}: {where}: lacks {', '.join(missing)}")
    for name, value in row.items():
        wants = _TYPES.get(name, float)
        if isinstance(value, bool) or not isinstance(value, (int, float) if wants is float else wants):
            spoken = {str: "text", int: "a whole number", float: "a number"}[wants]
            raise BadInput(f"{path}: {where}: {name} must be {spoken}, found {value!r}")
    try:
        return GpuKind(**row)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
