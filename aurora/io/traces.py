"""Reads and writes traces of runs (npz, schema 1)."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from aurora.io.files import Arrays, load_npz, save_npz
from aurora.types import ControlReport, ControlWindow, PlacementChange, Trace
from aurora.types.read_numbers import whole_number

TRACE_FORMAT = "aurora trace"


def load_trace(path: str | Path) -> Trace:
    """Read a trace. Raises BadInput if the file is missing, damaged or of another format."""
    return load_npz(Path(path), {TRACE_FORMAT: trace_from_arrays})


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace to exactly `path`."""
    about = {"kind": trace.kind, "names_M": list(trace.names_M), "ranks": trace.ranks}
    about |= {"control_M": [asdict(report) for report in trace.control_M]} if trace.control_M else {}
    save_npz(path, TRACE_FORMAT, about, {name: getattr(trace, name) for name in Trace.COLUMNS})


def trace_from_arrays(about: dict[str, Any], arrays: Arrays) -> Trace:
    """Returns the trace in a file's header `about` and arrays."""
    columns = {name: arrays[name] for name in Trace.COLUMNS}
    arrays.get("epoch_X")  # of earlier versions: the set of ranks in force
    control_M = tuple(_control_report(**report) for report in about.get("control_M", ()))
    return Trace(str(about["kind"]), tuple(about["names_M"]), whole_number(about["ranks"]), **columns, control_M=control_M)


def _control_report(changes: list[dict[str, Any]], series: list[dict[str, Any]], **more: Any) -> ControlReport:
    """A control loop's report in a header."""
    changed = tuple(PlacementChange(**change | {"layers": tuple(change["layers"])}) for change in changes)
    return ControlReport(**more, changes=changed, series=tuple(ControlWindow(**window) for window in series))
