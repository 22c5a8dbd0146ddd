"""Serves a model by vLLM without and with the plugin, and compares greedy answers: `python bench/gpu/served.py MODEL RANKS`.

Sums in bf16 depend on their sequence, so that two tokens that are about as likely may change places. An answer is compared up
to the first token that differs, which vLLM without the plugin must find as likely as its own, within CLOSE.
"""

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
CLOSE = 0.1  # of log-probabilities: 2 roundings of bf16 at logits of 16
Answer = tuple[list[int], list[dict[str, float]]]  # tokens, and for each the log-probabilities of the likeliest ones
EPLB = {"num_redundant_experts": 8, "step_interval": 50, "window_size": 50}
WAYS: dict[str, tuple[list[str], dict[str, Any] | None]] = {  # vLLM's options, and the plugin's settings
    "vLLM": ([], None),
    "record": ([], {"record": "seen", "record_every_s": 1}),
    "order": ([], {"order": "auto"}),
    "follow": (["--moe-backend", "triton"], {"adapt": True, "required": True}),
    "follow through EPLB": (["--enable-eplb", "--eplb-config", json.dumps(EPLB)], {"adapt": True, "required": True}),
}


def tokens(model: str, ranks: int, options: list[str], settings: dict[str, Any] | None, log: Path) -> list[Answer]:
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


def complete(port: int, model: str, prompt: list[int]) -> Answer:
    """A greedy answer of 32 tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = json.loads(ask(port, "/v1/completions", body))["choices"]
    return list(choice["token_ids"]), list(choice["logprobs"]["top_logprobs"])


def difference(found: Answer, expected: Answer) -> str | None:
    """Returns in words where an answer differs from the expected one by more than rounding explains, or None."""
    for at, (token, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        likely = expected[1][at]
        own = likely[f"token_id:{wanted}"]
        if token != wanted:
            apart = own - likely.get(f"token_id:{token}", float("-inf"))
            return None if apart <= CLOSE else f"token {at} is {token}, expected {wanted}, {apart:.2g} likelier"
    return None


def main() -> None:
    """Prints a line for each way, and ends with 1 if answers differ."""
    model, ranks = sys.argv[1], int(sys.argv[2])
    answers: dict[str, list[Answer]] = {}
    differ = False
    for way, (options, settings) in WAYS.items():
        answers[way] = tokens(model, ranks, options, settings, Path(f"vllm-{way.replace(' ', '-')}.log"))
        wrong = [each for pair in zip(answers[way], answers["vLLM"], strict=True) if (each := difference(*pair)) is not None]
        differ |= bool(wrong)
        print(f"{way}: {'; '.join(wrong) or 'alike'}", flush=True)
    sys.exit(differ)


if __name__ == "__main__":
    main()
