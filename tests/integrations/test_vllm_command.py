"""`aurora vllm` with a real vLLM on the CPU: from nothing to answers by a plan, and on without a lost rank."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.integrations.survivors import start

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("vllm", "vllm_router"))),
        reason="vllm is not installed here; make test-vllm installs it",
    ),
    pytest.mark.timeout(3600),
]
HERE = Path(__file__).parent
LIMIT_S = 900
PROMPTS = [[1 + (7 * seed + 13 * place) % 200 for place in range(4 + seed)] for seed in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer."""
    from aurora.io import shipped

    folder = tmp_path_factory.mktemp("command") / "model"
    subprocess.run([sys.executable, HERE / "tiny.py", "qwen3moe", folder], check=True)
    for file in shipped("models/qwen3moe-stdlib").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def running(pids):
    """Those of the processes that have not ended within some seconds; nobody may have collected a zombie."""
    import psutil

    until = time.monotonic() + 5
    while True:
        found = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                found += [(pid, process.cmdline())] if (process := psutil.Process(pid)).status() != "zombie" else []
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


class Served:
    """A running `aurora vllm`; what it says, and its answers."""

    def __init__(self, model, folder, *more):
        sizes = ("--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")
        self.process, port = start(model, folder / "state", "--json", *sizes, *more, stdout=subprocess.PIPE)
        self.url, self.model, self.said = f"http://127.0.0.1:{port}", str(model), []
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def wait_for(self, text):
        """The first line that has this."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and self.process.poll() is None:
            if found := [line for line in self.said if re.search(text, line)]:
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in " + "".join(self.said))

    def ask(self, prompt, stream=False, tokens=48):
        """The token ids of a greedy answer."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        body |= {"return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        if not stream:
            return json.loads(text)["choices"][0]["token_ids"]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert text.rstrip().endswith("data: [DONE]")
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]

    def children(self):
        """Process ids of all that it started and that have not ended."""
        import psutil

        return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]

    def group_of(self, name):
        """The process group of a rank's server ("rank-1"), the router or the keeper, older than its spare, by its log."""
        for pid in sorted(self.children()):
            with suppress(OSError):
                if re.match(rf"{name}\b", Path(f"/proc/{pid}/fd/2").readlink().stem):
                    return os.getpgid(pid)
        raise AssertionError(f"no {name}")

    def close(self):
        """Kills it and what it runs beside the servers, and closes its pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.reader.join()
        self.process.stderr.close()
        self.process.stdout.close()
        self.process.wait()

    def end(self, number=signal.SIGINT):
        """Exit code and the object that it prints, after Ctrl-C; no process is left."""
        started = self.children() if self.process.poll() is None else []
        self.process.send_signal(number)
        text = self.process.stdout.read()  # until it ends
        self.process.wait(LIMIT_S)
        assert running(started) == []
        return self.process.returncode, json.loads(text) if text else None


def test_one_command_from_nothing_to_an_answer_by_a_plan(model, tmp_path):
    """The first start records and advises at its end; the second serves by a plan of that record. Answers stay the same."""
    before, found, shown = answers(model, tmp_path, rounds=6)
    assert set(found) == {"schema", "state", "plan", "lost", "recommendation"}
    assert found["lost"] == ""
    assert found["recommendation"]["engine"] == "vllm"
    assert (found["plan"] is None) == (found["recommendation"]["recommendation"] is None)
    assert "no plan yet" in shown
    assert "a default, not measured" in shown
    for phase in ("starting processes", "loading the model", "serving"):
        assert phase in shown
    if found["plan"] is None:  # too little to gain on so short a record
        inputs = ["--profile", tmp_path / "state/profile.npz", "--cluster", tmp_path / "state/cluster.toml"]
        (tmp_path / "state/recommended").mkdir()
        plan = ["plan", *inputs, "--engine", "vllm", "-o", tmp_path / "state/recommended/plan.json"]
        subprocess.run([sys.executable, "-m", "aurora", *plan], check=True, stdout=subprocess.DEVNULL)
    after, _, shown = answers(model, tmp_path, rounds=1)
    assert f"serves by {tmp_path / 'state/recommended/plan.json'}" in shown
    assert "vLLM places the experts" not in shown
    assert after == before


def answers(model, folder, rounds):
    """Answers, the same in all rounds, of a server with --apply; what it printed at its end, and what it said."""
    served = Served(model, folder, "--apply")
    try:
        served.wait_for("ready on")
        with ThreadPoolExecutor(6) as pool:
            found = [list(pool.map(served.ask, PROMPTS)) for _ in range(rounds)]
        assert found == [found[0]] * rounds
        code, printed = served.end()
    finally:
        served.close()
    assert code == 0
    return found[0], printed, "".join(served.said)


@pytest.mark.slow
def test_a_lost_rank_ends_the_server_with_an_exit_code_that_tells(model, tmp_path):
    served = Served(model, tmp_path, "--data-parallel-size", "2")
    try:
        served.wait_for("ready on")
        assert len(served.ask(PROMPTS[0])) == 48
        started = served.children()
        os.kill(next(pid for pid in started if "VLLM::Worker" in Path(f"/proc/{pid}/comm").read_text()), signal.SIGKILL)
        served.wait_for(r"rank \d is lost: its process \d+ ended")
        code, found = served.process.wait(LIMIT_S), json.loads(served.process.stdout.read())
    finally:
        served.close()
    assert code == 1
    assert "ended" in found["lost"]
    assert running(started) == []


@pytest.mark.slow
def test_streams_are_whole_when_processes_are_killed_and_stopped(model, tmp_path):
    """Ranks, the router and the keeper, of a server with the options of the example for containers."""
    _, *words = yaml.safe_load((HERE.parents[1] / "integrations/examples/compose.yaml").read_text())["services"]["vllm"][
        "command"
    ]
    words = [word.replace("=8", "=3") for word in words if not word.startswith(("--host", "--port", "--state"))]
    served = Served(model, tmp_path, *words)
    try:
        served.wait_for("ready on")
        with ThreadPoolExecutor(12) as pool:
            expected = [served.ask(prompt, tokens=200) for prompt in PROMPTS]
            for lost, number in (
                ("router", signal.SIGKILL),
                ("keeper", signal.SIGKILL),
                ("rank-1", signal.SIGKILL),
                ("rank-0", signal.SIGSTOP),
            ):
                streams = [pool.submit(served.ask, prompt, True, 200) for prompt in PROMPTS]
                answers = [pool.submit(served.ask, prompt, False, 200) for prompt in PROMPTS]
                time.sleep(1.0)
                group = served.group_of(lost)
                os.killpg(group, number)
                served.wait_for(f"{lost.replace('-', ' ')} (is lost|ended, killed by signal 9)")
                assert [each.result(LIMIT_S) for each in streams] == expected
                assert [each.result(LIMIT_S) for each in answers] == expected
        assert any("2 of 3 ranks serve on" in line for line in served.said)
        code, found = served.end(signal.SIGTERM)
    finally:
        served.close()
    assert (code, found["lost"]) == (0, "")
