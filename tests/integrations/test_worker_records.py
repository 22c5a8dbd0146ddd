"""What a worker writes, when, where, and what it answers to commands."""

import errno
import threading
import time

import numpy as np
import pytest
import torch
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import ChoiceCounts, EngineFacts
from aurora_vllm.worker_integration import WorkerIntegration
from aurora_vllm.worker_records import WorkerRecords

from aurora.io.plugin_records import load_record

FACTS = EngineFacts("tiny", "", "vllm", "cpu", 0, 1, 2, 1, 4, 64, 64, 100, 0)
LIMIT_S = 60.0


@pytest.fixture
def begun(tmp_path):
    """Records of one rank, begun with the settings' folder `seen`."""
    made = []

    def begin(every_s=3600.0, folder=tmp_path / "seen"):
        records = WorkerRecords(Settings(record=folder, record_every_s=every_s), 0)
        records.lost = []
        records.begin(FACTS, on_failure=lambda: records.lost.append(1))
        made.append(records)
        return records

    yield begin
    for records in made:
        records._ended.set()


def route(records, *experts):
    counts = ChoiceCounts(torch.bincount(torch.tensor(experts), minlength=4)[None])
    records.end_pass(0, counts, counts)


def counted(folder):
    return load_record(folder / "rank-0.npz").tokens_TLE.sum(axis=(0, 1)).tolist()


def test_records_are_written_without_a_request(tmp_path, begun):
    """Nobody calls anything after the pass: neither a forward pass nor a command."""
    records = begun(every_s=0.05)
    route(records, 1, 2)
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if (tmp_path / "seen" / "rank-0.npz").exists() and counted(tmp_path / "seen") == [0, 1, 1, 0]:
            return
        time.sleep(0.01)
    pytest.fail("nothing was written")


def test_records_are_written_at_the_end(tmp_path, begun):
    records = begun()
    assert records.command("start", "mine") == f"rank 0: recording to {tmp_path / 'seen' / 'mine'}"
    route(records, 3, 3)
    records.end()
    assert counted(tmp_path / "seen") == counted(tmp_path / "seen" / "mine") == [0, 0, 0, 2]


def test_a_pass_is_not_read_before_it_ends(tmp_path, begun):
    records = begun()
    wrote = threading.Thread(target=records.command, args=("write",))
    with records.between_passes:
        route(records, 0, 1)
        wrote.start()
        wrote.join(0.1)
        assert not (tmp_path / "seen").exists()
    wrote.join(LIMIT_S)
    assert counted(tmp_path / "seen") == [1, 1, 0, 0]


def test_a_record_on_command_leaves_the_others_alone(tmp_path, begun):
    records, seen = begun(), tmp_path / "seen"
    route(records, 0)
    records.command("start", "mine")
    route(records, 1)
    assert records.command("stop", "mine") == f"rank 0: wrote {seen / 'mine' / 'rank-0.npz'}"
    route(records, 2)
    records.command("write")
    assert counted(seen / "mine") == [0, 1, 0, 0]
    assert counted(seen) == [1, 1, 1, 0]
    assert records.command("stop", "mine") == f"rank 0: records nothing to {seen / 'mine'}"
    records.command("start")
    records.command("stop")
    assert not records.active
    assert not load_record(seen / "rank-0.npz").tokens_TLE.any()


@pytest.mark.parametrize("folder", ["/etc/cron.d", "../elsewhere", "inside/../../elsewhere", "link/elsewhere"])
def test_a_command_writes_nowhere_but_in_the_settings_folder(tmp_path, begun, folder):
    records = begun()
    (tmp_path / "outside").mkdir()
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "link").symlink_to(tmp_path / "outside")
    said = records.command("start", folder)
    assert said == f"rank 0: refused: expected a folder in {tmp_path / 'seen'}, the server's record, found {folder}"
    records.end()
    assert [path.name for path in tmp_path.rglob("*.npz")] == ["rank-0.npz"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected start, write or stop, and at most one folder, found nothing"),
        (("go",), "expected start, write or stop, and at most one folder, found go"),
        (("start", 3), "expected start, write or stop, and at most one folder, found start 3"),
        (("start", "a", "b"), "expected start, write or stop, and at most one folder, found start a b"),
        (({"name": "start"},), "expected start, write or stop"),
    ],
)
def test_a_bad_command_is_one_sentence(begun, words, said):
    assert said in begun().command(*words)
    assert begun().command(*words).startswith("rank 0: refused: ")


def test_refusals_of_good_commands(tmp_path, begun):
    records = begun()
    records.command("start", "mine")
    assert records.command("start", "mine").endswith("mine is being recorded already")
    without = begun(folder=None)
    assert 'expected "record" among the settings of the server' in without.command("start", str(tmp_path))
    assert not without.active
    (tmp_path / "file").write_text("")
    nowhere = begun(folder=tmp_path / "file")
    assert "file: cannot be made a folder: File exists" in nowhere.command("write")


def test_a_folder_that_cannot_be_written_ends_its_record_alone(tmp_path, begun, caplog):
    records = begun()
    records.command("start", "mine")
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "mine").write_text("")
    records.end()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "mine: cannot be made a folder: File exists; recording stops" in caplog.text
    assert (tmp_path / "seen" / "rank-0.npz").exists()


def test_a_full_disk_ends_the_record_with_one_line_and_one_count(begun, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    records = begun()
    monkeypatch.setattr("aurora.io.files.os.replace", full)
    records._write_all()
    records.end()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith("rank-0.npz: cannot be written: No space left on device; recording stops")
    assert not records.active
    assert records.lost == [1]


def test_a_worker_holds_its_records_during_a_forward_pass():
    integration = WorkerIntegration(Settings(), 0, 1, None, None)
    taken = []

    def take():
        taken.append(integration.records.between_passes.acquire(blocking=False))

    with integration.forward_pass(1):
        other = threading.Thread(target=take)
        other.start()
        other.join()
    assert taken == [False]
    assert integration.records.between_passes.acquire(blocking=False)


def test_drift_is_told_each_time_the_settings_record_is_written(tmp_path):
    told = []
    records = WorkerRecords(Settings(record=tmp_path / "seen"), 0)
    records.begin(FACTS, lambda tokens_TLE: told.append(tokens_TLE.sum(axis=(0, 1))))
    records.command("start", "mine")
    route(records, 1, 1)
    records.command("write")
    records.command("write", "mine")
    records._ended.set()
    np.testing.assert_array_equal(told, [[0, 2, 0, 0]])


def test_a_record_that_is_stopped_before_its_turn_ends_no_others(tmp_path, begun):
    records = begun()
    records.command("start", "mine")
    folder = (tmp_path / "seen" / "mine").resolve()
    records.command("stop", "mine")
    assert records._write(folder) is None


def test_a_folder_that_is_no_path_is_refused_in_one_sentence(begun):
    assert "expected a folder, found 'a\\x00b'" in begun().command("start", "a\0b")
