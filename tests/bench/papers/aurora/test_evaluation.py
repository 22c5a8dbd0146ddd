"""The evaluation end to end on a small draw, its headlines, its traffic."""

import csv
from math import isfinite

import numpy as np
import pytest

from aurora.errors import BadInput
from bench.papers.aurora import traffic
from bench.papers.aurora.evaluation import ReproduceOptions, reproduce
from bench.papers.aurora.figures import FIGURES, Run
from bench.papers.aurora.headlines import HEADLINES, Headline, measure, measured
from bench.papers.aurora.studies import STUDIES, with_foreign
from bench.papers.aurora.text import as_json, as_markdown
from bench.papers.aurora.traffic import TRAFFIC, Workload, profile
from bench.papers.ranges import Range

pytestmark = pytest.mark.full


def silent(*_):
    pass


def small(rng, folder):
    """One data set, two layers."""
    found = traffic.generated(rng, folder).profiles_DM[0]
    return Workload((tuple(profile(p.model, p.tokens_TLSE[0, :2]) for p in found),))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRAFFIC, "generated", small)
        return reproduce(ReproduceOptions("all", "generated", 1), tmp_path_factory.mktemp("none"), silent)


def test_every_headline_is_there_under_every_price_and_finite(runs):
    found = measured(runs)
    for headline in HEADLINES:
        rows = [one for one in found if one.headline is headline]
        assert tuple(one.pricing for one in rows) == STUDIES[FIGURES[headline.figure].study].pricings
        for one in rows:
            assert one.seeds == 1
            assert all(isfinite(value) for value in vars(one.found).values())
            assert one.found.lowest <= one.found.mean <= one.found.highest


def test_page_and_json_hold_every_headline(runs):
    found = measured(runs)
    page = as_markdown(found, runs, ["a.svg"])
    rows = as_json(found)["headlines"]
    for headline in HEADLINES:
        assert f"| {headline.name} | {headline.figure} |" in page
        assert headline.name in [row["headline"] for row in rows]
    assert "nan" not in page


def test_a_figure_alone_gives_the_same_numbers(runs, monkeypatch, tmp_path):
    monkeypatch.setitem(TRAFFIC, "generated", small)
    again = reproduce(ReproduceOptions("14b", "generated", 1), tmp_path, silent)
    for run in again:
        (first,) = [one for one in runs if (one.study, one.pricing) == (run.study, run.pricing)]
        assert np.array_equal(first.seconds_WSC, run.seconds_WSC)


def test_order_and_placement_never_beat_what_bounds_them(runs):
    """The best order ends with its ports, so no other order is shorter; the optimum is no longer than what it bounds."""
    by = {(run.study, run.pricing): run for run in runs}
    orders = by["exclusive, equal", "printed"]
    for way in orders.ways:
        assert (orders.seconds(way) >= orders.seconds("Aurora") * (1 - 1e-9)).all()
    assert (by["optimum", "causal"].seconds("Aurora") >= by["optimum", "causal"].seconds("optimum") * (1 - 1e-9)).all()
    for study in ("colocated, equal", "colocated, mixed"):
        printed, causal = by[study, "printed"], by[study, "causal"]
        assert (printed.seconds("Aurora") <= causal.seconds("Aurora") * (1 + 1e-9)).all()


def test_a_headline_by_hand():
    """Two seeds, two cases: ratios 2, 4 and 3, 3. Student's t of 95 % with one degree of freedom is 12.706."""
    seconds = np.array([[[1.0, 1.0], [1.0, 2.0]], [[2.0, 4.0], [3.0, 6.0]]])
    run = Run("exclusive, equal", "generated", "printed", ("Aurora", "SJF"), ("x", "y"), seconds, seconds)
    one = measure(HEADLINES[0], run)
    assert one.found == Range(2.5, 3.0, 3.5)
    assert one.half.lowest == pytest.approx(12.706 / 2, rel=1e-4)
    assert one.half.mean == 0
    assert one.met == "yes"


@pytest.mark.parametrize(
    ("paper", "at_most", "met"),
    [
        (Range(), False, "-"),
        (Range(2.0, None, 3.0), False, "yes"),
        (Range(None, None, 3.6), False, "nearly"),
        (Range(None, 3.1, None), False, "no"),
        (Range(None, 3.1, None), True, "yes"),
        (Range(None, 2.9, None), True, "no"),
    ],
)
def test_what_meets_a_claim(paper, at_most, met):
    values = np.array([[2.0, 4.0], [3.0, 3.0]])
    run = Run("", "", "", (), (), values[None], values[None])
    assert measure(Headline("h", "11a", paper, lambda _: values, at_most=at_most), run).met == met


def test_foreign_traffic_is_mixed_in_exactly():
    layers = np.stack([np.full((8, 8), 10**k) for k in range(4)])
    mixes = {level: with_foreign(profile("m", layers), level).tokens_TLSE[0, 0, 0, 0] for level in (0, 25, 50, 75)}
    assert mixes == {0: 8, 25: 26, 50: 224, 75: 2222}
    assert with_foreign(profile("m", layers[:3]), 75).tokens_TLSE[0, 0, 0, 0] == 2 + 30 + 300


def test_every_source_holds_the_same_and_images_differ_by_patches(tmp_path):
    for name, tokens in (("generated", [8192, 8192]), ("same-images", [8192, 2048])):
        made = TRAFFIC[name](np.random.default_rng(0), tmp_path)
        for profiles in made.profiles_DM:
            for p, count in zip(profiles, tokens, strict=True):
                assert (p.tokens_TLSE.sum(axis=3) == count).all()


def test_recorded_counts_are_folded_and_dealt(tmp_path):
    """OLMoE's experts 0 to 7 take all its tokens, so the folded expert 0 does; Mixtral's expert 3 does."""
    (tmp_path / "olmoe_mixtral_domains").mkdir()
    with (tmp_path / traffic.COUNTS).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "domain", "selection", "layer", "expert", "count"])
        for domain in ("book", "c4", "wikipedia", "arxiv", "github"):
            for layer in (0, 7):
                for expert in range(64):
                    rows.writerow(["olmoe-1b-7b-0924", domain, "topk", layer, expert, int(expert < 8)])
                    rows.writerow(["olmoe-1b-7b-0924", domain, "top1", layer, expert, 5])
                for expert in range(8):
                    rows.writerow(["mixtral-8x7b-v0.1", domain, "topk", layer, expert, int(expert == 3)])
    made = traffic.recorded(np.random.default_rng(0), tmp_path)
    assert (len(made.profiles_DM), made.layers) == (2, 2)
    for olmoe, mixtral in made.profiles_DM:
        assert (olmoe.tokens_TLSE[..., 0] == traffic.TOKENS).all()
        assert (mixtral.tokens_TLSE[..., 3] == traffic.TOKENS).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ReproduceOptions(figure="15"), "`figure`: expected one of all, 11a"),
        (ReproduceOptions(traffic="drawn"), "`traffic`: expected one of all, generated"),
        (ReproduceOptions(traffic="recorded", seeds=1), "recorded traffic cannot be read"),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        reproduce(options, tmp_path, silent)


def test_recorded_traffic_without_a_folder_is_refused():
    with pytest.raises(BadInput, match=r"`recorded`: expected the folder of recorded data.*AURORA_DATA, found neither"):
        reproduce(ReproduceOptions("14b", "recorded", 1), None, silent)


def test_recorded_traffic_is_left_out_where_absent(monkeypatch, tmp_path):
    for name in ("generated", "same-images"):
        monkeypatch.setitem(TRAFFIC, name, small)
    found = reproduce(ReproduceOptions("14b", "all", 1), tmp_path, silent)
    assert {run.traffic for run in found} == {"generated", "same-images"}
