"""Reads and writes traces of runs (npz, schema 1)."""

from pathlib import Path
from typing import Any

from aurora.io.files import Arrays, load_npz, save_npz
from aurora.io.schema import shared, table_of
from aurora.types import Trace

TRACE_FORMAT = "aurora trace"
TraceHeader: Any = table_of(Trace, leave=Trace.COLUMNS)


def load_trace(path: str | Path) -> Trace:
    """Reads a trace. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), TRACES)


def save_trace(trace: Trace, path: Path) -> None:
    """Writes a trace to exactly `path`."""
    arrays = {name: getattr(trace, name) for name in Trace.COLUMNS}
    save_npz(path, TRACE_FORMAT, TraceHeader(**shared(trace, TraceHeader)), arrays)


def _trace(header: Any, arrays: Arrays) -> Trace:
    columns: dict[str, Any] = {name: arrays.pop(name) for name in Trace.COLUMNS}
    return Trace(**shared(header, Trace), **columns)


TRACES = {TRACE_FORMAT: (TraceHeader, _trace)}
