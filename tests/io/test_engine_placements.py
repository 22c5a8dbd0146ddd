"""Engines' placements: files as the engines write them, round trips, and files that lie."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import save
from aurora.io.engine_placements import PLACEMENT_FORMATS, export_placement, import_placement, off_by
from aurora.io.placements import evenly_split, layers_json, load_placement, placement_from_json, save_placement
from aurora.planner.make_plan import make_plan
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.types import Placement, SyntheticOptions
from tests.conftest import cluster

UNREPLICATED = Placement((((0, 3), (1, 2)), ((2, 3), (0, 1))))
REPLICATED = Placement((((0, 1), (0, 2)),), (((0.5, 1.0), (0.5, 1.0)),))

SGLANG = '{"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 0, 2]]}'
EPLB = '{"phy2log": [[0, 1, 2, 0]], "log2phy": [[[0, 3], [1, -1], [2, -1]]], "logcnt": [[2, 1, 1]]}'
ASCEND = """{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": [
    {"device_id": 1, "device_expert": [2, 0]}, {"device_id": 0, "device_expert": [0, 1]}]}]}"""
TRTLLM = """
num_slots: 4
initial_global_assignments:
  3: [0, 1, 2, 0]
  4: [0, 1, 0, 2]
layer_updates_per_iter: 0
"""


def read(tmp_path, text, form, gpus=2, dense_layers=0):
    (tmp_path / "engine").write_text(text)
    return import_placement(tmp_path / "engine", form, gpus, dense_layers)


@pytest.mark.parametrize(("form", "text"), [("sglang", SGLANG), ("eplb", EPLB), ("vllm-ascend", ASCEND), ("trtllm", TRTLLM)])
def test_files_as_engines_write_them(tmp_path, form, text):
    found = read(tmp_path, text, form)
    assert found.layer(0) == REPLICATED
    assert len(found.slots_LG) == (2 if form in ("sglang", "trtllm") else 1)


@pytest.mark.parametrize("form", PLACEMENT_FORMATS)
@pytest.mark.parametrize("dense_layers", [0, 3])
@pytest.mark.parametrize("placement", [UNREPLICATED, REPLICATED])
def test_round_trips(tmp_path, form, dense_layers, placement):
    assert read(tmp_path, export_placement(placement, form, dense_layers), form, 2, dense_layers) == placement
    assert off_by(placement, form) == 0


@st.composite
def placements(draw):
    """Some layers on some GPUs, each with a first expert of its own; replicas take even parts."""
    gpus, extra = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        homes = [draw(st.integers(0, gpus - 1)) for _ in range(extra)]
        held = [{g, *(gpus + e for e in range(extra) if homes[e] == g)} for g in range(gpus)]
        for g in range(gpus):
            held[g] |= set(draw(st.lists(st.integers(0, gpus + extra - 1), max_size=2)))
        layers.append(tuple(tuple(sorted(own)) for own in held))
    return evenly_split(tuple(layers))


@given(placements(), st.sampled_from(sorted(PLACEMENT_FORMATS)))
def test_what_an_engine_makes_of_an_export(tmp_path_factory, placement, form):
    """Every expert is where it was, and shares differ by as much as `off_by` says; only padding of unlike GPUs makes any."""
    path = tmp_path_factory.mktemp("engine") / "f"
    path.write_text(export_placement(placement, form))
    found = import_placement(path, form, placement.gpus)
    assert found.slots_LG == placement.slots_LG
    apart = [abs(found.split_EG(l) - placement.split_EG(l)).max() for l in range(len(placement.slots_LG))]
    assert max(apart) == pytest.approx(off_by(placement, form))
    if form == "vllm-ascend" or len({len(held) for layer in placement.slots_LG for held in layer}) == 1:
        assert max(apart) == 0


def test_padding_repeats_what_one_gpu_alone_holds():
    placement = Placement((((0, 1, 2), (3,)),))
    assert json.loads(export_placement(placement, "eplb"))["phy2log"] == [[0, 1, 2, 3, 3, 3]]
    assert off_by(placement, "eplb") == 0


def test_shares_that_an_engine_cannot_hold():
    assert off_by(Placement((((0,), (0,)),), (((0.75,), (0.25,)),)), "sglang") == pytest.approx(0.25)


def test_eplb_maps_agree_with_one_another():
    found = json.loads(export_placement(REPLICATED, "eplb"))
    assert found == {"phy2log": [[0, 1, 0, 2]], "log2phy": [[[0, 2], [1, -1], [3, -1]]], "logcnt": [[2, 1, 1]]}


def test_an_idle_gpu_has_no_slots_to_number():
    idle = Placement((((0, 1), ()),))
    with pytest.raises(BadInput, match="layer 0: expected an expert on every GPU, found none on GPU 1"):
        export_placement(idle, "sglang")
    assert '"device_expert": []' in export_placement(idle, "vllm-ascend")


@pytest.mark.parametrize(
    ("form", "text", "gpus", "dense_layers", "message"),
    [
        ("sglang", "[[0, 1]]", 2, 0, "expected a JSON object, found list"),
        ("sglang", "{", 2, 0, "not JSON"),
        ("sglang", '{"logical_count": [[[3, 4]]]}', 2, 0, r"holds loads \(logical_count\), not a placement"),
        ("sglang", "{}", 2, 0, "not a placement of sglang: KeyError"),
        ("sglang", '{"physical_to_logical_map": 3}', 2, 0, "not a placement of sglang: TypeError"),
        ("sglang", '{"physical_to_logical_map": [3]}', 2, 0, "not a placement of sglang: TypeError"),
        ("sglang", SGLANG, 3, 0, r"expected as many slots in every layer, on 3 GPUs evenly, found \[4\]"),
        ("sglang", SGLANG, 0, 0, "on 0 GPUs evenly"),
        ("sglang", SGLANG, -2, 0, "on -2 GPUs evenly"),
        ("sglang", SGLANG, None, 0, "does not say the number of GPUs; give `gpus`"),
        ("sglang", SGLANG, 2, 2, r"expected as many slots in every layer, on 2 GPUs evenly, found \[\]"),
        ("sglang", SGLANG, 2, -1, "`dense_layers`: expected zero or more, found -1"),
        ("eplb", '{"phy2log": [[0, 1], [0, 1, 1]]}', 1, 0, r"as many slots in every layer, on 1 GPUs evenly, found \[2, 3\]"),
        ("eplb", '{"phy2log": [[0, 2]]}', 2, 0, r"expected experts 0\.\.2 once, found \[0, 2\]"),
        ("eplb", '{"phy2log": [[0, -1]]}', 2, 0, r"expected experts 0\.\.0 once, found \[-1, 0\]"),
        ("eplb", '{"phy2log": [[0, 1], [0, 0]]}', 2, 0, r"layer 1: expected experts 0\.\.1 once"),
        ("eplb", '{"phy2log": [[0, 1000000000000]]}', 2, 0, "expected experts 0..1000000000000 once"),
        ("eplb", '{"phy2log": [[0, 1.0]]}', 2, 0, "expected experts as whole numbers"),
        ("eplb", '{"phy2log": [[0, "1"]]}', 2, 0, "expected experts as whole numbers"),
        ("eplb", '{"phy2log": [[0, [1]]]}', 2, 0, "not a placement of eplb: TypeError"),
        ("eplb", '{"phy2log": [[], []]}', 2, 0, "expected at least one expert, found none"),
        ("eplb", '{"phy2log": []}', 2, 0, "as many slots in every layer"),
        ("vllm-ascend", ASCEND, 3, 0, "expected 3 GPUs, found 2"),
        ("vllm-ascend", ASCEND.replace('"device_id": 1', '"device_id": 0'), 2, 0, r"expected device_id from 0 to 1, each once"),
        ("vllm-ascend", ASCEND.replace('"layer_id": 0', '"layer_id": 1'), 2, 0, r"expected layer_id from 0 to 0, each once"),
        ("vllm-ascend", '{"layer_list": []}', 2, 0, "expected one list of GPUs for every layer"),
        ("vllm-ascend", '{"layer_list": [3]}', 2, 0, "not a placement of vllm-ascend: TypeError"),
        ("vllm-ascend", "{}", 2, 0, "not a placement of vllm-ascend: KeyError"),
        ("trtllm", "a: [", 2, 0, "not YAML"),
        ("trtllm", "", 2, 0, "not a placement of trtllm: TypeError"),
        ("trtllm", "initial_global_assignments: 3", 2, 0, "not a placement of trtllm: "),
        ("trtllm", "initial_global_assignments: [[0, 1]]", 2, 0, "not a placement of trtllm: "),
        ("trtllm", "num_slots: 6", 2, 0, "not a placement of trtllm: KeyError"),
        ("trtllm", TRTLLM.replace("num_slots: 4", "num_slots: 6"), 2, 0, r"expected num_slots = 6 .* found \[4\]"),
        ("best", SGLANG, 2, 0, "`format`: expected one of sglang, eplb, vllm-ascend, trtllm, found 'best'"),
    ],
)  # fmt: skip
def test_files_that_lie(tmp_path, form, text, gpus, dense_layers, message):
    with pytest.raises(BadInput, match=message) as found:
        read(tmp_path, text, form, gpus, dense_layers)
    assert "\n" not in str(found.value)


def test_a_missing_file(tmp_path):
    for form in PLACEMENT_FORMATS:
        with pytest.raises(BadInput, match="none: no such file"):
            import_placement(tmp_path / "none", form, 2)


@given(placements())
def test_placements_as_json(placement):
    assert placement_from_json(json.loads(json.dumps(layers_json(placement)))) == placement


def test_the_placement_of_a_plan(tmp_path):
    config = {
        "num_local_experts": 4,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
    }
    profile = synthetic_profile("zipf:1", config, SyntheticOptions(sources=2, window_tokens=16))
    plan = make_plan(cluster(1e6, 2e6), [profile])
    save(plan, tmp_path / "plan.json")
    assert load_placement(tmp_path / "plan.json") == plan.models[0].placement
    older = json.loads((tmp_path / "plan.json").read_text()) | {"schema": 1}
    (tmp_path / "plan.json").write_text(json.dumps(older))
    with pytest.raises(BadInput, match="expected schema = 3, found 1; make it anew with aurora plan"):
        load_placement(tmp_path / "plan.json")


def test_placement_files(tmp_path):
    path = tmp_path / "p.json"
    for placement in (UNREPLICATED, REPLICATED):
        save_placement(placement, "by hand", path)
        assert load_placement(path) == placement
    with pytest.raises(BadInput, match="expected one model; name one of none by `model`, found 'm'"):
        load_placement(path, "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "expected one list of GPUs for every layer"),
        ({"layers": 3}, "not a placement: TypeError"),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 0.5]]}}]}, "not a placement: KeyError"),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 0.5], [1, 0.6]]}}]}, "sum to 1 for every expert"),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 2], [1, -1]]}}]}, "expected shares of zero or more"),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, float("nan")], [1, 0.5]]}}]}, "expected shares"),
        ({"layers": [{"slots": [[0, 0]], "split": {"0": [[0, 1]]}}]}, "expected no expert twice on a GPU"),
        ({"layers": [{"slots": [["0"]]}]}, "expected experts as whole numbers"),
        ({"schema": 2}, "expected schema = 1, found 2"),
        ({"models": [3]}, "not a placement: AttributeError"),
        ({"models": []}, "name one of none by `model`"),
    ],
)
def test_placement_files_that_lie(tmp_path, change, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"schema": 1, "layers": [{"slots": [[0], [1]]}], **change}))
    with pytest.raises(BadInput, match=message) as found:
        load_placement(path)
    assert "\n" not in str(found.value)


def test_slots_without_shares_divide_evenly():
    found = placement_from_json([{"slots": [[0, 1, 1], [1, 2, 2]]}])
    assert found.split_EG(0) == pytest.approx(np.array([[1, 0], [2 / 3, 1 / 3], [0, 1]]))
