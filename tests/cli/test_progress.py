"""That functions are compiled is told."""

from dataclasses import replace

import numba
import pytest

import aurora
from aurora.cli import output
from aurora.cli.output import COMPILING, progress_bars


def test_that_functions_are_compiled_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(output, "COMPILING_S", 1e-9)
    with progress_bars():
        assert numba.njit(lambda number: number + 1)(1) == 2
        assert numba.njit(lambda number: number * 2)(1) == 2
    assert capsys.readouterr() == ("", COMPILING + "\n")
    with progress_bars():
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_recommending_and_reporting_tell_how_far_they_are(tmp_path):
    pytest.importorskip("jinja2")
    told = []
    drawn = aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(windows=4))
    traffic, cluster = replace(drawn, provenance={"tool": "recorder"}), aurora.load("demo-4")
    aurora.recommend(cluster, "sglang", profile=traffic, progress=lambda *each: told.append(each))
    plan = aurora.plan(cluster, traffic)
    traces = {"p": aurora.simulate(plan, traffic)}
    aurora.report(plan, traces, [traffic], output=tmp_path / "r.html", progress=lambda *each: told.append(each))
    for what in ("comparing plans", "simulating ways of sharing", "writing sections"):
        steps = [(done, total) for name, done, total in told if name == what]
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1] == max(total for _, total in steps) > 0
