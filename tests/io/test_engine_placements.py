"""Engines' placements: files as the engines write them, round trips, and files that lie."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.gpu_slots import filled
from aurora.algorithms.placement.map_balance import map_balance
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.io.engine_placements import PLACEMENT_FORMATS, export_placement, import_placement
from aurora.io.plans import layers_json, load_placement, save_placement
from aurora.types import Placement
from tests.io.engine_readers import READERS

UNREPLICATED = Placement((((0, 3), (1, 2)), ((2, 3), (0, 1))))
REPLICATED = Placement((((0, 1), (0, 2)),), (((0.5, 1.0), (0.5, 1.0)),))

SGLANG = '{"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 0, 2]]}'
EPLB = '{"phy2log": [[0, 1, 2, 0]], "log2phy": [[[0, 3], [1, -1], [2, -1]]], "logcnt": [[2, 1, 1]]}'
ASCEND = """{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": [
    {"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": [2, 0]}]}]}"""
TRTLLM = """
num_slots: 4
initial_global_assignments:
  3: [0, 1, 2, 0]
  4: [0, 1, 0, 2]
layer_updates_per_iter: 0
"""


def read(tmp_path, text, form, gpus=2, dense_layers=(), model=None):
    (tmp_path / "engine").write_text(text)
    return import_placement(tmp_path / "engine", form, gpus, dense_layers, model).placement


VLLM = """{"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 1, "num_slots": 4,
    "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [0, 1, 0, 2]}}""".replace("\n", " ")
ENGINES = {"sglang": SGLANG, "eplb": EPLB, "vllm-ascend": ASCEND, "trtllm": TRTLLM, "vllm-map": VLLM}


@pytest.mark.parametrize(("form", "text"), ENGINES.items())
def test_files_as_engines_write_them(tmp_path, form, text):
    found = read(tmp_path, text, form)
    assert found.layer(0) == REPLICATED
    assert len(found.slots_LG) == (1 if form in ("eplb", "vllm-ascend") else 2)


@pytest.mark.parametrize("form", PLACEMENT_FORMATS)
@pytest.mark.parametrize("dense_layers", [(), (0, 1, 2), (0, 2)])
@pytest.mark.parametrize("placement", [UNREPLICATED, REPLICATED])
def test_round_trips(tmp_path, form, dense_layers, placement):
    made = export_placement(placement, form, dense_layers)
    assert read(tmp_path, made.text, form, 2, dense_layers) == placement
    assert made.off_by == 0
    assert not made.added_LG.any()


@st.composite
def placements(draw):
    """Some layers on some GPUs, of which one may be idle; experts have replicas, and GPUs hold any number of experts."""
    gpus, experts = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        held = [set() for _ in range(gpus)]
        for expert in range(experts):
            for gpu in draw(st.sets(st.integers(0, gpus - 1), min_size=1, max_size=2)):
                held[gpu].add(expert)
        layers.append(tuple(tuple(sorted(own)) for own in held))
    return Placement.evenly(tuple(layers))


@st.composite
def cases(draw):
    """A placement, dense layers anywhere among its own, loads, and whether GPUs are equally fast."""
    placement = draw(placements())
    layers = len(placement.slots_LG)
    count = draw(st.integers(0, 3))
    dense = tuple(sorted(draw(st.sets(st.integers(0, layers + count - 1), min_size=count, max_size=count))))
    loads = draw(st.lists(st.integers(0, 50), min_size=layers * placement.experts, max_size=layers * placement.experts))
    return placement, dense, np.array(loads, dtype=np.int64).reshape(layers, -1), draw(st.booleans())


@pytest.mark.parametrize("form", sorted(PLACEMENT_FORMATS))
@given(case=cases())
def test_engines_read_exports_of_any_plan(tmp_path_factory, form, case):
    """All planned experts are where the plan has them, all GPUs have the fewest slots that hold them, none an expert twice."""
    placement, dense, load_LE, equal = case
    made = export_placement(placement, form, dense, load_LE, equal)
    layers = len(placement.slots_LG)
    numbers = [number for number in range(layers + len(dense)) if number not in dense]
    found = READERS[form](made.text, numbers, layers + len(dense), placement.experts, placement.gpus, made.redundant)
    most = max(len(held) for layer in placement.slots_LG for held in layer)
    for layer in range(layers):
        for gpu, held in enumerate(found[layer]):
            assert len(set(held)) == len(held) == most
            assert set(placement.slots_LG[layer][gpu]) <= set(held)
            assert made.added_LG[layer, gpu] == most - len(placement.slots_LG[layer][gpu])
    path = tmp_path_factory.mktemp("engine") / "f"
    path.write_text(made.text)
    back = import_placement(path, form, placement.gpus, dense).placement
    apart = [abs(back.split_EG(l) - placement.split_EG(l)).max() for l in range(layers)]
    assert max(apart) == pytest.approx(made.off_by)


@pytest.mark.parametrize(
    ("load_E", "equal", "added"),
    [
        ((8, 4, 2, 3), True, (0, 1)),  # the hottest, while GPU 0 stays the busiest
        ((1, 2, 3, 20), True, (0, 1)),  # GPU 1 is the busiest: the coldest
        ((8, 2, 4, 3), True, (0, 2)),  # by load, not by number
        ((8, 4, 2, 3), False, (1, 2)),  # GPU 1 is slow: by the plan it is as busy as GPU 0
    ],
)
def test_what_padding_repeats(load_E, equal, added):
    placement = Placement((((0, 1, 2), (3,)),))
    assert filled(placement, np.array([load_E]), equal) == (((0, 1, 2), (*added, 3)),)
    assert filled(placement, np.array([load_E]), equal) == filled(placement, 5 * np.array([load_E]), equal)


def test_padding_to_more_slots_than_any_gpu_holds():
    placement = Placement((((0, 1, 2), (3,)),))
    assert filled(placement, np.array([[8, 4, 2, 3]]), slots=4) == (((0, 1, 2, 3), (0, 1, 2, 3)),)


@given(cases())
def test_padding_makes_no_gpu_busier_than_the_busiest_while_it_can(case):
    """Where an expert of no tokens is missing on every GPU that is filled, or one fits, the busiest GPU stays as it was."""
    placement, _, load_LE, _ = case
    load_LE = load_LE * (np.arange(placement.experts) > 0)  # expert 0 has no tokens: it always fits
    for layer, held_G in enumerate(filled(placement, load_LE)):
        own_G = placement.slots_LG[layer]
        if any(0 in own or len(held) > len(own) + 1 for held, own in zip(held_G, own_G, strict=True) if held != own):
            continue
        before_G = load_LE[layer] @ Placement.evenly((own_G,)).split_EG(0)
        assert (load_LE[layer] @ Placement.evenly((held_G,)).split_EG(0)).max() <= before_G.max() * (1 + 1e-12)


MODEL = Shape("m", 2, (), 3, 2, 64, 32, 64, 3 * 64 * 32, mtp_layers=1, shared_experts=1)
ROWS = "[[0, 1, 2, 0], [0, 1, 0, 2]]"


@pytest.mark.parametrize(
    ("form", "text", "remark"),
    [
        ("vllm-map", "[0, 1, 2, 0]", ""),
        ("vllm-list", ROWS, ""),
        ("vllm-list", '{"0": [0, 1, 2, 0], "1": [0, 1, 0, 2]}', ""),
        ("vllm-map", '{"physical_to_logical_map": ' + ROWS + "}", ""),
        ("vllm-map", '{"record_type": "eplb_load_stats"}\n' + VLLM, ""),
        ("vllm-map", '{"model_maps": {"A": {"num_moe_layers": 2, "physical_to_logical_map": ' + ROWS + "}}}", ""),
        ("vllm-map", """{"model_maps": {"A#pp_rank=1": {"physical_to_logical_map": [[0, 1, 0, 2]]},
            "A#pp_rank=0": {"physical_to_logical_map": [[0, 1, 2, 0]]}, "AMTP": {"physical_to_logical_map": [[0, 1, 2, 0]]}}}""",
         "maps of multi-token prediction are left out: AMTP"),
        ("trtllm", "initial_global_assignments: {0: [0, 1, 2, 0], 1: [0, 1, 0, 2], 2: [0, 1, 2, 0]}",
         "rows of multi-token prediction are left out: 2"),
        ("vllm-ascend", '{"layer_list": [{"device_list": [{"device_expert": [0, 1, 3]}, {"device_expert": [2, 3, 0]}]}, '
         '{"device_list": [{"device_expert": [3, 0, 1]}, {"device_expert": [0, 2, 3]}]}]}',
         "shared experts under mix placement are left out: 3; every token computes them"),
    ],
)  # fmt: skip
def test_dialects_are_read_by_their_keys(tmp_path, form, text, remark):
    (tmp_path / "engine").write_text(text)
    found = import_placement(tmp_path / "engine", form, 2, (), MODEL)
    assert found.placement.layer(0) == REPLICATED
    assert found.placement.slots_LG[1] == ((0, 1), (0, 2))
    assert found.remarks == ((remark,) if remark else ())


def test_ranks_of_experts_are_a_map_of_all_layers(tmp_path):
    found = read(tmp_path, '{"expert_to_ep_rank": [0, 1, 0]}', "vllm-map", None, (), MODEL)
    assert found.slots_LG == (((0, 2), (1,)),) * 2


@pytest.mark.parametrize(
    ("slots", "gpus", "said"),
    [
        # loads 8 1 7 2 6 3 5 4 in slots 0 2 1 3 4 6 5 7 on 4 GPUs: 15 3 11 7, mean 9, 15 / 9 = 1.67; in sequence 9 9 9 9.
        # On 2 GPUs 8 + 7 + 1 + 2 = 18 and 6 + 5 + 3 + 4 = 18: as even as without the map.
        ([0, 2, 1, 3, 4, 6, 5, 7], 4, "1.67 of the mean load on 4 GPUs, worse than no map (1.00): on 2 GPUs it has 1.00; was it made for 2?"),
        ([0, 2, 1, 3, 4, 6, 5, 7], 2, "1.00 of the mean load on 2 GPUs, beside no map (1.00)"),
        # 8 + 7 + 6 + 5 = 26 of 36: 26 / 18 = 1.44. On 4 GPUs 15 11 3 7: worse than none, too, so it was made for neither.
        ([0, 2, 4, 6, 1, 3, 5, 7], 2, "1.44 of the mean load on 2 GPUs, worse than no map (1.00)"),
    ],
)  # fmt: skip
def test_a_map_is_judged_by_traffic(slots, gpus, said):
    loads = np.array([[8.0, 1, 7, 2, 6, 3, 5, 4]])
    placement = Placement.evenly((tuple(map(tuple, np.array(slots).reshape(gpus, -1).tolist())),))
    assert f"the fullest GPU has {said}" == str(map_balance(placement, loads, np.array([slots])))


def test_names_that_engines_do_not_read(tmp_path):
    for form in ("sglang", "vllm-ascend"):
        with pytest.raises(BadInput, match=rf"map: expected a name that ends in \.json, as {form} reads it, found none"):
            export_placement(UNREPLICATED, form, path=tmp_path / "map")
    assert export_placement(UNREPLICATED, "trtllm", path=tmp_path / "map").text


def test_shares_that_an_engine_cannot_hold():
    uneven = Placement((((0,), (0,)),), (((0.75,), (0.25,)),))
    assert export_placement(uneven, "sglang").off_by == pytest.approx(0.25)


def test_eplb_maps_agree_with_one_another():
    found = json.loads(export_placement(REPLICATED, "eplb").text)
    assert found == {"phy2log": [[0, 1, 0, 2]], "log2phy": [[[0, 2], [1, -1], [3, -1]]], "logcnt": [[2, 1, 1]]}


@pytest.mark.parametrize(
    ("form", "text", "gpus", "dense_layers", "message"),
    [
        ("sglang", "[[0, 1]]", 2, (), r"expected a JSON object, found \[\[0, 1\]\]"),
        ("sglang", '{"logical_count": [[[3, 4]]]}', 2, (), r"holds loads \(logical_count\), not a placement"),
        ("sglang", SGLANG, 3, (), r"expected as many slots in every layer, on 3 GPUs evenly, found \[4\]"),
        ("sglang", SGLANG, None, (), "does not say the number of GPUs; give `gpus`"),
        ("sglang", SGLANG, 2, (-1,), r"`dense_layers`: expected ascending layer numbers below 4096, found \(-1,\)"),
        ("eplb", '{"phy2log": [[0, 2]]}', 2, (), "layer 0: expected experts 0 to 2, 1 missing, first 1"),
        ("eplb", '{"phy2log": [[0, -1]]}', 2, (), "layer 0, slot 1: expected an expert from 0 on, found -1, as in an empty slot"),
        ("eplb", '{"phy2log": [[0, 1], [0, 0]]}', 2, (), "layer 1: expected experts 0 to 1, 1 missing, first 1"),
        ("eplb", '{"phy2log": []}', 2, (), "expected rows of layers with experts, found none"),
        ("vllm-ascend", ASCEND, 3, (), r"expected 3 GPUs in every layer, found \[2\]"),
        ("vllm-ascend", ASCEND.replace('"device_id": 1', '"device_id": 0'), 2, (), "expected device_id ascending, as the engine goes by the list's sequence"),
        ("vllm-ascend", ASCEND.replace('"moe_layer_count": 1', '"moe_layer_count": 2'), 2, (), "expected the 2 layers of moe_layer_count, found 1"),
        ("trtllm", "initial_global_assignments: {-1: [0, 1]}", 2, (), "a key of initial_global_assignments: expected a whole number >= 0"),
        ("trtllm", TRTLLM.replace("num_slots: 4", "num_slots: 0"), 2, (), r"expected num_slots = 0 .* found \[4\]"),
        ("vllm-map", '{"record_type": "eplb_load_stats"}', 2, (), "expected a line of record_type eplb_initial_mapping, found none"),
        ("vllm-map", "[0, 1]", 2, (), r"expected the model's sizes \(`shape`\), as one map for all layers"),
        ("vllm-map", '{"model_maps": {"A": {"physical_to_logical_map": [[0]]}, "B": {"physical_to_logical_map": [[0]]}}}', 1, (), "expected the map of one model, .* found A, B"),
        ("vllm-map", '{"model_maps": {"A#pp_rank=1": {"physical_to_logical_map": [[0]]}}}', 1, (), r"A: expected pipeline stages 0 to 1, found \[1\]"),
        ("vllm-map", '{"model_maps": {"A": {"physical_to_logical_map": [[0]], "num_moe_layers": 2}}}', 1, (), "A: expected the 2 layers of num_moe_layers, found 1"),
        ("vllm-map", VLLM.replace('"1":', '"one":'), 2, (), "a key of initial_global_assignments: expected a whole number, found text"),
        ("vllm-map", VLLM.replace('"num_slots": 4', '"num_slots": 5'), 2, (), r"expected num_slots = 5 slots in every layer, found \[4\]"),
        ("eplb", ASCEND, 2, (), "'phy2log' is missing"),
        ("vllm-ascend", ASCEND.replace('"device_count": 2', '"device_count": 7'), 2, (), "expected the 7 devices of device_count, found 2"),
        ("vllm-ascend", ASCEND.replace("[2, 0]", "[2, 0, 1]"), 2, (), "expected as many experts on every device, found 2 and 3"),
        ("vllm-ascend", '{"layer_list": [{"layer_id": 3, "device_list": []}, {"layer_id": 3, "device_list": []}]}', 2, (), r"expected layer_id ascending, .* found \[3, 3\]"),
        ("trtllm", TRTLLM.replace("  4:", "  3:"), 2, (), "line 4: expected each key once, found 2 keys, some twice"),
        ("best", SGLANG, 2, (), "`format`: expected one of vllm-map, vllm-list, sglang, eplb, vllm-ascend, trtllm, found 'best'"),
    ],
)  # fmt: skip
def test_files_that_lie(tmp_path, form, text, gpus, dense_layers, message):
    with pytest.raises(BadInput, match=message) as found:
        read(tmp_path, text, form, gpus, dense_layers)
    assert "\n" not in str(found.value)


@given(placements())
def test_placements_come_back(tmp_path_factory, placement):
    path = tmp_path_factory.mktemp("placement") / "p.json"
    for each in (placement, UNREPLICATED, REPLICATED):
        save_placement(each, "by hand", path)
        assert load_placement(path) == each
        assert json.loads(path.read_text())["layers"] == json.loads(json.dumps(layers_json(each)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "layers: expected a list of length >= 1"),
        (
            {"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 0.5]]}}]},
            r"layers\[0\]\.split: expected a part of expert 0 on GPU 1",
        ),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 0.5], [1, 0.6]]}}]}, "sum to 1 for every expert"),
        ({"layers": [{"slots": [[0], [0]], "split": {"0": [[0, 2], [1, -1]]}}]}, "expected shares of zero or more"),
        ({"layers": [{"slots": [[0, 0]], "split": {"0": [[0, 1]]}}]}, "expected no expert twice on a GPU"),
        ({"schema": 2}, "expected schema = 1, found 2"),
    ],
)
def test_placement_files_that_lie(tmp_path, change, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"schema": 1, "layers": [{"slots": [[0], [1]]}], **change}))
    with pytest.raises(BadInput, match=message) as found:
        load_placement(path)
    assert "\n" not in str(found.value)


def test_slots_without_shares_divide_evenly(tmp_path):
    (tmp_path / "p.json").write_text('{"schema": 1, "layers": [{"slots": [[0, 1, 1], [1, 2, 2]]}]}')
    assert load_placement(tmp_path / "p.json").split_EG(0) == pytest.approx(np.array([[1, 0], [2 / 3, 1 / 3], [0, 1]]))
