"""Serves a model by vLLM in several ways, and compares greedy answers and tokens a second on skewed prompts.

Usage: python -m bench.gpu.served FOLDER RANKS WAY..., where FOLDER gets a drawn model unless it has one. Answers of ways before
are read from served.json. Sums in bf16 depend on their sequence, so that two tokens of like probability may change places. An
answer is compared up to the first token that differs, which the first way must find as likely as its own, within CLOSE.

In Triton's interpreter a stand-in of this file takes vLLM's place, and nothing of vLLM is shown.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.gpu.device import report

DRY = os.environ.get("TRITON_INTERPRET") == "1"
PROMPTS = [[1 + (7 * seed + step) % 200 for step in range(16)] for seed in range(8)]
REQUESTS, PROMPT, NEW, AT_ONCE = (4, 8, 4, 2) if DRY else (128, 256, 64, 32)  # of a rank; few words, so that experts are hot
CLOSE = 0.25  # of log-probabilities
Answer = tuple[list[int], list[dict[str, float]]]  # tokens, and for each the log-probabilities of the likeliest ones
WITH_EPLB = ["--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": 8, "step_interval": 50, "window_size": 50})]
WAYS: dict[str, tuple[list[str], dict[str, Any] | None]] = {  # vLLM's options, and the plugin's settings
    "vLLM": ([], None),
    "record": ([], {"record": "seen", "record_every_s": 1}),
    "EPLB": (WITH_EPLB, None),
    "plan": (["--enable-eplb"], {"plan": "served-plan.json", "required": True}),
    "push": (["--enable-eplb"], {"plan": "served-plan.json", "order": "push", "required": True}),
    "follow": (WITH_EPLB, {"adapt": True, "required": True}),
}


def command(model: str, ranks: int, way: str, port: int) -> list[str]:
    """Returns the command of a server."""
    options, settings = WAYS[way]
    found = ["vllm", "serve", model, "--port", str(port), "--data-parallel-size", str(ranks), "--enable-expert-parallel"]
    found += ["--skip-tokenizer-init", "--max-model-len", "512", "--gpu-memory-utilization", "0.5", *options]
    found += ["--compilation-config", json.dumps({"cudagraph_capture_sizes": [1, 8, 32]})]  # few, which are captured in seconds
    return found + ([] if settings is None else ["--additional-config", json.dumps({"aurora": settings})])


def served(model: str, ranks: int, way: str) -> dict[str, Any]:
    """Starts a server and ends it. Returns its answers, and its tokens a second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = [sys.executable, "-m", "bench.gpu.served", "--stand-in", str(port)] if DRY else command(model, ranks, way, port)
    environ = {**os.environ, **({"VLLM_PLUGINS": ""} if WAYS[way][1] is None else {})}
    log = Path(f"vllm-{way}.log")
    with log.open("w") as said:
        server = subprocess.Popen(asked, env=environ, stdout=said, stderr=said, start_new_session=True)
    try:
        while True:
            try:
                ask(port, "/health")
                break
            except OSError as error:
                if server.poll() is not None:
                    raise RuntimeError(f"the server is not ready; see {log}") from error
                time.sleep(1)
        answers = [complete(port, model, prompt, 32) for prompt in PROMPTS]
        rng = random.Random(0)
        words = rng.sample(range(1, 200), 12)
        prompts = [rng.choices(words, k=PROMPT) for _ in range(REQUESTS * ranks)]
        with ThreadPoolExecutor(AT_ONCE * ranks) as pool:
            for count in (AT_ONCE * ranks, len(prompts)):  # first to warm up
                began_s = time.monotonic()
                found = list(pool.map(lambda prompt: complete(port, model, prompt, NEW), prompts[:count]))
        return {"answers": answers, "tokens_per_s": sum(len(each[0]) for each in found) / (time.monotonic() - began_s)}
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            if server.poll() is None:
                os.killpg(server.pid, number)
            try:
                server.wait(10)
                break
            except subprocess.TimeoutExpired:
                continue


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Returns a reply of the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bytes(reply.read())


def complete(port: int, model: str, prompt: list[int], new: int) -> Answer:
    """Returns a greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 5}
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


class StandIn(BaseHTTPRequestHandler):
    """Answers as vLLM's server does, by arithmetic."""

    def do_GET(self) -> None:
        """Says that it is ready."""
        self._reply({})

    def do_POST(self) -> None:
        """Answers a completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [(sum(body["prompt"]) + step) % 200 for step in range(body["max_tokens"])]
        likely = [{f"token_id:{token}": -0.1, f"token_id:{token + 1}": -3.0} for token in tokens]
        self._reply({"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": likely}}]})

    def _reply(self, reply: dict[str, Any]) -> None:
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def make_model(folder: Path) -> None:
    """Makes a Qwen3-MoE of 4.8 GB, whose likeliest tokens are clear of others; a tiny one on a CPU."""
    if DRY:
        from tests.integrations.tiny import make

        make("qwen3moe", folder)
        return
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=128, vocab_size=32000,
        moe_intermediate_size=768, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.lm_head.weight.normal_(0, 0.1)
    model.save_pretrained(folder)


def main() -> None:
    """Prints a line for each way, and ends with 1 if answers differ."""
    if sys.argv[1] == "--stand-in":
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), StandIn).serve_forever()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    model, ranks, ways = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if not (Path(model) / "config.json").exists():
        make_model(Path(model))
    before = Path("served.json")
    results = json.loads(before.read_text()) if before.exists() else {}
    differ: dict[str, list[str]] = {}
    for way in ways:
        results[way] = served(model, ranks, way)
        before.write_text(json.dumps(results))
        expected = next(iter(results.values()))["answers"]
        pairs = zip(results[way]["answers"], expected, strict=True)
        wrong = [each for pair in pairs if (each := difference(*pair)) is not None]
        differ |= {way: wrong} if wrong else {}
        print(f"{way}: {results[way]['tokens_per_s']:.0f} tokens/s, {'; '.join(wrong) or 'answers are alike'}", flush=True)
        report(**{f"{name}_tokens_per_s": each["tokens_per_s"] for name, each in results.items()}, differ=len(differ))
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
