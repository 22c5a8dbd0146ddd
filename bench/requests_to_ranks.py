"""Requests to ranks on real vLLM servers with emulated devices, and as simulated: `python bench/requests_to_ranks.py [RUNS]`.

It runs where vLLM is installed for CPUs, and writes bench/results/requests-to-ranks-DATE.md. Four data-parallel ranks serve a
tiny model. `bench/emulated` lets each forward pass take T0 + CP x prompt tokens + CD x generating requests, by sleeping:
lockstep, schedulers, routing and API server are vLLM's own, and devices share no cores. Prompts and arrivals are those of
traces (AURORA_DATA, default ../shared/data), with shorter lengths. A server of each rule is up all the time; they take turns.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
from tables import Table, write

from aurora.algorithms.requests import dispatch
from aurora.algorithms.requests.steps import Cadence, RanksAtStep
from aurora.io import shipped
from aurora.io.requests import load_requests
from aurora.simulator.serving import serve
from aurora.types import RequestOptions, Requests

HERE = Path(__file__).parent
ROOT = HERE.parent
DATA = Path(os.environ.get("AURORA_DATA", ROOT.parent / "shared" / "data")) / "request_traces"
RANKS = 4
T0, CP, CD = 0.08, 0.0032, 0.0004
REAL = float(os.environ.get("REAL_S", "0.03"))  # seconds that this machine takes for a pass of the tiny model
MOST_TOKENS, MOST_SEQS, CONTEXT = 1024, 64, 2304
RULES = {"requests": "stock", "tokens": "tokens", "cadence": "cadence"}  # by name in the simulator: the plugin's setting
FIGURES = ("tokens/s", "TTFT p50, s", "TTFT p95, s", "TPOT p50, ms")


def shortened(file: str, requests: int, inputs: int, outputs: int, most: int, faster: float) -> Requests:
    """Returns the first requests of a trace, with tokens divided by `inputs` and `outputs`, `faster` times as fast."""
    trace = load_requests(DATA / file)
    arrivals = (trace.arrival_s_Q[:requests] - trace.arrival_s_Q[0]) / faster
    prompts = np.clip(trace.input_tokens_Q[:requests] // inputs, 4, 2000)
    return Requests(arrivals, prompts, np.clip(trace.output_tokens_Q[:requests] // outputs, 2, most))


def workloads() -> dict[str, Requests]:
    """Returns the requests of each workload, by name."""
    return {
        "Azure conversation": shortened("azure_conv_2023.csv", 480, 8, 4, 150, 1.6),
        "Mooncake conversation": shortened("mooncake_conversation.jsonl", 140, 32, 8, 100, 0.7),
        "equal requests": Requests(np.arange(480) * 0.25, np.full(480, 115), np.full(480, 66)),
    }


class VllmCadence(Cadence):
    """The cadence as vLLM keeps it: a rank that generates nothing computes its prompts at once, alone."""

    def open_R(self, ranks: RanksAtStep) -> list[bool]:
        return [opens or not busy for opens, busy in zip(super().open_R(ranks), ranks.generating_R, strict=True)]


def simulated(requests: Requests, rule: str) -> tuple[float, ...]:
    """Returns the figures of requests as simulated."""
    options = RequestOptions(max_num_batched_tokens=MOST_TOKENS, max_num_seqs=MOST_SEQS, dispatch=rule)
    served = serve(
        requests, RANKS, lambda prompt_G, generating_G: float((T0 + CP * prompt_G + CD * generating_G).max()), options
    )
    return figures(requests, served.first_s_Q - served.arrival_s_Q, served.last_s_Q - served.first_s_Q, served.last_s_Q.max())


def figures(requests: Requests, first_s_Q: Any, rest_s_Q: Any, span_s: float) -> tuple[float, ...]:
    """Returns FIGURES from seconds to the first token, from there to the last, and in all."""
    tokens = int((requests.input_tokens_Q + requests.output_tokens_Q).sum())
    each_s_Q = rest_s_Q / np.maximum(1, requests.output_tokens_Q - 1)
    return tokens / span_s, *np.percentile(first_s_Q, (50, 95)), float(np.median(each_s_Q)) * 1e3


class Server:
    """A vLLM server with emulated devices."""

    def __init__(self, model: Path, setting: str, port: int, folder: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{setting}.log"
        options = {
            "--served-model-name": "model", "--port": port, "--data-parallel-size": RANKS, "--dtype": "float32",
            "--max-model-len": CONTEXT, "--max-num-seqs": MOST_SEQS, "--max-num-batched-tokens": MOST_TOKENS,
            "--api-server-count": 1, "--kv-cache-memory-bytes": 200_000_000,
            "--additional-config": json.dumps({"aurora": {"requests": setting}}),
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        words += ["--enable-expert-parallel", "--enforce-eager", "--no-enable-prefix-caching"]
        path = os.pathsep.join([str(HERE / "emulated"), str(ROOT), str(ROOT / "integrations")])
        environ = {
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path, "EMULATE": f"{T0},{CP},{CD},{REAL}",
        }  # fmt: skip
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *words]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environ, start_new_session=True)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Waits until the server answers, and warms its ranks up."""
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(1)
        await self.measure(session, Requests(np.zeros(16), np.full(16, 600), np.full(16, 8)))

    async def measure(self, session: aiohttp.ClientSession, requests: Requests) -> tuple[float, ...]:
        """Sends requests at their times, and returns FIGURES."""
        began = time.monotonic()
        times = np.array(await asyncio.gather(*(self._one(session, requests, number) for number in range(len(requests)))))
        sent_Q, first_Q, last_Q = times.T
        return figures(requests, first_Q - sent_Q, last_Q - first_Q, last_Q.max() - began)

    async def _one(self, session: aiohttp.ClientSession, requests: Requests, number: int) -> tuple[float, float, float]:
        await asyncio.sleep(float(requests.arrival_s_Q[number]))
        prompt = [(number * 7 + place * 13) % 250 + 3 for place in range(int(requests.input_tokens_Q[number]))]
        tokens = int(requests.output_tokens_Q[number])
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        sent = first = last = time.monotonic()
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = time.monotonic()
                    first = last if first == sent else first
        return sent, first, last

    def end(self) -> None:
        """Ends the server's processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            time.sleep(4)


def make_model(folder: Path) -> Path:
    """Returns the folder of a tiny model whose context is long enough."""
    model = folder / "model"
    subprocess.run([sys.executable, ROOT / "tests/integrations/tiny.py", "qwen3moe", model], check=True)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (model / "config.json").write_text(json.dumps(config))
    for file in shipped("models/qwen3moe-stdlib").glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    return model


async def measured(runs: int, folder: Path) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Returns the figures of all runs, by workload and rule."""
    model, found = make_model(folder), defaultdict[tuple[str, str], list[tuple[float, ...]]](list)
    servers = {rule: Server(model, setting, 8171 + number, folder) for number, (rule, setting) in enumerate(RULES.items())}
    limits = {"timeout": aiohttp.ClientTimeout(total=None), "connector": aiohttp.TCPConnector(limit=0, force_close=True)}
    try:
        async with aiohttp.ClientSession(**limits) as session:
            await asyncio.gather(*(server.ready(session) for server in servers.values()))
            for run in range(runs):
                for name, requests in workloads().items():
                    for rule, server in servers.items():
                        found[name, rule].append(await server.measure(session, requests))
                        print(run, name, rule, *found[name, rule][-1], "load", os.getloadavg()[0], flush=True)
    finally:
        for server in servers.values():
            server.end()
    return found


def ratios(figures: Sequence[float], of: Sequence[float]) -> str:
    """Returns figures over others, in percent."""
    return " / ".join(f"{100 * figure / other:.0f}" for figure, other in zip(figures, of, strict=True))


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with TemporaryDirectory() as folder:
        found = asyncio.run(measured(runs, Path(folder)))
    report(found)


def report(found: dict[tuple[str, str], list[tuple[float, ...]]]) -> None:
    """Writes the figures of all runs beside those that the simulator predicts."""
    columns = (
        "workload",
        "rule",
        "runs",
        *FIGURES,
        "measured, % of requests",
        "simulated",
        "simulated, ranks that generate nothing go on alone",
    )
    table = Table("Requests to ranks", " | ".join(columns), __doc__ or "")
    for name, rule in found:
        medians, base = (np.median(found[name, of], axis=0) for of in (rule, "requests"))
        simulation, plain = (simulated(workloads()[name], of) for of in (rule, "requests"))
        with mock.patch.object(dispatch, "Cadence", VllmCadence):
            alone = simulated(workloads()[name], rule)
        cells = name, rule, len(found[name, rule]), *(f"{figure:.2f}" for figure in medians), ratios(medians, base)
        table.add(*cells, ratios(simulation, plain), ratios(alone, plain))
    spread = max(float(np.ptp(each, axis=0)[0] / np.median(each, axis=0)[0]) for each in found.values())
    about = f"Medians; tokens/s differ by at most {100 * spread:.0f} % between runs of one rule."
    write("requests-to-ranks", table.lines, [about + f" Load of the machine at the end: {os.getloadavg()[0]:.1f}."])


if __name__ == "__main__":
    main()
