"""Traces as Chrome trace events for ui.perfetto.dev: ranks are processes; models and their transfers are tracks.

Source: the Trace Event Format's phases M (names), X (slices), s and f (flows); times in microseconds.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.reports.inputs import ReportInputs
from aurora.reports.spans import interval_colouring
from aurora.reports.trace_times import TIMED_PHASES, Bars, bars, transfer_ends
from aurora.types import TRACE_PHASES, Trace

Event = dict[str, Any]
MOST_LEVELS = 1000  # of one track, side by side at most
AFTER_LAYERS = -1


def perfetto(inputs: ReportInputs, packed: bool = False) -> bytes:
    """Returns the content of one Perfetto file with all traces, each beginning at time zero.

    Args:
        inputs: the traces, and the names of the plan's models.
        packed: True: compress it with gzip.

    Returns:
        The content, the same bytes for the same inputs.

    Raises:
        BadInput: if there is no trace.
    """
    if not inputs.traces:
        raise BadInput("`format` perfetto: expected a trace, found none; aurora simulate PLAN writes one")
    events: list[Event] = []
    for number, (name, trace) in enumerate(inputs.traces):
        events += _events(name, trace, inputs.names_in(trace), 1 + number * trace.ranks, len(events))
    about = {"cluster": inputs.plan.cluster.name, "scenario": inputs.plan.scenario, "seed": str(inputs.plan.options.seed)}
    whole = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    content = (json.dumps(whole, separators=(",", ":"), allow_nan=False) + "\n").encode()
    return gzip.compress(content, mtime=0) if packed else content


def _events(name: str, trace: Trace, models: tuple[str, ...], first_pid: int, first_flow: int) -> Iterator[Event]:
    """Rank r is process first_pid + r, flows count from first_flow; a model's tracks are its steps, sends and receives."""
    began = trace.start_s_X.min()
    start_us_X, end_us_X = ((column - began) * 1e6 for column in (trace.start_s_X, trace.end_s_X))
    names = [f"{model}{suffix}" for model in models for suffix in ("", ": sends", ": receives")]
    track_X = trace.model_X * 3 + np.where(trace.sent_X, 1, 2)
    level_X = interval_colouring(trace.rank_X * len(names) + track_X, trace.start_s_X, trace.end_s_X)
    tid_X = 1 + track_X * MOST_LEVELS + np.minimum(level_X, MOST_LEVELS - 1)  # 0 is the idle thread to readers
    moved_X = trace.peer_X >= 0
    for rank in range(trace.ranks):
        pid = first_pid + rank
        yield _named("process_name", pid, 1, name=f"rank {rank}: {name} ({trace.kind})")
        yield _named("process_sort_index", pid, 1, sort_index=pid)
        of_rank = trace.rank_X == rank
        nested = 1 + np.unique(trace.model_X[of_rank]) * 3 * MOST_LEVELS
        for tid in sorted({*nested.tolist(), *tid_X[of_rank & moved_X].tolist()}):
            track, level = divmod(tid - 1, MOST_LEVELS)
            yield _named("thread_name", pid, tid, name=names[track] + (f", {level + 1}" if level else ""))
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
    yield from _nested(bars(trace), models, first_pid)
    for row in np.flatnonzero(moved_X):
        where = {"pid": first_pid + int(trace.rank_X[row]), "tid": int(tid_X[row])}
        times_us = float(start_us_X[row]), float(end_us_X[row])
        args = {column: int(getattr(trace, f"{column}_X")[row]) for column in ("step", "layer", "peer", "bytes")}
        words = f"{TRACE_PHASES[trace.phase_X[row]]} {'to' if trace.sent_X[row] else 'from'} {args['peer']}"
        yield _slice(words, models[trace.model_X[row]], where, *times_us, args)
    ends_F2 = transfer_ends(trace)
    ends_F2 = ends_F2[trace.end_s_X[ends_F2[:, 1]] > trace.start_s_X[ends_F2[:, 0]]]
    for flow, (sent, received) in enumerate(ends_F2.tolist()):
        phase, model = TRACE_PHASES[trace.phase_X[sent]], models[trace.model_X[sent]]
        later_us = max(start_us_X[sent], start_us_X[received])
        for kind, row, ts, bound in (("s", sent, start_us_X[sent], {}), ("f", received, later_us, {"bp": "e"})):
            yield {
                "ph": kind, "id": first_flow + flow, "name": phase, "cat": model, "pid": first_pid + int(trace.rank_X[row]),
                "tid": int(tid_X[row]), "ts": float(ts), **bound,
            }  # fmt: skip


def _nested(spans: Bars, models: tuple[str, ...], first_pid: int) -> Iterator[Event]:
    """Slices of steps, in them those of layers, and in these those of phases; the head follows the last layer."""
    after_X = np.isin(spans.phase_X, [TIMED_PHASES.index("head")])
    layer_X = np.where(after_X, AFTER_LAYERS, spans.layer_X)
    by_worker = np.lexsort((spans.start_s_X, spans.model_X, spans.rank_X))
    columns = spans.rank_X, spans.model_X, spans.step_X, layer_X, spans.phase_X, spans.start_s_X * 1e6, spans.end_s_X * 1e6
    rows: list[list[Any]] = []
    reach_us = 0.0
    for *key, start_us, end_us in zip(*(column[by_worker].tolist() for column in columns), strict=True):
        reach_us = reach_us if rows and key[:2] == rows[-1][:2] else 0.0  # a GPU's clock and its host's may differ a little
        start_us, reach_us = max(start_us, reach_us), max(end_us, reach_us)
        rows.append([*key, start_us, reach_us])
    for depth, name in ((3, "step"), (4, "layer"), (5, "phase")):
        for key, group in groupby(rows, key=itemgetter(*range(depth))):
            pieces, (rank, model, step, *inner) = list(group), key
            if depth == 4 and inner[0] == AFTER_LAYERS:
                continue
            words = TIMED_PHASES[inner[1]] if depth == 5 else f"{name} {key[-1]}"
            args = {"step": step} | ({"layer": inner[0]} if inner and inner[0] != AFTER_LAYERS else {})
            where = {"pid": first_pid + rank, "tid": 1 + model * 3 * MOST_LEVELS}
            yield _slice(words, models[model], where, pieces[0][5], pieces[-1][6], args)


def _slice(name: str, model: str, where: Event, start_us: float, end_us: float, args: Event) -> Event:
    return {"ph": "X", "name": name, "cat": model, **where, "ts": start_us, "dur": end_us - start_us, "args": args}


def _named(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
