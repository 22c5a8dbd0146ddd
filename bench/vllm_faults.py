"""Losses of ranks under `aurora vllm --survive`: `.venv-vllm/bin/python bench/vllm_faults.py [--kills 50] [--signal KILL]`.

Needs what `make test-vllm` installs. A random Qwen3-MoE of three layers and eight experts, two ranks hold each expert, four
data-parallel ranks on the CPU. While streams run, a signal ends (KILL) or stops (STOP) a drawn process (server, engine or
worker) of a drawn rank; with two ranks left the next one waits until the lost ones are back. Every stream must end whole, with
the tokens of one rank.
Seconds to served on go from the kill to the later one of two moments: the command says that the others serve on; a request sent
at the kill is answered. Results: bench/results/vllm-faults-DATE.json, written after each kill.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from machine import machine  # noqa: E402
from tables import today  # noqa: E402

from tests.integrations.survivors import ENVIRON, Command, left  # noqa: E402

RANKS, LEAST, STREAMS, NEW = 4, 2, 6, 150
START_S, SERVED_S, BACK_S = 1200, 60, 1800
PROMPTS = [[random.Random(seed).randrange(1, 250) for _ in range(5 + 7 * seed)] for seed in range(STREAMS)]


def alone(model: Path, folder: Path) -> list[list[int]]:
    """The tokens of one rank."""
    job = {"model": str(model), "prompts": PROMPTS, "new_tokens": NEW, "llm": {"kv_cache_memory_bytes": 64 << 20}}
    (folder / "job.json").write_text(json.dumps(job))
    environ = {**os.environ, **ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [sys.executable, str(ROOT / "tests/integrations/engine.py"), str(folder / "job.json")]
    subprocess.run(words, env=environ, check=True, capture_output=True)
    answers = json.loads((folder / "answers-0.json").read_text())["answers"]
    return [answers[str(index)]["tokens"] for index in range(STREAMS)]


def kill(
    command: Command, alive: list[int], expected: list[list[int]], rng: random.Random, sent: signal.Signals
) -> dict[str, Any]:
    """Sends a signal to a process of a rank while streams run. Returns what became of it."""
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        streams = [pool.submit(command.stream, PROMPTS[index], NEW) for index in range(STREAMS)]
        time.sleep(rng.uniform(0.5, 2.0))
        rank = rng.choice(alive)
        kinds = command.processes(rank)
        kind = rng.choice(sorted(kinds))
        began_s = time.monotonic()
        os.kill(kinds[kind], sent)
        probe = pool.submit(command.stream, PROMPTS[0], 1)
        alive.remove(rank)
        said_s = command.said("serve on, after", began_s, SERVED_S) - began_s
        probe.result()
        answered_s = time.monotonic() - began_s
        wrong, broken = 0, []
        for index, stream in enumerate(streams):
            try:
                wrong += stream.result() != expected[index]
            except Exception as error:
                broken.append(f"{type(error).__name__}: {error}"[:200])
    fresh = sum(command.stream(PROMPTS[index], 16) != expected[index][:16] for index in range(STREAMS))
    return {
        "rank": rank, "process": kind, "said_s": round(said_s, 3), "served_s": round(max(said_s, answered_s), 3),
        "wrong": wrong, "wrong_after": fresh, "broken": broken, "left": left(command.servers[rank]), "load": os.getloadavg()[0],
    }  # fmt: skip


def summary(
    kills: list[dict[str, Any]], failed: list[str], starts_s: list[float], back_s: list[float], left_over: int
) -> dict[str, Any]:
    """The figures of all kills; `failed` says which starts failed, and after which kills nobody served on or came back."""
    quantiles = np.quantile([each["served_s"] for each in kills] or [np.nan], [0.5, 0.95, 1]).round(2).tolist()
    return {
        "what": " ".join((__doc__ or "").split("\n\n")[1].split()), "machine": machine(), "command": sys.argv[1:],
        "kills": len(kills), "failed": failed, "served_s": dict(zip(("p50", "p95", "most"), quantiles, strict=True)),
        "wrong_answers": sum(each["wrong"] + each["wrong_after"] for each in kills),
        "broken_streams": sum(len(each["broken"]) for each in kills), "left_over": left_over, "starts_s": starts_s,
        "all_back_s": back_s,
        "each": kills,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60, help="after which no server is started anew")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / f"bench/results/vllm-faults-{today()}.json")
    args = parser.parse_args()
    sent = signal.Signals[f"SIG{args.signal}"]
    rng, until_s = random.Random(args.seed), time.monotonic() + args.minutes * 60
    kills: list[dict[str, Any]] = []
    starts_s, back_s, failed, left_over = list[float](), list[float](), list[str](), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), Path(temporary) / "model"
        subprocess.run([sys.executable, str(ROOT / "tests/integrations/tiny.py"), "qwen3moe", str(model)], check=True)
        expected = alone(model, folder)
        while len(kills) < args.kills and time.monotonic() < until_s:
            command, alive, began_s = Command(model, folder / "state", RANKS), list(range(RANKS)), time.monotonic()
            try:
                starts_s.append(round(command.said("ready on", began_s, START_S) - began_s, 1))
                with ThreadPoolExecutor(STREAMS) as pool:  # the first passes of all ranks
                    first = list(pool.map(command.stream, PROMPTS, [NEW] * STREAMS))
                assert first == expected, "answers without a loss"
                while len(kills) < args.kills and time.monotonic() < until_s:
                    command.find_servers()
                    began_s = time.monotonic()
                    kills.append({"start": len(starts_s), **kill(command, alive, expected, rng, sent)})
                    print(kills[-1], flush=True)
                    args.out.write_text(json.dumps(summary(kills, failed, starts_s, back_s, left_over), indent=1) + "\n")
                    if len(alive) == LEAST:
                        at_s = command.said(f"{RANKS} of {RANKS} ranks serve on", began_s, BACK_S)
                        back_s.append(round(at_s - began_s, 1))
                        alive = list(range(RANKS))
            except (AssertionError, TimeoutError, OSError) as error:
                failed.append(f"{'after' if command.servers else 'in'} start {len(starts_s)}: {error}")
                print(failed[-1], flush=True)
            finally:
                left_over += command.end()
            args.out.write_text(json.dumps(summary(kills, failed, starts_s, back_s, left_over), indent=1) + "\n")


if __name__ == "__main__":
    main()
