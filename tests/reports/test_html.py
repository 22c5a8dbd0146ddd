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
from aurora.reports.html import page
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.sections import SIDES

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
        return json.loads(zlib.decompress(base64.b64decode("".join(self.texts[at]))))


def columns_of(panel):
    """Columns of a panel of a view; rising ones are given by their differences."""
    columns = panel["columns"].items()
    return {name.removesuffix("+"): np.cumsum(column) if name.endswith("+") else np.array(column) for name, column in columns}


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
    assert f"<td>counts</td><td>{seconds(summary.phases['counts'])}</td>" in page(together)


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


def test_landmarks_headings_and_ids(shown):
    _, outline = shown
    tags = [tag for tag, _, _ in outline.found]
    assert [tags.count(tag) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    ids = [a["id"] for _, a, _ in outline.found if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in outline.found:
        named = attributes.get("aria-labelledby", "").split() + attributes.get("aria-describedby", "").split()
        assert set(named) <= set(ids)
        assert attributes.get("href", "#answer").removeprefix("#") in (*ids, "data:,")
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_numbers_arrive_as_they_were(shown, together):
    _, outline = shown
    flows = ReportNumbers(together).traffic_M[1]
    views = outline.numbers["traffic-map"]["views"]
    assert [view["at"] for view in views] == [["one", "0"], ["one", "1"], ["two", "0"], ["two", "1"], ["two", "2"]]
    for layer, view in enumerate(views[2:]):
        for side, panel in enumerate(view["panels"][:2]):
            assert np.array_equal(columns_of(panel)["value"].reshape(4, 4), flows.tokens_BLGG[side, layer])
        for axis, panel in zip((2, 1), view["panels"][2:], strict=True):
            ports = columns_of(panel)
            assert list(zip(ports["series"], ports["at"], strict=True)) == [(side, gpu) for side in SIDES for gpu in range(4)]
            assert np.array_equal(ports["value"], flows.tokens_BLGG[:, layer].sum(axis=axis).ravel())
    (there, _) = ReportNumbers(together).planned_MLW[1][2]
    panels, profile = outline.numbers["expert-map"]["views"][1]["panels"], together.profiles[1]
    load_LE = profile.tokens_TLSE.sum(axis=(0, 2))
    busy_BLG = flows.port_s_BLG + flows.expert_s_BLG
    for panel, load_LX in zip(panels, (load_LE, *busy_BLG), strict=True):
        relative_XL = (load_LX / load_LX.mean(axis=1, keepdims=True)).T
        assert panel["params"]["across"] == 3
        assert np.allclose(columns_of(panel)["value"].reshape(-1, 3), relative_XL, atol=0.005)
    (panel,) = outline.numbers["gantt"]["views"][-2]["panels"]
    columns, tick_s = columns_of(panel), panel["params"]["total"] / panel["params"]["ticks"]
    assert np.array_equal(columns["track"], there.src_X * 2)
    assert np.array_equal(columns["track2"], there.dst_X * 2 + 1)
    assert np.array_equal(columns["bytes"], there.bytes_X)
    assert np.allclose(columns["begin"] * tick_s, there.start_s_X, atol=tick_s)
    assert np.allclose((columns["begin"] + columns["length"]) * tick_s, there.end_s_X, atol=tick_s)


def test_a_large_schedule_shows_the_busiest_ports(large):
    """Of 64 GPUs those ports are drawn that are busiest, with all their transfers, and a map of when each pair has ended."""
    numbers = ReportNumbers(large)
    figure = Outline(page(large)).numbers["gantt"]
    assert [words for words, _ in figure["shown"]] == ["busiest ports"]
    (there, _), (ports, pairs) = numbers.planned_MLW[0][0], figure["views"][0]["panels"]
    busy_P = np.zeros(128)
    for port_X in (there.src_X * 2, there.dst_X * 2 + 1):
        np.add.at(busy_P, port_X, there.end_s_X - there.start_s_X)
    shown = ports["params"]["tracks"]
    assert busy_P[shown].min() >= np.delete(busy_P, shown).max() - 1e-12
    columns = columns_of(ports)
    for track in shown:
        at = columns["track2" if track % 2 else "track"] == track
        own = (there.dst_X if track % 2 else there.src_X) == track // 2
        assert columns["bytes"][at].sum() == there.bytes_X[own].sum()
    ends, last = columns_of(pairs)["value"].reshape(64, 64), {}
    for src, dst, end_s in zip(there.src_X.tolist(), there.dst_X.tolist(), there.end_s_X.tolist(), strict=True):
        last[src, dst] = max(end_s, last.get((src, dst), 0.0))
    assert all(0 <= ends[pair] - 100 * end_s / there.seconds < 4 for pair, end_s in last.items())
    assert ends.max() == 100
    assert (np.diag(ends) < 0).all()


def test_the_answer_comes_first(alone):
    text = page(alone)
    assert text.index("<dl>") < text.index("<figure")
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


def test_what_is_missing_is_asked_for(alone):
    text = page(ReportInputs(alone.plan))
    assert text.count("Pass --profile once per model") == 1
    assert [a["id"] for a, _ in Outline(text).all("section")] == ["answer", "schedule", "placement"]
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
    assert Outline(text).numbers["timeline-chart"]["views"][0]["at"] == ["</script><b>&.npz"]


@pytest.mark.full
def test_64_gpus_and_58_layers_stay_below_2_mb(large):
    assert len(page(large).encode()) < 2_000_000
