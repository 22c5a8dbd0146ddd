"""Cluster TOML files."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.store.fabrics import read_fabric
from aurora.store.files import check_keys, check_schema, read_text
from aurora.types import Cluster, Gpu


def load_cluster(path: str | Path) -> Cluster:
    """A cluster TOML (schema 1). Raises BadInput with the key that is wrong."""
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    check_schema(path, table)
    check_keys(path, "the file", table, {"schema", "name", "gpu", "fabric", "incast"})
    rows = table.get("gpu")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{path}: expected one [[gpu]] table or more, found none")
    gpus: list[Gpu] = []
    for row in rows:
        gpus.extend(read_gpus(str(path), row, len(gpus)))
    fabric = read_fabric(str(path), table["fabric"], gpus) if "fabric" in table else None
    incast = table.get("incast", 0.0)
    if isinstance(incast, bool) or not isinstance(incast, (int, float)):
        raise BadInput(f"{path}: incast must be a number, found {incast!r}")
    try:
        return Cluster(str(table.get("name", path.stem)), tuple(gpus), fabric, float(incast))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def read_gpus(path: str, row: Any, index: int) -> list[Gpu]:
    """One table of a cluster, repeated `count` times."""
    if not isinstance(row, dict):
        raise BadInput(f"{path}: expected a table for GPU {index}, found {row!r}")
    where = f"[[gpu]] {row.get('name', index)!r}"
    known = {field.name: field for field in fields(Gpu)}
    check_keys(path, where, row, {*known, "count"})
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
