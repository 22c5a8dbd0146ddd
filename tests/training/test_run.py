"""Training runs: checkpoints, resuming on other ranks, and the trained model."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from aurora.errors import BadInput, InfeasiblePlan
from aurora.models.loading import load_model
from aurora.training.run import train
from aurora.training.trainer import Trainer
from aurora.types import TrainOptions
from tests.models.architectures import build, load_plain

OPTIONS = TrainOptions(steps=4, ranks=2, batch=4, length=8, dtype="float64", transport="memory", checkpoint_every=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("qwen3_moe", tmp_path_factory.mktemp("training") / "qwen3_moe")


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """A run without a stop, on two threads."""
    made = tmp_path_factory.mktemp("straight")
    (made / "text.txt").write_text("def f(x): return x + 1\n" * 20)
    return train(folder, [made / "text.txt"], OPTIONS, output=made / "out"), made


def losses(result):
    return [step.loss for step in result.steps]


def test_ranks_in_processes_do_the_same(folder, straight, tmp_path):
    result, made = straight
    again = train(folder, [made / "text.txt"], replace(OPTIONS, steps=2, transport="gloo"), output=tmp_path / "out")
    assert again.transport == "gloo"
    np.testing.assert_allclose(losses(again), losses(result)[:2], rtol=0, atol=1e-9)


@pytest.mark.full
def test_a_run_resumed_on_other_ranks_ends_with_the_same_model(folder, straight, tmp_path, monkeypatch, caplog):
    result, made = straight
    files = [made / "text.txt"]
    train(folder, files, replace(OPTIONS, steps=3, ranks=3, checkpoint_every=1), output=tmp_path)
    whole = sorted(tmp_path.glob("checkpoints/*"))[-2:]  # and an older one, if the first rank was the first to write
    assert [path.name for path in whole] == ["step-00000002-of-3", "step-00000003-of-3"]
    torn = whole[1] / "shard-1.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"x")
    with pytest.raises(BadInput, match="step-00000002-of-3: was made with seed 0, expected 1"):
        train(folder, files, replace(OPTIONS, resume=True, seed=1), output=tmp_path)
    (tmp_path / "other.txt").write_text("def f(x): return x - 1\n" * 20)
    with pytest.raises(BadInput, match=r"step-00000002-of-3: was made with text [0-9a-f]{16}, expected [0-9a-f]{16}"):
        train(folder, [tmp_path / "other.txt"], replace(OPTIONS, resume=True), output=tmp_path)
    before, said = {path.name: path.read_bytes() for path in whole[1].iterdir()}, []

    def prepare(trainer, prepare=Trainer.prepare):
        said[:] = said or [record.getMessage() for record in caplog.records if record.name == "aurora.train"]
        return prepare(trainer)

    monkeypatch.setattr(Trainer, "prepare", prepare)
    rest = train(folder, files, replace(OPTIONS, resume=True), output=tmp_path)
    assert (rest.resumed, [step.step for step in rest.steps]) == (2, [2, 3])
    aside = "training goes on from step 2; this newer checkpoint is kept as step-00000003-of-3.aside-1"
    assert rest.remarks == (
        damaged := f"{torn}: is damaged: expected the SHA-256 in shard-1.sha256",
        f"{whole[1]}: {aside}",
    )
    assert said == [damaged, f"{whole[1]}: {aside}"], "before the first step"
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "checkpoints" / "step-00000003-of-3.aside-1").iterdir()
    } == before
    assert not whole[1].exists(), "shards of two runs would be in one folder"
    np.testing.assert_allclose(losses(rest), losses(result)[2:], rtol=0, atol=1e-9)
    weights, expected = (load_file(each.model / "model.safetensors") for each in (rest, result))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl"}


def with_a_flipped_byte(shard):
    kept = bytearray(shard.read_bytes())
    kept[-1] ^= 1
    shard.write_bytes(kept)
    return rf"{shard}: is damaged: expected the SHA-256 in shard-1.sha256"


@pytest.mark.parametrize("change", [{}, {"transport": "gloo", "elastic": True}, {"ranks": 1, "transport": "auto"}])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_resumed_and_keeps_them(folder, straight, tmp_path, change):
    output = tmp_path / "out"
    shutil.copytree(straight[1] / "out", output)
    said = "; ".join(
        with_a_flipped_byte(shard) for shard in sorted(output.glob("checkpoints/*/shard-1.safetensors"), reverse=True)
    )
    assert said.count(";") == 1
    before = contents(output)
    with pytest.raises(BadInput, match=f"`resume`: expected a complete checkpoint, found none: {re.escape(said)}"):
        train(folder, [straight[1] / "text.txt"], replace(OPTIONS, resume=True, steps=6, **change), output=output)
    assert contents(output) == before


def test_the_trained_model_is_a_transformers_checkpoint(folder, straight):
    result, _ = straight
    trained = load_plain(result.model, dtype=torch.float64, experts_implementation="eager")
    before = load_plain(folder, dtype=torch.float64)
    for (name, weight), old in zip(trained.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(weight, old), name
    assert len(load_model(result.model).layers) == 4
    assert len(result.steps) == 4


def test_checkpoints_of_an_earlier_run_are_neither_removed_nor_taken_for_those_of_this_run(folder, straight):
    _, made = straight
    before = sorted((made / "out").rglob("*"))
    with pytest.raises(
        BadInput, match="step-00000004-of-2: is of an earlier run: expected `resume`, which goes on from it, or"
    ):
        train(folder, [made / "text.txt"], OPTIONS, output=made / "out")
    assert sorted((made / "out").rglob("*")) == before


def test_checkpoints_of_another_version_are_named_and_kept(folder, straight, tmp_path):
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    with pytest.raises(BadInput, match="step-00000004: expected a name such as step-00000100-of-4"):
        train(folder, [straight[1] / "text.txt"], replace(OPTIONS, resume=True), output=tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints", "step-00000004"]


def test_a_model_that_no_run_wrote_is_not_replaced(folder, straight, tmp_path):
    files = [straight[1] / "text.txt"]
    mine = shutil.copytree(folder, tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="model: is of no run that can be resumed, and would be replaced"):
        train(folder, files, OPTIONS, output=tmp_path)
    (tmp_path / "checkpoints" / "step-00000002-of-2").mkdir(parents=True)
    with pytest.raises(BadInput, match="model: is the folder to which the trained model is written"):
        train(mine, files, replace(OPTIONS, resume=True), output=tmp_path)
    assert contents(tmp_path) == before


def test_a_model_that_a_full_disk_does_not_take_is_a_sentence(folder, straight, tmp_path, monkeypatch):
    def full(*_args, **_named):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(BadInput, match=r"out/model: cannot be written: I/O error: No space left on device"):
        train(folder, [straight[1] / "text.txt"], replace(OPTIONS, steps=1, ranks=1), output=tmp_path / "out")


def test_files_that_cannot_be_written_end_no_training(folder, straight, tmp_path, caplog):
    result, made = straight
    (tmp_path / "checkpoints").write_text("no folder")
    (tmp_path / "log.jsonl").mkdir()
    again = train(folder, [made / "text.txt"], replace(OPTIONS, steps=1), output=tmp_path)
    assert [remark.split(": ")[1] for remark in again.remarks] == [
        "steps were not logged",
        "shard 0 of 2 was not written",
        "shard 1 of 2 was not written",
    ]
    said = [record.getMessage() for record in caplog.records if record.name == "aurora.train"]
    assert sorted(said) == [f"{remark}; training goes on" for remark in again.remarks[1:]], (
        "when it happens, not at the end alone"
    )
    np.testing.assert_allclose(losses(again), losses(result)[:1], rtol=0, atol=1e-9)


def test_ranks_that_do_not_fit_are_refused_before_any_starts(folder, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("short")
    for change, error, said in (
        ({"ranks": 5}, BadInput, "`batch`: expected a sample for each of 5 ranks or more, found 4"),
        (
            {"min_replicas": 3},
            InfeasiblePlan,
            "`min_replicas` 3: replicas of an expert are on different ranks, found 2",
        ),
        ({}, BadInput, "text.txt: expected at least one sample of 8 tokens, found none"),
        ({"length": 300}, BadInput, "`length`: qwen3_moe takes at most 256 tokens, found 300"),
    ):
        with pytest.raises(error, match=said):
            train(folder, [file], replace(OPTIONS, **change), output=tmp_path / "out")
