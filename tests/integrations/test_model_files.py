"""Model files that change between a start and the return of a rank: a changed byte is seen, an equal copy is none."""

import os
import shutil

import pytest
from aurora_vllm.model_files import ModelFiles

from aurora.errors import BadInput


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors", "notes.md"):
        (tmp_path / "model" / name).write_text(f"{name}, as it was")
    return tmp_path / "model"


def loaded(folder, read=True):
    """Files that all ranks have loaded; their digests have been taken if `read`."""
    files = ModelFiles(lambda: folder)
    files.begin()
    if not read:
        files._read_all = lambda *_: None
    assert files.end() == ""
    files._reader.join()
    return files


def compared(files):
    """The verdict on a rank that loads now."""
    files.begin()
    return files.compare().result(10)


def flip(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def flip_and_set_time(path):
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_in_copy(path):
    before = path.stat()
    shutil.copy2(path, path.with_suffix(".new"))
    flip(path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [flip, flip_and_set_time, flip_in_copy, os.unlink])
@pytest.mark.parametrize("read", [True, False])
def test_a_changed_file_is_named(folder, change, read):
    files = loaded(folder, read)
    assert compared(files) == files.touched() == ""
    change(folder / "model-2.safetensors")
    expected = f"{folder / 'model-2.safetensors'} has changed since the serving ranks loaded it"
    assert compared(files) == files.touched() == expected


def test_another_file_is_a_change_unless_no_rank_loads_it(folder):
    files = loaded(folder)
    (folder / "notes.md").write_text("other notes")
    assert compared(files) == ""
    (folder / "model-3.safetensors").touch()
    assert compared(files).startswith(f"{folder / 'model-3.safetensors'} has changed since")


def copy_again(path):
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [copy_again, os.utime])
def test_an_equal_file_of_another_state_is_none_once_it_has_been_read(folder, change):
    files, unread = loaded(folder), loaded(folder, read=False)
    change(folder / "model-1.safetensors")
    assert files.touched().startswith(f"{folder / 'model-1.safetensors'} has changed since")
    assert compared(files) == ""
    assert files.touched() == "", "the state is known now"
    assert compared(unread).startswith(f"{folder / 'model-1.safetensors'} has changed since")


def test_files_that_change_and_change_back_while_a_rank_loads_are_seen(folder):
    files, path = loaded(folder), folder / "model-1.safetensors"
    files.begin()
    flip(path)
    flip(path)
    assert files.compare().result(10) == "the model's files changed while the rank loaded them"


def test_files_that_ranks_download_are_theirs_and_others_must_stay(folder):
    files = ModelFiles(lambda: folder)
    files.begin()
    (folder / "model-3.safetensors").write_text("downloaded")
    assert files.end() == ""
    files._reader.join()
    assert compared(files) == ""
    files.begin()
    flip(folder / "config.json")
    assert files.end() == f"{folder / 'config.json'} changed while ranks loaded it"


def test_a_folder_that_is_not_found_lets_no_rank_join(folder):
    def find():
        raise BadInput("no such model")

    files = ModelFiles(find)
    files.begin()
    assert files.end() == ""
    assert (
        compared(files)
        == files.touched()
        == "the model's files were not found, and so cannot be compared with those of the serving ranks"
    )
