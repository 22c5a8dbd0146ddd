"""The command lines of the evaluations: what they write and refuse."""

import json

import pytest

from bench.papers.aurora.__main__ import main as aurora
from bench.papers.aurora.traffic import TRAFFIC
from bench.papers.bcc.__main__ import main as bcc
from bench.papers.lazarus import evaluation
from bench.papers.lazarus.__main__ import main as lazarus
from bench.papers.lazarus.evaluation import LazarusEvaluation, LazarusFigure
from bench.papers.ranges import Range
from tests.bench.papers.aurora.test_evaluation import small

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(TRAFFIC, "generated", small)


def run(main, *args):
    main([str(each) for each in args])


def refusal(main, capsys, *args):
    """The one sentence that a command line is refused with."""
    with pytest.raises(SystemExit) as exit_:
        run(main, *args)
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.err.count("\n")) == (2, 1)
    return captured.err


def test_page_and_json(capsys, tmp_path):
    folder = tmp_path / "new" / "folder"
    run(aurora, "--figure", "12b", "--traffic", "generated", "--seeds", 1, "--no-plots", "-o", folder)
    assert "wrote" in capsys.readouterr().out
    found = json.loads((folder / "aurora.json").read_text())
    assert {row["figure"] for row in found["headlines"]} == {"12b"}
    assert "| mixed: utilisation, Aurora / exclusive | 12b |" in (folder / "aurora.md").read_text()


def test_pictures_are_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    written = []
    for name in ("one", "two"):
        run(aurora, "--figure", "14a", "--traffic", "generated", "--seeds", 2, "-o", tmp_path / name)
        assert "figure-14a-generated.svg" in (tmp_path / name / "aurora.md").read_text()
        written.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert set(written[0]) == {"aurora.md", "aurora.json", "figure-14a-generated.svg", "figure-14a-generated.png"}
    assert written[0] == written[1]


def test_refusals(capsys, tmp_path):
    assert "--seeds: expected more than zero" in refusal(aurora, capsys, "--no-plots", "--seeds", "0", "-o", tmp_path)
    assert "--figure: expected one of all" in refusal(aurora, capsys, "--no-plots", "--figure", "9", "-o", tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be made a folder" in refusal(aurora, capsys, "--no-plots", "-o", tmp_path / "file")
    assert "expected a folder of recorded data" in refusal(lazarus, capsys, "--recorded", tmp_path / "no", "-o", tmp_path)


def test_bcc_by_the_clock(capsys, tmp_path):
    args = ("--workers", 12, "--load", 4, "--iterations", 4, "--process-iterations", 0, "--draws", 5, "--no-plots")
    run(bcc, *args, "--recorded", tmp_path, "-o", tmp_path / "out")
    assert "wrote" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "bcc.json").read_text())["mixed"]["recommended"] == "even"
    assert "recorded, shuffled" not in (tmp_path / "out" / "bcc.md").read_text().split("## Headlines")[1]
    said = refusal(bcc, capsys, *args, "--workers", 3, "-o", tmp_path)
    assert "--workers: expected at least --load 4 workers, found 3" in said


def test_lazarus_writes_page_numbers_and_pictures(capsys, tmp_path, monkeypatch):
    figures = [
        LazarusFigure("8", f"{failed} failed", way, None, Range(None, 0.5, None))
        for failed in (1, 2)
        for way in ("aurora", "mro")
    ]
    monkeypatch.setattr(evaluation, "reproduce", lambda folder, progress: LazarusEvaluation(figures, folder == tmp_path, {}))
    run(lazarus, "--recorded", tmp_path, "-o", tmp_path / "out")
    assert "lazarus.json and 2 pictures" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "out" / "lazarus.md").read_text()
    assert "| 2 failed | 0.5 | 0.5 |" in page
    assert "**Spot trace.** Recorded" in page
    assert "(lazarus-8.svg)" in page
    assert len(json.loads((tmp_path / "out" / "lazarus.json").read_text())["figures"]) == 4
