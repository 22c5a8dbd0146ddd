"""Serves a model by vLLM without and with the plugin, and compares greedy tokens: `python bench/gpu/served.py MODEL RANKS`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPTS = [[1 + (7 * seed + step) % 200 for step in range(16)] for seed in range(8)]
READY_S = 900
EPLB = {"num_redundant_experts": 8, "step_interval": 50, "window_size": 50}
WAYS: dict[str, tuple[list[str], dict[str, Any] | None]] = {  # vLLM's options, and the plugin's settings
    "vLLM": ([], None),
    "record": ([], {"record": "seen", "record_every_s": 1}),
    "order": ([], {"order": "auto"}),
    "follow": (["--moe-backend", "triton"], {"adapt": True, "required": True}),
    "follow through EPLB": (["--enable-eplb", "--eplb-config", json.dumps(EPLB)], {"adapt": True, "required": True}),
}


def tokens(model: str, ranks: int, options: list[str], settings: dict[str, Any] | None, log: Path) -> list[list[int]]:
    """The tokens that a server answers, from start to end of its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "vllm", "serve", model, "--port", str(port), "--data-parallel-size", str(ranks), "--enable-expert-parallel",
        "--skip-tokenizer-init", "--max-model-len", "256", "--gpu-memory-utilization", "0.5", "--dtype", "float32", *options,
    ]  # fmt: skip
    command += [] if settings is None else ["--additional-config", json.dumps({"aurora": settings})]
    environ = {**os.environ, **({"VLLM_PLUGINS": ""} if settings is None else {})}
    with (
        log.open("w") as said,
        subprocess.Popen(command, env=environ, stdout=said, stderr=said, start_new_session=True) as server,
    ):
        try:
            until = time.monotonic() + READY_S
            while True:
                try:
                    ask(port, "/health")
                    break
                except OSError as error:
                    if server.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(f"the server is not ready; see {log}") from error
                    time.sleep(1)
            return [complete(port, model, prompt) for prompt in PROMPTS]
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    """A reply of the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bytes(reply.read())


def complete(port: int, model: str, prompt: list[int]) -> list[int]:
    """A greedy answer of 32 tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    answer = json.loads(ask(port, "/v1/completions", body | {"return_token_ids": True, "detokenize": False}))
    return list(answer["choices"][0]["token_ids"])


def main() -> None:
    """Prints a line for each way, and ends with 1 if answers differ."""
    model, ranks = sys.argv[1], int(sys.argv[2])
    answers = {}
    for way, (options, settings) in WAYS.items():
        answers[way] = tokens(model, ranks, options, settings, Path(f"vllm-{way.replace(' ', '-')}.log"))
        print(f"{way}: {'equal' if answers[way] == answers['vLLM'] else 'OTHER TOKENS'}", flush=True)
    sys.exit(any(each != answers["vLLM"] for each in answers.values()))


if __name__ == "__main__":
    main()
