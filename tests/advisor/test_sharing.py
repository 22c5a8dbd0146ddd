"""Ways of using GPUs: a case that is computed by hand, ties, divisions of GPUs, memory, and bad input."""

import re
from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.sharing import (
    BY_EXCHANGE,
    BY_LAYER,
    HALVES,
    IN_SEQUENCE,
    MICRO_BATCHES,
    THREE_MODELS,
    TIME_SLICED,
    WAYS,
    ApartSeconds,
    WayOutcome,
    WaysCompared,
    apart_seconds,
    compare_ways,
    one_after_the_other,
    served_steps,
    winners,
)
from aurora.advisor.sweep import compare_over_grid
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.plan import make_plan, price
from aurora.reports.advice import sharing_advice, sharing_line
from aurora.reports.numbers import ReportNumbers
from aurora.reports.report import ReportInputs
from aurora.reports.trace_times import summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Curve, Gpu, Placement, Profile, TraceRecorder

NOTHING = Curve(np.array([1.0]), np.array([0.0]))
BATCH = 8
EVEN = Placement.unreplicated(np.array([0, 1, 0, 1]), 2)


def two_gpus(memory_bytes=1000):
    return Cluster("two", tuple(Gpu(f"g{rank}", "cpu", rank, 8000.0, 8000.0, memory_bytes) for rank in range(2)))


def both_experts(seconds_a_pair=0.125):
    """Every token goes to both experts, one on each GPU: with BATCH tokens a dispatch and a combine take a second each."""
    compute = Curve(np.array([0.0, 1.0]), np.array([0.0, seconds_a_pair]))
    curves = {"cpu": {"gate": NOTHING, "expert": compute, "aggregate": NOTHING}}
    return Profile("m", "", np.full((1, 1, 2, 2), BATCH), 2, 1000, 1000, 100, 10, curves)


def test_gains_by_hand():
    """Alone a step takes 1 + 2 + 1 s. Two models: the exchanges of a round one after the other, one model's experts under the
    other's exchanges, 6 s in place of 8; three: 8 s in place of 12; two halves of a step: 3 s in place of 4. Each on a GPU of its
    own: 4 s of experts without an exchange, both at the same time."""
    found = compare_ways(two_gpus(), [both_experts()], BATCH, steps=3)
    by_hand = {IN_SEQUENCE: 1.0, TIME_SLICED: 1.0, MICRO_BATCHES: 4 / 3, BY_EXCHANGE: 4 / 3, BY_LAYER: 4 / 3, THREE_MODELS: 1.5}
    assert found.gains == pytest.approx({**by_hand, HALVES: 2.0})
    assert found.winner.way == HALVES
    assert compare_ways(two_gpus(), [both_experts()], 1, ways=(MICRO_BATCHES,)).gains[MICRO_BATCHES] == pytest.approx(1.0)
    of = {outcome.way: outcome for outcome in found.outcomes}
    assert of[IN_SEQUENCE].seconds == pytest.approx(2 * 3 * 4)
    assert of[IN_SEQUENCE].utilisation == pytest.approx(0.5)
    assert of[IN_SEQUENCE].tokens_per_s == pytest.approx(2 * BATCH / 4)
    assert of[IN_SEQUENCE].tpot_s_M == (pytest.approx((4, 4)),) * 2
    assert of[HALVES].tpot_s_M == (pytest.approx((4, 4)),) * 2
    assert of[TIME_SLICED].tpot_s_M == (pytest.approx((8, 8)),) * 2
    assert of[BY_EXCHANGE].tpot_s_M == (pytest.approx((6, 6)),) * 2
    assert of[MICRO_BATCHES].tpot_s_M == (pytest.approx((3, 3)),) * 2
    assert len(of[THREE_MODELS].tpot_s_M) == 3


def test_nothing_to_gain_where_only_the_gpu_is_busy():
    found = compare_ways(
        two_gpus().scaled(1e6), [both_experts()], BATCH, ways=(MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS)
    )
    assert max(found.gains.values()) < 1.001
    assert found.winner.way == IN_SEQUENCE


def test_the_simplest_of_ways_within_two_percent_wins():
    assert winners({IN_SEQUENCE: 1.0, BY_LAYER: 1.02}) == [IN_SEQUENCE, BY_LAYER]
    assert winners({BY_LAYER: 1.03, IN_SEQUENCE: 1.0}) == [BY_LAYER]
    assert winners({THREE_MODELS: 1.7, BY_LAYER: 1.69, MICRO_BATCHES: 1.4}) == [BY_LAYER, THREE_MODELS]


def test_what_memory_does_not_hold_is_left_out():
    share = 110  # an expert and the rest
    two = compare_ways(two_gpus(2 * share), [both_experts()], BATCH)
    assert set(two.left_out) == {THREE_MODELS}
    one = compare_ways(two_gpus(share), [both_experts()], BATCH)
    assert set(one.gains) == {IN_SEQUENCE, MICRO_BATCHES}
    assert len(one.winner.tpot_s_M) == 1
    with pytest.raises(InfeasiblePlan, match="memory"):
        compare_ways(two_gpus(share - 1), [both_experts()], BATCH)


def test_steps_of_a_trace():
    recorder = TraceRecorder("measured", ("a", "b"), 2)
    for model, ends in enumerate(([1.0, 2.0, 4.0], [2.0, 3.0, 3.5])):
        for step, end in enumerate(ends):
            for rank in range(2):
                recorder.add(rank, model, step, 0, "expert", end - 0.5 - 0.1 * rank, end - 0.1 * rank)
    found = served_steps(recorder.trace())
    assert found.seconds == pytest.approx(3.6)
    assert found.compute_s == pytest.approx(12 * 0.5)
    assert [np.diff(each[0]).tolist() for each in found.ends_M] == [pytest.approx([1, 2]), pytest.approx([1, 0.5])]
    assert found.tpot_s_M == (pytest.approx((1.5, 1.99)), pytest.approx((0.75, 0.995)))
    halves = served_steps(recorder.trace(), [0, 0])
    assert [len(streams) for streams in halves.ends_M] == [2]
    both = one_after_the_other([found, found])
    assert both.seconds == pytest.approx(7.2)
    assert both.ends_M[2][0][0] == pytest.approx(3.6 + found.ends_M[0][0][0])


def test_the_grid_has_every_combination_and_skews_differ():
    skewed = replace(both_experts(), tokens_TLSE=np.array([[[[15, 1]] * 2]]), top_k=1)
    cells = compare_over_grid(two_gpus(), [skewed], (2, 8), (1.0, 100.0), (0.0, 1.0), ways=(BY_LAYER,))
    assert [(cell.skew, cell.bandwidth, cell.batch) for cell in cells[:3]] == [(0.0, 1.0, 2), (0.0, 1.0, 8), (0.0, 100.0, 2)]
    assert len(cells) == 8
    even, as_profiled = (next(c for c in cells if (c.skew, c.bandwidth, c.batch) == (skew, 100.0, 8)) for skew in (0.0, 1.0))
    assert as_profiled.compared.outcomes[0].seconds > 1.3 * even.compared.outcomes[0].seconds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (((0,), (1.0,), (1.0,)), "`batch`: expected different values from 1 to"),
        (((4, 4), (1.0,), (1.0,)), "`batch`: .* found 4, 4"),
        (((4,), (0.0,), (1.0,)), "`bandwidth`: "),
        (((4,), (1.0,), (-1.0,)), "`skew`: "),
        (((4,), (float("nan"),), (1.0,)), "`bandwidth`: "),
        (((4,), (1.0,), ()), "`skew`: .* found none"),
    ],
)
def test_bad_grids(values, message):
    with pytest.raises(BadInput, match=message):
        compare_over_grid(two_gpus(), [both_experts()], *values)


def test_bad_comparisons():
    with pytest.raises(BadInput, match="from 1 to 3 models to compare, found 4"):
        compare_ways(two_gpus(), [both_experts()] * 4, BATCH)
    with pytest.raises(BadInput, match="`steps`: expected 2 or more, found 1"):
        compare_ways(two_gpus(), [both_experts()], BATCH, steps=1)
    with pytest.raises(BadInput, match="one of one after the other"):
        compare_ways(two_gpus(), [both_experts()], BATCH, ways=("together",))
    with pytest.raises(BadInput, match="2 source ranks"):
        compare_ways(Cluster("one", two_gpus().gpus[:1]), [both_experts()], BATCH)


def compared(**gains):
    """Ways with these gains, by their names with _ for spaces and dashes."""
    named = {way: gain for way in WAYS for name, gain in gains.items() if way.replace(" ", "_").replace("-", "_") == name}
    return WaysCompared(64, tuple(WayOutcome(way, 1.0, gain, 1.0, (), 0.5) for way, gain in named.items()), {})


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (
            {"micro_batches": 1.01, "by_exchange": 1.0, "by_layer": 1.02, "three_models": 1.03},
            "Leave the GPUs .* with 64 tokens .*: three models 1.03x; a second model, by layer, 1.02x; two micro",
        ),
        ({"micro_batches": 1.26, "by_exchange": 1.2, "by_layer": 1.3}, "second model, by layer: 1.30x .* alone 1.26x"),
        (
            {"micro_batches": 1.4, "by_exchange": 1.3, "by_layer": 1.399},
            "Cut each step .* 1.40x .*; a second model, by layer, 1.40x",
        ),
        ({"micro_batches": 1.4}, "Cut each step .* memory does not hold a second"),
        ({"micro_batches": 1.0}, "Leave .* memory does not hold a second"),
        ({"micro_batches": 1.1, "by_exchange": 1.3, "by_layer": 1.6, "three_models": 1.5}, "second model, by layer: 1.60x"),
        ({"micro_batches": 1.1, "by_exchange": 1.3, "by_layer": 1.2}, "second model, by exchange: 1.30x .*; two micro"),
        ({"micro_batches": 1.1, "by_exchange": 1.3, "by_layer": 1.4, "three_models": 1.7}, "three models: 1.70x"),
        (
            {"halves_of_the_GPUs": 1.9, "micro_batches": 1.1, "by_exchange": 1.3},
            "a copy of this model on each half of the GPUs: 1.90x .*; two micro-batches of this model alone 1.10x",
        ),
        (
            {"halves_of_the_GPUs": 0.9, "micro_batches": 1.0, "by_layer": 1.0},
            "Leave .*: two micro-batches of this model alone 1.00x; .* on each half of the GPUs 0.90x",
        ),
    ],
)
def test_advice_follows_the_gains(gains, said):
    assert re.search(said, sharing_advice(compared(one_after_the_other=1.0, **gains)))


def test_sharing_is_compared_at_the_profiles_own_batch():
    found = ReportNumbers(ReportInputs(make_plan(two_gpus(), [both_experts()]), (), (both_experts(),))).sharing
    assert found.batch == BATCH
    assert "a copy of this model on each half" in sharing_advice(found)


def test_mixed_gpus_are_split_so_that_the_slower_half_has_less_to_do():
    """Models of 1 and of 3 s a step on GPUs of which one is half as fast: 2 and 3 s the right way round, 1 and 6 the other."""
    slow, fast = two_gpus().gpus
    cluster = Cluster("mixed", (fast, replace(slow, kind="other", speed=0.5)))
    light, heavy = (replace(both_experts(seconds / 32), other_bytes=0) for seconds in (1, 3))
    for models in ((light, heavy), (heavy, light)):
        found = compare_ways(cluster, models, BATCH, steps=2, ways=(HALVES,))
        halves = found.outcomes[1]
        assert halves.seconds == pytest.approx(2 * 3)
        assert [tpot_s for tpot_s, _ in halves.tpot_s_M] == pytest.approx([3, 2] if models[0] is heavy else [2, 3])
    odd = Cluster("odd", (*cluster.gpus, replace(fast, name="third")))
    left_out = compare_ways(odd, [light.at_sources(3)], BATCH, steps=2, ways=(HALVES,)).left_out
    assert "expected an even number of GPUs to split, found 3" in left_out[HALVES]


def test_a_placement_is_no_gain_of_sharing():
    """Large steps put three of four experts on GPU a; in small ones each expert takes a second, so that two on each are best."""
    gpus = tuple(Gpu(kind, kind, rank, 1e9, 1e9, 10_000) for rank, kind in enumerate("ab"))
    curves = {
        kind: {
            "gate": NOTHING,
            "expert": Curve(np.array([0.0, 1.0, 32.0, 64.0]), np.array([0.0, 1.0, 1.0, last])),
            "aggregate": NOTHING,
        }
        for kind, last in (("a", 8.0), ("b", 40.0))
    }
    model = Profile("m", "", np.full((1, 1, 2, 4), 64), 2, 1, 1, 100, 10, curves)
    found = compare_ways(Cluster("mixed", gpus), [model], BATCH, steps=2, ways=(TIME_SLICED,))
    assert found.gains[TIME_SLICED] == pytest.approx(1.0, abs=0.05)


def test_what_a_colocated_plan_is_compared_with():
    """Its models' parts of it, and their own plans: by these a model's hot experts are apart, and sharing this plan loses."""
    hot_LSE = np.tile([[9, 9, 1, 1]] * 2, (20, 1, 1))
    models = [replace(both_experts(), model=name, tokens_TLSE=hot_LSE[None], top_k=1) for name in "ab"]
    lopsided = Placement.stack([Placement.unreplicated(np.array([0, 0, 1, 1]), 2)] * 20)
    plan = price(two_gpus(100_000), models, [lopsided] * 2)
    apart = apart_seconds(plan, models)
    assert apart.by_plan == pytest.approx(simulate_plan(plan, models, interleave="off").seconds)
    own = [price(plan.cluster, each, Placement.stack([EVEN] * 20)) for each in models]
    alone_s = [simulate_plan(*each).seconds for each in zip(own, ([each] for each in models), strict=True)]
    assert apart.by_own == pytest.approx(sum(alone_s))  # its layers are alike: eight of them stand for twenty
    shared = summarise(simulate_plan(plan, models), plan.cluster)
    assert apart.by_own < shared.seconds < apart.by_plan
    assert re.search(
        r"^Sharing loses here: .*each by a plan of its own\. .*: plan and serve each model alone",
        sharing_line(shared, apart),
    )
    assert "is worth 1." in sharing_line(shared, apart._replace(by_own=apart.by_plan))
    assert "makes no difference here" in sharing_line(shared, ApartSeconds(shared.seconds * 1.01, shared.seconds * 1.01))
    assert "makes no difference here" in sharing_line(shared, ApartSeconds(shared.seconds * 0.99, shared.seconds))
    assert "--interleave off" in sharing_line(shared, ApartSeconds(shared.seconds / 2, shared.seconds))
