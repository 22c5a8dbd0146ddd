"""Tables fit the terminal, and long commands tell how far they are."""

from dataclasses import replace

import pytest

import aurora
from aurora.advisor.two_models import recommend_for_two
from aurora.cli import output
from aurora.reports.tables import Table, text


def test_tables_have_all_they_say_in_80_columns_and_titles_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    heads = ("makespan", "fluid bound", "one-to-one bound", "cut bound", "gap", "rows", "one to one")
    title = "exclusive, equal GPUs: place swap-search, assign exact, order openshop, all-to-all flat, aim mean"
    columns = {"method": text, **dict.fromkeys(heads, str)}
    row = ("openshop-best", "12.7 ms", "8.13 ms", "8.13 ms", "11.7 ms", "8.5%", "614", "yes")
    output.show(False, {}, Table(columns, [row], title))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == title
    assert [tuple(map(str.strip, line.strip("│").split("│"))) for line in lines if "openshop" in line] == [row]
    assert "makespan" in "".join(lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.full
def test_recommending_and_reporting_tell_how_far_they_are(tmp_path):
    told = []
    drawn = aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(windows=4))
    traffic, cluster = replace(drawn, provenance={"tool": "recorder"}), aurora.load("demo-4")
    aurora.recommend(cluster, "sglang", profile=traffic, progress=lambda *each: told.append(each))
    recommend_for_two(cluster, "vllm", [traffic] * 2, lambda *each: told.append(each))
    plan = aurora.plan(cluster, traffic)
    traces = {"p": aurora.simulate(plan, traffic)}
    aurora.report(plan, traces, [traffic], output=tmp_path / "r.html", progress=lambda *each: told.append(each))
    for what in ("comparing plans", "simulating ways of sharing", "writing sections"):
        steps = [(done, total) for name, done, total in told if name == what]
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1] == max(total for _, total in steps) > 0


def test_a_terminal_that_tells_no_columns_is_printed_on(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert output.terminal().width == 80
