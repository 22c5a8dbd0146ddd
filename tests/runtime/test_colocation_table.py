"""Table of models in separate processes: its folder, and who is in it."""

import os

import pytest

from aurora.errors import BadInput
from aurora.runtime import colocation_table as colocated
from aurora.runtime.colocation_table import colocation_folder
from aurora.runtime.process_port_arbiter import ProcessPortArbiter
from aurora.types import RunOptions


def test_folders_that_cannot_be_used_and_names(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file cannot be used: Not a directory"):
        ProcessPortArbiter(tmp_path / "file", 0)
    with pytest.raises(BadInput, match="`colocate`: expected GPUs 0 to 63"):
        ProcessPortArbiter(tmp_path, 64)
    with pytest.raises(BadInput, match="`colocate`: expected at most 40 letters"):
        RunOptions(interleave="processes", colocate="../x")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which every user can write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def mode(path):
    return path.lstat().st_mode & 0o777


def test_the_folder_is_this_users_alone_in_and_out_of_login_sessions(tmp_path, temporary, monkeypatch):
    found = colocation_folder("both")
    assert found == temporary / f"aurora-runtime-{os.getuid()}" / f"both.{colocated.TABLE_VERSION}"
    assert mode(found) == mode(found.parent) == 0o700
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert colocation_folder("both") == found


def test_a_folder_of_another_user_or_a_link_is_not_trusted(tmp_path, temporary, monkeypatch):
    """Another user's link in the folder for temporary files made the file behind it ours to truncate and to write."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    ours = temporary / f"aurora-runtime-{os.getuid()}"
    ours.symlink_to(victim)
    with pytest.raises(BadInput, match="expected a folder of this user alone, found a symbolic link"):
        colocation_folder("both")
    assert not list(victim.iterdir())
    ours.unlink()
    ours.mkdir(mode=0o700)
    ours.chmod(0o777)
    with pytest.raises(BadInput, match="found mode 777, not 700"):
        colocation_folder("both")
    ours.chmod(0o700)
    (ours / f"both.{colocated.TABLE_VERSION}").symlink_to(victim)
    with pytest.raises(BadInput, match="found a symbolic link"):
        colocation_folder("both")
    uid = os.getuid()
    ours.rename(temporary / f"aurora-runtime-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(BadInput, match=f"found one of user {uid}"):
        colocation_folder("both")


@pytest.mark.parametrize("name", ["table", "0.0"])
def test_no_link_in_the_folder_is_followed(tmp_path, temporary, name):
    (tmp_path / "precious").write_text("what the user has")
    folder = colocation_folder("both")
    (folder / name).symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="cannot be used: Too many levels of symbolic links"):
        ProcessPortArbiter(folder, 0)
    assert (tmp_path / "precious").read_text() == "what the user has"
