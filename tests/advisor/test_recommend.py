"""Recommendations: clusters from short texts, gains on traffic not planned for, and nothing where nothing helps."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import aurora
from aurora.advisor.datasheet_gpus import cluster_of, with_datasheet_curves
from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.recommend import CONFIDENCE, interval, nic_Bps_of, recommend, save_recommendation
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.io import load_gpus
from aurora.types import SyntheticOptions
from aurora.types.network import Servers
from tests.io.engine_readers import READERS

CONFIG = {
    "num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 512, "intermediate_size": 1024,
}  # fmt: skip
KINDS = load_gpus()


def skewed(windows, hot):
    """Traffic of four sources in which `hot` experts get most tokens, alike in all windows but for noise."""
    rng = np.random.default_rng(0)
    share_E = np.where(np.arange(8) < hot, 10.0, 1.0)
    tokens_TLSE = rng.multinomial(8192, share_E / share_E.sum(), size=(windows, 2, 4))
    return Shape.of(CONFIG).profile(tokens_TLSE, {}, kinds=[KINDS["NVIDIA H20"]])


def test_a_short_text_becomes_servers_of_gpus_with_datasheet_figures():
    cluster = cluster_of("h20:3,a100:8", KINDS, nic_Bps=1e10, per_server=2)
    assert [gpu.kind for gpu in cluster.gpus] == ["NVIDIA H20"] * 3 + ["NVIDIA A100-SXM4-80GB"] * 8
    assert [gpu.node for gpu in cluster.gpus] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert cluster.gpus[0].memory_bytes == KINDS["NVIDIA H20"].memory_bytes
    assert cluster.servers is not None
    assert cluster_of("a100-pcie:2", KINDS).gpus[0].kind == "NVIDIA A100 80GB PCIe"
    assert cluster_of("h20:8", KINDS).servers is None


@pytest.mark.parametrize("gpus", ["", "h20", "h20:0", "h20:8,", "h20:-1", "h2:8", "h20:99999", "nvidia;rm:8"])
def test_a_text_that_is_no_cluster_is_refused(gpus):
    with pytest.raises(BadInput, match="`gpus`: expected"):
        cluster_of(gpus, KINDS)


@pytest.mark.full
def test_hot_experts_that_share_a_gpu_are_moved_apart_and_the_gain_holds_on_later_traffic():
    profile = skewed(windows=10, hot=2)  # experts 0 and 1, which the default puts on GPU 0
    found = recommend(cluster_of("h20:4", KINDS), "sglang", profile=profile.at_windows(range(5)))
    assert found.best is not None
    assert found.best.gain > 1.2
    assert found.best.low < found.best.gain < found.best.high
    later = profile.at_windows(range(5, 10))
    default = aurora.PlanOptions(place="contiguous", assign="contiguous", order="all-at-once")
    before, after = aurora.plan(found.cluster, later, default), found.plan
    gathered = [aurora.simulate(plan, later, orders="allgather").seconds for plan in (before, after)]
    gain = gathered[0] / gathered[1]
    assert found.best.low <= gain <= found.best.high


@pytest.mark.full
def test_balanced_traffic_is_left_alone():
    found = recommend(cluster_of("h20:4", KINDS), "trtllm", profile=skewed(windows=5, hot=8))
    assert found.best is None
    assert all(0.9 < candidate.gain < 1.1 for candidate in found.simulated.candidates)


def test_few_windows_have_no_interval():
    found = recommend(cluster_of("h20:4", KINDS), "sglang", profile=skewed(windows=3, hot=2))
    assert {(candidate.low, candidate.high) for candidate in found.simulated.candidates} == {(None, None)}
    assert found.best is not None


@pytest.mark.full
@pytest.mark.parametrize("name", SERVING_ENGINES)
def test_every_engine_gets_a_command_and_files_that_it_reads(name, tmp_path):
    engine = SERVING_ENGINES[name]
    found = recommend(cluster_of("h20:4", KINDS), name, profile=skewed(windows=1, hot=2))
    words = shlex.split(save_recommendation(found, tmp_path / "out", "my model"))
    assert "my model" in words
    assert found.way.exchange == found.default.exchange == engine.default(4, 4).exchange
    if engine.form is None:
        settings = json.loads(words[words.index("--additional-config") + 1])
        assert settings == {"aurora": {"plan": str(tmp_path / "out" / "plan.json")}}
        return
    texts = [(tmp_path / "out" / file).read_text() for file in engine.files(found.best.way, tmp_path)]
    assert str(tmp_path / "out" / engine.file) in " ".join([*words, *texts])
    held_LG = found.plan.models[0].placement.slots_LG
    redundant = 4 * max(len(held) for layer in held_LG for held in layer) - 8
    assert found.best.way.redundant == redundant
    text = (tmp_path / "out" / engine.file).read_text()
    read_LG = READERS[engine.form](text, [0, 1], 2, 8, 4, redundant)
    for planned_G, read_G in zip(held_LG, read_LG, strict=True):
        assert all(set(planned) <= set(read) for planned, read in zip(planned_G, read_G, strict=True))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("per_server", [4, 1, 2], ids=["one-nvlink-domain", "flat-between-servers", "over-servers"])
def test_no_order_is_advised_on_any_fabric(per_server, name, tmp_path):
    """Also under skew, which orders gain most from: where one may pay is measured, as docs/concepts/orders.md says."""
    found = recommend(cluster_of("h20:4", KINDS, per_server=per_server), name, profile=skewed(windows=3, hot=2))
    plans = [candidate.plan for candidate in found.simulated.candidates]
    models = [model for plan in (found.plan, *plans) for model in plan.models]
    assert {order.method for model in models for order in (*model.dispatch_L, *model.combine_L)} == {"all-at-once"}
    command = save_recommendation(found, tmp_path, "model")
    assert [word for word in ("push", "online", '"order": "plan"', '"order": "auto"') if word in command] == []


def test_an_allgather_is_simulated_where_the_engine_does_one():
    profile = skewed(windows=1, hot=2)
    cluster = cluster_of("h20:4", KINDS)
    gathered = recommend(cluster, "vllm", profile=profile)
    routed = recommend(cluster, "trtllm", profile=profile)
    default = aurora.PlanOptions(place="contiguous", assign="contiguous", order="all-at-once")
    plan = aurora.plan(cluster, profile, default)
    assert gathered.simulated.default_s == aurora.simulate(plan, profile, orders="allgather").seconds
    assert routed.simulated.default_s == aurora.simulate(plan, profile).seconds


def test_gains_on_several_kinds_are_of_a_whole_step():
    """Experts and exchanges on the kind that is slowest at them, the rest on the kind that is slowest at it: Amdahl's law."""
    config, kinds = {**CONFIG, "num_attention_heads": 8, "vocab_size": 1000}, [KINDS["NVIDIA H20"], KINDS["NVIDIA H800"]]
    profile = aurora.synthetic_profile("zipf:1", config, SyntheticOptions(sources=4, windows=5))
    cluster, given = cluster_of("h20:2,h800:2", KINDS), with_datasheet_curves(profile, config, kinds)
    with_rest, layers = (recommend(cluster, "sglang", model=each, profile=given).simulated for each in (config, None))
    assert (layers.share, layers.default_s) == (1.0, with_rest.default_s)
    assert 0 < with_rest.share < 1
    step = SchedulerStep(prefill_tokens=round(with_rest.tokens / 4), prefill_requests=1)
    each = [step_seconds(config, kind, with_rest.default.layout, step, nic_Bps=50e9, per_server=2) for kind in kinds]
    slowest = {part: max(vars(one)[part] for one in each) for part in vars(each[0])}
    assert with_rest.share == pytest.approx((slowest["experts_s"] + slowest["collectives_s"]) / sum(slowest.values()))
    for found, alone in zip(with_rest.candidates, layers.candidates, strict=True):
        assert (found.name, found.seconds) == (alone.name, alone.seconds)
        assert 1 / found.gain == pytest.approx(1 - with_rest.share + with_rest.share / alone.gain)


def test_datasheet_times_are_added_for_kinds_that_a_profile_lacks():
    profile = aurora.synthetic_profile("zipf:1", CONFIG, SyntheticOptions(sources=4))
    found = aurora.recommend("h20:2,h800:2", "sglang", model=CONFIG, profile=profile)
    assert {"NVIDIA H20", "NVIDIA H800"} <= set(found.profile.curves)
    with pytest.raises(BadInput, match="`model`: expected the profile's layers"):
        aurora.recommend("h20:4", "sglang", model={**CONFIG, "num_hidden_layers": 3}, profile=profile)
    with pytest.raises(BadInput, match="found neither"):
        aurora.recommend("h20:4", "sglang")
    with pytest.raises(BadInput, match="`engine`: expected one of vllm"):
        aurora.recommend("h20:4", "tgi", model=CONFIG)


@given(st.integers(3, 12), st.floats(-0.5, 0.5), st.floats(0.001, 0.3), st.integers(0, 2**32 - 1))
def test_the_interval_is_the_prediction_interval_of_one_further_gain(blocks, mean, spread, seed):
    drawn_W = np.random.default_rng(seed).normal(mean, spread, blocks)
    middle, low, high = np.log(interval(drawn_W))
    assert low < middle < high
    assert middle == pytest.approx(drawn_W.mean())
    # a further gain at an end of the interval is just rejected by a t-test of one value against the others
    tail = stats.t.sf((high - middle) / (drawn_W.std(ddof=1) * np.sqrt(1 + 1 / blocks)), blocks - 1)
    assert tail == pytest.approx((1 - CONFIDENCE) / 2)


def test_gpus_that_share_a_nic_each_have_their_part_of_it():
    own = cluster_of("h100:16", KINDS, nic_Bps=50e9)
    shared = replace(own, servers=Servers.of([gpu.node for gpu in own.gpus], 50e9, shared_nic=True))
    assert nic_Bps_of(own) == 50e9
    assert nic_Bps_of(shared) == 50e9 / 8
    assert nic_Bps_of(cluster_of("h100:8", KINDS)) is None
