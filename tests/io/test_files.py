"""Files that only one process writes."""

import threading

import pytest

from aurora.errors import BadInput
from aurora.io.files import open_locked
from aurora.io.journals import JournalFile


def test_a_file_is_open_once_at_a_time(tmp_path):
    path = tmp_path / "file"
    with open_locked(path):
        with pytest.raises(BadInput, match="file: another run writes it"):
            open_locked(path)
        path.unlink()
        with open_locked(path) as other:  # a new file
            other.write(b"x")
    with open_locked(path) as again:
        assert again.tell() == 1
    with pytest.raises(BadInput, match="no/file: cannot be written: No such file or directory"):
        open_locked(tmp_path / "no" / "file")


def test_of_runs_that_begin_a_journal_at_once_one_goes_on(tmp_path):
    together, begun, refused = threading.Barrier(4, timeout=60), [], []

    def begin():
        together.wait()
        try:
            begun.append(JournalFile(tmp_path / "journal", {"model": 1}, resume=True))
        except BadInput as error:
            refused.append(str(error))

    for _ in range(20):
        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(begun) == 1
        begun.pop().close()
        assert not (tmp_path / "journal").exists()
    assert set(refused) == {f"{tmp_path / 'journal'}: another run writes it"}
    assert len(refused) == 60
