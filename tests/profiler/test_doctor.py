"""The doctor's findings where parts are there, missing or broken."""

import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from threading import Thread

import pytest

from aurora.errors import BadInput, RankFailed
from aurora.profiler import doctor
from aurora.profiler.doctor import BROKEN, MISSING, WORKS, examine
from tests.test_compiled import run_without as run_without_extensions


@pytest.fixture(scope="module")
def findings():
    return {finding.name: finding for finding in examine()}


def test_what_these_tests_run_on_works_and_the_rest_says_what_to_do(findings):
    for name in ("compiled modules", "models", "ranks over gloo"):
        assert (findings[name].state, findings[name].mend) == (WORKS, ""), findings[name]
    assert all(finding.mend for finding in findings.values() if finding.state != WORKS)
    assert {finding.state for finding in findings.values()} <= {WORKS, MISSING, BROKEN}


def test_modules_that_are_not_compiled_are_found(tmp_path):
    code = (
        "from aurora.profiler import doctor\nfound = doctor._examined('compiled modules')\n"
        "print(found.state, found.found, found.mend)"
    )
    said = run_without_extensions(tmp_path, "-c", code)[1]
    assert said.startswith("broken aurora.algorithms.search.slots_core is not compiled: `pip install .`, or ")
    assert "needs a C compiler" in said


def test_ranks_that_do_not_meet_and_libraries_that_are_missing(monkeypatch):
    def lost(*_, **__):
        raise RankFailed("rank 1 of 2 died (exit code 1); the others were stopped")

    monkeypatch.setattr(doctor, "launch", lost)
    found = doctor._examined("ranks over gloo")
    assert (found.state, "rank 1 of 2 died" in found.found, "loopback" in found.mend) == (BROKEN, True, True)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name, extra in (("models", "run"), ("GPUs", "gpu")):
        assert doctor._examined(name).state == MISSING
        assert f"aurora-moe[{extra}]" in doctor._examined(name).mend


def test_an_allow_list_without_the_plugin_is_found(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")
    for allowed, state in (("lora,aurora", WORKS), ("lora", BROKEN), ("", BROKEN)):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        assert doctor._examined("vllm").state == state
    assert "where VLLM_PLUGINS is set, add aurora to it" in doctor._examined("vllm").mend


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
    for serving, state in ((2, WORKS), (1, BROKEN)):
        server.shown = f"{METRICS.splitlines()[2]}\naurora_ranks 2.0\naurora_ranks_serving {serving}.0\n"
        assert doctor.examine_server(server.url)[1].state == state
    server.shown = 'aurora_engaged{ep_rank="0",model_name="m",reason="no plan"} 0.0'
    assert [finding.state for finding in doctor.examine_server(server.url)] == [BROKEN]
    server.shown = "vllm:num_requests_running 0.0"
    (missing,) = doctor.examine_server(server.url)
    assert (missing.state, "VLLM_PLUGINS" in missing.mend) == (MISSING, True)


def test_where_no_server_is_one_sentence_says_so():
    for url in ("http://127.0.0.1:9", "nowhere", "http://[", "http://127.0.0.1:9/\x00"):
        with pytest.raises(BadInput, match="--vllm: expected the address of a vLLM server that answers, found "):
            doctor.examine_server(url)
