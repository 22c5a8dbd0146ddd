"""Heartbeats tell which rank hangs, also those that wait for it in gloo."""

import os
import signal
import time

import pytest
import torch

from aurora.errors import RankFailed
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.process_groups import SILENT, Heartbeats, default_process_group, new_process_group


class Store(dict):
    """A store within one thread."""

    def clone(self):
        return self

    def add(self, key, number):
        self[key] = self.get(key, 0) + number

    def multi_get(self, keys):
        return [self[key] for key in keys]


def test_a_rank_without_heartbeats_is_silent(monkeypatch):
    monkeypatch.setattr(Heartbeats, "_run", lambda _self: None)
    store = Store()
    first, second, third = (Heartbeats(store, rank, 4) for rank in range(3))
    for look in range(2 * SILENT):
        assert first.silent == ([] if look <= SILENT else [2, 3])
        second.beat()
        first.look()  # does not wait for rank 3, which has never been there
    third.beat()
    first.look()
    assert first.silent == [3]


def gather_with_a_stopped_peer(rank_info, folder):
    """Rank 1 of 4 is stopped while the others gather; rank 3 leaves them first."""
    rank = rank_info.rank
    with default_process_group(rank_info) as heartbeats:
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        transport = GlooTransport(new_process_group("gloo", 8.0 if rank == 3 else 12.0), None, heartbeats)
        transport.gather(torch.zeros(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "was stopped"
        with pytest.raises(RankFailed) as lost:
            transport.gather(torch.zeros(1))
        if rank == 3:
            del transport
        (folder / f"done{rank}").touch()
        while len(list(folder.glob("done*"))) < 3:
            time.sleep(0.01)
        if rank == 0:
            os.kill(int((folder / "pid1").read_text()), signal.SIGCONT)
        return str(lost.value)


def test_a_stopped_peer_is_named_by_all_that_gather(tmp_path):
    said_R = launch(gather_with_a_stopped_peer, 4, tmp_path, timeout_s=60)
    assert said_R[1] == "was stopped"
    for rank in (0, 2, 3):
        assert said_R[rank].startswith(f"rank {rank} lost rank 1: ")
