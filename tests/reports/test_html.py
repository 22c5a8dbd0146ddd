"""The page: every chart has its table, nothing comes from the network, the same bytes each time, small enough."""

import base64
import json
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from aurora.reports.formatting import seconds
from aurora.reports.inputs import Baseline, ReportInputs
from aurora.reports.numbers import ReportNumbers

pytest.importorskip("jinja2")

from aurora.reports.html import page

VOID = {"meta", "link", "br", "img", "input"}


class Outline(HTMLParser):
    """Elements with their parents, ids, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.path, self.found, self.texts = [], [], {}
        self.feed(text)
        assert not self.path, self.path

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), tuple(self.path)))
        if tag not in VOID:
            self.path.append((tag, dict(attributes).get("data-chart")))

    def handle_endtag(self, tag):
        assert self.path.pop()[0] == tag

    def handle_data(self, text):
        self.texts.setdefault(len(self.found) - 1, []).append(text)

    def all(self, tag):
        return [(attributes, path) for name, attributes, path in self.found if name == tag]

    @property
    def numbers(self):
        at = next(i for i, (_, attributes, _) in enumerate(self.found) if attributes.get("id") == "numbers")
        return json.loads("".join(self.texts[at]))


def unpacked(frame):
    raw, at, columns = zlib.decompress(base64.b64decode(frame["packed"])), 0, {}
    for name, kind, count in frame["columns"]:
        dtype = np.dtype({"B": "u1", "H": "<u2", "I": "<u4", "f": "<f4"}[kind[0]])
        planes = np.frombuffer(raw, np.uint8, count * dtype.itemsize, at).reshape(dtype.itemsize, count)
        at += planes.size
        column = np.ascontiguousarray(planes.T).view(dtype).ravel()
        columns[name] = column.astype(np.int64).cumsum() if kind.endswith("+") else column
    assert at == len(raw)
    return columns


@pytest.fixture(scope="module")
def shown(together):
    text = page(together)
    return text, Outline(text)


def test_the_page_stands_alone(shown):
    text, outline = shown
    assert "http:" not in text
    assert "https:" not in text
    assert not [a for tag in ("script", "img", "iframe") for a, _ in outline.all(tag) if "src" in a]
    assert [a["href"] for a, _ in outline.all("link")] == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text


def test_where_the_time_goes_tells_of_counts(together):
    (summary,) = ReportNumbers(together).summaries
    assert f"their counts for {seconds(summary.phases['counts'])}, computes" in page(together)


def test_every_chart_has_a_name_a_table_and_its_numbers(shown):
    _, outline = shown
    charts = [a["data-chart"] for a, _ in outline.all("figure")]
    assert charts == [
        "phases",
        "expert-map",
        "traffic-map",
        "port-loads",
        "expert-loads",
        "gantt",
        "timeline-chart",
    ]
    assert sorted(outline.numbers) == sorted(charts)
    behind = {dict(path)["figure"] for _, path in outline.all("table") if ("details", None) in path and "figure" in dict(path)}
    assert behind == set(charts)
    for attributes, _ in outline.all("canvas"):
        assert attributes["tabindex"] == "0"
        assert attributes["aria-label"]


def test_landmarks_headings_and_ids(shown):
    _, outline = shown
    tags = [tag for tag, _, _ in outline.found]
    assert [tags.count(tag) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    ids = [a["id"] for _, a, _ in outline.found if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in outline.found:
        named = attributes.get("aria-labelledby", "").split() + attributes.get("aria-describedby", "").split()
        assert set(named) <= set(ids)
        assert attributes.get("href", "#main").removeprefix("#") in (*ids, "data:,")
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_numbers_arrive_as_they_were(shown, together):
    _, outline = shown
    flows = ReportNumbers(together).traffic_M[1]
    frames = outline.numbers["traffic-map"]["frames"]
    assert [len(layers) for layers in frames] == [2, 3]
    for layer, frame in enumerate(frames[1]):
        columns = unpacked(frame)
        for side, name in enumerate(("before", "after")):
            assert np.array_equal(columns[name].reshape(4, 4), flows.tokens_BLGG[side, layer])
            assert np.array_equal(columns[f"{name}-out"], flows.tokens_BLGG[side, layer].sum(axis=1))
    (there, _) = ReportNumbers(together).planned_MLW[1][2]
    frame = outline.numbers["expert-map"]["frames"][1]
    columns, profile = unpacked(frame), together.profiles[1]
    assert columns["rows"].tolist() == [8, 4, 4]
    load_LE = profile.tokens_TLSE.sum(axis=(0, 2))
    relative_EL = (load_LE / load_LE.mean(axis=1, keepdims=True)).T
    assert np.allclose(columns["experts"].reshape(8, 3) * frame["scale"], relative_EL, atol=frame["scale"])
    for side, name in enumerate(("before", "after")):
        busy_LG = flows.port_s_BLG[side] + flows.expert_s_BLG[side]
        shown_GL = columns[name].reshape(4, 3) * frame["scale"]
        assert np.allclose(shown_GL, (busy_LG / busy_LG.mean(axis=1, keepdims=True)).T, atol=frame["scale"])
    frame = outline.numbers["gantt"]["frames"][1][2][0]
    columns = unpacked(frame)
    assert np.array_equal(columns["track0"], there.src_X)
    assert np.array_equal(columns["track1"], there.dst_X)
    assert np.allclose(columns["start"] * frame["scale"], there.start_s_X, atol=frame["scale"])
    assert np.allclose((columns["start"] + columns["length"]) * frame["scale"], there.end_s_X, atol=frame["scale"])


def test_the_answer_comes_first(alone):
    text = page(alone)
    assert text.index('class="tiles"') < text.index("<figure")
    assert "-20.0%" in text
    before_s, after_s = ReportNumbers(alone).objective_s
    assert "Speed-up, by the objective" in text
    assert f"{before_s / after_s:.2f}x" in text
    (_, trace), slow = alone.traces
    runs = replace(alone, traces=(slow, ("c.npz", replace(trace, kind="measured"))))
    assert "Speed-up, measured" in (found := page(runs))
    assert "Tokens processed per second, measured" in found
    assert "against" in found
    assert "1.25x" in found
    baseline = Baseline("in turn", {"predicted": 1.0, "measured": 5 * slow[1].seconds})
    assert "5.00x" in (found := page(replace(alone, baseline=baseline)))
    assert "against in turn" in found


def test_what_is_missing_is_asked_for(alone):
    text = page(ReportInputs(alone.plan))
    assert text.count("Pass --profile once per model") >= 3
    assert "aurora simulate PLAN" in text
    assert not Outline(text).numbers


def test_replicas_show_copies_and_survival(replicated):
    text = page(replicated)
    assert "Replicas and survival" in text
    cells = "".join(f"<td>{cell}</td>" for cell in ("one", 1, 9, 1, 7, 0))  # layer 1: nine slots, seven experts with one copy
    assert cells in text
    assert "0 (25%) 1" in text
    assert "0 (75%) 2 3" in text


def test_the_same_inputs_give_the_same_page(together):
    assert page(together) == page(replace(together))


def test_text_from_files_stays_text(alone):
    trace = alone.traces[0][1]
    text = page(replace(alone, traces=(("</script><b>&.npz", trace),)))
    assert "</script><b>" not in text
    assert Outline(text).numbers["timeline-chart"]["choices"] == [["trace", ["</script><b>&.npz"]]]


@pytest.mark.full
def test_64_gpus_and_58_layers_stay_below_5_mb(large):
    assert len(page(large).encode()) < 5_000_000
