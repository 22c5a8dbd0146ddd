"""Perfetto's input against the fields that the Trace Event Format asks of each phase."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.reports.inputs import ReportInputs
from aurora.reports.perfetto import perfetto
from aurora.reports.trace_times import bars, phase_seconds
from aurora.types import TraceRecorder

REQUIRED = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "name", "cat", "pid", "tid", "ts", "id"},
    "f": {"ph", "name", "cat", "pid", "tid", "ts", "id", "bp"},
}
NAMES = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def events(inputs):
    return json.loads(perfetto(inputs))["traceEvents"]


def transfers(found):
    """The slices that are transfers."""
    return [event for event in found if event["ph"] == "X" and "peer" in event["args"]]


def test_fields_of_every_phase(together):
    found = events(together)
    assert {event["ph"] for event in found} == set(REQUIRED)
    for event in found:
        assert set(event) == REQUIRED[event["ph"]]
        assert event["pid"] > 0
        if event["ph"] == "M":
            assert event["name"] in NAMES
            assert set(event["args"]) == ({"name"} if event["name"].endswith("_name") else {"sort_index"})
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_transfers_are_the_trace_in_microseconds(together):
    ((_, trace),) = together.traces
    found = transfers(events(together))
    moved = trace.peer_X >= 0
    assert len(found) == moved.sum()
    assert np.allclose([e["ts"] for e in found], (trace.start_s_X - trace.start_s_X.min())[moved] * 1e6)
    assert np.allclose([e["dur"] for e in found], (trace.end_s_X - trace.start_s_X)[moved] * 1e6)
    tracks = defaultdict(list)
    for event in found:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(together) if e["name"] == "thread_name"}
    assert set(tracks) < set(named)
    assert {"one", "one: sends", "two", "two: receives"} <= set(named.values())
    for spans in tracks.values():
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in zip(sorted(spans), sorted(spans)[1:], strict=False))


def test_steps_hold_layers_and_layers_hold_phases(together):
    """Every phase lies in a layer of its own step, every layer in its step, and the phases' times are the summary's."""
    ((_, trace),) = together.traces
    nested = defaultdict(list)
    for event in events(together):
        if event["ph"] == "X" and "peer" not in event["args"]:
            nested[event["pid"], event["tid"]].append(event)
    assert len(nested) == 2 * trace.ranks
    spent = defaultdict(float)
    for slices in nested.values():
        by_name = {(e["name"], e["args"]["step"]): e for e in slices if e["name"].startswith(("step", "layer"))}
        for event in slices:
            step, layer = event["args"]["step"], event["args"].get("layer")
            if event["name"].startswith("step"):
                continue
            holder = by_name[f"step {step}" if event["name"].startswith("layer") else f"layer {layer}", step]
            assert holder["ts"] - 1e-3 <= event["ts"] <= event["ts"] + event["dur"] <= holder["ts"] + holder["dur"] + 1e-3
            if not event["name"].startswith("layer"):
                spent[event["name"]] += event["dur"] * 1e-6 / trace.ranks
    of_models = phase_seconds(trace, bars(trace))  # each model has tracks of its own
    phases = {phase: sum(each[phase] for each in of_models) for phase in of_models[0]}
    assert spent == pytest.approx({phase: value for phase, value in phases.items() if value})


def test_the_head_is_in_its_step_and_in_no_layer(alone):
    recorder = TraceRecorder("measured", ("one",), 4)
    recorder.add(0, 0, 0, 0, "gate", 1.0, 2.0)
    recorder.add(0, 0, 0, 1, "gate", 2.0, 3.0)
    recorder.add(0, 0, 0, 1, "head", 3.0, 5.0)
    found = [e for e in events(ReportInputs(alone.plan, (("x", recorder.trace()),))) if e["ph"] == "X"]
    assert {e["name"]: (e["ts"], e["dur"]) for e in found if e["name"] != "gate"} == {
        "step 0": (0.0, 4e6), "layer 0": (0.0, 1e6), "layer 1": (1e6, 1e6), "head": (2e6, 2e6),
    }  # fmt: skip


def test_every_transfer_flows_from_its_send_to_its_receipt(together):
    ((_, trace),) = together.traces
    found = events(together)
    starts, ends = ({e["id"]: e for e in found if e["ph"] == kind} for kind in "sf")
    assert len(starts) == int(trace.sent_X.sum())
    assert starts.keys() == ends.keys()
    slices = defaultdict(list)
    for event in transfers(found):
        slices[event["pid"], event["tid"]].append(event)
    for flow, start in starts.items():
        end = ends[flow]
        assert end["ts"] >= start["ts"]
        (sent,), received = (
            [e for e in slices[at["pid"], at["tid"]] if e["ts"] <= at["ts"] < e["ts"] + e["dur"]] for at in (start, end)
        )
        assert any((sent["args"]["bytes"], sent["args"]["layer"]) == (e["args"]["bytes"], e["args"]["layer"]) for e in received)
        assert sent["args"]["peer"] == end["pid"] - 1
        assert start["pid"] - 1 in [e["args"]["peer"] for e in received]


def test_what_is_sent_and_never_received_has_no_flow(alone):
    recorder = TraceRecorder("measured", ("one",), 4)
    recorder.add(0, 0, 0, 0, "dispatch", 1.0, 2.0, (1, True, 6))
    recorder.add(1, 0, 0, 0, "dispatch", 1.5, 2.5, (0, False, 6))
    recorder.add(0, 0, 0, 0, "dispatch", 2.0, 3.0, (2, True, 6))
    recorder.add(3, 0, 0, 0, "dispatch", 8.0, 9.0, (0, True, 6))
    recorder.add(0, 0, 0, 0, "dispatch", 6.0, 7.0, (3, False, 6))
    found = events(ReportInputs(alone.plan, (("x", recorder.trace()),)))
    assert [(e["ph"], e["ts"]) for e in found if e["ph"] in "sf"] == [("s", 0.0), ("f", 0.5e6)]


def test_ranks_of_two_traces_are_processes_apart(alone):
    names = [e["args"]["name"] for e in events(alone) if e["name"] == "process_name"]
    assert names == [
        f"rank {r}: {name} ({kind})" for name, kind in (("a.npz", "predicted"), ("b.npz", "measured")) for r in range(4)
    ]
    assert len({e["pid"] for e in events(alone) if e["name"] == "process_name"}) == 8
    flows = [e["id"] for e in events(alone) if e["ph"] == "s"]
    assert len(flows) == len(set(flows))


def test_packed_is_the_same_and_nothing_to_show_is_refused(alone):
    assert gzip.decompress(perfetto(alone, packed=True)) == perfetto(alone)
    assert perfetto(alone, packed=True) == perfetto(alone, packed=True)
    with pytest.raises(BadInput, match="expected a trace, found none"):
        perfetto(replace(alone, traces=()))
