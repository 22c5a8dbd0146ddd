"""The doctor's findings where parts are there, missing or broken."""

import sys
from importlib import metadata

import pytest

from aurora.errors import RankFailed
from aurora.profiler import doctor
from aurora.profiler.doctor import BROKEN, MISSING, WORKS, Finding, examine, healthy
from tests.profiler.nvml import Replay


@pytest.fixture(scope="module")
def findings():
    return {finding.name: finding for finding in examine()}


def test_what_these_tests_run_on_works(findings):
    for name in ("python", "numpy", "scipy", "networkx", "numba", "torch", "transformers", "ranks over gloo", "jinja2"):
        assert findings[name].state == WORKS, findings[name]
        assert findings[name].mend == ""
    assert healthy(list(findings.values()))
    assert "round trip" in findings["ranks over gloo"].found


def test_whatever_does_not_work_says_what_to_do(findings):
    assert all(finding.mend for finding in findings.values() if finding.state != WORKS)
    assert {finding.state for finding in findings.values()} <= {WORKS, MISSING, BROKEN}


def test_versions_that_are_missing_or_too_old(monkeypatch):
    def none(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", none)
    found = doctor._library("torch", "run")
    assert (found.state, found.mend) == (MISSING, 'pip install --upgrade "aurora-moe[run]"')
    monkeypatch.setattr(metadata, "version", lambda _: "2.3.1+cu121")
    assert doctor._library("torch", "run").found == "2.3.1+cu121, expected 2.11 or newer"
    assert doctor._library("torch", "run").state == BROKEN
    monkeypatch.setattr(metadata, "version", lambda _: "99.0")
    monkeypatch.setitem(sys.modules, "networkx", None)
    broken = doctor._library("networkx", basic=True)
    assert broken.state == BROKEN
    assert "does not import" in broken.found
    assert not healthy([broken])
    assert healthy([Finding("vllm", MISSING, "")])


def test_gpus_by_nvml(monkeypatch):
    def at(machine):
        nvml = Replay(machine)
        nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return doctor._gpus()

    assert at("h100-sxm-8").found == "8 x NVIDIA H100 80GB HBM3; driver 580.65.06; NVLink"
    assert at("a100-t4").found.startswith("1 x NVIDIA A100 80GB PCIe, 1 x Tesla T4")
    split = at("a100-mig")
    assert split.state == BROKEN
    assert "MIG" in split.found
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor._gpus().mend == 'pip install "aurora-moe[gpu]"'


def test_ranks_that_do_not_meet(monkeypatch):
    from aurora.runtime.distributed import launcher

    def lost(*_, **__):
        raise RankFailed("rank 1 of 2 died (exit code 1); the others were stopped")

    monkeypatch.setattr(launcher, "launch", lost)
    found = doctor._ranks(True)
    assert found.state == BROKEN
    assert "rank 1 of 2 died" in found.found
    assert "loopback" in found.mend
    assert doctor._ranks(False).state == MISSING
