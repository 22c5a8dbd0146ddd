"""Traces (npz, schema 1): events of a predicted or measured run, one array per column."""

from pathlib import Path
from typing import Any

from aurora.io.npz import Arrays, load_npz, save_npz
from aurora.types import Trace

FORMAT = "aurora trace"


def load_trace(path: str | Path) -> Trace:
    """Read a trace. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {FORMAT: trace_from_arrays})


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace to exactly `path`."""
    about = {"kind": trace.kind, "names_M": list(trace.names_M), "ranks": trace.ranks}
    save_npz(path, FORMAT, about, {name: getattr(trace, name) for name in Trace.COLUMNS})


def trace_from_arrays(about: dict[str, Any], arrays: Arrays) -> Trace:
    """Returns the trace in a file's header `about` and arrays."""
    columns = {name: arrays[name] for name in Trace.COLUMNS}
    return Trace(str(about["kind"]), tuple(about["names_M"]), int(about["ranks"]), **columns)
