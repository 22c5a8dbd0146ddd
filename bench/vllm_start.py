"""Seconds until `aurora vllm` serves, beside plain `vllm serve`: `.venv-vllm/bin/python bench/vllm_start.py [--rounds 4]`.

Needs what `make test-vllm` installs. A random Qwen3-MoE on two data-parallel ranks on the CPU. The commands start by turns, and
each ends before the next. Results: bench/results/vllm-start-DATE.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from machine import machine  # noqa: E402
from tables import Table, write  # noqa: E402

from tests.integrations.survivors import ENVIRON, OPTIONS, left  # noqa: E402

COMMANDS = {
    "vllm serve": ("-P", "-m", "vllm.entrypoints.cli.main", "serve", "--enable-expert-parallel"),
    "aurora vllm": ("-m", "aurora", "vllm"),
}
LONGEST_S = 1200


def seconds(words: list[str], port: int) -> float:
    """Starts a server, waits until it serves, and ends it."""
    began_s = time.monotonic()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([sys.executable, *words], env={**os.environ, **ENVIRON}, **quiet) as process:  # type: ignore[call-overload]
        while process.poll() is None and time.monotonic() < began_s + LONGEST_S:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            time.sleep(0.05)
        took_s, code = time.monotonic() - began_s, process.poll()
        process.terminate()
    assert code is None, f"the server has ended, exit code {code}"
    assert not left(process.pid, 30), "processes are left"
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    from aurora_vllm.child_processes import free_ports

    table = Table("Until two data-parallel ranks serve", "round | vllm, s | aurora, s | ratio | load", f"{machine()}.")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(ROOT / "tests/integrations/tiny.py"), "qwen3moe", f"{folder}/model"], check=True)
        for number in range(rounds):
            took_s = []
            for name, words in COMMANDS.items():
                (port,) = free_ports(1)
                more = ["--state", f"{folder}/state-{number}"] if name == "aurora vllm" else []
                given = [f"{folder}/model", "--port", str(port), "--data-parallel-size", "2", *OPTIONS, *more]
                took_s.append(seconds([*words, *given], port))
            ratios.append(took_s[1] / took_s[0])
            table.add(number, *(f"{each:.1f}" for each in took_s), f"{ratios[-1]:.2f}", f"{os.getloadavg()[0]:.1f}")
    write("vllm-start", table.lines, [f"Median ratio {statistics.median(ratios):.2f}."])


if __name__ == "__main__":
    main()
