"""Fixtures that many tests share: the shipped models and small clusters."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores: threads of one operation would wait for each other

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import REGISTERED
from aurora.io import shipped
from aurora.types import Cluster, Gpu

ROOT = Path(__file__).parents[1]

# Neither a deadline nor a health check that measures time: a busy machine is slow at everything.
SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile("aurora", deadline=None, max_examples=60, derandomize=True, suppress_health_check=SLOW_IS_FINE)
settings.load_profile("aurora")


def pytest_collection_modifyitems(items):
    """Puts the tests that take longest first, so that no worker begins one when the others have nothing left to do."""
    items.sort(key=lambda item: item.path.parent != ROOT / "tests")


@pytest.fixture
def registries():
    """The dicts that methods of one's own are registered in, afterwards as they were."""
    before = [(registry, dict(registry)) for registry in (ORDER, PLACE, REGISTERED)]
    yield
    for registry, content in before:
        registry.clear()
        registry.update(content)


@pytest.fixture(scope="session")
def mixtral():
    return shipped("models/mixtral-topics")


@pytest.fixture(scope="session")
def qwen():
    return shipped("models/qwen3moe-stdlib")


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """A folder with the commands `aurora` and `python`, in processes that need not import torch and its like; all workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm"
    users = folder / "users"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            user = os.open(users, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # there is no server, or it has ended
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            subprocess.run([sys.executable, "-m", "tests.warm", str(folder)], cwd=ROOT, check=True)
            user = os.open(users, os.O_WRONLY | os.O_NONBLOCK)
    yield folder
    os.close(user)


@pytest.fixture
def text(tmp_path):
    """A UTF-8 file of 12,000 tokens for the shipped byte-level models."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"def line_{i}(x): return x + {i}\n" for i in range(400))[:12000])
    return file


def cluster(*rates, **fields):
    return Cluster("test", tuple(Gpu(f"g{i}", "cpu", 0, r, r, 10**9, **fields) for i, r in enumerate(rates)))
