"""Lost ranks are named."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from aurora_vllm.lost_ranks import PeerProcesses, is_running, naming_lost_ranks

from aurora.errors import RankFailed


def test_a_lost_rank_is_named():
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = PeerProcesses(store, "k", 0, 2)
    assert not here.read_all()
    store.set("k/process/1", f"{os.uname().nodename} {child.pid}")
    assert here.read_all()
    assert is_running(child.pid)
    assert here.lost() == []
    child.kill()
    with pytest.raises(RankFailed, match="expert-parallel rank 1 is gone: Connection closed"), naming_lost_ranks(here):
        raise RuntimeError("Connection closed\nat great length")
    child.communicate()
    assert not is_running(child.pid)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="bad weights"), naming_lost_ranks(None):
        raise RuntimeError("bad weights")
