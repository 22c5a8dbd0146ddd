"""Step time of training under stragglers, with parts of each batch computed by one, two and three ranks.

`python bench/stragglers.py [--steps 20]` trains the shipped Mixtral on 6 ranks (processes) and writes
bench/results/stragglers-DATE.md. With redundancy 1 a step waits for all ranks. All else is the same.

Ranks wait before they compute, as if they worked on hosts of their own; what they really compute takes a small part of that:

- recorded: BASE_S seconds for each part, times what a worker of the recorded jobs took of its job's mean in that step
  (`--recorded`, by default $AURORA_DATA). Twice the parts take twice as long.
- one slow: the same, and one rank takes five times as long.
- messages: every message takes a time of its own, exponential with a mean of BASE_S, however many parts it is of: delays of the
  kind that fits the tables of the BCC paper.
- one stopped: as recorded, and one rank is stopped (SIGSTOP) after the second step, for good. Waiting for all never ends;
  the ratio is to waiting for all of the recorded, none stopped.
"""

import argparse
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine
from tables import Table, write

from aurora.algorithms.gradient_codes import load_of
from aurora.io import shipped
from aurora.training.coded_gradients import train_coded
from aurora.training.data import read_samples
from aurora.training.training_run import TrainResult
from aurora.types import TrainOptions
from bench.papers.bcc.delays import recorded_steps
from bench.papers.bcc.studies import Injected

MODEL, RANKS, BASE_S, SLOW, STOPPED = shipped("models/mixtral-topics"), 6, 0.3, 5.0, 4
OPTIONS = TrainOptions(ranks=RANKS, batch=12, length=32, dtype="float64", router_loss=0.0)
WAYS = (("balanced", 1), ("balanced", 2), ("balanced", 3), ("cyclic", 2), ("cyclic", 3), ("bcc", 3))
CASES = ("recorded", "one slow", "messages", "one stopped")


def waits(case: str, steps: int, parts: int, folder: Path | None) -> Injected:
    """The delays of a case for workers that compute so many parts each."""
    rng = np.random.default_rng(0)
    if case == "messages":
        return Injected(rng.exponential(BASE_S, (steps, RANKS)))
    seconds_IW = BASE_S * parts * recorded_steps(steps, RANKS, rng, folder)
    if case == "one slow":
        seconds_IW[:, STOPPED] *= SLOW
    return Injected(seconds_IW)


def stop(step: int, pids: dict[int, int]) -> None:
    """Stops a rank after the second step."""
    if step == 1:
        os.kill(pids[STOPPED], signal.SIGSTOP)


def trained(case: str, scheme: str, redundancy: int, steps: int, folder: Path | None) -> TrainResult:
    """Trains once."""
    parts = load_of(scheme, RANKS, RANKS, redundancy)
    samples_NT = read_samples(MODEL, [MODEL / "tokenizer.json"], OPTIONS.length)[:300]
    options = replace(OPTIONS, steps=steps, redundancy=redundancy, scheme=scheme)
    watch = stop if case == "one stopped" else (lambda step, pids: None)
    with tempfile.TemporaryDirectory() as output:
        return train_coded(str(MODEL), samples_NT, options, Path(output), waits(case, steps, parts, folder), watch)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recorded", type=Path, default=os.environ.get("AURORA_DATA"))
    args = parser.parse_args()
    folder = None if args.recorded is None else Path(args.recorded)
    table = Table(
        "Step time of training under stragglers",
        "stragglers | scheme | redundancy | parts a rank | median s | mean s | worst s | median / r=1 | losses apart",
        f"{args.steps} steps of {OPTIONS.batch * OPTIONS.length} tokens on {RANKS} ranks, two not counted. {machine()}.",
    )
    losses, all_s = list[float](), dict[str, float]()
    for case in CASES:
        for scheme, redundancy in WAYS:
            if case == "one stopped" and redundancy == 1:
                table.add(case, scheme, redundancy, 1, "never ends", "", "", "", "")
                continue
            steps = trained(case, scheme, redundancy, args.steps, folder).steps
            losses = losses or [step.loss for step in steps]
            seconds = np.array([step.seconds for step in steps[2:]])
            if redundancy == 1:
                all_s[case] = float(np.median(seconds))
            base_s = all_s["recorded" if case == "one stopped" else case]
            apart = max(abs(step.loss - loss) for step, loss in zip(steps, losses, strict=True))
            timed = (np.median(seconds), seconds.mean(), seconds.max(), np.median(seconds) / base_s)
            parts = load_of(scheme, RANKS, RANKS, redundancy)
            table.add(case, scheme, redundancy, parts, *(f"{each:.2f}" for each in timed), f"{apart:.0e}")
    write("stragglers", table.lines)


if __name__ == "__main__":
    main()
