"""aurora reproduce: what it writes and refuses."""

import json

import pytest

from aurora.reproduce.aurora.traffic import TRAFFIC
from aurora.reproduce.lazarus import evaluation as lazarus
from aurora.reproduce.lazarus.evaluation import LazarusEvaluation, LazarusFigure
from aurora.reproduce.ranges import Range
from tests.cli.refusal import refused
from tests.reproduce.aurora.test_evaluation import small


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(TRAFFIC, "generated", small)


def test_page_and_json(aurora, tmp_path):
    folder = tmp_path / "new" / "folder"
    code, out, err = aurora(
        "reproduce", "aurora", "--figure", "12b", "--traffic", "generated", "--seeds", 1, "--no-plots", "-o", folder
    )
    assert (code, err) == (0, "")
    assert "wrote" in out
    found = json.loads((folder / "aurora.json").read_text())
    assert {row["figure"] for row in found["headlines"]} == {"12b"}
    assert "| mixed: utilisation, Aurora / exclusive | 12b |" in (folder / "aurora.md").read_text()


def test_pictures_are_the_same_every_time(aurora, tmp_path):
    pytest.importorskip("matplotlib")
    written = []
    for name in ("one", "two"):
        args = ("--figure", "14a", "--traffic", "generated", "--seeds", 2, "-o", tmp_path / name)
        assert aurora("reproduce", "aurora", *args)[0] == 0
        assert "figure-14a-generated.svg" in (tmp_path / name / "aurora.md").read_text()
        written.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert set(written[0]) == {"aurora.md", "aurora.json", "figure-14a-generated.svg", "figure-14a-generated.png"}
    assert written[0] == written[1]


def test_refusals(aurora, tmp_path):
    refused(aurora("reproduce", "aurora", "--no-plots", "--seeds", "0", "-o", tmp_path), "--seeds: expected more than zero")
    refused(aurora("reproduce", "aurora", "--no-plots", "--figure", "9", "-o", tmp_path), "--figure: expected one of all")
    (tmp_path / "file").write_text("")
    refused(aurora("reproduce", "aurora", "--no-plots", "-o", tmp_path / "file"), "cannot be made a folder")


def test_bcc_by_the_clock(aurora, tmp_path):
    args = ("--workers", 12, "--load", 4, "--iterations", 4, "--process-iterations", 0, "--draws", 5, "--no-plots")
    code, out, err = aurora("reproduce", "bcc", *args, "--recorded", tmp_path, "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "wrote" in out
    assert json.loads((tmp_path / "out" / "bcc.json").read_text())["mixed"]["recommended"] == "even"
    assert "recorded, shuffled" not in (tmp_path / "out" / "bcc.md").read_text().split("## Headlines")[1]
    refused(
        aurora("reproduce", "bcc", *args, "--workers", 3, "-o", tmp_path),
        "--workers: expected at least --load 4 workers, found 3",
    )


def test_lazarus_writes_page_numbers_and_pictures(aurora, tmp_path, monkeypatch):
    found = [
        LazarusFigure("8", f"{failed} failed", way, None, Range(None, 0.5, None))
        for failed in (1, 2)
        for way in ("aurora", "mro")
    ]
    monkeypatch.setattr(lazarus, "reproduce", lambda folder, progress: LazarusEvaluation(found, folder == tmp_path, {}))
    code, out, err = aurora("reproduce", "lazarus", "--recorded", tmp_path, "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "lazarus.json and 2 pictures" in " ".join(out.split())
    page = (tmp_path / "out" / "lazarus.md").read_text()
    assert "| 2 failed | 0.5 | 0.5 |" in page
    assert "**Spot trace.** Recorded" in page
    assert "(lazarus-8.svg)" in page
    assert len(json.loads((tmp_path / "out" / "lazarus.json").read_text())["figures"]) == 4
