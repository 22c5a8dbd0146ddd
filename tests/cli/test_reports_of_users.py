"""Inputs after public reports, each through the command that it was meant for: what is read, or the sentence that refuses it."""

import json
import os
import re
from pathlib import Path

import pytest

from aurora.io import load, load_cluster
from aurora.io.plans import load_placement, save_placement
from aurora.types import Placement
from tests.cli.refusal import refused

REPORTS = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[3] / "shared/data")) / "reports"
pytestmark = pytest.mark.skipif(not REPORTS.exists(), reason="recorded data is not here: set AURORA_DATA")


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def imported(aurora, case, form, *names, shape=True, more=()):
    folder = REPORTS / case
    files = [path for name in names for path in sorted(folder.glob(name))]
    given = ("--shape", folder / "config.json") if shape else ()
    return aurora("import", *files, "--format", form, "--output", "out.npz" if form not in MAPS else "out.json", *given, *more)


MAPS = ("eplb", "trtllm", "vllm-ascend", "sglang", "vllm-map", "vllm-list")


@pytest.mark.parametrize(
    ("case", "form", "file", "message"),
    [
        ("30-routed-all-zero", "tokens", "tokens.npz", r"expected different experts, found \[0, 0\]; 546 of 546 tokens"),
        ("33-routed-255-shared", "tokens", "tokens.npz", "expected 2 choices a token as in the config, found 3"),
        ("37-sglang-stat-negative", "sglang-recorder", "dump.pt", "step 1, row 2, expert 3: .* found -2147483000: a counter of 32"),
        ("38-fused-shared-expert", "sglang-recorder", "dump.pt", "expected 8 experts as in the config, found 9"),
        ("40-mtp-row-looks-dense", "eplb-load", "loads.npy", "row 0: .* found 217 tokens: leave out the rows of multi-token pred"),
        ("47-per-token-uninitialised", "sglang-recorder", "dump.pt", "expected 2 choices of each token .* found"),
        ("48-per-token-no-physical-count", "sglang-recorder", "dump.pt", "'global_physical_count' is missing"),
        ("49-huge-counts", "eplb-load", "loads.npy", "found 3000000000000000000|more than 64 bits hold"),
        ("55-tokens-int8-wrapped", "tokens", "tokens.npz", "token 0, row 0: .* from 0 to 255, found .* int8 holds no expert above"),
        ("60-vllm-map-extra", "vllm-map", "map.jsonl", r"expected layers 0 to 2 \(3\), found 0 to 3 \(4\)"),
        ("102-vllm-map-dialects", "vllm-map", "d-bad-misses-expert-3.json", "layer 0: expected experts 0 to 3, 1 missing, first 3"),
        ("83-map-minus-one", "eplb", "map.json", "layer 0, slot 4: expected an expert from 0 to 7, found -1, as in an empty slot"),
        ("83-map-minus-one", "vllm-ascend", "ascend.json", "layer 0, slot 4: expected an expert from 0 to 7, found -1"),
        ("41-eplb-duplicate-on-gpu", "eplb", "map.json", r"expected layers 0 to 2 \(3\), found 0: layer 1 is missing"),
        ("43-ascend-no-device-id", "vllm-ascend", "map.json", r"expected layers 0 to 2 \(3\), found 0 to 1 \(2\): layer 2 is missing"),
    ],
)  # fmt: skip
def test_what_is_refused(aurora, case, form, file, message):
    refused(imported(aurora, case, form, file, more=("--gpus", 2) if form in MAPS else ()), message, re.escape(file))


@pytest.mark.parametrize(
    ("case", "form", "file", "layers", "told"),
    [
        ("32-routed-minus-one", "tokens", "tokens.npz", 3, r"left out: tokens.npz: \d+ of 60 tokens, which are padding \(-1\)"),
        ("34-routed-with-dense-row", "tokens", "tokens.npz", 3, ""),
        ("36-sglang-stat-float", "sglang-recorder", "dump.pt", 3, ""),
        ("46-sglang-csv-ranks", "sglang-csv", "*.csv", 3, "2 sources"),
        ("56-csv-nemotron", "csv", "counts.csv", 23, ""),
        ("56-csv-nemotron", "eplb-load", "loads23.npy", 23, ""),
        ("56-csv-nemotron", "eplb-load", "loads52.npy", 23, ""),
    ],
)
def test_recordings_that_are_read(aurora, case, form, file, layers, told):
    code, out, err = imported(aurora, case, form, file)
    assert (code, err) == (0, "")
    assert re.search(told, " ".join(out.split()))
    assert load("out.npz").tokens_TLSE.shape[1] == layers


def test_a_row_of_a_layer_without_experts_is_refused(aurora):
    case = REPORTS / "56-csv-nemotron"
    Path("mamba.csv").write_text((case / "counts.csv").read_text() + "0,0,7\n")
    found = aurora("import", "mamba.csv", "--format", "csv", "--shape", case / "config.json")
    refused(found, r"mamba\.csv: expected .* layers 1 to 51 \(23\) as in the config, found layer 0")


@pytest.mark.parametrize(
    ("case", "form", "file", "shape", "gpus", "layers", "told"),
    [
        ("41-eplb-duplicate-on-gpu", "eplb", "map.json", False, 2, 1, "1 slots repeat an expert of their own GPU"),
        ("42-trtllm-mtp-layer", "trtllm", "lb.yaml", True, 4, 3, "rows of multi-token prediction are left out: 4"),
        ("43-ascend-no-device-id", "vllm-ascend", "map.json", False, 4, 2, ""),
        ("59-sglang-map-mtp", "sglang", "map.json", True, 4, 3, "rows of multi-token prediction are left out: 4"),
    ],
)
def test_maps_that_are_read(aurora, case, form, file, shape, gpus, layers, told):
    code, out, err = imported(aurora, case, form, file, shape=shape, more=("--gpus", gpus))
    assert (code, err) == (0, "")
    assert told in out
    placement = load_placement(Path("out.json"))
    assert (len(placement.slots_LG), placement.gpus, placement.experts) == (layers, gpus, 8)


@pytest.mark.parametrize(
    ("case", "form", "file", "gpus", "loads", "told"),
    [
        # loads 40 20 10 10 of experts 0 1 2 3 on 3 GPUs; halves of 0 and 1 are 20 and 10: 30 20 30, mean 26.67, so 1.125
        ("102-vllm-map-dialects", "vllm-map", "a-49572-one-list.json", 3, "loads.csv", r"fullest GPU has 1\.12 of the mean load on 3"),
        # layer 1: halves of 3 and 2 are 5 each: 10 60 10, so 2.25; the mean of both layers is 1.69
        ("102-vllm-map-dialects", "vllm-list", "b-49572-list-per-layer.json", 3, "loads.csv", r"1\.69 .* \(2\.25 in layer 1\)"),
        ("102-vllm-map-dialects", "vllm-map", "c-34811-rank-of-expert.json", 3, "loads.csv", r"has 2\.25 of the mean load on 3"),
        ("101-trtllm-map-of-another-ep", "trtllm", "map-of-ep2.yaml", 4, "counts.csv", r"1\.67 .* worse than no map \(1\.00\): .* made for 2\?"),
        # 416 slots, of which 1 + 2 + 4 are seconds on their GPU
        ("110-nvidia-own-map-twice-on-a-gpu", "trtllm", "map.yaml", 16, None, "^7 slots repeat .*: expert 356 of layer 0 on GPU 15, .*416 slots"),
    ],
)  # fmt: skip
def test_maps_are_judged_where_traffic_is_given(aurora, case, form, file, gpus, loads, told):
    judge = () if loads is None else ("--loads", REPORTS / case / loads)
    code, out, err = imported(aurora, case, form, file, shape=loads is not None, more=("--gpus", gpus, *judge))
    assert (code, err) == (0, "")
    assert re.search(told, " ".join(out.split()))
    if loads is not None:
        out = aurora("evaluate", "out.json", "--profile", REPORTS / case / loads)[1]
        assert re.search(told.partition(": ")[0], " ".join(out.split()))


def test_padding_is_named_wherever_traffic_is_read(aurora):
    """64 real tokens over 16 experts and 64 rows of padding, which choose 0 and 1 as 8 of the real ones do."""
    _, out, _ = imported(aurora, "106-padding-rows-in-routing", "tokens", "padded.npz")
    said = "72 of 128 tokens (56%) chose the same experts in all 2 layers (0, 1 in the first): padding?"
    assert said in " ".join(out.split())
    for command in (
        ["plan", "--cluster", "demo-4", "--profile", "out.npz"],
        ["order", "out.npz", "--layer", 0],
        ["recommend", "--engine", "vllm", "--gpus", "h100:4", "--profile", "out.npz"],
        ["place", "out.npz", "--slots", 5, "--gpus", 4],
    ):
        code, _, err = aurora(*command)
        assert (code, f"aurora: out.npz: {said}" in err) == (0, True)
    assert "padding" not in "".join(imported(aurora, "106-padding-rows-in-routing", "tokens", "real.npz")[1:])


def test_loads_that_are_no_numbers_are_refused(aurora):
    refused(aurora("place", REPORTS / "50-nan-loads/loads.csv", "--slots", 4, "--gpus", 4), r"loads\.csv: .*nan")


def test_the_loads_of_eplb_give_the_slots_of_its_readme(aurora):
    options = ("--method", "eplb", "--slots", 2, "--gpus", 8, "--groups", 4, "--nodes", 2, "--json")
    _, out, _ = aurora("place", REPORTS / "53-eplb-readme/loads.csv", *options)
    phy2log = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
    for layer, row in zip(json.loads(out)["layers"], phy2log, strict=True):
        node_G = [sorted(set(row[half : half + 8])) for half in (0, 8)]
        found = [sorted({expert for held in layer["slots"][half : half + 4] for expert in held}) for half in (0, 4)]
        assert found == node_G  # which experts a node has; ties inside a node are broken differently


CLUSTERS = [("72-pcie-only", 8), ("73-six-gpus", 6), ("77-mig", 7), ("79-more-gpus-than-experts", 16)]
CLUSTERS += [pytest.param(case, gpus, marks=pytest.mark.full) for case, gpus in (("71-4h20-4h100", 8), ("74-three-nodes", 24))]


@pytest.mark.parametrize(("case", "gpus"), CLUSTERS)
def test_clusters_are_planned(aurora, case, gpus):
    folder = REPORTS / case
    assert aurora("synthetic", "zipf:1", folder / "config.json", "--sources", gpus)[0] == 0
    code, _, err = aurora("plan", "--cluster", folder / "cluster.toml", "--profile", "profile.npz", "--output", "plan.json")
    assert (code, "Traceback" in err) == (0, False)
    slots_LG = load("plan.json").models[0].placement.slots_LG
    assert len(slots_LG[0]) == gpus
    assert all(len({expert for held in layer for expert in held}) in (8, 128) for layer in slots_LG)


def test_rates_by_rail_are_refused_by_one_sentence():
    from aurora.errors import BadInput

    with pytest.raises(BadInput, match=r"fabric\.nic_Bps: expected a number, found \["):
        load_cluster(REPORTS / "76-slow-rail/cluster.toml")


@pytest.mark.parametrize(("method", "more"), [("equal-split", "1.0078"), ("eplb", "1.1250")])
def test_replicas_that_do_not_pay_are_named(aurora, method, more):
    """256 equal loads on 72 GPUs: 4 on some, mean 3.556; 32 slots more leave 8 GPUs with four whole experts (report 94)."""
    options = ("--gpus", 72, "--method", method)
    code, out, _ = aurora("place", REPORTS / "94-uniform-odd-counts/u256.csv", "--slots", 4, *options)
    said = f"the 32 replicas of a layer do not pay: max/mean is 1.1250 without any; with 5 slots per GPU it is {more}"
    assert (code, said in " ".join(out.split())) == (0, True)
    _, out, _ = aurora("place", REPORTS / "94-uniform-odd-counts/u128.csv", "--slots", 22, "--gpus", 6, "--method", method)
    assert "do not pay" not in out


@pytest.mark.parametrize(("experts", "gpus", "least"), [(128, 12, 4), (160, 6, 2)])
def test_the_least_number_of_redundant_experts_is_said(aurora, experts, gpus, least):
    """Report 93: (-experts) mod GPUs, also where a plan without equal slots needs more of them."""
    held = [[*range(20)], *([*range(20 + at, experts, gpus - 1)] for at in range(gpus - 1))]
    save_placement(Placement.evenly([held]), "by hand", Path("placed.json"))
    code, out, _ = aurora("export", "placed.json", "--format", "vllm-map", "--output", "map.jsonl")
    assert (code, f"the least is {least}, {-(-experts // gpus)} slots on each GPU" in out) == (0, True)
