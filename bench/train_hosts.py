"""Losses of `aurora train --elastic` over several hosts whose links are cut, beside those of a run without faults.

`python bench/train_hosts.py [--hosts 4] [--cuts 6] [--steps 400]` trains the shipped Mixtral in float64 on hosts that are
network namespaces (needs root), one of which runs the lighthouse. Again and again the link of another host is cut, and is back
after a while. Writes bench/results/train-hosts-DATE.md: how far the losses are from those of one process, and the pauses.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import machine
from tables import Table, write

from aurora.io import shipped
from aurora.training.run import train
from aurora.types import TrainOptions

sys.path.append(str(Path(__file__).parent / "network"))
import net

MODEL = shipped("models/mixtral-topics")
TEXT = MODEL / "tokenizer.json"
PORT, BATCH, LENGTH, RANKS = 29600, 8, 24, 2
MOST_S = 900.0  # without a step
LIGHTHOUSE = [
    *(sysconfig.get_path("scripts") + "/torchft_lighthouse", f"--bind={net.SUBNET}.1:{PORT}", "--min_replicas=1"),
    *("--join_timeout_ms=2000", "--heartbeat_timeout_ms=2000", "--quorum_tick_ms=50"),
]


def command(output: Path, steps: int) -> list[str]:
    """Returns the command of a host."""
    options = [f"--ranks={RANKS}", f"--min-ranks={RANKS}", f"--timeout={MOST_S:g}", f"--lighthouse={net.SUBNET}.1:{PORT}"]
    options += [f"--steps={steps}", f"--batch={BATCH}", f"--length={LENGTH}", "--dtype=float64", "--checkpoint-every=50"]
    start = [sys.executable, "-m", "aurora", "train", str(MODEL), "--text", str(TEXT), "--elastic", "-o", str(output)]
    return [*start, *options]


def logged(output: Path) -> dict[int, dict]:
    """Returns the steps of the log by number; the last one counts."""
    log = output / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return {step["step"]: step for step in map(json.loads, (line for line in lines if line.endswith("\n")))}


def wait_for(output: Path, step: int, processes: list[subprocess.Popen], members: int | None = None) -> None:
    """Waits until a step is logged and, if wanted, the last change of membership has led to so many ranks."""
    since_s = time.monotonic()
    while True:
        steps = logged(output)
        pauses = [each["pause"]["members"] for _, each in sorted(steps.items()) if each["pause"]]
        if max(steps, default=-1) >= step and (members is None or pauses[-1:] == [members]):
            return
        if time.monotonic() - since_s > MOST_S or processes[0].poll() is not None:
            raise SystemExit(f"step {step} of {members} ranks did not come, only {max(steps, default=-1)} of {pauses[-1:]}")
        time.sleep(0.05)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--cuts", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    if (why_not := net.refusal()) is not None:
        raise SystemExit(why_not)
    dice, processes = random.Random(1), list[subprocess.Popen]()
    with tempfile.TemporaryDirectory() as folder, net.network([1e9] * chosen.hosts, buffer_bytes=1 << 20) as hosts:
        output = Path(folder) / "out"
        try:
            for host in hosts:
                line = ["ip", "netns", "exec", host, *command(output, chosen.steps)]
                processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
            line = ["ip", "netns", "exec", hosts[0], *LIGHTHOUSE]
            processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_for(output, 2, processes, RANKS * chosen.hosts)
            for _ in range(chosen.cuts):
                lost = dice.randrange(1, chosen.hosts)
                net.unplug(lost)
                wait_for(output, max(logged(output)) + 2, processes, RANKS * (chosen.hosts - 1))
                net.plug_in_again(lost)
                wait_for(output, max(logged(output)) + 2, processes, RANKS * chosen.hosts)
            ended = [process.wait(MOST_S) for process in processes[:-1]]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        steps = logged(output)
        options = TrainOptions(chosen.steps, batch=BATCH, length=LENGTH, dtype="float64", transport="memory")
        plain = train(MODEL, [TEXT], options, output=Path(folder) / "plain")
    assert plain is not None
    apart = np.abs([steps[each.step]["loss"] - each.loss for each in plain.steps]).max()
    pauses_s = [sum(value for name, value in each["pause"].items() if name.endswith("_s") and name != "at_s")
                for each in steps.values() if each["pause"]]  # fmt: skip
    table = Table(
        "Training over hosts whose links are cut",
        "hosts | ranks | cuts | exit codes | steps | largest difference of a loss | pauses | median | longest",
        f"{chosen.steps} steps in float64, every cut and every return is a pause. {machine()}.",
    )
    pause = f"{np.median(pauses_s):.2f} s", f"{max(pauses_s):.2f} s"
    ranks = RANKS * chosen.hosts
    table.add(chosen.hosts, ranks, chosen.cuts, set(ended), len(steps), f"{apart:.1e}", len(pauses_s), *pause)
    table.lines.append(f"\nLargest difference of a loss: {apart:.1e}, {'within' if apart < 1e-9 else 'beyond'} 1e-9.")
    print("\n".join(table.lines))
    write("train-hosts", table.lines)


if __name__ == "__main__":
    main()
