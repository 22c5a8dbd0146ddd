"""Naming who is gone."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from aurora_vllm.lost_ranks import LivePeers, alive, naming_the_dead

from aurora.errors import RankFailed


def test_who_is_gone_is_named():
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = LivePeers(store, "k", 0, 2)
    assert not here.meet()
    store.set("k/process/1", f"{os.uname().nodename} {child.pid}")
    assert here.meet()
    assert alive(child.pid)
    assert here.gone() == []
    child.kill()
    with pytest.raises(RankFailed, match="expert-parallel rank 1 is gone: Connection closed"), naming_the_dead(here):
        raise RuntimeError("Connection closed\nat great length")
    child.communicate()
    assert not alive(child.pid)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="bad weights"), naming_the_dead(None):
        raise RuntimeError("bad weights")
