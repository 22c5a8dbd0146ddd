"""Drawn faults of all kinds while a model trains: `python bench/faults.py [--faults 40] [--seed 0]`.

Ranks are killed (-9), two at once, or stopped; torchft's lighthouse is killed; links of hosts are cut (network namespaces,
root). Writes bench/results/faults-DATE.md: of each kind how often, what it cost, and the pauses. A stopped rank goes on after
four seconds.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from machine import machine
from tables import Table, write

from aurora.io import shipped
from aurora.training import elastic_run
from aurora.training.data import read_samples
from aurora.training.run import train
from aurora.types import TrainOptions

sys.path.append(str(Path(__file__).parent / "network"))
import net

HERE = Path(__file__).parent
MODEL = shipped("models/mixtral-topics")
TEXT = HERE.parent / "README.md"
RANKS = 6
STEPS_A_FAULT = 25
STOPPED_S = 4.0
OPTIONS = TrainOptions(
    ranks=RANKS, batch=24, length=24, elastic=True, transport="gloo", dtype="float64", min_replicas=3, respawn=1000,
    min_ranks=2, timeout_s=200.0, learning_rate=1e-6,  # rounding grows little, and a step too many or too few shows
)  # fmt: skip
ON_RANKS = ("kill", "kill two", "stop")
TRAINING = (*ON_RANKS, "lighthouse", "cut")


class Struck:
    """Strikes the ranks of a training run one time after the other, when all are there and some steps have passed."""

    def __init__(self, kinds: list[str], dice: random.Random) -> None:
        self.left, self.dice, self.done = (
            list(kinds),
            dice,
            list[tuple[float, str, int]](),
        )  # when, which kind, of how many ranks
        self.lighthouse = None
        self._after = STEPS_A_FAULT // 2

    def watch(self, step: int, pids: dict[int, int]) -> None:
        """Strikes, if it is time."""
        if not self.left or len(pids) < RANKS or step < self._after:
            return
        self._after = step + STEPS_A_FAULT
        kind = self.left.pop()
        victims = self.dice.sample(sorted(pids.values()), {"kill two": 2, "lighthouse": 0}.get(kind, 1))
        self.done.append((time.time(), kind, len(victims)))
        print(f"training, step {step}: {kind}", flush=True)
        if kind == "lighthouse":
            self.lighthouse._child[0].kill()
        for victim in victims:
            os.kill(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            if kind == "stop":
                threading.Timer(STOPPED_S, os.kill, (victim, signal.SIGCONT)).start()


def trained(kinds: list[str], seed: int, table: Table) -> None:
    """Adds rows of faults while a model trains."""
    struck = Struck(kinds, random.Random(seed))
    options = replace(OPTIONS, steps=STEPS_A_FAULT * (len(kinds) + 1))

    class Noted(elastic_run.Lighthouse):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            struck.lighthouse = self

    elastic_run.Lighthouse = Noted
    with tempfile.TemporaryDirectory() as folder:
        samples_NT = read_samples(MODEL, [TEXT], options.length)
        (output := Path(folder) / "elastic").mkdir()
        result = elastic_run.train_elastic(str(MODEL), samples_NT, options, output, struck.watch)
        alone = replace(options, ranks=1, elastic=False, transport="memory", min_replicas=1, respawn=0, min_ranks=1)
        plain = train(MODEL, [TEXT], alone, output=Path(folder) / "plain")
    apart = np.abs([one.loss - other.loss for one, other in zip(result.steps, plain.steps, strict=True)]).max()
    for kind in sorted(set(kinds)):
        pauses_s, left_out, times = [], 0, 0
        for (at_s, its, ranks), end in zip(struck.done, [*struck.done[1:], (np.inf, "", 0)], strict=True):
            if its != kind:
                continue
            times += 1
            caused = [pause for pause in result.pauses if at_s - 1 < pause.at_s < end[0] - 1]
            pauses_s.append(max((pause.seconds for pause in caused), default=0.0))
            left_out += sum(pause.members < RANKS - ranks for pause in caused)
        lost = f"{len(plain.steps) - len(result.steps)} steps; losses {apart:.0e} apart"
        table.add(kind, f"{times} of {kinds.count(kind)}", lost, left_out, spread(pauses_s))


def spread(seconds: list[float]) -> str:
    """Median, 95th percentile and longest."""
    if not seconds:
        return "none"
    return ", ".join(f"{np.percentile(seconds, at):.2f}" for at in (50, 95, 100)) + " s"


def cut(script: str, option: str, times: int) -> list[str]:
    """Runs a bench that cuts links of hosts. Returns what it prints."""
    if not times:
        return []
    command = [sys.executable, str(HERE / script), option, str(times)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return [
        "",
        f"`python bench/{script} {option} {times}`, exit code {said.returncode}:",
        "",
        said.stdout[said.stdout.find("#") :] or said.stderr[-2000:],
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    dice = random.Random(chosen.seed)
    possible = list(TRAINING)
    if (why_not := net.refusal()) is not None:
        print(f"no links are cut: {why_not}")
        possible.remove("cut")
    drawn = [dice.choice(possible) for _ in range(chosen.faults)]
    print(Counter(drawn), flush=True)
    table = Table(
        f"{chosen.faults} drawn faults",
        "fault | times | what was lost | healthy ranks taken for dead | pause: median, 95 %, longest",
        f"{RANKS} ranks on one host, mixtral-topics; seed {chosen.seed}. {machine()}, load {os.getloadavg()[0]:.1f} before.",
    )
    trained([kind for kind in drawn if kind != "cut"], chosen.seed, table)
    lines = [*table.lines, *cut("train_hosts.py", "--cuts", drawn.count("cut"))]
    lines += ["", f"Processes left: {len([rank for child in psutil.Process().children() for rank in child.children()])}."]
    print("\n".join(lines))
    write("faults", lines)


if __name__ == "__main__":
    main()
