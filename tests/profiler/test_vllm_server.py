"""Commands to a server, whose part an HTTP server of the standard library plays."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from aurora_vllm.traffic_recorder import EngineFacts, TrafficRecorder

from aurora.errors import BadInput
from aurora.io.engine_records import save_record
from aurora.profiler.vllm_server import profile_vllm_server

FACTS = EngineFacts("tiny", "", "vllm", "cpu", 0, 1, 2, 1, 4, 64, 64, 100, 0)


@pytest.fixture
def server():
    """(url, state): state["code"] is what it answers, state["said"] what it heard."""
    state = {"code": 200, "said": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["said"].append((self.path, body))
            if body["args"] == ["stop"]:
                recording = TrafficRecorder(FACTS)
                recording.count(3, 0, np.array([1, 0, 2, 1]))
                save_record(recording.record(), Path(state["said"][0][1]["args"][1]))
            self.send_response(state["code"])
            self.end_headers()

        def log_message(self, *_args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/", state
        found.shutdown()
        thread.join()


def test_start_wait_stop_read(server, tmp_path):
    url, state = server
    slept = []
    profile = profile_vllm_server(url, tmp_path / "seen", 42.0, slept.append)
    assert slept == [42.0]
    assert profile.tokens_TLSE.tolist() == [[[[1, 0, 2, 1]]]]
    assert state["said"] == [
        ("/collective_rpc", {"method": "aurora", "args": ["start", str(tmp_path / "seen")]}),
        ("/collective_rpc", {"method": "aurora", "args": ["stop"]}),
    ]
    with pytest.raises(BadInput, match="expected a folder without records"):
        profile_vllm_server(url, tmp_path / "seen", 1.0, slept.append)


@pytest.mark.parametrize(
    ("code", "sentence"), [(404, "VLLM_SERVER_DEV_MODE=1"), (500, "additional-config"), (418, "answers 418")]
)
def test_what_a_server_refuses(server, code, sentence, tmp_path):
    url, state = server
    state["code"] = code
    with pytest.raises(BadInput, match=sentence):
        profile_vllm_server(url, tmp_path, 0.0)


def test_no_server(tmp_path):
    for url in ("http://127.0.0.1:9", "nowhere"):
        with pytest.raises(BadInput, match="no server answers"):
            profile_vllm_server(url, tmp_path, 0.0)
