"""Traces as Chrome trace events, which ui.perfetto.dev opens: ranks are processes, models and phases their tracks.

Source: the Trace Event Format's phases M (names), X (slices), s and f (flows) and C (counters); times in microseconds.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.reports.inputs import ReportInputs
from aurora.reports.spans import interval_colouring
from aurora.types import TRACE_PHASES, Trace
from aurora.types.arrays import FloatArray, IntArray

Event = dict[str, Any]
MOST_LEVELS = 1000  # of one track, side by side at most


def perfetto(inputs: ReportInputs, packed: bool = False) -> bytes:
    """Returns one Perfetto file of all traces; each begins at time zero.

    Args:
        inputs: the traces, and the names of the plan's models.
        packed: whether to compress it with gzip.

    Returns:
        The file's content, the same at every call.

    Raises:
        BadInput: if there is no trace.
    """
    if not inputs.traces:
        raise BadInput("`format` perfetto: expected a trace, found none; aurora simulate PLAN writes one")
    events: list[Event] = []
    for number, (name, trace) in enumerate(inputs.traces):
        events += _events(name, trace, inputs.models, 1 + number * trace.ranks, len(events))
    about = {"cluster": inputs.plan.cluster.name, "scenario": inputs.plan.scenario, "seed": str(inputs.plan.options.seed)}
    whole = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    content = (json.dumps(whole, separators=(",", ":"), allow_nan=False) + "\n").encode()
    return gzip.compress(content, mtime=0) if packed else content


def _events(name: str, trace: Trace, models: tuple[str, ...], first_pid: int, first_flow: int) -> Iterator[Event]:
    """Rank r is process first_pid + r; flows count from first_flow."""
    track_X, tracks = _tracks(trace, models)
    began = trace.start_s_X.min()
    start_us_X, end_us_X = ((column - began) * 1e6 for column in (trace.start_s_X, trace.end_s_X))
    level_X = interval_colouring(trace.rank_X * len(tracks) + track_X, trace.start_s_X, trace.end_s_X)
    tid_X = 1 + track_X * MOST_LEVELS + np.minimum(level_X, MOST_LEVELS - 1)  # 0 is the idle thread to readers
    for rank in range(trace.ranks):
        pid = first_pid + rank
        yield _named("process_name", pid, 1, name=f"rank {rank}: {name} ({trace.kind})")
        yield _named("process_sort_index", pid, 1, sort_index=pid)
        for tid in np.unique(tid_X[trace.rank_X == rank]).tolist():
            track, level = divmod(tid - 1, MOST_LEVELS)
            yield _named("thread_name", pid, tid, name=tracks[track] + (f", {level + 1}" if level else ""))
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
    for row in range(len(trace)):
        phase, peer = TRACE_PHASES[trace.phase_X[row]], int(trace.peer_X[row])
        args: Event = {"step": int(trace.step_X[row]), "layer": int(trace.layer_X[row])}
        if peer >= 0:
            args |= {"peer": peer, "bytes": int(trace.bytes_X[row])}
        yield {
            "ph": "X", "name": phase if peer < 0 else f"{phase} {'to' if trace.sent_X[row] else 'from'} {peer}",
            "cat": models[trace.model_X[row]], "pid": first_pid + int(trace.rank_X[row]), "tid": int(tid_X[row]),
            "ts": float(start_us_X[row]), "dur": float(end_us_X[row] - start_us_X[row]), "args": args,
        }  # fmt: skip
    for flow, (sent, received) in enumerate(_pairs(trace).tolist()):
        phase, model = TRACE_PHASES[trace.phase_X[sent]], models[trace.model_X[sent]]
        later_us = max(start_us_X[sent], start_us_X[received])
        for kind, row, ts, bound in (("s", sent, start_us_X[sent], {}), ("f", received, later_us, {"bp": "e"})):
            yield {
                "ph": kind, "id": first_flow + flow, "name": phase, "cat": model, "pid": first_pid + int(trace.rank_X[row]),
                "tid": int(tid_X[row]), "ts": float(ts), **bound,
            }  # fmt: skip
    yield from _counters(trace, first_pid, start_us_X, end_us_X)


def _tracks(trace: Trace, models: tuple[str, ...]) -> tuple[IntArray, list[str]]:
    """(X,) int64 the track of each event, and the tracks' names: a model's phases, there and back apart."""
    names = [f"{model}: {phase}{way}" for model in models for phase in TRACE_PHASES for way in ("", " out", " in")]
    way_X = np.where(trace.peer_X < 0, 0, np.where(trace.sent_X, 1, 2))
    return (trace.model_X * len(TRACE_PHASES) + trace.phase_X) * 3 + way_X, names


def _pairs(trace: Trace) -> IntArray:
    """(F, 2) int64 rows of a transfer's two ends that overlap or touch in this order: sent, received."""
    ends = []
    for sent in (True, False):
        rows = np.flatnonzero((trace.peer_X >= 0) & (trace.sent_X == sent))
        src_X, dst_X = (trace.rank_X, trace.peer_X) if sent else (trace.peer_X, trace.rank_X)
        columns = (trace.start_s_X, dst_X, src_X, trace.phase_X, trace.layer_X, trace.step_X, trace.model_X)
        rows = rows[np.lexsort([column[rows] for column in columns])]
        key_XK = np.stack([column[rows] for column in columns[:0:-1]], axis=1)
        same = (np.diff(key_XK, axis=0) == 0).all(axis=1)
        first = np.flatnonzero(np.concatenate([[True], ~same])[: len(rows)])
        turn_X = np.arange(len(rows)) - np.repeat(first, np.diff(np.append(first, len(rows))))
        keys = map(tuple, np.column_stack([key_XK, turn_X]).tolist())
        ends.append(dict(zip(keys, rows.tolist(), strict=True)))
    found = np.array([(row, ends[1][key]) for key, row in ends[0].items() if key in ends[1]], dtype=np.int64).reshape(-1, 2)
    return found[trace.end_s_X[found[:, 1]] > trace.start_s_X[found[:, 0]]]


def _counters(trace: Trace, first_pid: int, start_us_X: FloatArray, end_us_X: FloatArray) -> Iterator[Event]:
    """Events of each rank's bytes under way as a sender, whenever they change."""
    for rank in range(trace.ranks):
        rows = np.flatnonzero(trace.sent_X & (trace.rank_X == rank))
        at_X = np.concatenate([start_us_X[rows], end_us_X[rows]])
        step_X = np.concatenate([trace.bytes_X[rows], -trace.bytes_X[rows]])
        changes_us, change_X = np.unique(at_X, return_inverse=True)
        change = np.zeros(len(changes_us), dtype=np.int64)
        np.add.at(change, change_X, step_X)
        for at_us, level in zip(changes_us.tolist(), change.cumsum().tolist(), strict=True):
            yield {"ph": "C", "name": "bytes under way", "pid": first_pid + rank, "ts": at_us, "args": {"bytes": level}}


def _named(what: str, pid: int, tid: int, name: str | None = None, sort_index: int | None = None) -> Event:
    args = {"name": name} if name is not None else {"sort_index": sort_index}
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
