"""Files that are not what a reader expects: named pipes, byte order marks, other kinds of files; models by their hub names."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aurora
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.io import load_model_config, load_profile, read_text, save, shipped
from aurora.io.engine_placements import PLACEMENT_FORMATS, import_placement
from aurora.io.files import kind_of
from aurora.io.model_configs import served_model
from aurora.io.prompts import check_corpus, load_prompts, load_token_ids
from aurora.io.routing_dumps import ROUTING_FORMATS, read_dump
from aurora.models.hub import model_folder
from aurora.profiler.import_routing import file_digest
from aurora.types import SyntheticOptions

LOADERS = [getattr(aurora.io, name) for name in dir(aurora.io) if name.startswith(("load_", "read_"))]
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
MIXTRAL |= {"first_k_dense_replace": 0}
READERS = [
    *LOADERS,
    *(lambda path, form=form: import_placement(path, form, 2) for form in PLACEMENT_FORMATS),
    *(lambda path, form=form: read_dump(path, form, Shape.of(MIXTRAL), {}) for form in ROUTING_FORMATS),
    *(load_prompts, load_token_ids, file_digest, lambda path: check_corpus([path])),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("suffix", [".json", ".npz", ".npy", ".csv", ".toml"])
def test_no_reader_waits_for_a_named_pipe(tmp_path, reader, suffix):
    path = tmp_path / f"rank0{suffix}"
    os.mkfifo(path)
    signal.alarm(60)
    try:
        with pytest.raises(BadInput, match=str(path)) as found:
            reader(path)
    finally:
        signal.alarm(0)
    assert "not a regular file" in str(found.value) or "expected" in str(found.value)  # of another suffix


def test_a_model_with_a_named_pipe_among_its_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(BadInput, match=r"model-00001-of-00002\.safetensors: not a regular file"):
        model_folder(tmp_path)


def test_pipes_of_the_shell_are_read():
    code = "import sys; from aurora.io.files import load_json; print(load_json(sys.argv[1]))"
    command = f"{sys.executable} -c '{code}' <(echo '{{\"a\": 1}}')"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "{'a': 1}\n"


BOM = b"\xef\xbb\xbf"


def test_a_byte_order_mark_before_any_text_is_skipped(tmp_path):
    def write(name, text):
        (tmp_path / name).write_bytes(BOM + text.encode())
        return tmp_path / name

    shape = Shape.of(MIXTRAL)
    csv = write("c.csv", "layer,expert,count\n0,0,3\n0,1,3\n1,1,4\n1,0,4\n")
    assert read_dump(csv, "csv", shape, {}).counts_TLE.sum() == 14
    assert read_dump(write("l.csv", "1,2,3,4\n4,3,2,1\n"), "eplb-load", shape, {}).counts_TLE.sum() == 20
    assert aurora.io.load_loads(write("l.csv", "1,2\n")).tolist() == [[1, 2]]
    assert aurora.io.load_loads(write("l.csv", "layer,expert,count\n4,2,5\n1,0,3\n")).tolist() == [[3, 0, 0], [0, 0, 5]]
    for wrong, message in (
        ("1,0,3\n1,0,3\n", "one row for each expert"),
        ("1,0\n", "found 2 columns"),
        ("0,0,-1", "zero or more"),
    ):
        with pytest.raises(BadInput, match=rf"l\.csv: expected .*{message}"):
            aurora.io.load_loads(write("l.csv", f"layer,expert,count\n{wrong}"))
    assert aurora.io.load_cluster(write("c.toml", Path(shipped("clusters/demo-4.toml")).read_text())).gpus
    assert load_prompts(write("p.jsonl", '{"prompt": "a"}\n')) == ["a"]
    assert load_model_config(write("config.json", json.dumps(MIXTRAL))) == MIXTRAL
    yaml = "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 2, 3]\n"
    assert import_placement(write("b.yaml", yaml), "trtllm", 2).placement.gpus == 2
    assert aurora.io.load_requests(write("r.csv", "arrival_s,input_tokens,output_tokens\n0,1,1\n"))


def _content(value):
    file = io.BytesIO()
    (np.save if isinstance(value, np.ndarray) else lambda to, arrays: np.savez(to, **arrays))(file, value)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (_content(np.zeros(3)), "an .npy array"),
        (_content({"a": np.zeros(3)}), r"a zip archive \(as .npz and .pt are\)"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text"),
        (b"\x1f\x8b\x08\x00\xff", "a gzip archive"),
        (b"\x80\x04K\x01.\xff", "a pickle"),
        (b"\xff" * 8 + b'{"a":', "text of another encoding, or no text"),
        ("café".encode("latin-1"), "text of another encoding, or no text"),
    ],
)
def test_text_readers_say_what_a_file_is(tmp_path, content, kind):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadInput, match=rf"f: expected UTF-8 text, found {kind}$"):
        read_text(tmp_path / "f")


def test_readers_of_our_formats_say_which_of_them_a_file_is(tmp_path):
    drawn = draw_profile("zipf:1", load_model_config("mixtral-topics"), SyntheticOptions(sources=2))
    save(drawn, tmp_path / "p.npz")
    assert kind_of(tmp_path / "p.npz") == "an aurora profile (.npz)"
    with pytest.raises(BadInput, match=r"p\.npz: expected JSON, found an aurora profile \(\.npz\)$"):
        aurora.io.load_plan(tmp_path / "p.npz")
    (tmp_path / "p.json").write_text('\n{"format": "aurora plan", "schema": 5}')
    with pytest.raises(BadInput, match=r"p\.json: expected an aurora profile, found an aurora plan \(JSON\)$"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(BadInput, match=r"p\.json: expected an \.npy array of numbers, found an aurora plan \(JSON\)$"):
        load_token_ids(tmp_path / "p.json")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(BadInput, match=r"empty: expected an aurora profile, found an empty file$"):
        load_profile(tmp_path / "empty")


def test_models_are_read_by_their_names_in_the_hub_cache(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "params.json").write_text("{}")
    assert load_model_config(tmp_path) == {}  # of Mistral's own files
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert load_model_config(tmp_path) == MIXTRAL
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert load_model_config("org/model") == MIXTRAL
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    for source in (tmp_path, tmp_path / "config.json", "org/model"):
        config = load_model_config(source)
        assert config == MIXTRAL | {"quantization_config": {"quant_method": "modelopt", **modelopt}}
        assert Shape.of(config).weight_bits == 4.5
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    with pytest.raises(BadInput, match="org/model: no such file, and no model of this name in the local hub cache"):
        load_model_config("org/model")


def test_an_engine_loads_a_model_by_the_name_that_the_config_states_or_by_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTRAL))
    assert served_model(tmp_path) == served_model(config) == str(tmp_path)
    assert served_model("mixtral-topics") == str(shipped("models/mixtral-topics"))
    config.write_text(json.dumps({**MIXTRAL, "_name_or_path": "org/model"}))
    assert served_model(config) == served_model(tmp_path) == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)  # a path of whoever wrote the config, not a name of the hub
    assert served_model(config) == str(tmp_path)
    with pytest.raises(BadInput, match="no such"):
        served_model("missing")
