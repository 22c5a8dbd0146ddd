"""Files that are not what a reader expects: named pipes, byte order marks, other kinds of files; models by their hub names."""

import json
import os
import subprocess
import sys

import pytest

import aurora
from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.io import load_model_config, shipped
from aurora.io.model_configs import served_model
from aurora.models.hub import model_folder

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
MIXTRAL |= {"first_k_dense_replace": 0}


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


def test_counts_of_experts_are_read_as_loads(tmp_path):
    def read(text):
        (tmp_path / "l.csv").write_text(text)
        return aurora.io.load_loads(tmp_path / "l.csv").tolist()

    assert read("1,2\n") == [[1, 2]]
    assert read("layer,expert,count\n4,2,5\n1,0,3\n") == [[3, 0, 0], [0, 0, 5]]
    for wrong, message in (
        ("layer,expert,count\n1,0,3\n1,0,3\n", "line 3: expected one row of expert 0 of layer 1, found two"),
        ("layer,expert,count\n1,0\n", "line 2: expected 3 fields, found 2"),
        ("layer,expert,count\n0,0,-1", "count: expected a whole number >= 0, found"),
        ("1,2\n3,nan\n", r"row 2, column 2: expected a finite number, found nan"),
    ):
        with pytest.raises(BadInput, match=rf"l\.csv: .*{message}"):
            read(wrong)


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
