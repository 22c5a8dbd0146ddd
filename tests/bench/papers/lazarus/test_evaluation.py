"""Lazarus' figures: all there, finite, and what must hold whatever the draw."""

from dataclasses import replace
from math import isfinite

import pytest

from bench.papers.lazarus import evaluation as lazarus
from bench.papers.lazarus.drawing import draw
from bench.papers.lazarus.evaluation import reproduce
from bench.papers.lazarus.generated_traces import hourly, spot
from bench.papers.lazarus.text import SECTIONS, as_json, as_markdown

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazarus, "DRAWS", 1)
        patch.setattr(lazarus, "JOBS", {name: replace(job, load_LE=job.load_LE[:1]) for name, job in lazarus.JOBS.items()})
        patch.setattr(lazarus, "_large", list)  # seconds, for 1024 GPUs
        return reproduce(tmp_path_factory.mktemp("none"), lambda *_: None)


def test_every_figure_is_there_and_finite(made, tmp_path):
    assert {one.figure for one in made.found} == set(SECTIONS) - {"13", "Real"}
    assert all(isfinite(one.ours.mean) for one in made.found)
    pictures = draw(made, tmp_path)
    assert {"lazarus-8.svg", "lazarus-9-GPT-L.png"} <= {picture.name for picture in pictures}
    page = as_markdown(made, [picture.name for picture in pictures if picture.suffix == ".svg"])
    assert all(one.case in page for one in made.found)
    assert all(f"({picture.name})" in page for picture in pictures if picture.suffix == ".svg")
    assert len(as_json(made)["figures"]) == len(made.found)
    assert "the paper's theorem fails" in page
    assert "**Spot trace.** Generated" in page


def test_placing_is_never_below_the_papers_and_where_its_theorem_fails(made):
    ours = {(one.figure, one.case, one.way): one.ours.mean for one in made.found}
    for (figure, case, way), p in ours.items():
        if figure in ("4", "8", "10b", "Theorem 1") and way == "mro":
            assert ours[figure, case, "aurora"] >= p - 1e-12
    assert ours["Theorem 1", "1 of 4 nodes failed", "mro"] == 0.75
    assert ours["Theorem 1", "2 of 4 nodes failed", "aurora"] == 1.0
    assert ours["4", "3 of 5 nodes failed", "mro"] == 0.7


def test_skew_costs_less_than_five_percent_with_replicas(made):
    """60 whole slots: one expert at four times the mean, against its own throughput when all are equal."""
    ours = {(one.case, one.way): one.ours.mean for one in made.found if one.figure == "10a"}
    assert min(ours[f"{ratio}:1", "aurora"] for ratio in (2, 3, 4)) >= 0.95
    assert ours["4:1", "DS"] == pytest.approx(0.7)  # (4 + 3 * 4 / 7) / 8 of the tokens in one half


@pytest.mark.parametrize("trace", [spot(10, 4800.0, 1), hourly(8, 0.2, 12, 1)])
def test_generated_traces_can_be(trace):
    there = set()
    for before, change in zip([None, *trace], trace, strict=False):
        assert before is None or change.time_s >= before.time_s
        assert set(change.removed) <= there
        assert not set(change.added) & there
        there = there - set(change.removed) | set(change.added)
