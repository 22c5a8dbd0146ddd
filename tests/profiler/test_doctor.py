"""The doctor's findings where parts are there, missing or broken."""

import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from threading import Thread

import pytest

from aurora.errors import BadInput, RankFailed
from aurora.profiler import doctor
from aurora.profiler.doctor import BROKEN, MISSING, WORKS, Finding, examine, healthy
from tests.profiler.nvml import Replay


@pytest.fixture(scope="module")
def findings():
    return {finding.name: finding for finding in examine()}


def test_what_these_tests_run_on_works(findings):
    for name in ("python", "numpy", "scipy", "numba", "torch", "transformers", "ranks over gloo", "jinja2"):
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
    monkeypatch.setitem(sys.modules, "scipy", None)
    broken = doctor._library("scipy", basic=True)
    assert broken.state == BROKEN
    assert "does not import" in broken.found
    assert not healthy([broken])
    assert healthy([Finding("vllm", MISSING, "")])


def test_gpus_by_nvml(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))

    def at(machine):
        nvml = Replay(machine)
        nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return doctor._gpus()

    alone = at("h100-sxm-8")
    assert alone.found == "8 x NVIDIA H100 80GB HBM3; driver 580.65.06; NVLink; no MPS"
    assert "--gpu-memory-utilization 0.45" in alone.mend
    assert "nvidia-cuda-mps-control -d" in alone.mend
    (tmp_path / "control").touch()
    assert at("h100-sxm-8").found.endswith("NVLink; MPS")
    assert "nvidia-cuda-mps-control" not in at("h100-sxm-8").mend
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


def test_an_allow_list_without_the_plugin_is_found(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")
    for allowed, state in (("lora,aurora", WORKS), ("lora", BROKEN), ("", BROKEN)):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        assert doctor._vllm().state == state
    assert doctor._vllm().mend == "where VLLM_PLUGINS is set, add aurora to it"


METRICS = """# HELP aurora_engaged x
vllm:num_requests_running{engine="0"} 0.0
aurora_engaged{ep_rank="0",model_name="m",reason=""} 1.0
aurora_engaged{ep_rank="1",model_name="m",reason=""} 1.0
aurora_watchdog_timestamp_seconds{ep_rank="0",model_name="m"} NOW
aurora_watchdog_timestamp_seconds{ep_rank="1",model_name="m"} LOOKED
aurora_stuck_rank{cause="stopped",ep_rank="1",model_name="m",reason="is stopped: \\"it\\""} STUCK
aurora_stuck_rank{cause="link",ep_rank="",model_name="m",reason="waits"} 0.0
"""


@pytest.fixture
def server():
    """The address of a server whose /metrics are set by its `shown`."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(self.server.shown.encode())

        def log_message(self, *_given):
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{made.server_port}"
        yield made
        made.shutdown()


def test_a_server_is_examined_by_its_metrics(server):
    def said(looked_ago_s, stuck):
        now_s = time.time()
        server.shown = (
            METRICS.replace("NOW", str(now_s)).replace("LOOKED", str(now_s - looked_ago_s)).replace("STUCK", str(stuck))
        )
        return [(finding.name, finding.state, finding.found) for finding in doctor.examine_server(server.url)]

    healthy_server = [("plugin", WORKS, "engaged on 2 ranks"), ("watchdog", WORKS, "looked 1 s ago or less, on 2 ranks")]
    assert [(name, state) for name, state, _ in said(1, 0.0)] == [each[:2] for each in healthy_server]
    stuck = said(30, 1.0)
    assert stuck[1:] == [("watchdog", BROKEN, "silent on rank 1"), ("rank 1", BROKEN, 'is stopped: "it"')]
    server.shown = 'aurora_engaged{ep_rank="0",model_name="m",reason="no plan"} 0.0'
    assert [finding.state for finding in doctor.examine_server(server.url)] == [BROKEN, MISSING]
    server.shown = "vllm:num_requests_running 0.0"
    (missing,) = doctor.examine_server(server.url)
    assert (missing.state, "VLLM_PLUGINS" in missing.mend) == (MISSING, True)


def test_where_no_server_is_one_sentence_says_so():
    for url in ("http://127.0.0.1:9", "nowhere", "http://[", "http://127.0.0.1:9/\x00"):
        with pytest.raises(BadInput, match="--vllm: expected the address of a vLLM server that answers, found "):
            doctor.examine_server(url)
