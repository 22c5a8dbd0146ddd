"""Ranks that must all serve by one plan or none: every way in which they can differ."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from aurora_vllm import agreement as module
from aurora_vllm.agreement import agree


def verdicts(said, ranks, monkeypatch, timeout_s=5.0):
    """What each rank in `said` {rank: (word, trouble)} of `ranks` hears."""
    monkeypatch.setattr(module, "LATER_S", 0.1)
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        heard = {r: pool.submit(agree, store, "here", r, ranks, *word, timeout_s) for r, word in said.items()}
    return {rank: future.result() for rank, future in heard.items()}


def test_one_word_means_go(monkeypatch):
    assert verdicts(dict.fromkeys(range(4), ("plan a", None)), 4, monkeypatch) == dict.fromkeys(range(4), (None, False))


@pytest.mark.parametrize("odd", [0, 2])
def test_trouble_of_one_rank_is_everybodys_and_said_once(odd, monkeypatch):
    heard = verdicts({rank: ("plan a", "no such file" if rank == odd else None) for rank in range(3)}, 3, monkeypatch)
    assert {reason for reason, _ in heard.values()} == {f"rank {odd}: no such file"}
    assert sum(mine for _, mine in heard.values()) == 1


def test_another_plan_on_a_rank(monkeypatch):
    heard = verdicts({0: ("plan a", None), 1: ("plan b", None)}, 2, monkeypatch)
    assert {reason for reason, _ in heard.values()} == {"rank 1: its plan or settings are not rank 0's"}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_without_the_plugin(absent, monkeypatch):
    heard = verdicts({rank: ("plan a", None) for rank in range(3) if rank != absent}, 3, monkeypatch, timeout_s=0.2)
    (reason,) = {reason for reason, _ in heard.values()}
    assert f"rank {absent} said nothing within" in reason
    assert sum(mine for _, mine in heard.values()) == 1
