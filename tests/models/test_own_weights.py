"""A model without its experts, and experts read from its files one by one: the same weights as of the whole model, and no others."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from aurora.errors import BadInput, MissingDependency
from aurora.io import shipped
from aurora.models import own_weights
from aurora.models.loading import expert_parameters, hold_experts, load_model
from aurora.models.own_weights import ExpertReader, load_without_experts
from aurora.runtime.distributed_experts import DistributedExperts
from tests.models.architectures import SERVED, build, tiny_config


def as_one_file(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(folder):
    """Each tensor in one of three files, experts of a layer spread over all."""
    tensors = as_one_file(folder)
    (folder / "model.safetensors").unlink()
    shards = {key: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, key in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({key: tensors[key] for key in tensors if shards[key] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def fused(folder):
    """All experts of a layer in one tensor, under transformers' own names."""
    write(folder, {name: tensor.clone() for name, tensor in load_model(folder).model.state_dict().items()})


def half(folder):
    write(folder, {key: tensor.to(torch.bfloat16) for key, tensor in as_one_file(folder).items()})


def pickled(folder):
    torch.save(as_one_file(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


LAYOUTS = {"by expert": lambda folder: None, "sharded": sharded, "fused": fused, "bfloat16": half, "pickled": pickled}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in SERVED for layout in ("by expert", "fused")]
    + [("mixtral", layout) for layout in ("sharded", "bfloat16", "pickled")],
)
def test_weights_and_outputs_are_those_of_the_whole_model(name, layout, tmp_path):
    folder = build(name, tmp_path / name)
    LAYOUTS[layout](folder)
    whole, parts = load_model(folder), load_without_experts(folder)
    assert parts.identity == whole.identity
    assert (parts.other_bytes, parts.dense_layers) == (whole.other_bytes, whole.dense_layers)
    for full, layer in zip(whole.layers, parts.layers, strict=True):
        assert {len(weight) for _, weight in expert_parameters(layer.experts)} == {0}
        reader = layer.experts.reader
        found = reader.read([4, 1])
        for expert in (4, 1):
            assert {key: tensor.tolist() for key, tensor in found[expert].items()} == {
                key: weight[expert].tolist() for key, weight in expert_parameters(full.experts)
            }
        hold_experts(layer.experts, [reader.read([expert])[expert] for expert in range(layer.count)])
        hold_experts(full.experts, range(full.count))  # not in the file: where a tensor begins decides on how it is multiplied
    expected, found = whole.model.state_dict(), parts.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in expected.items())
    ids = torch.randint(3, 259, (2, 9))
    with torch.inference_mode():
        assert torch.equal(parts.model(ids).logits, whole.model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_and_the_wanted_dtype(tmp_path, dtype):
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral", num_local_experts=3, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped("models/mixtral-topics") / file, tmp_path)
    assert "lm_head.weight" not in as_one_file(tmp_path)
    whole, parts = load_model(tmp_path, dtype=dtype), load_without_experts(tmp_path, dtype=dtype)
    assert parts.model.lm_head.weight is parts.model.model.embed_tokens.weight
    assert torch.equal(parts.model.lm_head.weight, whole.model.lm_head.weight)
    assert {weight.dtype for weight in parts.layers[0].experts.reader.read([2])[2].values()} == {dtype}
    assert all(torch.equal(a, b) for a, b in zip(parts.model.buffers(), whole.model.buffers(), strict=True))


class Watched:
    """A tensor of a file that notes in `seen` that it was read, or which rows were."""

    def __init__(self, key, tensor, seen):
        self._key, self._tensor, self._seen = key, tensor, seen

    def __getitem__(self, index):
        self._seen.append((self._key, range(index.start, index.stop) if isinstance(index, slice) else None))
        return self._tensor[index]

    def __getattr__(self, name):
        return getattr(self._tensor, name)


@pytest.mark.parametrize("layout", ["by expert", "fused"])
def test_nothing_else_is_read(layout, tmp_path, monkeypatch):
    folder, seen, tensors = build("mixtral", tmp_path / "m"), [], own_weights._tensors
    LAYOUTS[layout](folder)
    monkeypatch.setattr(
        own_weights, "_tensors", lambda path: {key: Watched(key, tensor, seen) for key, tensor in tensors(path).items()}
    )
    model = load_without_experts(folder)
    dense = {key for key in as_one_file(folder) if ".experts." not in key}
    assert sorted(seen) == sorted((key, None) for key in dense)
    seen.clear()
    model.layers[1].experts.reader.read([3, 0])
    if layout == "by expert":
        names = [f"model.layers.1.block_sparse_moe.experts.{each}.w{part}.weight" for each in (0, 3) for part in (1, 2, 3)]
        assert sorted(seen) == [(name, None) for name in names]
    else:
        names = [f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]
        assert sorted(seen, key=str) == [(name, range(each, each + 1)) for name in names for each in (0, 3)]


def test_a_layer_reads_what_it_does_not_hold(tmp_path, monkeypatch):
    folder, read, reads = build("mixtral", tmp_path / "m"), ExpertReader.read, []
    monkeypatch.setattr(ExpertReader, "read", lambda self, experts: reads.append(experts) or read(self, experts))
    whole = {name: weight.detach() for name, weight in expert_parameters(load_model(folder).layers[0].experts)}
    layer = DistributedExperts(load_without_experts(folder).layers[0].experts)
    assert (layer.num_experts, layer.held) == (5, ())
    for wanted, expected in [((2, 0), [0, 2]), ((0, 3), [3]), ((3,), None), ((), None)]:
        layer.hold(wanted)
        assert reads == ([] if expected is None else [expected])
        reads.clear()
        for name, weight in expert_parameters(layer.local):
            assert torch.equal(weight, whole[name][list(wanted)])


def test_files_that_lack_an_expert_or_change_are_refused(tmp_path):
    folder = build("mixtral", tmp_path / "m")
    tensors, last = as_one_file(folder), "model.layers.1.block_sparse_moe.experts.4"
    write(folder, {key: tensor for key, tensor in tensors.items() if key != f"{last}.w1.weight"})
    with pytest.raises(
        BadInput, match=r"model\.safetensors: expected 5 tensors like .*experts\.0\.w1\.weight, found 4"
    ) as caught:
        load_without_experts(folder)
    assert "not a model" not in str(caught.value)
    write(folder, {key: tensor for key, tensor in tensors.items() if "layers.1" not in key or ".w2." not in key})
    layers = load_without_experts(folder).layers
    assert layers[0].experts.reader.read([2])
    with pytest.raises(BadInput, match=r"expected the weights of 5 experts, found none that fit .*layers\.1.*down_proj"):
        layers[1].experts.reader.read([2])
    write(folder, tensors | {f"{last}.w2.weight": torch.zeros(3, 3)})
    layers = load_without_experts(folder).layers
    with pytest.raises(BadInput, match=r"found none that fit .*layers\.1.*down_proj"):
        layers[1].experts.reader.read([0, 4])
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(BadInput, match=r"model\.safetensors: expected weights of the model, found none"):
        layers[1].experts.reader.read([0])
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors: expected weights of the model, found none"):
        layers[1].experts.reader.read([0])


MEASURE = """
import re, sys
import torch
import transformers
from pathlib import Path
from aurora.models.own_weights import load_without_experts
from aurora.runtime.distributed_experts import DistributedExperts


def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def load(folder):
    model = load_without_experts(folder)
    for layer in model.layers:
        DistributedExperts(layer.experts).hold(held)
    return model

small, large, held = sys.argv[1], sys.argv[2], [int(expert) for expert in sys.argv[3:]]
load(small)  # all that is imported and made once is there now
before = anonymous()
model = load(large)
print(anonymous() - before, model.other_bytes, model.expert_bytes * len(held) * len(model.layers))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' account of memory")
@pytest.mark.parametrize("layout", ["by expert", "fused"])
def test_a_rank_has_memory_for_the_dense_weights_and_its_own_experts(layout, tmp_path):
    """Of 300 MB of bfloat16 as float32, a third for dense weights: anonymous memory, which is not a file's, of a fresh process."""
    small, folder = build("mixtral", tmp_path / "small"), tmp_path / "large"
    shape = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 40000, "num_hidden_layers": 2, "head_dim": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral", **shape, num_local_experts=12), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / file, folder)
    if layout == "fused":
        write(folder, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    command = [sys.executable, "-c", MEASURE, str(small), str(folder), "1", "2", "4"]
    rise, dense, own = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert dense > 1e8
    assert own > 3.5e7
    assert dense + own <= rise * 1.02
    assert rise <= 1.1 * (dense + own)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_environment_is_as_before(tmp_path, monkeypatch, before):
    """No thread reads ahead while weights are loaded; what the process loads later by itself may."""
    folder, seen, tensors = build("mixtral", tmp_path / "m"), set(), own_weights._tensors

    def noted(path):
        return {key: Noted(key, tensor, seen) for key, tensor in tensors(path).items()}

    class Noted(Watched):
        def __getitem__(self, index):
            seen.add(os.environ[own_weights.IN_ONE_THREAD])
            return self._tensor[index]

    monkeypatch.setattr(own_weights, "_tensors", noted)
    monkeypatch.delenv(own_weights.IN_ONE_THREAD, raising=False)
    if before is not None:
        monkeypatch.setenv(own_weights.IN_ONE_THREAD, before)
    model = load_without_experts(folder)
    assert os.environ.get(own_weights.IN_ONE_THREAD) == before
    model.layers[1].experts.reader.read([3, 0])
    assert os.environ.get(own_weights.IN_ONE_THREAD) == before
    assert seen == {before or "1"}


def test_a_transformers_that_loads_otherwise_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(transformers.PreTrainedModel, "_load_pretrained_model")
    with pytest.raises(MissingDependency, match=r"reading single experts needs transformers as of .*, found 5\."):
        load_without_experts(tmp_path)


def test_another_threads_model_is_loaded_whole_meanwhile(tmp_path, monkeypatch):
    folder = build("mixtral", tmp_path / "m")
    counts = []

    def load_in_a_thread(*given):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(
                target=lambda: counts.append(sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()))
            )
            thread.start()
            thread.join()
        return plain(*given)

    plain = own_weights.load_model
    monkeypatch.setattr(own_weights, "load_model", load_in_a_thread)
    assert len(load_without_experts(folder).layers[0].experts.down_proj) == 0
    assert counts == [sum(p.numel() for p in load_model(folder).model.parameters())]


class TwoWeights(nn.Module):
    """Five experts with two parameters of different dtypes; each expert's values tell its number."""

    def __init__(self, layer):
        super().__init__()
        self.num_experts = 5
        number_E = 10 * layer + torch.arange(5)[:, None, None]
        self.up = nn.Parameter((number_E + torch.rand(5, 3, 7)).to(torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter((number_E + torch.rand(5, 2, 3)).to(torch.float16), requires_grad=False)


def weights_of(experts, slot):
    return {name: parameter[slot].clone() for name, parameter in expert_parameters(experts)}


def test_slots_take_experts_of_the_module_and_new_weights():
    experts, other = TwoWeights(0), TwoWeights(1)
    before = [weights_of(experts, slot) for slot in range(5)]
    hold_experts(experts, [1, 0, weights_of(other, 2)])
    after = [before[1], before[0], weights_of(other, 2)]
    for slot, expected in enumerate(after):
        assert all(torch.equal(expected[name], found) for name, found in weights_of(experts, slot).items())
