"""Checkpoints whose newest one is damaged: the one before is found, and it is told why."""

import errno
import hashlib
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from aurora.errors import BadInput
from aurora.training.checkpoint import (
    WholeCheckpoint,
    _load,
    _remove_older,
    begun_checkpoints,
    newest_checkpoint,
    set_newer_aside,
)


def as_a_folder(shard):
    shard.unlink()
    shard.mkdir()


def as_a_pipe(shard):
    shard.unlink()
    os.mkfifo(shard)


def as_a_dangling_link(shard):
    shard.unlink()
    shard.symlink_to("nowhere")


def as_no_folder_of_its_own(shard):
    shutil.rmtree(shard.parent)
    shard.parent.write_text("no folder")


DAMAGES = {
    "a folder": as_a_folder,
    "a pipe": as_a_pipe,
    "a dangling link": as_a_dangling_link,
    "empty": lambda shard: shard.write_bytes(b""),
    "cut off": lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
    "missing": lambda shard: shard.unlink(),
    "without its digest": lambda shard: shard.with_suffix(".sha256").unlink(),
    "no folder": as_no_folder_of_its_own,
}


def write_checkpoint(home, step):
    """Writes a complete checkpoint of two shards. Returns the second one."""
    folder = home / f"step-{step:08d}-of-2"
    folder.mkdir()
    for rank in range(2):
        shard = folder / f"shard-{rank}.safetensors"
        save_file({"dense.a": torch.ones(2)}, shard, {"aurora": "{}"})
        shard.with_suffix(".sha256").write_text(f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}\n")
    return shard


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_found(tmp_path, damage):
    _, shard = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    assert newest_checkpoint(tmp_path)[0].steps == 2
    damage(shard)
    found, remarks = newest_checkpoint(tmp_path)
    assert found.steps == 1
    assert len(remarks) == (not (tmp_path / "step-00000002-of-2").is_file())


@pytest.mark.parametrize(("damaged", "kept"), [((), [3, 4]), ((4,), [2, 3, 4]), ((2, 4), [1, 2, 3, 4]), ((3, 4), [1, 2, 3, 4])])
def test_older_checkpoints_are_removed_once_two_newer_ones_are_complete(tmp_path, damaged, kept):
    for step in (1, 2, 3, 4):
        shard = write_checkpoint(tmp_path, step)
        if step in damaged:
            shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    _remove_older(tmp_path)
    assert [step for step, _ in begun_checkpoints(tmp_path)] == kept


def test_no_checkpoint_is_removed_or_passed_over_while_one_cannot_be_read(tmp_path, monkeypatch):
    def unreadable(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    monkeypatch.setattr("aurora.training.checkpoint._digest", unreadable)
    for work in (_remove_older, newest_checkpoint):  # it is not taken for damaged
        with pytest.raises(BadInput, match=r"shard-0\.safetensors: cannot be read: Permission denied"):
            work(tmp_path)
    assert len(begun_checkpoints(tmp_path)) == 3


def test_checkpoints_that_are_set_aside_keep_apart(tmp_path):
    for name in ("step-00000003-of-2.aside-1", "step-00000003-of-2.aside-2"):
        write_checkpoint(tmp_path, 3)
        (remark,) = set_newer_aside(tmp_path, 2)
        assert remark.endswith(f"this newer checkpoint is kept as {name}")
        assert len(list((tmp_path / name).iterdir())) == 4
    assert not begun_checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("key", "size", "said"), [("dense.b", 2, "Missing key in checkpoint state_dict: dense.b"), ("dense.a", 3, "Size mismatch")]
)
def test_tensors_that_a_checkpoint_lacks_are_a_sentence(tmp_path, key, size, said):
    folder = write_checkpoint(tmp_path, 1).parent
    with pytest.raises(BadInput, match=f"step-00000001-of-2: cannot be loaded: {said}"):
        _load(WholeCheckpoint(1, folder, {}), {key: torch.zeros(size)})
