"""Engines' ways of serving: what travels, which settings go together, and commands that say exactly what they are."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aurora.advisor.engines import SERVING_ENGINES, command_with, described
from aurora.advisor.engines.engine import EplbSettings, Layout, ServingWay, launch_places
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.errors import BadInput
from aurora.io.engine_placements import PLACEMENT_FORMATS

FOLDER = Path("a folder")
SIZES = [(1, 8), (4, 8), (8, 8), (16, 8), (16, 4), (12, 12)]
EVERY_WAY = {
    name: [way for gpus, per_server in SIZES for way in engine.ways(gpus, per_server, 128)]
    for name, engine in SERVING_ENGINES.items()
}
TRTLLM_FIELDS = {  # of TensorRT-LLM's llmapi/llm_args.py: LlmArgs, MoeConfig, MoeLoadBalancerConfig
    "": {
        *(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "moe_expert_parallel_size",
            "moe_tensor_parallel_size",
            "enable_attention_dp",
        ),
        *("gpus_per_node", "moe_config"),
    },
    "moe_config": {"backend", "load_balancer", "max_num_tokens"},
    "load_balancer": {"num_slots", "initial_global_assignments", "layer_updates_per_iter"},
}


def starts(way):
    """The words of each command of a way."""
    text = SERVING_ENGINES[way.engine].command(way, "org/model", FOLDER / SERVING_ENGINES[way.engine].file)
    return [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_layout_counts_its_gpus_and_divides_experts_evenly(tensor, data, copies):
    size = tensor * data
    for expert in range(1, size + 2):
        if size % expert:
            with pytest.raises(BadInput, match="expected a divisor of a copy's"):
                Layout(tensor, data, expert, copies)
        else:
            assert Layout(tensor, data, expert, copies).gpus == size * copies


@pytest.mark.parametrize("name", SERVING_ENGINES)
def test_every_exchange_and_setting_of_an_engine_is_described(name):
    engine = SERVING_ENGINES[name]
    assert engine.name == name
    assert set(engine.exchanges) <= set(EXCHANGES)
    assert set(engine.overlaps) <= set(engine.exchanges)
    assert all(EXCHANGES[EXCHANGES[name].decode or name].sends == EXCHANGES[name].sends for name in engine.exchanges)
    assert engine.default(8, 8).layout == Layout(data=8, expert=8)


def test_what_engines_exchange_by_default():
    assert SERVING_ENGINES["vllm"].default(16, 8).exchange == "allgather"
    assert SERVING_ENGINES["sglang"].default(16, 8).exchange == "allgather"
    assert SERVING_ENGINES["vllm-ascend"].default(16, 8).exchange == "mc2"
    trtllm = SERVING_ENGINES["trtllm"]
    assert [trtllm.default(gpus, 8).exchange for gpus in (1, 8, 16, 24)] == [
        *("all-reduce", "nvlink-one-sided", "deepep-ht", "allgather")
    ]
    assert trtllm.default(8, 8, nvlink=False).exchange == "allgather"


def test_copies_tensor_parallelism_and_balancers_are_among_the_ways():
    for name, engine in SERVING_ENGINES.items():
        ways = engine.ways(16, 8, 128)
        assert ways[0] == engine.default(16, 8, 128)
        assert len(set(ways)) == len(ways)
        layouts = {way.layout for way in ways}
        assert {Layout(data=8, expert=8, copies=2), Layout(tensor=16), Layout(tensor=8, copies=2)} <= layouts
        assert {(bool(way.eplb), way.placement == "plan", way.redundant > 0) for way in ways} >= {
            (True, False, False), (True, False, True), (False, True, False), (False, True, True)
        }  # fmt: skip
        assert any(way.overlap for way in ways) == bool(engine.overlaps)
        assert {way.balance for way in ways} == {"", *engine.balances}, name


@pytest.mark.parametrize("name", SERVING_ENGINES)
def test_a_way_starts_each_copy_once_on_gpus_of_its_own(name):
    for way in EVERY_WAY[name]:
        places = list(launch_places(way))
        assert len(places) == way.hosts * way.layout.copies
        every = range(min(way.layout.copy_gpus, way.per_server))
        used = [(place.host, gpu) for place in places for gpu in place.devices or every]
        assert len(set(used)) == len(used) == way.layout.gpus
        heads = {(place.head, place.copy) for place in places if place.node == 0}
        assert len(heads) == way.layout.copies
        assert all("org/model" in words for words in starts(way))


@pytest.mark.parametrize("name", SERVING_ENGINES)
def test_different_ways_have_different_commands(name):
    """But for vllm-ascend's exchanges, which follow the device, UCCL-EP's, which is installed as DeepEP, and TensorRT-LLM's slots."""
    engine = SERVING_ENGINES[name]
    said = {}
    for way in engine.ways(16, 8, 128):
        if (name, way.exchange) == ("vllm-ascend", "allgather"):
            way = replace(way, exchange="mc2")
        way = replace(way, exchange=way.exchange.replace("uccl-", "deepep-"))
        if (name, way.placement) == ("trtllm", "plan"):
            way = replace(way, redundant=0)
        key = (engine.command(way, "m", FOLDER / engine.file), tuple(engine.files(way, FOLDER / engine.file).items()))
        assert said.setdefault(key, way) == way


@pytest.mark.parametrize("form", PLACEMENT_FORMATS)
def test_an_exported_placement_comes_with_the_engines_own_command(form):
    """On the engine's default layout, as `aurora recommend` would say it."""
    file = FOLDER / "m.json"
    said = command_with(form, file, gpus=2, experts=4, redundant=2)
    engine = next((engine for engine in SERVING_ENGINES.values() if engine.form == form), None)
    if engine is not None:
        way = replace(engine.default(2, 2, 4), placement="plan", redundant=2)
        assert said.startswith(engine.command(way, "MODEL", file))
        assert str(file) in said
    if form in (paths := {"vllm-map": "initial_mapping_path", "vllm-list": "initial_expert_map_path"}):
        assert f'"num_redundant_experts": 2, "{paths[form]}": "{file}"' in said
    if form == "trtllm":
        assert f"\n# write this to {FOLDER / 'options.yaml'}:\n" in said
        assert yaml.safe_load(said.partition("\n")[2])["moe_config"]["load_balancer"] == str(file)
    assert "redundant" in said or form == "trtllm"


def test_copies_on_one_server_have_devices_and_ports_of_their_own():
    way = replace(SERVING_ENGINES["sglang"].default(4, 8), layout=Layout(data=2, expert=2, copies=2))
    assert [(words[0], words[-2:]) for words in starts(way)] == [
        ("CUDA_VISIBLE_DEVICES=0,1", ["--ep-size", "2"]),
        ("CUDA_VISIBLE_DEVICES=2,3", ["--port", "30001"]),
    ]


def test_servers_of_a_copy_meet_at_its_first():
    layout = Layout(tensor=2, data=8, expert=16, copies=2)
    vllm = starts(replace(SERVING_ENGINES["vllm"].default(32, 8), layout=layout))
    at = [words[words.index("--data-parallel-address") + 1] for words in vllm]
    first = [words[words.index("--data-parallel-start-rank") + 1] if "--headless" in words else "0" for words in vllm]
    assert (at, first) == (["HOST_0", "HOST_0", "HOST_2", "HOST_2"], ["0", "4", "0", "4"])
    sglang = starts(replace(SERVING_ENGINES["sglang"].default(32, 8), layout=layout))
    assert [words[words.index("--node-rank") + 1] for words in sglang] == ["0", "1", "0", "1"]
    assert [words[words.index("--dist-init-addr") + 1][:6] for words in sglang] == at
    trtllm = starts(SERVING_ENGINES["trtllm"].default(16, 8))
    assert [words[words.index("-H") + 1] for words in trtllm] == ["HOST_0:8,HOST_1:8"]


def test_tensorrt_llms_options_have_its_fields_and_say_the_way():
    engine = SERVING_ENGINES["trtllm"]
    for way in EVERY_WAY["trtllm"]:
        (text,) = engine.files(way, FOLDER / engine.file).values()
        found, layout = yaml.safe_load(text), way.layout
        moe = found.get("moe_config", {})
        balancer = moe.get("load_balancer", {})
        assert set(found) <= TRTLLM_FIELDS[""]
        assert set(moe) <= TRTLLM_FIELDS["moe_config"]
        assert found["tensor_parallel_size"] == layout.stage_gpus
        assert found.get("pipeline_parallel_size", 1) == layout.pipeline
        assert found.get("moe_expert_parallel_size", 1) == layout.expert
        assert found.get("moe_tensor_parallel_size", layout.stage_gpus) * layout.expert == layout.stage_gpus
        assert found.get("enable_attention_dp", False) == (layout.data > 1)
        if way.placement == "plan":
            assert balancer == str(FOLDER / engine.file)
        elif way.eplb:
            assert set(balancer) <= TRTLLM_FIELDS["load_balancer"]
            assert balancer["num_slots"] == 128 + way.redundant
            assert balancer["num_slots"] % layout.expert == 0
        else:
            assert not moe


def test_vllm_ascends_settings_have_its_fields_and_say_the_way():
    for way in EVERY_WAY["vllm-ascend"]:
        for words in starts(way):
            config = json.loads(words[words.index("--additional-config") + 1]) if "--additional-config" in words else {}
            eplb = config.get("eplb_config", {})
            assert set(config) <= {"eplb_config", "enable_fused_mc2"}
            assert eplb.get("num_redundant_experts", 0) == way.redundant
            assert ("expert_map_path" in eplb) == (way.placement == "plan")
            assert ("DYNAMIC_EPLB=true" in words) == eplb.get("dynamic_eplb", False) == bool(way.eplb)
            assert ("enable_fused_mc2" in config) == (way.exchange == "fused-mc2")


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("vllm", {"exchange": "mc2"}, "expected an exchange of"),
        ("vllm", {"layout": Layout(data=8)}, None),
        ("vllm", {"layout": Layout(data=8), "exchange": "deepep-ll"}, "whole experts on all GPUs"),
        ("vllm", {"layout": Layout(tensor=8, expert=8)}, "all-reduce goes without data-parallel ranks"),
        ("vllm", {"layout": Layout(data=8, expert=4)}, "over all 8 GPUs of a stage or over none"),
        ("sglang", {"layout": Layout(data=8, expert=4)}, None),
        ("vllm", {"redundant": 8}, "replicas need a plan or the engine's balancer"),
        ("vllm", {"redundant": 8, "placement": "plan", "eplb": EplbSettings(10, 10)}, "exclude each other"),
        ("vllm", {"overlap": True}, "batches overlap with deepep-ht"),
        ("sglang", {"overlap": True}, "batches overlap with deepep"),
        ("sglang", {"overlap": True, "exchange": "deepep"}, None),
        ("vllm", {"exchange": "moonep"}, None),
        ("vllm", {"exchange": "moonep", "eplb": EplbSettings(10, 10)}, "balances every step by itself"),
        ("vllm", {"exchange": "nvlink-one-sided", "nvlink": False}, "needs NVLink"),
        ("vllm", {"exchange": "nvlink-one-sided", "per_server": 4}, "needs NVLink"),
        ("vllm", {"exchange": "deepep-ht", "per_server": 4}, None),
        ("vllm", {"balance": "lplb"}, "it has no lplb in each step"),
        ("sglang", {"balance": "lplb", "redundant": 8, "placement": "plan"}, "lplb needs an all-to-all"),
        ("sglang", {"balance": "lplb", "redundant": 8, "placement": "plan", "exchange": "deepep"}, None),
        ("sglang", {"eplb": EplbSettings(2000, 1000)}, "no more steps than lie between two changes"),
        ("trtllm", {"layout": Layout(tensor=2, data=4, expert=8)}, "data-parallel on all GPUs or on none"),
        ("trtllm", {"eplb": EplbSettings(1, 1)}, "`experts` is missing"),
        ("trtllm", {"eplb": EplbSettings(1, 5), "experts": 128}, "one layer a step"),
        ("vllm-ascend", {"eplb": EplbSettings(600, 600)}, "interval is longer than its window"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_reason(name, changes, why):
    engine = SERVING_ENGINES[name]
    way = replace(engine.default(8, 8), **changes)
    if why is None:
        engine.check(way)
    else:
        with pytest.raises(BadInput, match=why):
            engine.command(way, "m", FOLDER / engine.file)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"exchange": "pigeon"}, "`exchange`: expected one of"),
        ({"placement": "mine"}, "`placement`: expected one of"),
        ({"redundant": -1}, "no negative numbers"),
        ({"redundant": 3, "experts": 128}, "as many slots on each of 8 GPUs"),
        ({"layout": Layout(data=3, expert=3, copies=4)}, "copies that fill servers of 8 GPUs"),
    ],
)
def test_a_way_that_cannot_be_is_refused(changes, why):
    with pytest.raises(BadInput, match=why):
        ServingWay(**{"engine": "vllm", "layout": Layout(data=8, expert=8), "exchange": "allgather", **changes})


def test_eplb_needs_a_window_and_an_interval():
    with pytest.raises(BadInput, match="from 1 step on"):
        EplbSettings(0, 10)


def test_an_engine_is_described_by_version():
    """MoonEP came with vLLM 0.31; the description is of 0.30 to 0.33."""
    assert ["moonep" in described(f"vllm==0.{minor}")[0].exchanges for minor in (30, 31, 33)] == [False, True, True]
    assert ["nccl-ep" in described(f"trtllm==1.{minor}")[0].exchanges for minor in (2, 3)] == [False, True]
    known = [version for version in ("", "0.29.1", "0.30", "0.33.2", "0.34", "1.0") if described("vllm")[0].describes(version)]
    assert known == ["", "0.30", "0.33.2"]
    for text, message in (("vllm==", "a version after =="), ("vllm==new", "such as 0.33 after =="), ("llm", "expected one of")):
        with pytest.raises(BadInput, match=message):
            described(text)
