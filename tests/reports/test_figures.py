"""Figures for papers: which there are, how wide, and the same bytes every time."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from aurora.reports.inputs import ReportInputs

pytest.importorskip("matplotlib")

from aurora.reports.figures import COLUMN, PAGE, draw


def test_figures_are_there_and_the_same_each_time(alone, tmp_path):
    written = []
    for name, inputs in (("one", alone), ("two", replace(alone, traces=alone.traces[:1]))):
        (tmp_path / name).mkdir()
        written.append({path.name: path.read_bytes() for path in draw(inputs, tmp_path / name)})
        assert set(written[-1]) == {path.name for path in (tmp_path / name).iterdir()}
    names = ("traffic-0", "loads-0", "layers-0", "schedule-0", "timeline-0", "timeline-1")
    assert set(written[0]) == {f"{name}.{suffix}" for name in names for suffix in ("svg", "png")}
    assert written[1] == {name: content for name, content in written[0].items() if not name.startswith("timeline-1")}
    for name in names:
        assert ElementTree.fromstring(written[0][f"{name}.svg"]).tag.endswith("svg")


@pytest.mark.parametrize("width", [PAGE, COLUMN])
def test_a_pdf_is_as_wide_as_it_should_be(together, tmp_path, width):
    for path in draw(together, tmp_path, width, ("pdf",)):
        assert path.suffix == ".pdf"
        box = re.search(rb"/MediaBox \[ ?([\d. ]+)\]", path.read_bytes())[1]
        assert float(box.split()[2]) == pytest.approx(72 * width)
    assert (tmp_path / "decisions-0.pdf").exists()
    assert not (tmp_path / "decisions-1.pdf").exists(), "no window had tokens"


def test_without_traffic_or_traces_there_is_nothing_to_draw(alone, tmp_path):
    assert draw(ReportInputs(alone.plan), tmp_path) == []


def test_a_models_name_is_text_and_no_formula(alone, tmp_path):
    name = "$\\x{$ a_b^c"
    plan = replace(alone.plan, models=tuple(replace(model, model=name) for model in alone.plan.models))
    given = tuple(replace(profile, model=name) for profile in alone.profiles)
    assert len(draw(ReportInputs(plan, (), given), tmp_path)) == 8
