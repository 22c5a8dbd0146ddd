"""Every headline figure, recomputed from the trace's arrays in plain code: `--json`, terminal and page say the same."""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.cli import demo
from aurora.io import load_json, load_plan, load_trace, save, shipped
from aurora.reports.formatting import percent, seconds, speedup
from aurora.reports.html import page
from aurora.reports.inputs import Baseline, ReportInputs
from aurora.types import TRACE_PHASES, SyntheticOptions
from tests.reports.test_html import Outline, unpacked

pytestmark = pytest.mark.full

MODELS = {"a": "mixtral-topics", "b": "qwen3moe-stdlib"}
COMPUTED = ("gate", "expert", "aggregate", "head")


@pytest.fixture
def folder(tmp_path):
    """A profile of either shipped model's shape, from four source ranks."""
    for name, model in MODELS.items():
        config = load_json(shipped(f"models/{model}/config.json"))
        made = draw_profile("zipf:1", config, SyntheticOptions(sources=4, window_tokens=16, windows=2))
        save(made, tmp_path / f"{name}.npz")
    return tmp_path


def covered_s(spans):
    """How long at least one of the (start, end) lasts."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def recomputed(trace, cluster):
    """The figures of a trace: seconds, phases, utilisation, exchange gap and each layer's exchanges."""
    names = ("rank", "model", "step", "layer", "phase", "peer", "sent", "start_s", "end_s", "bytes")
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(getattr(trace, f"{n}_X").tolist() for n in names), strict=True)]
    ends = defaultdict(lambda: ([], []))
    for row in rows:
        if row["peer"] >= 0:
            pair = (row["rank"], row["peer"]) if row["sent"] else (row["peer"], row["rank"])
            ends[row["model"], row["step"], row["layer"], row["phase"], *pair][row["sent"]].append(row)
    begins = {id(row): row["start_s"] for row in rows}
    for received, sent in ends.values():
        for pair in zip(received, sent, strict=True):
            ready_s = max(row["start_s"] for row in pair)
            begins |= {id(row): ready_s for row in pair if ready_s < row["end_s"]}
    spans, ports, loads, workers = (defaultdict(list) for _ in range(4))
    for row in rows:
        span, phase = (begins[id(row)], row["end_s"]), TRACE_PHASES[row["phase"]]
        spans[row["rank"], row["model"], row["step"], row["layer"], phase].append(span)
        workers[row["rank"], row["model"]].append(span)
        if row["peer"] >= 0:
            gpu, case = cluster.gpus[row["rank"]], (row["model"], row["step"], row["layer"], phase)
            ports[case, row["rank"], row["sent"]].append(span)
            loads[case, row["rank"], row["sent"]].append(row["bytes"] / (gpu.out_Bps if row["sent"] else gpu.in_Bps))
    phases = defaultdict(float)
    for (*_, phase), own in spans.items():
        phases[phase] += covered_s(own) / trace.ranks
    for own in workers.values():
        phases["waiting"] += (max(e for _, e in own) - min(s for s, _ in own) - covered_s(own)) / trace.ranks
    took_s, bound_s = defaultdict(float), defaultdict(float)
    for (case, *_), own in ports.items():
        took_s[case] = max(took_s[case], covered_s(own))
    for (case, *_), own in loads.items():
        bound_s[case] = max(bound_s[case], sum(own))
    whole_s = max(row["end_s"] for row in rows) - min(row["start_s"] for row in rows)
    layers = {(m, l, p): sum(s for (m2, _, l2, p2), s in took_s.items() if (m2, l2, p2) == (m, l, p)) for m, _, l, p in took_s}
    return {
        "seconds": whole_s,
        "phases": dict(phases),
        "utilisation": sum(phases[phase] for phase in COMPUTED) / whole_s,
        "exchange_gap": sum(took_s.values()) / sum(bound_s.values()) - 1,
        "layers": layers,
    }


def tiles(outline):
    """The values of the page's tiles by their titles."""
    texts = [" ".join(outline.texts[i]).strip() for i, (tag, *_) in enumerate(outline.found) if tag in ("dt", "dd")]
    return dict(zip(texts[::3], texts[1::3], strict=True))


def same(found, expected):
    for figure in ("seconds", "utilisation", "exchange_gap"):
        assert found[figure] == pytest.approx(expected[figure], rel=1e-6, abs=1e-9), figure
    phases = {phase: value for phase, value in found["phases"].items() if value}
    assert phases == pytest.approx({phase: value for phase, value in expected["phases"].items() if value}, rel=1e-6, abs=1e-9)
    for layer in found["layers"]:
        took_s = [expected["layers"][0, layer["layer"], phase] for phase in ("dispatch", "combine")]
        assert [layer["dispatch_s"], layer["combine_s"]] == pytest.approx(took_s, rel=1e-6)


def test_terminal_json_and_page_say_what_the_traces_hold(aurora, folder):
    """A measured run of a shipped model and the simulation of its own traffic."""
    plan, model = folder / "alone.json", shipped("models/mixtral-topics")
    assert aurora("plan", "--cluster", "demo-4", "--profile", folder / "a.npz", "-o", plan)[0] == 0
    (folder / "prompts.txt").write_text("import os\n\nclass Thing:\nThe statement\nno\n")
    run = ["run", plan, "--model", model, "--prompts", folder / "prompts.txt", "--max-new-tokens", 2, "--transport", "memory"]
    code, out, err = aurora(*run, "--compare", "--json")
    assert code == 0, err
    found = json.loads(out)
    cluster = load_plan(plan).cluster
    paths = folder / "alone.measured.predicted.npz", folder / "alone.measured.npz"
    predicted, measured = (recomputed(load_trace(path), cluster) for path in paths)
    same(found, measured)
    error = predicted["seconds"] / measured["seconds"] - 1
    assert found["comparison"]["error"] == pytest.approx(error)
    for row in found["comparison"]["phases"]:
        pair = predicted["phases"].get(row["phase"], 0.0), measured["phases"].get(row["phase"], 0.0)
        assert (row["predicted_s"], row["measured_s"]) == pytest.approx(pair, rel=1e-6, abs=1e-9)
    simulated = json.loads(aurora("simulate", plan, "--json")[1])
    same(simulated, recomputed(load_trace(folder / "alone.predicted.npz"), cluster))
    out = " ".join(aurora("simulate", plan)[1].split())
    assert f"busiest ports {percent(simulated['exchange_gap'])} above the fluid bound" in out
    code, _, err = aurora("report", plan, *paths, "-o", folder / "report.html")
    assert code == 0, err
    outline = Outline((folder / "report.html").read_text())
    shown = tiles(outline)
    assert shown["Prediction error"] == percent(error)
    assert shown["Time per step, measured"] == seconds(measured["seconds"] / np.unique(load_trace(paths[1]).step_X).size)
    (frame,) = [outline.numbers["phases"]["frames"]]
    for column, expected in zip(unpacked(frame).values(), (predicted, measured), strict=True):
        names = outline.numbers["phases"]["about"]["names"]
        assert dict(zip(names, column.tolist(), strict=True)) == pytest.approx(
            {name: expected["phases"].get(name, 0.0) for name in names}, rel=1e-5, abs=1e-9
        )
    cells = ["".join(outline.texts.get(i, [])).strip() for i, (tag, *_) in enumerate(outline.found) if tag == "td"]
    at = cells.index("gate")
    for step, phase in enumerate((*TRACE_PHASES, "waiting")):
        row = [phase, *(seconds(figures["phases"].get(phase, 0.0)) for figures in (predicted, measured))]
        assert cells[at + 3 * step : at + 3 * step + 3] == row


def test_the_demos_terminal_and_report_have_one_headline(aurora, folder):
    """What the demo prints of its last way is what its report says first."""
    plan = folder / "two.json"
    assert (
        aurora("plan", "--cluster", "demo-4", "--profile", folder / "a.npz", "--profile", folder / "b.npz", "-o", plan)[0] == 0
    )
    assert aurora("simulate", plan, "-o", folder / "p.npz")[0] == 0
    trace = load_trace(folder / "p.npz")
    slower = replace(trace, kind="measured", start_s_X=trace.start_s_X * 1.5, end_s_X=trace.end_s_X * 1.5)
    outcomes = [demo.DemoOutcome(2.0, 3.0), demo.DemoOutcome(2.0, 3.0), demo.DemoOutcome(trace.seconds, slower.seconds)]
    table = demo.outcome_table(outcomes)
    shown = [list(column.cells)[-1] for column in table.columns]
    baseline = Baseline(demo.WAYS[0].name, {"predicted": 2.0, "measured": 3.0})
    text = page(ReportInputs(load_plan(plan), (("p", trace), ("m", slower)), baseline=baseline))
    found = Outline(text)
    headlines = tiles(found)
    assert headlines["Speed-up, measured"] == speedup(3.0, slower.seconds)
    assert headlines["Prediction error"] == percent(trace.seconds / slower.seconds - 1)
    assert [shown[3], shown[4]] == [headlines["Prediction error"], headlines["Speed-up, measured"]]
    assert str(table.columns[3].header) == "prediction error"
