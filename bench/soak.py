"""Soak test: ranks are killed, stopped and restarted at random while they serve. Are answers the same, how long are pauses?

`python bench/soak.py --kills 100` (as many single kills), `python bench/soak.py --minutes 30` (kills of one or two at once,
also while the others recover, and ranks that hang). With `--adapt` experts move all the time (bench/drawn_moves.py), so that
nearly all ranks are lost in the middle of moves; a loss of one rank must then leave an expert to the model's files only where
`--min-replicas` is 1. The pause after a change of membership is from the last token before it
to the first after it, of any request; a change before the first token, while ranks still start, has none.

Each kill is one line. After `--minutes`, or a SIGTERM, it ends with what it has. A run is a section of
bench/results/soak-DATE.md; one with the same options replaces it. So many kills may be taken in pieces, of other `--seed`s.
"""

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from drawn_moves import serve_with_drawn_moves
from machine import machine
from tables import today

from aurora.elastic import serving as running
from aurora.elastic.elastic_rank import Decided, NewTokens
from aurora.elastic.serving import RequestJournal
from aurora.io import shipped
from aurora.models.decoding import greedy_decode
from aurora.models.loading import MoeModel, load_model
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime.result import RunResult
from aurora.types import Cluster, ControlOptions, Gpu, Plan, PlanOptions, ProfileOptions, RunOptions

MODEL = "models/mixtral-topics"
ROOT = Path(__file__).parents[1]
NEW_TOKENS = 16
HANG_S = 3.0
PERIOD_S = 0.2  # of a window with --adapt: after each, experts move
WITHIN_S = {False: 1.5, True: 6.0}  # in an epoch, until a rank is struck; with --adapt so late that experts move by then
AT_ONCE = 64  # answers that are compared in one forward pass


class FaultInjector:
    """Kills or stops members of an epoch up to `within_s` after it has begun, once all ranks are back.

    Single kills are counted one by one: each comes up to `within_s` after the epoch's first token, not in the pause of another.

    Attributes:
        done: what was done.
        struck: the ranks that were killed alone, each with the epoch in which it was, and whether it was that one's first.
        absent_s: how long each rank that was lost and came back took part in no epoch.
        away_s: the same of those that have not come back, until the end.
    """

    def __init__(self, ranks: int, kills: int | None, until: float, rng: random.Random, within_s: float) -> None:
        self.ranks, self.kills, self.until, self.rng, self.within_s = ranks, kills, until, rng, within_s
        self.done: list[str] = []
        self.struck: list[tuple[int, bool]] = []
        self.absent_s: list[float] = []
        self.over = False
        self.serves = threading.Event()  # set by each token, and cleared when an epoch begins
        self._began_s = time.monotonic()
        self._epoch, self._first, self._ended_s = 0, 0, self._began_s
        self._gone_s: dict[int, float] = {}  # since when, by rank

    def watch(self, epoch: int, pids: dict[int, int]) -> None:
        mixed, now_s = self.kills is None, time.monotonic()
        self._epoch, self._first = epoch, min(pids)
        self.serves.clear()
        self.absent_s += [now_s - self._gone_s.pop(rank) for rank in sorted(pids.keys() & self._gone_s.keys())]
        self._gone_s |= {rank: now_s for rank in range(self.ranks) if rank not in pids and rank not in self._gone_s}
        ready = len(pids) == self.ranks or (mixed and self.rng.random() < 0.2)
        if ready and not self.over:
            threading.Thread(target=self._strike, args=(epoch, dict(pids), mixed), daemon=True).start()

    def _strike(self, epoch: int, pids: dict[int, int], mixed: bool) -> None:
        if not mixed:
            self.serves.wait()
        time.sleep(self.rng.uniform(0.0, self.within_s))
        if epoch != self._epoch:  # another has begun
            return
        if self.over or (self.kills is not None and len(self.done) >= self.kills):
            self.over = True
            return
        kind = self.next_kind(mixed)
        ranks = self.rng.sample(sorted(pids), min(len(pids) - 1, 2 if kind == "kill two" else 1))
        for rank in ranks:
            try:
                os.kill(pids[rank], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            except ProcessLookupError:
                continue
            self._gone_s[rank] = time.monotonic()
        if kind == "kill":
            self.struck.append((self._epoch, ranks[0] == self._first))
        self.done.append(kind)
        after_s = time.monotonic() - self._began_s
        print(f"{len(self.done)}: {kind}, rank {' and '.join(map(str, ranks))}, epoch {epoch}, {after_s:.1f} s", flush=True)

    def next_kind(self, mixed: bool) -> str:
        """Draws what happens next."""
        return self.rng.choice(["kill", "kill", "kill two", "stop"]) if mixed else "kill"

    @property
    def away_s(self) -> list[float]:
        return [self._ended_s - gone_s for gone_s in self._gone_s.values()]

    def end(self, *_: object) -> None:
        """Lets the run end now, with what it has."""
        self.until = 0.0

    @property
    def ended(self) -> bool:
        self._ended_s = time.monotonic()
        out_of_time = self._ended_s > self.until
        self.over |= out_of_time
        return out_of_time or (self.over and self.kills is not None)


def plan_of(ranks: int, min_replicas: int, adapt: bool) -> Plan:
    """The plan that is served, with slots for two ranks less."""
    texts = [ROOT / "LICENSE", ROOT / "README.md"]
    options = ProfileOptions(sources=ranks, prompt_tokens=32, limit=4 * ranks)
    profile = profile_model(shipped(MODEL), texts, options, lambda *_: None)
    cluster = Cluster("soak", tuple(Gpu(f"g{i}", "cpu", i, 1e9, 1e9, 10**9) for i in range(ranks)))
    left = ranks if adapt else max(1, ranks - 2)  # with slots for all experts everywhere none would move
    slots = -(-profile.experts * min_replicas // left) + 1
    return make_plan(cluster, [profile], PlanOptions(min_replicas=min_replicas, slots_per_gpu=min(slots, profile.experts)))


def serve(
    plan: Plan, prompts: list[list[int]], faults: FaultInjector, adapt: bool
) -> tuple[RunResult, list[float], list[psutil.Process], set[int]]:
    """The result, when tokens came, processes that are left, and the epochs whose last change of placement came to nothing."""
    token_s: list[float] = []
    moving: set[int] = set()

    class Ending(RequestJournal):
        """Ends when the faults have, whatever is left to answer."""

        @property
        def finished(self) -> bool:
            return super().finished or faults.ended

        def on_progress(self, rank, progress):  # type: ignore[no-untyped-def]
            if isinstance(progress, NewTokens):
                token_s.append(time.perf_counter())
                faults.serves.set()
            if isinstance(progress, Decided):
                last = progress.report.changes[-1:]
                (moving.add if last and last[0].took_s is None else moving.discard)(progress.epoch)
            return super().on_progress(rank, progress)

    running.RequestJournal = Ending  # type: ignore[misc]
    options = RunOptions(NEW_TOKENS, 4, "gloo", 60.0, survive=True, respawn=1000, hang_s=HANG_S)
    if adapt:
        options = replace(options, adapt=ControlOptions(period_s=PERIOD_S))
        running.serve_elastic_rank = serve_with_drawn_moves
    result = running.run_elastic(plan, [shipped(MODEL)], [prompts], options, watch=faults.watch)
    return result, token_s, [rank for child in psutil.Process().children() for rank in child.children()], moving


@torch.inference_mode()
def wrong_answers(model: MoeModel, prompts: Sequence[list[int]], answers: Mapping[int, list[int]]) -> int:
    """How many answers are not the plain model's.

    Each token must be what the model chooses after all tokens before it: one forward pass tells, for answers of equal length
    together. Where it tells otherwise, the answer is decoded alone.
    """
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, tokens in answers.items():
        alike[len(prompts[index]), len(tokens)].append(index)
    eos, wrong = model.tokenizer.eos_token_id, 0
    for (before, count), indices in alike.items():
        for at in range(0, len(indices), AT_ONCE) if count else ():
            some = indices[at : at + AT_ONCE]
            ids_BT = torch.tensor([[*prompts[index], *answers[index]] for index in some])
            chosen_BT = model.model(ids_BT).logits[:, before - 1 : -1].argmax(dim=2)
            apart_B = (chosen_BT != ids_BT[:, before:]).any(dim=1) | (ids_BT[:, before:-1] == eos).any(dim=1)
            for index in np.array(some)[apart_B.numpy()].tolist():
                wrong += greedy_decode(model.model, prompts[index], count, eos)[0] != answers[index]
    return wrong


def pauses(result: RunResult) -> tuple[list[float], list[float]]:
    """Seconds without a token after ranks were killed, and after ranks hung."""
    killed: list[float] = []
    hung: list[float] = []
    resumed_s = None
    for change in reversed(result.changes):  # another change may have come before a token did
        resumed_s = resumed_s if change.resumed_s is None else change.resumed_s
        if change.lost and resumed_s is not None and change.stopped_s is not None:
            how = hung if any("it hangs" in how for how in change.lost.values()) else killed
            how.append(resumed_s - change.stopped_s)
    return killed, hung


def rows(
    result: RunResult, faults: FaultInjector, token_s: list[float], wrong: int, left: int, moving: set[int], adapt: bool
) -> list[str]:
    """The rows of the table."""
    answers = result.answers_M[0].tokens
    found: dict[str, Any] = {f"{kind}, times": faults.done.count(kind) for kind in sorted(set(faults.done))}
    found["changes of membership"] = len(result.changes)
    found["answers begun; not the plain model's"] = f"{len(answers)}; {wrong}"
    found["tokens"] = sum(map(len, answers.values()))
    moved, from_files = sum(c.moved for c in result.changes), sum(c.from_checkpoint for c in result.changes)
    found["experts' weights from other ranks; from the model's files"] = f"{moved}; {from_files}"
    if adapt:
        changes = [change for report in result.control_M for change in report.changes]
        performed = [change for change in changes if change.took_s is not None]
        given_up = sum(report.changes[-1].took_s is None for report in result.control_M if report.changes)
        none = sum(all(change.took_s is None for change in report.changes) for report in result.control_M)
        found["changes of placement in force; given up by a loss"] = (
            f"{len(performed)}; {given_up} of {len(result.control_M)} epochs"
        )
        found["epochs in which no change came into force"] = none
        found["moved experts"] = sum(change.moves for change in performed)
        found["kills while experts moved; of the rank that decides, which cannot say"] = (
            f"{sum(epoch in moving for epoch, first in faults.struck if not first)}; {sum(first for _, first in faults.struck)}"
        )
    others = [how for change in result.changes for how in change.lost.values() if how != f"killed by signal {signal.SIGKILL:d}"]
    found["ranks that were lost but not killed"] = f"{len(others)} {' '.join(sorted(set(others)))}".strip()
    for name, gaps_s in zip(("killed", f"hung, found after {HANG_S:g} s"), pauses(result), strict=True):
        if gaps_s:
            found[f"no token after a rank was {name}, s: median, 95 %, worst of {len(gaps_s)}"] = (
                f"{statistics.median(gaps_s):.2f}, {np.quantile(gaps_s, 0.95):.2f}, {max(gaps_s):.2f}"
            )
    if faults.absent_s:
        found[f"a rank that was lost took part again after s: median, worst of {len(faults.absent_s)}; away at the end"] = (
            f"{statistics.median(faults.absent_s):.2f}, {max(faults.absent_s):.2f}; {max(faults.away_s, default=0.0):.2f}"
        )
    usual_s = np.diff(token_s)
    found["usual time between tokens, s: median, worst"] = f"{np.median(usual_s):.4f}, {usual_s.max():.2f}"
    found["how it ended; processes left"] = f"{result.failure or 'as it should'}; {left}"
    return ["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in found.items())]


def write(path: Path, section: str, lines: Sequence[str]) -> None:
    """Puts a section into a file of results, in place of an earlier one of its name."""
    _, *parts = path.read_text().rstrip().split("\n\n## ") if path.exists() else [""]
    sections = {part.split("\n")[0]: f"## {part}" for part in parts} | {section: "\n".join([f"## {section}", "", *lines])}
    head = f"# Ranks lost while serving, {today()}\n\nOn {machine()}."
    path.write_text("\n\n".join([head, *(sections[name] for name in sorted(sections))]) + "\n")
    print(f"wrote {path}")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--adapt", action="store_true", help="experts move while ranks are lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file instead of the one in bench/results")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]

    plan = plan_of(chosen.ranks, chosen.min_replicas, chosen.adapt)
    model = load_model(shipped(MODEL))
    ids = model.tokenizer((ROOT / "README.md").read_text(), add_special_tokens=False)["input_ids"]
    rng = random.Random(chosen.seed)
    prompts = [ids[at : at + rng.randint(3, 12)] for at in (rng.randrange(len(ids) - 12) for _ in range(20_000))]

    until_s = time.monotonic() + 60 * chosen.minutes
    faults = FaultInjector(chosen.ranks, chosen.kills, until_s, rng, WITHIN_S[chosen.adapt])
    signal.signal(signal.SIGTERM, faults.end)
    began = time.monotonic()
    result, token_s, left, moving = serve(plan, prompts, faults, chosen.adapt)
    took_s = time.monotonic() - began
    wrong = wrong_answers(model, prompts, result.answers_M[0].tokens)

    asked = " ".join(
        f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        for name, value in vars(chosen).items()
        if value not in (None, False) and name != "out"
    )
    how = (
        f"`python bench/soak.py {asked}` took {took_s:.0f} s; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after. "
        f"{chosen.ranks} ranks, mixtral-topics, every expert on {chosen.min_replicas} at least; a lost rank is started anew."
    )
    kind = (
        f"{chosen.kills or 'mixed'} kills{', experts move' if chosen.adapt else ''}, {chosen.ranks} ranks, seed {chosen.seed}"
    )
    lines = rows(result, faults, token_s, wrong, len(left), moving, chosen.adapt)
    print("\n".join([*lines, "", how]))
    write(chosen.out or ROOT / "bench" / "results" / f"soak-{today()}.md", kind, [*lines, "", how])


if __name__ == "__main__":
    main()
