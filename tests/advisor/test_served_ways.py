"""Ways of serving against step times by hand, and against traffic whose best placement is known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import aurora
from aurora.advisor.best_way import best_way, installs
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import EplbSettings, Layout
from aurora.advisor.gpu_memory import memory_bytes
from aurora.advisor.ratio_errors import RATIO_ERRORS
from aurora.advisor.recommend import planned, recommend
from aurora.advisor.served_ways import (
    compare_ways_of_serving,
    method_of,
)
from aurora.advisor.serving_case import BATCHED_TOKENS, ServingCase
from aurora.advisor.step_constants import COMPUTED_ERROR
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.advisor.without_records import without_records
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import InfeasiblePlan
from aurora.io import load_gpus
from aurora.reports.advice import recommendation_lines, replicas_line
from aurora.reports.html import tiles
from aurora.reports.inputs import ReportInputs
from aurora.reports.json_objects import recommendation_json
from aurora.reports.numbers import ReportNumbers
from aurora.types import RequestLoad

H100 = load_gpus()["NVIDIA H100 80GB HBM3"]
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4096, "intermediate_size": 4096,
}  # fmt: skip
LOAD = RequestLoad(isl=512, osl=64, concurrency=16)
ONE_SERVER = ServingCase(CONFIG, H100, LOAD, None, 8)
SGLANG = SERVING_ENGINES["sglang"]


def traffic(hot=2.0, windows=20, seed=0):
    """Experts 0 to 3, which the default puts on the first GPUs, get `hot` times the tokens of the others, in every window."""
    share_E = np.where(np.arange(16) < 4, hot, 1.0)
    tokens_TLSE = np.random.default_rng(seed).multinomial(1 << 14, share_E / share_E.sum(), size=(windows, 4, 8))
    return Shape.of(CONFIG).profile(tokens_TLSE, {"tool": "recorder"}, kinds=[H100])


@pytest.fixture(scope="module")
def compared():
    return compare_ways_of_serving(traffic(), ONE_SERVER, "sglang", 8)


@pytest.mark.parametrize("isl", [512, 2 * BATCHED_TOKENS + 100])
def test_a_rank_serves_its_requests_once_in_their_decode_steps_and_prompts(isl):
    model = replace(ONE_SERVER, load=replace(LOAD, isl=isl))
    way = SGLANG.default(8, 8, 16)
    service = model.service(way)
    requests, together = 16, max(1, min(16, BATCHED_TOKENS // isl))

    def seconds(step):
        return step_seconds(CONFIG, H100, way.layout, step, ratio=1.0).total

    prompts_s = 0.0
    for begin in range(0, isl, BATCHED_TOKENS):
        tokens, before = min(BATCHED_TOKENS, isl - begin) * together, begin * together
        prompts_s += seconds(SchedulerStep(tokens, 0, before, before, together))
    decode_s = seconds(SchedulerStep(decode_requests=requests, kv_tokens=requests * (isl + 32)))
    cycle_s = 64 * decode_s + requests / together * prompts_s
    assert service.tokens_per_s == pytest.approx(8 * requests * 64 / cycle_s)
    assert service.tpot_s == pytest.approx(cycle_s / 64)
    assert service.ttft_s == pytest.approx(prompts_s + decode_s / 2)


def test_imbalance_takes_time_of_experts_and_of_exchanges_that_follow_the_placement():
    way = SGLANG.default(8, 8, 16)
    routed = next(other for other in SGLANG.ways(8, 8, 16) if other.exchange == "deepep")
    even, uneven = ((ONE_SERVER.service(each), ONE_SERVER.service(each, (1.5, 1.5))) for each in (way, routed))
    assert even[1].tpot_s > even[0].tpot_s
    experts_s = step_seconds(CONFIG, H100, way.layout, SchedulerStep(16 * 512, 0, 0, 0, 16), ratio=1.0).experts_s
    prompts = even[1].ttft_s - even[0].ttft_s
    decoded = step_seconds(CONFIG, H100, way.layout, SchedulerStep(decode_requests=16, kv_tokens=16 * 544), ratio=1.0)
    assert prompts == pytest.approx(0.5 * (experts_s + decoded.experts_s / 2))
    assert uneven[1].ttft_s - uneven[0].ttft_s > prompts


def test_a_planned_placement_removes_what_is_stable_and_nothing_beats_the_ceiling(compared):
    prompts, answers = compared.splits
    assert prompts.stable.value > 0.3 > 0.01 > prompts.per_step.value - prompts.by_slots
    assert answers.whole.value < 0.05  # every expert is active, and reading its weights takes the time
    of = {other.name: other for other in compared.others}
    static = of["planned placement"]
    assert static.way.placement == "plan"
    assert static.share == pytest.approx(1 - prompts.by_slots / prompts.whole.value, abs=0.05)
    assert static.low <= static.gain <= static.high
    assert compared.default.gain == 1.0
    for other in compared.others:
        if other.share is not None:
            assert other.gain <= compared.ceiling.gain * (1 + 1e-9), other.name
    replicas = of["planned placement, +1 slot"]
    assert replicas.memory_bytes == 4 * Shape.of(CONFIG).expert_bytes
    assert all(other.way is not None for other in compared.others)  # only what the engine can be told to do


def test_what_layouts_or_exchanges_change_is_sure_only_beyond_the_error_of_computed_steps(compared):
    apart = [other for other in compared.others if other.way is not None and other.way.layout != compared.default.way.layout]
    assert apart
    for other in apart:
        assert other.share is None
        assert other.low * COMPUTED_ERROR <= other.gain * (1 + 1e-9)
        assert other.high >= other.gain * COMPUTED_ERROR * (1 - 1e-9)


def test_even_traffic_has_nothing_to_balance():
    even = compare_ways_of_serving(traffic(hot=1.0), ONE_SERVER, "vllm", 8)
    assert even.ceiling.gain < 1.02
    best = best_way(even)
    assert best is None or best.way.placement == "linear"


def test_two_servers_of_a_small_model_have_copies():
    """Between servers bytes are slow: a copy on each server has none of them, and answers faster. An exchange that
    must be installed is not taken for a difference within the error of computed steps."""
    model = replace(ONE_SERVER, nic_Bps=50e9)
    compared = compare_ways_of_serving(traffic(), model, "vllm", 16)
    assert best_way(compared).way.layout.copies >= 2
    two = replace(SERVING_ENGINES["vllm"].default(16, 8, 16), layout=Layout(data=8, expert=8, copies=2))
    best = next(other for other in compared.others if other.way == two)
    assert best.gain > 1.1
    assert not installs(compared, best)
    routed = next(other for other in compared.others if other.way == replace(best.way, exchange="deepep-v2"))
    for faster, taken in ((1.05, best), (1.15, routed)):
        service = replace(routed.service, tokens_per_s=faster * best.service.tokens_per_s)
        sure = replace(best, low=1.1), replace(routed, service=service, low=1.1)
        assert best_way(replace(compared, others=sure)).way == taken.way
    assert (compared.default.starts, best.starts) == ("at once", "at once")
    assert {other.starts.split()[0] for other in compared.others} == {"at", "with", "after"}
    assert all(other.worst >= 1 for other in compared.others)


def test_shares_of_a_small_ceiling_are_not_told():
    """vLLM's allgather takes nearly all the time between servers: what balance brings is a small part, and losses are no shares."""
    compared = compare_ways_of_serving(traffic(), replace(ONE_SERVER, nic_Bps=1e9), "vllm", 16)
    assert 1 < compared.ceiling.gain < 1.02
    assert {other.share for other in compared.others} == {None}


def test_memory_decides_what_can_be_had():
    """Two copies have twice the experts on a GPU; even steps of 16 tokens, one of each request, leave no room for them."""
    model = replace(ONE_SERVER, nic_Bps=50e9)
    two = replace(SERVING_ENGINES["vllm"].default(16, 8, 16), layout=Layout(data=8, expert=8, copies=2))
    least = memory_bytes(CONFIG, two, 16 * 576, sequences=16, slots=2, tokens=16).total
    small = replace(model, kind=replace(H100, memory_bytes=int(least / 0.92)))
    compared = compare_ways_of_serving(traffic(), small, "vllm", 16)
    assert "a GPU needs" in compared.left_out["2 copies, each DP 8 EP 8"]
    assert not [other for other in compared.others if other.way.layout == two.layout and other.way.exchange == "allgather"]
    assert "2 copies, each DP 8 EP 8" in {fit.name for fit in compared.memory if fit.why}
    lowered = next(other for other in compared.others if other.way.batched_tokens)
    assert f"--max-num-batched-tokens {lowered.way.batched_tokens}" in SERVING_ENGINES["vllm"].command(
        lowered.way, "M", Path("p")
    )
    with pytest.raises(InfeasiblePlan, match="vllm's default on 8 GPUs: a GPU needs"):
        compare_ways_of_serving(traffic(), replace(ONE_SERVER, kind=replace(H100, memory_bytes=10**8)), "vllm", 8)


def test_methods_of_ways():
    ways = {method_of(way, "eplb"): way for engine in SERVING_ENGINES.values() for way in engine.ways(8, 8, 16)}
    assert {"", "linear", "static", "eplb", "eplb-every"} <= set(ways)
    assert ways[""].layout.expert == 1
    assert method_of(replace(ways["static"], redundant=8), "equal-split") == "static"
    assert method_of(SERVING_ENGINES["vllm"].default(8, 8), "eplb") == "linear"
    assert Layout(data=8, expert=8) == SERVING_ENGINES["vllm"].default(8, 8).layout


def test_the_plan_is_the_placement_that_was_compared(compared):
    cluster = aurora.advisor.datasheet_gpus.cluster_of("h100:8", load_gpus())
    for name, most in (("planned placement", 1.21), ("planned placement, +1 slot", 1.1)):
        best = next(other for other in compared.others if other.name == name)
        plan = planned(cluster, traffic(), best, SGLANG.replicate)
        (model,) = plan.models
        load_G = traffic().load_LE[0] @ model.placement.split_EG(0)
        assert load_G.max() / load_G.mean() < most
        assert sum(map(len, model.placement.slots_LG[0])) == 16 + best.way.redundant


@pytest.mark.parametrize("engine", SERVING_ENGINES)
def test_drawn_traffic_recommends_no_placement(engine):
    drawn = recommend("h100:8", engine, model=CONFIG)
    assert (drawn.drawn, drawn.plan) == (True, None)
    assert {other.method for other in drawn.served.others} <= {"", "linear"}
    said = recommendation_lines(drawn)
    assert said[0].startswith("Requests over 8 ranks: 1000 requests of drawn lengths, which advise nothing")
    if drawn.best is None:
        assert recommendation_json(drawn)["recommendation"] is None
        assert said[1].startswith(f"Keep {engine}'s layout and exchange")
    else:
        assert said[1].startswith(f"Serve with {drawn.best.name}: ")
        assert drawn.way.placement == "linear"
    assert said[2].startswith("No recommendation of a placement: this traffic is drawn")
    assert len(drawn.recorded.models) >= 2
    assert 1 < drawn.served.ceiling.low < drawn.served.ceiling.high < drawn.recorded.ratios["linear"][1]


def test_gains_without_records_cover_the_imbalance_of_recorded_models():
    """By hand: over ratios 1.1 and 1.5 of the slowest GPU's experts, and 1.10 for the error of computed steps of other layouts."""
    case = ServingCase(CONFIG, H100, RequestLoad(), None, 8)
    compared = compare_ways_of_serving(traffic(), case, "vllm", 8)
    served = without_records(compared, case, (1.1, 1.5))
    other, default = served.others[0], served.default.way

    def tokens_per_s(way, ratio):
        return case.service(way, (ratio, ratio)).tokens_per_s

    of_both = [tokens_per_s(other.way, ratio if other.method else 1.0) / tokens_per_s(default, ratio) for ratio in (1.1, 1.5)]
    assert other.low <= min(of_both) / 1.10 * (1 + 1e-12)
    assert other.high >= max(of_both) * 1.10 * (1 - 1e-12)
    assert served.default.gain == served.default.low == served.default.high == 1.0
    even = [tokens_per_s(default, 1.0) / tokens_per_s(default, ratio) for ratio in (1.1, 1.5)]
    assert (served.ceiling.low, served.ceiling.high) == pytest.approx(tuple(even))


def test_recorded_traffic_is_answered_in_one_sentence():
    found = recommend("h100:8", "sglang", model=CONFIG, profile=traffic())
    assert not found.drawn
    said = recommendation_lines(found)
    assert [line.split()[0] for line in said[1:4]] == ["EPLB:", "Replicas:", "Serve"]
    assert found.way is found.best.way
    assert (found.plan is not None) == (found.way.placement == "plan")
    assert "python -m sglang.launch_server --model-path M" in SGLANG.command(found.way, "M", Path("out"))
    assert recommendation_json(found)["recommendation"]["name"] == found.best.name
    even = recommend("h100:1", "sglang", model=CONFIG, profile=traffic(hot=1.0).at_sources(1))
    assert recommendation_lines(even)[0].startswith("Keep sglang's default")


def test_experts_that_do_not_divide_evenly_need_few_redundant_ones():
    """16 experts on 6 GPUs: 2 make 18, 3 slots each; 16 heads cannot be cut over 6 GPUs."""
    compared = compare_ways_of_serving(traffic(), ONE_SERVER, "vllm", 6)
    assert {other.way.redundant for other in compared.others if other.way.eplb} == {2, 8}
    assert compared.left_out["TP 6"] == "16 attention heads cannot be cut over 6 GPUs"
    gains = {other.name: other for other in compared.others}
    few, more = gains["planned placement, 2 redundant experts"], gains["planned placement, +1 slot"]
    assert more.memory_bytes - few.memory_bytes == 4 * Shape.of(CONFIG).expert_bytes
    said = replicas_line(compared)
    assert said.startswith("Replicas: EPLB needs 2 redundant experts at least for 16 experts on 6 GPUs, which bring ")
    assert said.endswith(f"one more slot on each GPU takes 101 MB and brings {more.gain / few.gain:.3f}x of that.")


def test_stalls_of_eplb_take_their_time():
    """A rank's 16 requests: 64 steps of answers, 1 of their 16 x 512 prompt tokens. 2 s in each 130 steps are 1 s more in 65."""
    way = replace(SGLANG.default(8, 8, 16), eplb=EplbSettings(100, 130))
    assert ONE_SERVER.steps(way) == 65
    at_once, waits = ONE_SERVER.service(way), ONE_SERVER.service(way, stall_s=2.0)
    assert 64 * (waits.tpot_s - at_once.tpot_s) == pytest.approx(1.0)
    assert 8 * 16 * 64 / waits.tokens_per_s == pytest.approx(8 * 16 * 64 / at_once.tokens_per_s + 1.0)
    assert waits.ttft_s == at_once.ttft_s


def test_small_steps_are_not_cut_and_halves_of_large_ones_hide_their_exchange():
    ways = {way.overlap: way for way in SERVING_ENGINES["vllm"].ways(16, 8, 16)
            if (way.exchange, way.placement, way.eplb, way.layout.data) == ("deepep-ll", "linear", None, 16)}  # fmt: skip
    slow = replace(ONE_SERVER, nic_Bps=1e9)
    whole, cut = (slow.service(ways[overlap]) for overlap in (False, True))
    assert cut.ttft_s < whole.ttft_s
    few = replace(slow, load=RequestLoad(isl=16, osl=64, concurrency=16))
    assert few.service(ways[True]) == few.service(ways[False])  # 16 requests, 256 tokens of prompts


def test_no_exchange_is_recommended_of_which_nobody_published_times(compared):
    """An interval has the least and the most of published paces; of an exchange without any it is that of all."""
    vllm = compare_ways_of_serving(traffic(), ONE_SERVER, "vllm", 8)
    found = {
        other.way.exchange: other for other in vllm.others if other.way and other.changes[1:] == () and other.method == "linear"
    }
    unknown, known = found["nvlink-two-sided"], found["nvlink-one-sided"]
    assert unknown.high / unknown.low > known.high / known.low
    faster = [replace(each, low=9.0, service=replace(each.service, tokens_per_s=9e9)) for each in (unknown, known)]
    assert best_way(replace(vllm, others=(faster[0],))) is None
    assert best_way(replace(vllm, others=tuple(faster))) is faster[1]
    base = ONE_SERVER.service(vllm.default.way, vllm.default.ratios[0]).tokens_per_s / RATIO_ERRORS["exchange"][0]
    assert known.high == pytest.approx(ONE_SERVER.service(known.way, known.ratios[1], pace=0).tokens_per_s / base)


def test_exchanges_of_another_maker_are_left_out(compared):
    assert compared.left_out["exchange mori-ht"] == "needs GPUs of AMD"
    assert not any(other.way and other.way.exchange.startswith("mori") for other in compared.others)


def test_the_page_of_a_recommended_plan_says_the_tokens_that_recommend_says(monkeypatch):
    """With keys and values as in Qwen3, and with latent attention as in DeepSeek-V3; the best planned placement is taken."""
    planned_way = "aurora.advisor.recommend.best_way"
    monkeypatch.setattr(
        planned_way, lambda served: next(way for way in served.others if way.way and way.way.placement == "plan")
    )
    latent = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
    for config in (CONFIG, CONFIG | latent):
        load = RequestLoad(4096, 8, 2)
        found = recommend("h100:8", "sglang", model=config, profile=traffic(hot=4.0), load=load)
        rate = f"{found.best.service.tokens_per_s:,.0f}"
        (shown,) = [tile for tile in tiles(ReportNumbers(ReportInputs(found.plan, (), ()))) if tile.title.startswith("Tokens")]
        assert shown.value == rate
        assert f"({found.best.gain:.2f}x of sglang's default)" in shown.note
        assert f"{rate} after" in " ".join(recommendation_lines(found))
