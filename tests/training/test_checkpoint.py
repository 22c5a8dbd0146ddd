"""Checkpoints whose newest one is damaged: the one before is found, and it is told why."""

import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from aurora.training.checkpoint import newest_checkpoint


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
    "no folder": as_no_folder_of_its_own,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_found(tmp_path, damage):
    for step in (1, 2):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        for rank in range(2):
            save_file({"dense.a": torch.ones(2)}, folder / "shard", {"aurora": json.dumps({"steps": step})})
            digest = hashlib.sha256((folder / "shard").read_bytes()).hexdigest()[:16]
            shard = (folder / "shard").rename(folder / f"shard-{rank}-of-2-{digest}.safetensors")
    assert newest_checkpoint(tmp_path)[0].steps == 2
    damage(shard)
    found, remarks = newest_checkpoint(tmp_path)
    assert found.steps == 1
    assert len(remarks) == (not (tmp_path / "step-00000002").is_file())
