"""Journals of answers: what is added is there afterwards, whole, and only the run that it is of goes on from it."""

from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io.journals import JournalFile, JournalledAnswer, _sealed, load_journal

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


def test_what_is_no_journal_is_refused(path):
    for lines in ("", "\n", "[]\n", '{"a": 1}\n', "[" * 100_000 + "\n"):
        path.write_text(lines)
        with pytest.raises(BadInput, match="expected the journal of an interrupted run"):
            load_journal(path)
    head, _ = _sealed({"format": "aurora journal", "schema": 99}, 0)
    path.write_bytes(head)
    with pytest.raises(BadInput, match="expected schema = 2, found 99; make it anew with aurora run --survive"):
        load_journal(path)


OF_TWO = ABOUT | {"answers": [[4, 100, 9], [1, 50, None]]}
WRITTEN = [(0, 3, 0, [7, 8], False), (1, 0, 0, [5, 9, 9, 9], True), (0, 3, 2, [9], True), (0, 0, 0, [1], False)]


def answers_of(rows):
    found = {}
    for model, prompt, _, tokens, finished in rows:
        answer = found.setdefault((model, prompt), JournalledAnswer())
        answer.tokens, answer.finished = answer.tokens + tokens, finished
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "answers.journal.jsonl"
    journal = JournalFile(path, OF_TWO, resume=False)
    for row in WRITTEN:
        journal.add(*row)
        journal._write()
    journal.close()
    return path


@given(damage=st.data())
def test_of_a_damaged_journal_whole_lines_before_the_damage_are_taken_and_nothing_else(written, damage, tmp_path_factory):
    """Bytes are changed, taken out or put in, lines exchanged or repeated: never an answer that the run has not given."""
    content, path = bytearray(written.read_bytes()), written.with_name("damaged.journal.jsonl")
    lines = content.splitlines(keepends=True)
    at = damage.draw(st.integers(0, len(content) - 1))
    match damage.draw(st.sampled_from(["byte", "cut", "gap", "put in", "repeated", "exchanged"])):
        case "byte":
            content[at] ^= damage.draw(st.integers(1, 255))
        case "cut":
            del content[at:]
        case "gap":
            del content[at : at + damage.draw(st.integers(1, 200))]
        case "put in":
            content[at:at] = damage.draw(st.binary(min_size=1, max_size=20))
        case "repeated":
            content = bytearray(b"").join([*lines, damage.draw(st.sampled_from(lines))])
        case "exchanged":
            content = bytearray(b"").join(damage.draw(st.permutations(lines)))
    path.write_bytes(content)
    possible = [answers_of(WRITTEN[:many]) for many in range(len(WRITTEN) + 1)]
    with suppress(BadInput):
        assert load_journal(path) in possible
        with closing(JournalFile(path, OF_TWO, resume=True)) as journal:
            assert journal.resumed in possible


def test_a_damaged_tail_is_cut_and_told(written, path, caplog):
    lines = written.read_bytes().splitlines(keepends=True)
    flipped = lines[2].replace(b"5,9", b"5,8")
    assert flipped != lines[2]
    path.write_bytes(b"".join([*lines[:2], flipped, *lines[3:]]))
    with closing(JournalFile(path, OF_TWO, resume=True)) as journal:
        assert journal.resumed == answers_of(WRITTEN[:1])
        journal.add(0, 0, 0, [2], False)
    said = f"{path}: its last {sum(map(len, lines[2:]))} bytes are damaged or cut off: left out, and produced anew"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert load_journal(path) == answers_of([WRITTEN[0], (0, 0, 0, [2], False)])


@pytest.mark.parametrize(
    "row",
    {
        "a model that is none": (2, 0, 0, [1], False),
        "a foreign prompt": (0, 4, 0, [1], False),
        "a negative prompt": (0, -1, 0, [1], False),
        "beyond the vocabulary": (1, 0, 0, [50], False),
        "negative": (0, 0, 0, [-1], False),
        "text": (0, 0, 0, ["1"], False),
        "true": (True, 0, 0, [1], False),
        "over the limit": (0, 0, 0, [1, 2, 3, 4, 5], True),
        "not finished at the limit": (0, 0, 0, [1, 2, 3, 4], False),
        "finished before": (0, 0, 0, [1, 2], True),
        "after its end": (0, 0, 0, [9, 2], False),
        "not finished by its end": (0, 0, 0, [9], False),
        "later": (0, 0, 1, [1], False),
        "a number for finished": (0, 0, 0, [1], 0),
    }.items(),
    ids=lambda each: each[0],
)
def test_what_no_run_can_have_written_is_refused_whatever_its_checksum(path, row):
    names = ("model", "prompt", "at", "tokens", "finished")
    head, before = _sealed({"format": "aurora journal", "schema": 2, **OF_TWO}, 0)
    line, _ = _sealed(dict(zip(names, row[1], strict=True)), before)
    path.write_bytes(head + line)
    with pytest.raises(BadInput, match="expected the journal of an interrupted run"):
        JournalFile(path, OF_TWO, resume=True)
    assert path.read_bytes() == head + line
