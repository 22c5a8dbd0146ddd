"""Quantised checkpoints as GPT-OSS (mxfp4) and DeepSeek-V3 (block fp8) ship: dequantised when loaded, whole or expert by expert."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations import mxfp4

from aurora.errors import BadInput, MissingDependency
from aurora.models.loading import expert_parameters, load_model
from aurora.models.own_weights import load_without_experts
from tests.models.architectures import SPECIAL, build

pytestmark = pytest.mark.full

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4_ROW, FP8_BLOCK = 32, 8  # values that share a scale: of a row, and of a square's side


def as_mxfp4(name, weight):
    """Random values of float4 for fused experts (E, in, out), and the tensors that a file has for them."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return weight, {name: weight}
    experts, rows, columns = weight.shape
    code = torch.randint(0, 16, (experts, columns, rows // FP4_ROW, FP4_ROW))
    scale = torch.randint(121, 125, code.shape[:3])
    value = FP4[code] * torch.exp2(scale[..., None] - 127.0)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)
    stored = {f"{name}_blocks": packed, f"{name}_scales": scale.to(torch.uint8)}
    return value.reshape(experts, columns, rows).transpose(1, 2).contiguous(), stored


def as_fp8(name, weight):
    """A projection's values as float8 with a scale a block, and the tensors that a file has for them."""
    if "_proj" not in name or weight.ndim != 2:
        return weight, {name: weight}
    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    value = (stored.float() * scale[:, None, :, None]).reshape(weight.shape)
    return value, {name: stored.reshape(weight.shape), f"{name}_scale_inv": scale}


KINDS = {
    "gpt_oss": (as_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
    "deepseek_v3": (as_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}),
}


def checkpoints(model_type, folder, monkeypatch):
    """(plain, quantised): folders of a model whose weights are equal once they are dequantised."""
    quantise, config = KINDS[model_type]
    monkeypatch.setitem(SPECIAL, "gpt_oss", {"intermediate_size": FP4_ROW})
    plain = build(model_type, folder / "plain")
    shutil.copytree(plain, folder / "quantised")
    pairs = {name: quantise(name, weight) for name, weight in load_file(plain / "model.safetensors").items()}
    save_file({name: value for name, (value, _) in pairs.items()}, plain / "model.safetensors", {"format": "pt"})
    stored = {key: tensor for _, tensors in pairs.values() for key, tensor in tensors.items()}
    save_file(stored, folder / "quantised" / "model.safetensors", {"format": "pt"})
    declare(folder / "quantised", config)
    return plain, folder / "quantised"


def declare(folder, quantised):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))


@pytest.mark.parametrize("model_type", KINDS)
def test_quantised_weights_are_those_that_they_stand_for(model_type, tmp_path, monkeypatch):
    plain, quantised = checkpoints(model_type, tmp_path, monkeypatch)
    expected, found, own = load_model(plain), load_model(quantised), load_without_experts(quantised)
    ids = torch.arange(1, 19).reshape(2, 9)
    with torch.no_grad():
        assert torch.equal(found.model(ids).logits, expected.model(ids).logits)
    assert found.fingerprint() == expected.fingerprint() == own.fingerprint()
    for whole, part in zip(expected.layers, own.layers, strict=True):
        weights = dict(expert_parameters(whole.experts))
        for expert, read in part.experts.reader.read([4, 1]).items():
            assert read.keys() == weights.keys()
            assert all(torch.equal(read[name], weights[name][expert]) for name in read)


def test_experts_have_the_dtype_that_is_asked_for(tmp_path, monkeypatch):
    """Whichever one transformers dequantises to: before 5.23, bfloat16."""
    _, quantised = checkpoints("gpt_oss", tmp_path, monkeypatch)
    dequantise = mxfp4.convert_moe_packed_tensors
    monkeypatch.setattr(mxfp4, "convert_moe_packed_tensors", lambda *args, **_: dequantise(*args, dtype=torch.bfloat16))
    for dtype in (torch.float32, torch.bfloat16):
        layers = load_model(quantised, dtype=dtype).layers
        assert {parameter.dtype for layer in layers for _, parameter in expert_parameters(layer.experts)} == {dtype}


def test_other_quantisation_and_a_missing_library_are_named(tmp_path, monkeypatch):
    folder = build("mixtral", tmp_path / "m")
    declare(folder, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(BadInput, match="expected weights as they are or quantised by fp8 or mxfp4, found gptq"):
        load_model(folder)
    declare(folder, {"quant_method": "fp8"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="accelerate is needed for weights in fp8"):
        load_model(folder)
