"""One entry for every form: what is written where, and what is refused."""

import gzip
import json

import pytest

import aurora
from aurora.errors import BadInput
from aurora.reports.html import page
from aurora.reports.inputs import FORMS
from aurora.reports.perfetto import perfetto


def test_the_public_function_writes_what_each_form_gives(alone, tmp_path):
    for form, content in (("html", page(alone).encode()), ("perfetto", perfetto(alone, packed=True))):
        output = tmp_path / FORMS[form]
        aurora.report(alone.plan, dict(alone.traces), alone.profiles, output=output, format=form)
        assert output.read_bytes() == content


def test_a_name_that_ends_in_gz_is_packed(alone, tmp_path):
    aurora.report(alone.plan, dict(alone.traces), output=tmp_path / "t.json", format="perfetto")
    aurora.report(alone.plan, dict(alone.traces), output=tmp_path / "t.json.gz", format="perfetto")
    plain = (tmp_path / "t.json").read_bytes()
    assert json.loads(plain)["traceEvents"]
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == plain


def test_a_report_without_profiles_says_why(alone, tmp_path):
    aurora.report(alone.plan, output=tmp_path / "r.html", missing_profiles="a.npz: gone; pass --profile")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert ("a.npz: gone; pass --profile.<" in text, "profile..<" in text) == (True, False)


def test_what_is_refused(alone, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"`format`: expected one of html, perfetto, found 'gif'"):
        aurora.report(alone.plan, output=tmp_path / "x.gif", format="gif")
    with pytest.raises(BadInput, match="`profile`: expected 1, found 3"):
        aurora.report(alone.plan, {}, alone.profiles * 3, output=tmp_path / "x.html")
    with pytest.raises(BadInput, match="expected a trace, found none"):
        aurora.report(alone.plan, output=tmp_path / "x.json", format="perfetto")
