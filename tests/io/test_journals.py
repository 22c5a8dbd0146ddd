"""Journals of answers: what is added is there afterwards, whole, and only the run that it is of goes on from it."""

import json
from contextlib import closing

import pytest

from aurora.errors import BadInput
from aurora.io.journals import JournalFile, JournalledAnswer, load_journal

ABOUT = {"prompts": "abc", "max_new_tokens": 4}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.journal.jsonl"


def test_what_is_added_is_read_and_gone_on_from(path):
    with closing(JournalFile(path, ABOUT, resume=False)) as journal:
        assert journal.resumed == {}
        journal.add(0, 3, 0, [7], False)
        journal.add(0, 3, 1, [8, 9], False)
        journal.add(1, 0, 0, [5], True)
    expected = {(0, 3): JournalledAnswer([7, 8, 9]), (1, 0): JournalledAnswer([5], True)}
    assert load_journal(path) == expected
    assert len(path.read_text().splitlines()) == 3, "one line for the head, one for each answer that was added to"
    with path.open("a") as cut_off:
        cut_off.write('{"model":0,"prompt":3,"at":3,"tok')
    with closing(JournalFile(path, ABOUT, resume=True)) as journal:
        assert journal.resumed == expected
        journal.add(0, 3, 3, [10], True)
    assert load_journal(path) == expected | {(0, 3): JournalledAnswer([7, 8, 9, 10], True)}


def test_a_journal_without_answers_is_not_left(path):
    JournalFile(path, ABOUT, resume=True).close()
    assert not path.exists()


class FullDisk:
    """A file on a disk that takes ten more bytes, and later everything."""

    def __init__(self, file):
        self.file, self.left = file, 10

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        if not self.left:
            raise OSError(28, "No space left on device")
        written = self.file.write(content[: self.left])
        self.left -= written
        return written


def test_answers_that_are_written_are_kept_though_the_disk_does_not_say_so(path, monkeypatch):
    def fails(_number):
        raise OSError(5, "Input/output error")

    with closing(JournalFile(path, ABOUT, resume=False)) as journal:
        monkeypatch.setattr("os.fsync", fails)
        journal.add(0, 0, 0, [7], True)
    assert load_journal(path) == {(0, 0): JournalledAnswer([7], True)}


def test_a_full_disk_is_said_once_and_what_it_did_not_take_is_written_later(path, caplog, monkeypatch):
    monkeypatch.setattr("aurora.io.journals.SYNC_S", 1000.0)  # the test says when
    with closing(JournalFile(path, ABOUT, resume=False)) as journal:
        journal._file = full = FullDisk(journal._file)
        for at in range(3):
            journal.add(0, 0, at, [at], False)
            journal._write()
            assert load_journal(path) == {}, "a line that is cut off is left out"
        full.left = 10**9
        journal.add(0, 0, 3, [3], True)
    assert load_journal(path) == {(0, 0): JournalledAnswer([0, 1, 2, 3], True)}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} cannot be written: No space left on device; serving goes on, and it is tried again"
    ]


def test_journals_of_others_are_refused(path):
    first = JournalFile(path, ABOUT, resume=False)
    first.add(0, 0, 0, [1], False)
    with pytest.raises(BadInput, match="another run writes it"):
        JournalFile(path, ABOUT, resume=True)
    first.close()
    with pytest.raises(BadInput, match="expected `resume`, which goes on from it, or no such file"):
        JournalFile(path, ABOUT, resume=False)
    with pytest.raises(BadInput, match="found one of a run with other max_new_tokens"):
        JournalFile(path, ABOUT | {"max_new_tokens": 5}, resume=True)
    head = path.read_text().splitlines()[0]
    for lines in ("[]\n", '{"a": 1}\n', f'{head}\n{{"model":0}}\n', f"{head}\n{json.dumps(line(at=1))}\n"):
        path.write_text(lines)
        with pytest.raises(BadInput, match="expected the journal of an interrupted run"):
            JournalFile(path, ABOUT, resume=True)


def line(at):
    return {"model": 0, "prompt": 0, "at": at, "tokens": [1], "finished": False}
