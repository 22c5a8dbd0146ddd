"""`aurora plan` with slots, domains, aims, plans on other traffic and moves, and what of it is refused."""

import json

import numpy as np
import pytest

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.io import load_plan, save, shipped
from aurora.types import SyntheticOptions
from tests.cli.refusal import refused
from tests.io.engine_readers import READERS

pytestmark = pytest.mark.full

CONFIG = {
    "num_local_experts": 12,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0, 2],
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
}
EQUAL = shipped("clusters/paper-equal-8.toml")
MIXED = shipped("clusters/paper-mixed-8.toml")


@pytest.fixture
def folder(tmp_path):
    """config.json and p0.npz, p1.npz and p2.npz of one model on 8 sources."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for seed in range(3):
        save(
            draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=8, window_tokens=64, seed=seed)), tmp_path / f"p{seed}.npz"
        )
    return tmp_path


@pytest.fixture
def planned(aurora, folder):
    """Make a plan of p0, or of the profiles given, and load it."""

    def call(*args, name="plan.json", cluster=EQUAL):
        out = folder / name
        code, printed, err = aurora("plan", "--cluster", cluster, "--profile", folder / "p0.npz", *args, "-o", out)
        assert (code, err) == (0, "")
        return load_plan(out), " ".join(printed.split())

    return call


def test_one_gap_is_printed_and_the_others_with_explain(planned, folder):
    for args, lacks in (
        (("--slots-per-gpu", "memory"), ""),
        (("--slots-per-gpu", 3), "found replicas"),
        (("--aim", "cvar", "--slots-per-gpu", "memory"), "found --aim cvar"),
        (("--domain", folder / "p1.npz"), "expected no --domain"),
    ):
        brief, printed = planned(*args)
        assert printed.count("gap ") == printed.count(" below ") == 1
        assert not any(words in printed for words in ("fluid bound", "these groups", "term"))
        plan, printed = planned(*args, "--explain")
        assert plan == brief
        assert all(words in printed for words in ("fluid bound", "one-to-one bound", "objective is over"))
        assert ("these groups of experts below" in printed) == (plan.assignment_bound_s is not None)
        assert "on the longest path" in printed if not lacks else "no terms of layers: expected" in printed and lacks in printed


@pytest.mark.parametrize("form", sorted(READERS))
def test_plans_and_placements_to_an_engine_and_back(aurora, planned, folder, form):
    """The profiles' model has dense layers 0 and 2, and the plan's GPUs hold different numbers of the 12 experts."""
    plan, _ = planned("--slots-per-gpu", "memory")
    slots = max(len(own) for held_G in plan.models[0].placement.slots_LG for own in held_G)
    redundant = 8 * slots - 12
    code, text, err = aurora("export", folder / "plan.json", "--format", form)
    assert code == 0
    assert f"{redundant} redundant experts a layer; {redundant} of them are not the plan's" in err
    assert aurora("export", folder / "plan.json", "--format", form, "-o", folder / "e.json")[0] == 0
    assert (folder / "e.json").read_text() == text
    found = READERS[form](text, (1, 3), 4, 12, 8, redundant)
    for layer, held_G in enumerate(plan.models[0].placement.slots_LG):
        assert all(set(own) <= set(held) and len(held) == slots for own, held in zip(held_G, found[layer], strict=True))
    given = ("--format", form, "--gpus", 8, "--shape", folder / "config.json")
    code, printed, err = aurora("import", folder / "e.json", *given, "-o", folder / "back.json")
    assert (code, err) == (0, "")
    assert f"2 layers, 12 experts in {8 * slots} slots on 8 GPUs" in printed
    assert json.loads((folder / "back.json").read_text())["method"] == f"imported from {form}"


def test_what_an_export_costs_and_how_the_engine_is_started(aurora, planned, folder):
    planned("--slots-per-gpu", "memory")
    given = ["export", folder / "plan.json", "--format", "sglang", "-o", folder / "e.json"]
    code, printed, _ = aurora(*given)
    printed = " ".join(printed.split())
    assert code == 0
    assert f"wrote {folder / 'e.json'} 12 redundant experts a layer; 12 of them are not the plan's" in printed
    assert "they take 7.37e-05 GB of a GPU on average" in printed
    assert f"--ep-num-redundant-experts 12 --init-expert-location {folder / 'e.json'}" in printed
    found = json.loads(aurora(*given, "--json")[1])
    assert found["added_experts"] == [12, 12]
    assert sum(found["added_bytes"]) == 24 * 2 * 3 * 64 * 64
    assert (found["redundant_experts"], found["text"]) == (12, None)
    refused(aurora(*given[:-1], folder / "e"), r"a name that ends in \.json")
    planned("--profile", folder / "p1.npz")
    refused(aurora(*given), "plan.json: expected a plan of one model, as engines serve it, found one of 2")


def test_what_aurora_place_prints_can_be_exported_and_uneven_shares_are_told(aurora, tmp_path):
    np.save(tmp_path / "l.npy", np.array([9.0, 1.0, 1.0]))
    code, out, _ = aurora("place", tmp_path / "l.npy", "--gpus", 2, "--slots", 2, "--json")
    assert code == 0
    (tmp_path / "place.json").write_text(out)
    code, out, err = aurora("export", tmp_path / "place.json", "--format", "eplb")
    assert code == 0
    assert json.loads(out)["logcnt"] == [[2, 1, 1]]
    assert "1 redundant experts a layer, as in the plan" in err
    assert "num_gpus=2" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["export", "{folder}/plan.json", "--format", "best"], "--format: expected one of vllm-map"),
        (
            ["export", "{folder}/plan.json", "--format", "sglang", "--dense-layers", "-1"],
            "--dense-layers: expected zero or more",
        ),
        (
            ["export", "{folder}/plan.json", "--format", "eplb", "--dense-layers", 1],
            "--dense-layers: expected none with --format eplb",
        ),
        (["export", "{folder}/plan.json", "--format", "eplb", "-o", "{folder}/plan.json"], "it would replace"),
        (["import", "{folder}/e.json", "--format", "best", "--gpus", 2], "--format: expected one of vllm-map"),
        (["import", "{folder}/e.json", "--format", "eplb", "-o", "{folder}/e.json"], "it would replace"),
    ],
)
def test_exports_and_imports_that_are_refused(aurora, planned, folder, args, message):
    planned()
    (folder / "e.json").write_text('{"phy2log": [[0, 1, 1, 0]]}')
    refused(aurora(*(str(arg).format(folder=folder) for arg in args)), message)
