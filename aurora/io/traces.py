"""Reads and writes traces of runs (npz, schema 1)."""

from pathlib import Path
from typing import Any

from aurora.io.files import Arrays, load_npz, save_npz
from aurora.types import Trace
from aurora.types.read_numbers import whole_number

TRACE_FORMAT = "aurora trace"


def load_trace(path: str | Path) -> Trace:
    """Read a trace. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {TRACE_FORMAT: trace_from_arrays})


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace to exactly `path`."""
    about = {"kind": trace.kind, "names_M": list(trace.names_M), "ranks": trace.ranks}
    save_npz(path, TRACE_FORMAT, about, {name: getattr(trace, name) for name in Trace.COLUMNS})


def trace_from_arrays(about: dict[str, Any], arrays: Arrays) -> Trace:
    """Returns the trace in a file's header `about` and arrays."""
    columns = {name: arrays.pop(name) for name in Trace.COLUMNS}
    return Trace(str(about["kind"]), tuple(about["names_M"]), whole_number(about["ranks"]), **columns)
