"""Agreement of ranks: every way in which their reports can differ; and lost ranks are named."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from aurora_vllm import peer_ranks as module
from aurora_vllm.peer_ranks import agree, folders_here, publish_folder
from aurora_vllm.rank_progress import ENGINE, WORKER, RankFiles, RankProgress, file_of, naming_lost_ranks, process_state
from aurora_vllm.stuck_rank import GONE, RUNS

from aurora.errors import RankFailed


def verdicts(reports, ranks, monkeypatch, timeout_s=60.0):
    """The verdict on each rank of `reports` {rank: (fingerprint, refusal)}, of `ranks`."""
    monkeypatch.setattr(module, "REPLY_MARGIN_S", 0.1)
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        found = {r: pool.submit(agree, store, "here", r, ranks, *own, timeout_s) for r, own in reports.items()}
    return {rank: future.result() for rank, future in found.items()}


def test_equal_fingerprints_are_accepted(monkeypatch):
    assert verdicts(dict.fromkeys(range(4), ("plan a", None)), 4, monkeypatch) == dict.fromkeys(range(4), (None, False))


@pytest.mark.parametrize("odd", [0, 2])
def test_a_refusal_on_one_rank_is_everybodys_and_reported_once(odd, monkeypatch):
    found = verdicts({rank: ("plan a", "no such file" if rank == odd else None) for rank in range(3)}, 3, monkeypatch)
    assert {reason for reason, _ in found.values()} == {f"rank {odd}: no such file"}
    assert sum(report_here for _, report_here in found.values()) == 1


def test_another_plan_on_a_rank(monkeypatch):
    found = verdicts({0: ("plan a", None), 1: ("plan b", None)}, 2, monkeypatch)
    assert {reason for reason, _ in found.values()} == {"rank 1: its plan or settings are not rank 0's"}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_without_the_plugin(absent, monkeypatch):
    found = verdicts({rank: ("plan a", None) for rank in range(3) if rank != absent}, 3, monkeypatch, timeout_s=2.0)
    (reason,) = {reason for reason, _ in found.values()}
    assert f"rank {absent} said nothing within" in reason
    assert sum(report_here for _, report_here in found.values()) == 1


def test_ranks_know_which_of_them_run_on_this_host():
    store = dist.HashStore()
    for rank, folder in ((0, "/a folder"), (2, "")):
        assert folders_here(store, "k", 3) is None
        publish_folder(store, "k", rank, folder)
    store.set("k/host/1", "another /b")
    assert folders_here(store, "k", 3) == {0: "/a folder", 2: ""}


def test_a_lost_rank_is_named(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for rank, pid in ((0, os.getpid()), (1, child.pid)):
        progress = RankProgress(file_of(tmp_path, rank))
        progress._words[WORKER] = progress._words[ENGINE] = pid
    files = RankFiles(tmp_path, [0, 1])
    assert files.lost() == []
    assert process_state(child.pid) == RUNS
    child.kill()
    with pytest.raises(RankFailed, match="expert-parallel rank 1 is gone: Connection closed"), naming_lost_ranks(files):
        raise RuntimeError("Connection closed\nat great length")
    child.communicate()
    assert process_state(child.pid) == GONE
    files.keep([0])
    assert files.lost() == [], "it is known to be lost"


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="bad weights"), naming_lost_ranks(None):
        raise RuntimeError("bad weights")
