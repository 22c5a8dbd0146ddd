"""Every reader on damaged files of its kind: a good read, or an AuroraError that names the file; never another exception.

Texts lose bytes, get others, and are cut; JSON, YAML, TOML and archives' headers get values of other types at any place, nested as
deep as a file can be; archives lose and repeat members, and their arrays become arrays of other types and shapes.
"""

import io
import json
import shutil
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import aurora
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import AuroraError
from aurora.io import load_gpus, load_loads, load_matrix, load_requests, save
from aurora.io.clusters import load_cluster
from aurora.io.engine_placements import PLACEMENT_FORMATS, export_placement, import_placement
from aurora.io.files import save_npz, shipped
from aurora.io.plans import load_placement, save_placement
from aurora.io.plugin_records import FORMAT, load_record
from aurora.io.prompts import check_corpus, load_arriving, load_token_ids
from aurora.profiler.import_routing import import_profile
from aurora.simulator.interpreter import simulate_plan
from aurora.training.training_run import logged_steps
from aurora.types import ComputeCurves, Placement, PlanOptions, SyntheticOptions

CONFIG = {
    "num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8,
}  # fmt: skip
LOADS = np.array([[10, 1, 5, 4], [2, 8, 7, 3]])
PLACEMENT = Placement.evenly((((0, 1), (2, 3)), ((0, 3), (1, 2))))


def written_routing(folder):
    """A file of each format of recorded routing."""
    torch.save({"rank": 0, "logical_count": torch.tensor(LOADS)[None]}, folder / "stat.pt")
    passes = {"forward_pass_id": 3, "rank": 0, "global_physical_count": torch.tensor(LOADS)}
    torch.save({"records": [passes], "last_physical_to_logical_map": torch.arange(4).repeat(2, 1)}, folder / "passes.pt")
    save_file({f"1_{layer}": LOADS[layer] for layer in range(2)}, folder / "rank0.safetensors")
    record = {"record_type": "eplb_load_stats", "expert_load": LOADS.tolist(), "p2l_map": [[0, 1, 2, 3]] * 2}
    (folder / "vllm.jsonl").write_text(json.dumps(record) + "\n")
    np.save(folder / "loads.npy", LOADS)
    np.savez(folder / "tokens.npz", experts=np.array([[[0, 1], [2, 3]]] * 3), seq_len=np.array([1, 2]))
    rows = "".join(f"{layer},{expert},{LOADS[layer, expert]}\n" for layer in range(2) for expert in range(4))
    (folder / "counts.csv").write_text(f"layer,expert,count\n{rows}")
    (folder / "expert_distribution_rank0_timestamp1.csv").write_text(f"layer_id,expert_id,count\n{rows}")
    forms = ["sglang-recorder", "sglang-recorder", "trtllm-statistics", "vllm", "eplb-load", "tokens", "csv", "sglang-csv"]
    names = ["stat.pt", "passes.pt", "rank0.safetensors", "vllm.jsonl", "loads.npy", "tokens.npz", "counts.csv",
             "expert_distribution_rank0_timestamp1.csv"]  # fmt: skip
    return {name: lambda path, form=form: import_profile([path], form, CONFIG) for name, form in zip(names, forms, strict=True)}


def record_arrays():
    return {
        "window_T": np.array([0]), "tokens_TLE": LOADS[None], "seconds_LP": np.ones((2, 5)), "passes_L": np.ones(2, dtype=int),
        "gram_P33": np.ones((3, 3, 3)), "target_P3": np.ones((3, 3)), "most_P": np.ones(3, dtype=int),
    }  # fmt: skip


def written(folder):
    """A good file for every reader, by name, and what reads it."""
    readers = written_routing(folder)
    profile = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=16, token_level=True))
    plan = aurora.plan(aurora.load("demo-4"), profile, PlanOptions(slots_per_gpu=2))
    save(profile, folder / "profile.npz")
    save(plan, folder / "plan.json")
    save(simulate_plan(plan, [profile]), folder / "trace.npz")
    curves = ComputeCurves("m", "f", 2, 16, 10, kinds=profile.curves)
    save(curves, folder / "curves.npz")
    readers |= dict.fromkeys(("profile.npz", "plan.json", "trace.npz", "curves.npz"), aurora.load)
    about = {"model": "m", "fingerprint": "f", "engine": "e", "kind": "k", "date": "d", "rank": 0, "ranks": 1, "top_k": 2,
             "dispatch_bytes": 8, "combine_bytes": 8, "expert_bytes": 8, "other_bytes": 8, "dense_layers": [],
             "width": 1}  # fmt: skip
    save_npz(folder / "rank-0.npz", FORMAT, about, record_arrays())
    readers["rank-0.npz"] = load_record
    for name, read in (("clusters/demo-4.toml", load_cluster), ("gpus.toml", load_gpus)):
        readers[Path(shutil.copy(shipped(name), folder)).name] = read
    for form in PLACEMENT_FORMATS:
        suffix = ".yaml" if form == "trtllm" else ".jsonl" if form == "vllm-map" else ".json"
        (folder / f"{form}{suffix}").write_text(export_placement(PLACEMENT, form).text)
        readers[f"{form}{suffix}"] = partial(import_placement, form=form, gpus=2)
    save_placement(PLACEMENT, "given", folder / "placement.json")
    readers["placement.json"] = load_placement
    (folder / "matrix.csv").write_text("0,4\n5,0\n")
    (folder / "loads.csv").write_text("6,5.5,1,1\n")
    (folder / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n1.5,7,8\n")
    (folder / "requests.jsonl").write_text('{"timestamp": 5, "input_length": 2, "output_length": 3}\n' * 2)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "at_s": 1.5}\n{"prompt": "b"}\n')
    (folder / "corpus.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"tokens": [1, 2]}\n')
    (folder / "log.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n')
    np.save(folder / "ids.npy", np.arange(6).reshape(2, 3))
    return readers | {
        "matrix.csv": load_matrix, "loads.csv": load_loads, "requests.csv": load_requests,
        "requests.jsonl": load_requests, "prompts.jsonl": load_arriving, "corpus.jsonl": lambda path: check_corpus([path]),
        "ids.npy": load_token_ids, "log.jsonl": logged_steps,
    }  # fmt: skip


READERS = [
    "stat.pt", "passes.pt", "rank0.safetensors", "vllm.jsonl", "loads.npy", "tokens.npz", "counts.csv",
    "expert_distribution_rank0_timestamp1.csv", "profile.npz", "plan.json", "trace.npz", "curves.npz", "rank-0.npz",
    "demo-4.toml", "gpus.toml", "vllm-map.jsonl", "sglang.json", "eplb.json", "vllm-ascend.json", "trtllm.yaml",
    "vllm-list.json", "placement.json", "matrix.csv", "loads.csv", "requests.csv", "requests.jsonl", "prompts.jsonl",
    "corpus.jsonl", "ids.npy", "log.jsonl",
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    return folder, written(folder)


ODD = [
    None, True, False, 0, -1, -3, 1.5, 10**30, -(10**30), float("nan"), float("inf"), "", "x", "1_0", "１", "1", "\x1b[2J", [], {},
    [[]], [1, [2]], {"a": 1}, [True], [None] * 3, 2**62, 2**63,
]  # fmt: skip


def spots(value, path=()):
    """The path of every place in nested values."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from spots(child, (*path, key))


def changed(value, path, new):
    """Nested values with another one in one place; Ellipsis: with none."""
    if not path:
        return None if new is ... else new
    made = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del made[path[0]]
    else:
        made[path[0]] = changed(value[path[0]], path[1:], new)
    return made


def other_value(draw, value):
    return changed(value, draw(st.sampled_from(list(spots(value)))), draw(st.sampled_from([*ODD, ...])))


def bytes_changed(draw, content):
    """The content with bytes flipped, taken out, put in, or cut off."""
    content = bytearray(content)
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(st.sampled_from(["flip", "cut", "gap", "put in", "twice"])):
        case "flip" if content:
            content[at] ^= draw(st.integers(1, 255))
        case "cut":
            del content[at:]
        case "gap":
            del content[at : at + draw(st.integers(1, 40))]
        case "put in":
            odd = [b"[" * 100_000, b'{"a":' * 100_000, b"\0", b"\xff\xfe", b"9" * 5000, b"-", b"_", b"true", b"1e999"]
            content[at:at] = draw(st.sampled_from(odd) | st.binary(max_size=8))
        case "twice":
            content *= 2
    return bytes(content)


def text_changed(draw, path, content):
    """The same of values in a text."""
    if path.suffix in (".json", ".yaml"):
        found = (json.loads if path.suffix == ".json" else yaml.safe_load)(content)
        made = other_value(draw, found)
        return (json.dumps(made) if path.suffix == ".json" else yaml.safe_dump(made)).encode()
    lines = content.decode().splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    if path.suffix == ".jsonl":
        lines[at] = json.dumps(other_value(draw, json.loads(lines[at])))
    elif path.suffix == ".toml" and "=" in lines[at]:
        new = draw(st.sampled_from([each for each in ODD if each is not None and "\x1b" not in str(each)]))
        text = json.dumps(new).replace("NaN", "nan").replace("Infinity", "inf").replace(":", " =")
        lines[at] = f"{lines[at].split('=')[0]}= {text}"
    else:
        cells = lines[at].split(",")
        cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(ODD)))
        lines[at] = ",".join(cells)
    return "\n".join(lines).encode()


def array_changed(draw, array):
    """An array of other values, type or shape."""
    changes = [
        lambda a: a.astype(np.float64) * 1.5, lambda a: a.astype(str), lambda a: a.astype(bool), lambda a: a[None], lambda a: a[:0],
        lambda a: a.ravel(), lambda a: np.zeros_like(a), lambda a: -a.astype(np.int64) - 1, lambda a: np.full(a.shape, np.nan),
        lambda a: np.full(a.shape, 2**62), lambda a: np.concatenate([a, a]), lambda a: a.astype(np.complex64),
        lambda a: a.astype("datetime64[s]"),
    ]  # fmt: skip
    return draw(st.sampled_from(changes))(array)


def archive_changed(draw, content):
    """An archive with an array changed, missing, added or twice; of its header, values."""
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    name = draw(st.sampled_from(sorted(arrays)))
    match draw(st.sampled_from(["changed", "missing", "added", "twice", "bytes"])):
        case "bytes":
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as archive, zipfile.ZipFile(io.BytesIO(content)) as source:
                for each in source.namelist():
                    kept = source.read(each)
                    archive.writestr(each, bytes_changed(draw, kept[:200]) + kept[200:] if each == f"{name}.npy" else kept)
            return made.getvalue()
        case "changed" if name == "about":
            arrays[name] = np.array(json.dumps(other_value(draw, json.loads(str(arrays[name])))))
        case "changed":
            arrays[name] = array_changed(draw, arrays[name])
        case "missing":
            del arrays[name]
        case "added":
            arrays[f"{name}2"] = arrays[name]
        case "twice":
            made = io.BytesIO(content)
            with zipfile.ZipFile(made, "a") as archive, zipfile.ZipFile(io.BytesIO(content)) as source:
                archive.writestr(f"{name}.npy", source.read(f"{name}.npy"))
            return made.getvalue()
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def tensors_changed(draw, content):
    """What torch.save wrote, with another value in some place."""
    found = torch.load(io.BytesIO(content), weights_only=True)
    tensor = draw(st.sampled_from([torch.zeros(0), torch.ones(2, 2, 2, 2), torch.eye(3).to_sparse(), torch.tensor(1.5)]))
    path = draw(st.sampled_from(list(spots(found))))
    made = io.BytesIO()
    torch.save(changed(found, path, draw(st.sampled_from([*ODD, ..., tensor]))), made)
    return made.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(good, name, data):
    folder, readers = good
    content, path = (folder / name).read_bytes(), folder / "damaged" / name
    path.parent.mkdir(exist_ok=True)
    if data.draw(st.booleans(), "bytes"):
        content = bytes_changed(data.draw, content)
    elif name.endswith(".npz"):
        content = archive_changed(data.draw, content)
    elif name.endswith(".pt"):
        content = tensors_changed(data.draw, content)
    elif name.endswith(".npy"):
        made = io.BytesIO()
        np.save(made, array_changed(data.draw, np.load(io.BytesIO(content))))
        content = made.getvalue()
    elif name.endswith(".safetensors"):
        content = bytes_changed(data.draw, content)
    else:
        content = text_changed(data.draw, path, content)
    path.write_bytes(content)
    said = None
    try:
        readers[name](path)
    except AuroraError as error:
        said = str(error)
    assert said is None or ((path.name in said or said.startswith("import: ")) and len(said) < 5000)


def test_every_good_file_is_read(good):
    folder, readers = good
    assert sorted(readers) == sorted(READERS)
    for name, read in readers.items():
        read(folder / name)
