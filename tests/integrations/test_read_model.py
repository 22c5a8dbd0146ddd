"""What the plugin reads of a model's files before vLLM loads them: identity, whatever lies beside the routers, and where."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from aurora_vllm.served_plan import ServedPlan, check_fit, read_checkpoint, read_model
from aurora_vllm.settings import Settings
from safetensors.torch import load_file, save_file

from aurora.algorithms.workload.model_structure import expert_count
from aurora.errors import BadInput
from aurora.io import load_model_config, save
from aurora.models.hub import model_folder
from aurora.models.loading import load_model
from aurora.planner.plan import make_plan
from aurora.types import PHASES, Cluster, Curve, Gpu, Hierarchy, PlanOptions, Profile, Servers
from tests.models.architectures import build


def tensors(folder):
    return load_file(folder / "model.safetensors")


def write(folder, changed):
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "names",
    [
        (
            "model.layers.{n}.mlp.gate.weight",
            "model.layers.{n}.mlp.gate.e_score_correction_bias",
            "model.layers.{n}.eh_proj.weight",
        ),
        ("mtp.layers.0.mlp.gate.weight",),
        ("model.mtp_layers.1.mlp.gate.weight",),
        ("visual.blocks.1.mlp.gate.weight",),
    ],
)
def test_layers_beside_the_decoder_layers_are_not_layers_of_the_plan(tmp_path, names):
    """DeepSeek-V3 and GLM-4.5 number a multi-token prediction layer after the last decoder layer, Qwen3-Next names it apart."""
    folder = build("deepseek_v3", tmp_path / "m")
    model = load_model(folder)
    layers = model.config.num_hidden_layers
    more = {name.format(n=layers): torch.rand((6, 32) if name.endswith("gate.weight") else (6,)) for name in names}
    write(folder, tensors(folder) | more)
    checkpoint, experts = read_model(str(folder))
    assert experts == model.experts
    assert checkpoint.layers == tuple(layer.number for layer in model.layers)
    assert checkpoint.fingerprint == model.fingerprint()


def test_a_block_quantised_router_is_that_of_the_whole_weights(tmp_path):
    folder = build("deepseek_v3", tmp_path / "m")
    found, scales = tensors(folder), {}
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        scale = torch.full((1, 2), 2.0)
        scale[0, 1] = 0.5
        coarse = found[name].to(torch.float8_e4m3fn)
        scales |= {name: coarse, f"{name}_scale_inv": scale}
        found[name] = coarse.float() * scale.repeat_interleave(16, 1)
    write(folder, found)
    whole = load_model(folder).fingerprint()
    write(folder, found | scales)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"weight_block_size": [16, 16]}}))
    assert read_model(str(folder))[0].fingerprint == whole


@pytest.mark.parametrize("damaged", [[16], [16, 0], [-16, 16], "no", [16, 16, 16], {"rows": 16}, [2, 16], [16.0, 16], 128])
def test_a_damaged_block_size_is_told(tmp_path, damaged):
    folder = build("deepseek_v3", tmp_path / "m")
    found = tensors(folder)
    routers = [name for name in found if name.endswith("mlp.gate.weight")]
    write(folder, found | {f"{name}_scale_inv": torch.full((1, 2), 2.0) for name in routers})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"weight_block_size": damaged}}))
    assert read_model(str(folder)) == (None, None)
    with pytest.raises(
        BadInput, match=r"config\.json, weight_block_size: expected the sides of \(1, 2\) blocks of a \(\d+, 32\) gate"
    ):
        read_checkpoint(folder, expert_count(load_model_config(folder)))


def planned(model, servers=None):
    """A plan of this model for two ranks."""
    tokens_TLSE = np.ones((1, len(model.layers), 2, model.experts), dtype=np.int64)
    curves = {"cpu": dict.fromkeys(PHASES, Curve([1.0], [1e-3]))}
    profile = Profile("m", model.fingerprint(), tokens_TLSE, model.top_k, 64, 64, model.expert_bytes, 0, curves)
    gpus = tuple(Gpu(f"g{rank}", "cpu", rank, 1e9, 1e9, 10**9) for rank in range(2))
    return make_plan(Cluster("two", gpus, servers=servers), [profile], PlanOptions())


def test_scales_of_a_router_may_lie_in_another_file_than_its_weights(tmp_path):
    """As in DeepSeek's shards, which are cut by size."""
    folder = build("deepseek_v3", tmp_path / "m")
    found = tensors(folder)
    routers = [name for name in found if name.endswith("mlp.gate.weight")]
    scales = {f"{name}_scale_inv": torch.full((1, 2), 4.0) for name in routers}
    coarse = {name: found[name].to(torch.float8_e4m3fn) for name in routers}
    write(folder, found | {name: 4 * weight.float() for name, weight in coarse.items()})
    whole = load_model(folder).fingerprint()
    (folder / "model.safetensors").unlink()
    save_file(found | coarse, folder / "model-00002-of-00003.safetensors")
    halves = list(scales.items())
    save_file(dict(halves[:1]), folder / "model-00001-of-00003.safetensors")
    save_file(dict(halves[1:]), folder / "model-00003-of-00003.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"weight_block_size": [16, 16]}}))
    assert read_model(str(folder))[0].fingerprint == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_the_same_at_another_precision(tmp_path, dtype):
    """Profiled in float32, run in another dtype, and the other way round; also by profiles that have one hash."""
    folder = build("mixtral", tmp_path / "m")
    wide, narrow = load_model(folder), load_model(folder, dtype=dtype)
    checkpoint, experts = read_model(str(folder))
    build("mixtral", tmp_path / "other")
    write(tmp_path / "other", {name: weight * 1.5 for name, weight in tensors(folder).items()})
    other = load_model(tmp_path / "other")
    for model in (wide, narrow):
        plan = planned(model)
        check_fit(plan, checkpoint, experts, 2)
        earlier = replace(plan.models[0], fingerprint=model.fingerprint().split(".")[0])
        check_fit(replace(plan, models=(earlier,)), checkpoint, experts, 2)
        for found in (wide, narrow):
            found.identity.check_same(model.identity, "the plan")
        with pytest.raises(BadInput, match=r"and other router weights$"):
            other.identity.check_same(model.identity, "the plan")


@pytest.mark.parametrize("all_to_all", ["auto", "flat", "hierarchical"])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_planned_order_is_for_the_alltoall_that_was_planned(tmp_path, hierarchical, all_to_all):
    """Of another one each batch gets an order of its own."""
    folder = build("mixtral", tmp_path / "m")
    plan = planned(load_model(folder), Servers.of([0, 1], 1e8))
    if hierarchical:
        made = replace(plan.models[0], hierarchy=Hierarchy(np.array([0, 1])))
        plan = replace(plan, models=(made,))
    save(plan, tmp_path / "plan.json")
    settings = Settings(plan=tmp_path / "plan.json", order="plan", all_to_all=all_to_all)
    served = ServedPlan(settings, 0, 2, *read_model(str(folder)))
    assert served.load() is None
    two_hops = hierarchical if all_to_all == "auto" else all_to_all == "hierarchical"
    assert (served.hierarchy is not None) == two_hops == (" and in two hops over 2 servers" in served.summary())
    assert (served.planned_orders(0) is not None) == (two_hops == hierarchical) == (served.order == "plan")


def test_a_model_is_the_same_by_its_folder_and_by_its_name_in_the_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--tiny"
    folder = build("mixtral", cached / "snapshots/0123456789abcdef0123456789abcdef01234567")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(folder.name)
    assert model_folder("org/tiny") == folder
    assert read_model("org/tiny") == read_model(str(folder))
    by_name, by_folder = load_model("org/tiny"), load_model(folder)
    assert by_name.name == "tiny"
    by_name.identity.check_same(by_folder.identity, "the plan")
    assert read_model("org/other") == (None, None)
    assert read_model("org/tiny", "another-branch") == (None, None)
    for name in ("org/other", "nowhere", "/no/such/folder", ""):
        with pytest.raises(BadInput, match="no such folder, and no model of this name in the local hub cache"):
            load_model(name)


def test_a_file_that_holds_no_weights_is_named(tmp_path):
    folder = build("mixtral", tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadInput, match=r"model\.safetensors: expected weights in safetensors, found none"):
        read_checkpoint(folder, 5)
