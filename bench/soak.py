"""Soak test: ranks are killed, stopped and restarted at random while they serve. Are answers the same, how long are pauses?

`python bench/soak.py --kills 100` (as many single kills), `python bench/soak.py --minutes 30` (kills of one or two at once,
also while the others recover, and ranks that hang). With `--adapt` experts move all the time (bench/drawn_moves.py), so that
nearly all ranks are lost in the middle of moves; a loss of one rank must then leave an expert to the model's files only where
`--min-replicas` is 1. The pause after a change of membership is from the last token before it
to the first after it, of any request; a change before the first token, while ranks still start, has none.
"""

import argparse
import datetime
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from drawn_moves import serve_with_drawn_moves
from machine import machine

from aurora.io import shipped
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.planner.make_plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime import run as running
from aurora.runtime.request_journal import RequestJournal
from aurora.types import Cluster, ControlOptions, Gpu, PlanOptions, ProfileOptions, RunOptions

MODEL = "models/mixtral-topics"
NEW_TOKENS = 16
HANG_S = 3.0


class FaultInjector:
    """Kills or stops members of an epoch some time after it has begun, once all ranks are back."""

    def __init__(self, ranks: int, kills: int | None, until: float, rng: random.Random) -> None:
        self.ranks, self.kills, self.until, self.rng = ranks, kills, until, rng
        self.done: list[str] = []
        self.over = False

    def watch(self, epoch: int, pids: dict[int, int]) -> None:
        mixed = self.kills is None
        ready = len(pids) == self.ranks or (mixed and self.rng.random() < 0.2)
        if ready and not self.over:
            threading.Thread(target=self._strike, args=(dict(pids), mixed), daemon=True).start()

    def _strike(self, pids: dict[int, int], mixed: bool) -> None:
        time.sleep(self.rng.uniform(0.0, 1.5))
        if self.over or (self.kills is not None and len(self.done) >= self.kills):
            self.over = True
            return
        kind = self.rng.choice(["kill", "kill", "kill two", "stop"]) if mixed else "kill"
        for rank in self.rng.sample(sorted(pids), min(len(pids) - 1, 2 if kind == "kill two" else 1)):
            try:
                os.kill(pids[rank], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.done.append(kind)

    @property
    def ended(self) -> bool:
        out_of_time = time.monotonic() > self.until
        self.over |= out_of_time
        return out_of_time or (self.over and self.kills is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--adapt", action="store_true", help="experts move while ranks are lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    path = shipped(MODEL)
    root = Path(__file__).parents[1]
    texts = [root / "LICENSE", root / "README.md"]
    profile = profile_model(
        path, texts, ProfileOptions(sources=chosen.ranks, prompt_tokens=32, limit=4 * chosen.ranks), lambda *_: None
    )
    cluster = Cluster("soak", tuple(Gpu(f"g{i}", "cpu", i, 1e9, 1e9, 10**9) for i in range(chosen.ranks)))
    left = chosen.ranks if chosen.adapt else max(1, chosen.ranks - 2)  # with slots for all experts everywhere none would move
    slots = -(-profile.experts * chosen.min_replicas // left) + 1
    plan = make_plan(
        cluster, [profile], PlanOptions(min_replicas=chosen.min_replicas, slots_per_gpu=min(slots, profile.experts))
    )
    model = load_model(path)
    ids = model.tokenizer((root / "README.md").read_text(), add_special_tokens=False)["input_ids"]
    rng = random.Random(chosen.seed)
    prompts = [ids[at : at + rng.randint(3, 12)] for at in (rng.randrange(len(ids) - 12) for _ in range(20_000))]

    faults = FaultInjector(chosen.ranks, chosen.kills, time.monotonic() + 60 * chosen.minutes, rng)
    token_s: list[float] = []

    class Ending(RequestJournal):
        """Ends when the faults have, whatever is left to answer."""

        @property
        def finished(self) -> bool:
            return super().finished or faults.ended

        def on_progress(self, rank, progress):  # type: ignore[no-untyped-def]
            token_s.append(time.perf_counter())
            return super().on_progress(rank, progress)

    running.RequestJournal = Ending  # type: ignore[misc]
    options = RunOptions(NEW_TOKENS, 4, "gloo", 60.0, survive=True, respawn=1000, hang_s=HANG_S)
    if chosen.adapt:
        options = replace(options, adapt=ControlOptions(period_s=0.2))
        running.serve_elastic_rank = serve_with_drawn_moves
    began = time.monotonic()
    result = running.run_elastic(plan, [path], [prompts], options, watch=faults.watch)
    took = time.monotonic() - began
    left = [rank for child in psutil.Process().children() for rank in child.children()]

    answers = result.answers_M[0].tokens
    wrong = 0
    for index, tokens in answers.items():
        plain, _ = greedy_decode(model.model, prompts[index], len(tokens), model.tokenizer.eos_token_id)
        wrong += plain != tokens
    killed: list[float] = []
    hung: list[float] = []
    resumed_s = None
    for change in reversed(result.changes):  # another change may have come before a token did
        resumed_s = resumed_s if change.resumed_s is None else change.resumed_s
        if change.lost and resumed_s is not None and change.stopped_s is not None:
            how = hung if any("said nothing" in how for how in change.lost.values()) else killed
            how.append(resumed_s - change.stopped_s)
    asked = " ".join(
        f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        for name, value in vars(chosen).items()
        if value not in (None, False) and name != "out"
    )
    lines = [
        f"# Ranks lost while serving, {datetime.date.today()}",
        "",
        f"`python bench/soak.py {asked}` on {machine()}; load average {os.getloadavg()[1]:.1f}.",
        "",
        f"{chosen.ranks} ranks, mixtral-topics, floor {chosen.min_replicas}, a lost rank is started anew; {took:.0f} s.",
        "",
        "| what | figure |",
        "|---|---|",
        *(f"| {kind}, times | {faults.done.count(kind)} |" for kind in sorted(set(faults.done))),
        f"| changes of membership | {len(result.changes)} |",
        f"| answers begun; not the plain model's | {len(answers)}; {wrong} |",
        f"| tokens | {sum(map(len, answers.values()))} |",
        f"| experts' weights from other ranks; from the model's files | {sum(c.moved for c in result.changes)}; "
        f"{sum(c.from_checkpoint for c in result.changes)} |",
    ]
    if chosen.adapt:
        last_X = [report.changes[-1] for report in result.control_M if report.changes]
        changes = [change for report in result.control_M for change in report.changes]
        others = [how for change in result.changes for how in change.lost.values() if "SIGKILL" not in how]
        lines += [
            f"| changes of placement in force; given up by a loss | {sum(change.took_s is not None for change in changes)}; "
            f"{sum(change.took_s is None for change in last_X)} of {len(result.control_M)} epochs |",
            "| epochs in which no change came into force | "
            f"{sum(all(change.took_s is None for change in report.changes) for report in result.control_M)} |",
            f"| moved experts | {sum(change.moves for change in changes if change.took_s is not None)} |",
            f"| ranks that were lost but not killed | {len(others)} {' '.join(sorted(set(others)))} |",
        ]
    for name, found in (("killed", killed), (f"hung, found after {HANG_S:g} s", hung)):
        if found:
            lines.append(
                f"| no token after a rank was {name}, s: median, 95 %, worst of {len(found)} | {statistics.median(found):.2f}, "
                f"{np.quantile(found, 0.95):.2f}, {max(found):.2f} |"
            )
    lines += [
        f"| usual time between tokens, s: median, worst | {np.median(np.diff(token_s)):.4f}, {np.diff(token_s).max():.2f} |",
        f"| how it ended; processes left | {result.failure or 'as it should'}; {len(left)} |",
        "",
    ]
    text = "\n".join(lines)
    if chosen.out is not None:
        chosen.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
