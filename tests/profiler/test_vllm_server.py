"""Commands to a server, whose part an HTTP server of the standard library plays."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import ChoiceCounts, EngineFacts
from aurora_vllm.worker_records import WorkerRecords

from aurora.errors import BadInput
from aurora.profiler.import_routing import profile_vllm_server

FACTS = EngineFacts("tiny", "", "vllm", "cpu", 0, 1, 2, 1, 4, 64, 64, 100, 0)


@pytest.fixture
def server(tmp_path):
    """(url, state): state["code"] is what it answers, state["said"] what it heard, state["records"] what its rank records."""
    records = WorkerRecords(Settings(record=tmp_path / "seen"), 0)
    records.begin(FACTS)
    state = {"code": 200, "said": [], "records": records, "answer": None}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["said"].append((self.path, body))
            self.send_response(state["code"])
            self.end_headers()
            answer = state["answer"] or {"results": [records.command(*body["args"])]}
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/", state
        found.shutdown()
        thread.join()
    records._ended.set()


def route(state, *experts):
    counts = ChoiceCounts(torch.bincount(torch.tensor(experts), minlength=4)[None])
    state["records"].end_pass(3, counts, counts)


def test_start_wait_stop_read(server, tmp_path):
    """The server's own record, which has files in the folder already, goes on."""
    url, state = server
    route(state, 1)
    state["records"].command("write")
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        route(state, 0, 2, 2, 3)

    profile = profile_vllm_server(url, tmp_path / "seen", 42.0, sleep)
    assert slept == [42.0]
    assert profile.tokens_TLSE.tolist() == [[[[1, 0, 2, 1]]]]
    (path, started), (_, stopped) = state["said"]
    assert path == "/collective_rpc"
    assert (started["method"], started["args"][0], stopped["args"][0]) == ("aurora", "start", "stop")
    assert started["args"][1] == stopped["args"][1]
    assert state["records"].active, "the server's own record goes on"
    again = profile_vllm_server(url, tmp_path / "seen", 1.0, sleep)
    assert again.tokens_TLSE.sum() == 4


def test_an_interrupted_record_is_ended(server, tmp_path):
    url, state = server

    def interrupt(_seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_vllm_server(url, tmp_path / "seen", 1.0, interrupt)
    assert [body["args"][0] for _, body in state["said"]] == ["start", "stop"]


def test_a_folder_that_is_not_the_servers_and_a_refusal(server, tmp_path):
    url, state = server
    with pytest.raises(BadInput, match=rf"elsewhere: expected .* the server answers: rank 0: wrote {tmp_path}/seen/"):
        profile_vllm_server(url, tmp_path / "elsewhere", 0.0)
    state["answer"] = {"results": ["rank 0: refused: it is Sunday"]}
    with pytest.raises(BadInput, match="rank 0: refused: it is Sunday"):
        profile_vllm_server(url, tmp_path / "seen", 0.0)
    state["answer"] = ["something", "else"]
    with pytest.raises(BadInput, match="expected the answers of vLLM's ranks"):
        profile_vllm_server(url, tmp_path / "seen", 0.0)


@pytest.mark.parametrize(
    ("code", "sentence"), [(404, "VLLM_SERVER_DEV_MODE=1"), (500, "additional-config"), (418, "answers 418")]
)
def test_what_a_server_refuses(server, code, sentence, tmp_path):
    url, state = server
    state["code"] = code
    with pytest.raises(BadInput, match=sentence):
        profile_vllm_server(url, tmp_path, 0.0)


def test_no_server(tmp_path):
    for url, why in (("http://127.0.0.1:9", "Connection refused"), ("nowhere", "unknown url type")):
        with pytest.raises(BadInput, match=f"^{url}: no server answers: {why}"):
            profile_vllm_server(url, tmp_path, 0.0)
