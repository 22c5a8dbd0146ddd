"""`aurora vllm` of a tiny model in a process, for tests and benchmarks, of lost ranks above all. Linux only."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ANSWER_S, END_S = 600, 120
ENVIRON = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
OPTIONS = (
    "--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20),
)  # fmt: skip


def start(model: Path, folder: Path, *words: str, stdout: int = subprocess.DEVNULL) -> tuple[subprocess.Popen[str], int]:
    """Starts `aurora vllm` of a model in a process group of its own. Returns the process, and the port of its server."""
    from aurora_vllm.child_processes import free_ports

    (port,) = free_ports(1)
    given = [str(model), "--state", str(folder), "--port", str(port), *words]
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", "aurora", "vllm", *given], env={**os.environ, **ENVIRON}, **pipes), port


class Command:
    """`aurora vllm --survive` in a process; its lines with the time of each."""

    def __init__(self, model: Path, folder: Path, ranks: int, *more: str) -> None:
        self.process, self.port = start(model, folder, "--survive", "--data-parallel-size", str(ranks), *OPTIONS, *more)
        self.model, self.lines, self.servers, self.helpers = (
            str(model),
            list[tuple[float, str]](),
            dict[int, int](),
            dict[str, int](),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.strip()))

    def said(self, text: str, since_s: float, within_s: float) -> float:
        """Waits for a line since a time, and returns its time."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and self.process.poll() is None:
            for at_s, line in list(self.lines):
                if at_s >= since_s and text in line:
                    return at_s
            time.sleep(0.01)
        raise TimeoutError(
            f"no {text!r} within {within_s:g} s; lines: {[line for at_s, line in self.lines if at_s >= since_s][:8]}"
        )

    def find_servers(self) -> None:
        """Finds each rank's newest server, the leader of its process group, and the keeper and the router, by their logs.

        The spare keeper is younger than the one that serves.
        """
        self.helpers = {}
        for pid in sorted(children(self.process.pid)):
            with suppress(OSError):
                name, *number = Path(f"/proc/{pid}/fd/2").readlink().stem.split("-")
                if name == "rank":
                    self.servers[int(number[0])] = pid
                else:
                    self.helpers.setdefault(name, pid)

    def stream(self, prompt: Sequence[int], tokens: int, times: list[float] | None = None) -> list[int]:
        """Returns the tokens of a streamed completion; adds the time of each to `times`."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        found, ended = list[int](), False
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            for line in reply:
                data = line.decode().removeprefix("data:").strip()
                ended |= data == "[DONE]"
                if data and data != "[DONE]":
                    found += json.loads(data)["choices"][0].get("token_ids") or []
                    if times is not None:
                        times.append(time.monotonic())
        if not ended:
            raise ConnectionError("the stream broke off")
        return found

    def processes(self, rank: int) -> dict[str, int]:
        """Returns a rank's server, engine and worker."""
        found = {"server": self.servers[rank]}
        for pid in members(self.servers[rank]):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text()
                found |= {kind: pid for kind in ("Engine", "Worker") if f"::{kind}" in name}
        return found

    def end(self) -> int:
        """Ends it as Ctrl-C does, without its advice. Returns how many processes of its servers are left over."""
        groups = {*self.servers.values(), *children(self.process.pid)}
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        until_s = time.monotonic() + END_S
        while any(map(members, groups)) and self.process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.1)
        found = sum(map(left, groups))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join()
        with self.process:  # closes its pipe
            return found


def children(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(each) for each in listed.split()}


def members(group: int) -> list[int]:
    """Processes of a group that are no zombies."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, of, stat in rows if int(of) == group and stat[0] != "Z"]


def left(group: int, within_s: float = 5.0) -> int:
    """How many processes of a group are there after some seconds."""
    until_s = time.monotonic() + within_s
    while members(group) and time.monotonic() < until_s:
        time.sleep(0.05)
    return len(members(group))
