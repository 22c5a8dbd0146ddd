"""Cluster TOML files."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.fabrics import fabric_json, read_fabric
from aurora.io.files import check_keys, check_schema, load_toml, shipped, write_text
from aurora.io.link_curves import link_curves_json, read_link_curves
from aurora.types import Cluster, Gpu

MOST_GPUS = 4096  # of a cluster; traffic matrices have the square of it


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a file.

    Args:
        path: a cluster TOML (schema 1), or the name of a shipped cluster.

    Raises:
        BadInput: if the file is missing or wrong; the message names the key.
    """
    path = _found(Path(path))
    table = load_toml(path)
    check_schema(path, table)
    check_keys(path, "the file", table, {"schema", "name", "gpu", "fabric", "incast", "link_curve"})
    rows = table.get("gpu")
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{path}: expected one [[gpu]] table or more, found none")
    gpus: list[Gpu] = []
    for row in rows:
        gpus.extend(read_gpus(str(path), row, len(gpus)))
        if len(gpus) > MOST_GPUS:
            raise BadInput(f"{path}: expected at most {MOST_GPUS} GPUs, found {len(gpus)} or more")
    fabric = read_fabric(str(path), table["fabric"], gpus) if "fabric" in table else None
    incast = table.get("incast", 0.0)
    if isinstance(incast, bool) or not isinstance(incast, (int, float)):
        raise BadInput(f"{path}: incast must be a number, found {incast!r}")
    curves = read_link_curves(str(path), table.get("link_curve", []))
    try:
        return Cluster(str(table.get("name", path.stem)), tuple(gpus), fabric, float(incast), curves)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _found(path: Path) -> Path:
    """The file itself, or the shipped cluster of that name."""
    if path.suffix or path.exists():
        return path
    folder = shipped("clusters")
    names = sorted(file.stem for file in folder.glob("*.toml"))
    if str(path) not in names:
        raise BadInput(f"{path}: expected a file or one of the clusters {', '.join(names)}, found neither")
    return folder / f"{path}.toml"


def save_cluster(cluster: Cluster, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write a cluster as TOML with one table per GPU, which `load_cluster` reads back as the same cluster.

    Args:
        cluster: the cluster.
        path: exact path of the file.
        remarks: comments for the top of the file, one per line.
    """
    lines = [*(f"# {_plain(remark)}" for remark in remarks), "schema = 1", f"name = {_quoted(cluster.name)}"]
    if cluster.incast:
        lines.append(f"incast = {_inline(cluster.incast)}")
    for gpu in cluster.gpus:
        lines += ["", "[[gpu]]"]
        for field in fields(Gpu):
            value = getattr(gpu, field.name)
            if value != field.default:
                lines.append(f"{field.name} = {_inline(value)}")
    if cluster.fabric is not None:
        lines += ["", "[fabric]"]
        for key, value in fabric_json(cluster.fabric, cluster.gpus).items():
            lines.append(f"{key} = {_inline(value)}")
    for row in link_curves_json(cluster.link_curves):
        lines += ["", "[[link_curve]]", *(f"{key} = {_inline(value)}" for key, value in row.items())]
    write_text(path, "\n".join(lines) + "\n")


def _inline(value: Any) -> str:
    """A value in TOML's inline notation."""
    if isinstance(value, list):
        return "[\n" + "".join(f"    {_inline(each)},\n" for each in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(each)}" for key, each in value.items()) + " }"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(float(value) if isinstance(value, float) else int(value))  # numpy's too


def _quoted(text: str) -> str:
    """A TOML basic string, with quotes, backslashes and control characters escaped."""
    escaped = "".join(f"\\U{ord(c):08X}" if ord(c) < 32 or ord(c) == 127 or c in '"\\' else c for c in text)
    return f'"{escaped}"'


def _plain(remark: str) -> str:
    """A remark on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in remark).split())


def read_gpus(path: str, row: Any, index: int) -> list[Gpu]:
    """Returns the GPUs of one [[gpu]] table, repeated `count` times.

    Args:
        path: the file's name, for messages.
        row: the table.
        index: the rank of the table's first GPU, for messages.

    Raises:
        BadInput: if a key is unknown, missing or has a wrong value.
    """
    if not isinstance(row, dict):
        raise BadInput(f"{path}: expected a table for GPU {index}, found {row!r}")
    where = f"[[gpu]] {row.get('name', index)!r}"
    known = {field.name: field for field in fields(Gpu)}
    check_keys(path, where, row, {*known, "count"})
    count = row.get("count", 1)
    if type(count) is not int or not 1 <= count <= MOST_GPUS:
        raise BadInput(f"{path}: {where}: count must be a whole number from 1 to {MOST_GPUS}, found {count!r}")
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
