"""`aurora run --adapt` on real sockets: traffic switches while a model is served, and experts follow it.

    python bench/network/adapt.py [--repetitions 3] [--batches 12] [--period 1.0]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Four ranks have ports of 200 Mbit/s each. Two cores
carry them, so experts' compute is a stand-in that waits, as in bench/interleave.py; all else is real. A third of the batches
asks for text of one kind, the rest for another. Ways: the plan for the first kind as it is; the same in a dry run, which shows
what planning beside serving costs; the same with --adapt; and the plan made for the second kind. All serve the same requests in
the same steps, and ways alternate. Throughput counts from one period after the switch. A gap is the time between the ends of
two steps that each bring a token; those of prompts are left out. Answers of the first repetition are compared.
Results: bench/results/adapt-network-DATE.md.
"""

import argparse
import datetime
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from net import PAYLOAD, network, refusal

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from interleave import known_texts  # noqa: E402
from machine import machine  # noqa: E402
from serving import TOKEN_S, served_on_hosts  # noqa: E402

from aurora.io import shipped  # noqa: E402
from aurora.planner.make_plan import make_plan  # noqa: E402
from aurora.profiler.profile_model import profile_model  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.result import RunResult, merge_results  # noqa: E402
from aurora.types import (  # noqa: E402
    TRACE_PHASES,
    Cluster,
    ControlOptions,
    Curve,
    Gpu,
    Plan,
    PlanOptions,
    Profile,
    ProfileOptions,
    RunOptions,
)

MODEL, RANKS, PORT_bps, DEEP = "mixtral-topics", 4, 200e6, 16 << 20
PROMPT, NEW_TOKENS, BATCH = 32, 64, 8
OLD, DRY, ADAPT, NEW = "plan of the old traffic", "the same, dry run", "the same, --adapt", "plan of the new traffic"


@dataclass(frozen=True)
class Steps:
    """When each step of a run ended, and what was decided."""

    end_s_I: np.ndarray
    result: RunResult

    @classmethod
    def of(cls, result: RunResult) -> "Steps":
        trace = result.trace
        heads_X = (trace.phase_X == TRACE_PHASES.index("head")) & (trace.peer_X < 0)
        end_s_I = np.zeros(int(trace.step_X.max()) + 1)
        np.maximum.at(end_s_I, trace.step_X[heads_X], trace.end_s_X[heads_X])
        return cls(end_s_I, result)

    @property
    def gaps_s(self) -> dict[int, float]:
        """By step, the seconds since the step before, prompts left out."""
        return {step: self.end_s_I[step] - self.end_s_I[step - 1] for step in range(1, len(self.end_s_I)) if step % NEW_TOKENS}

    @property
    def longest_gap(self) -> float:
        """The longest gap while experts moved, over the median of all; zero if none moved."""
        changes = self.result.control_M[0].changes
        moving = [(change.at_s, change.at_s + change.took_s) for change in changes if change.took_s is not None]
        gaps_s = [
            gap_s
            for step, gap_s in self.gaps_s.items()
            if any(start_s <= self.end_s_I[step] and self.end_s_I[step - 1] <= end_s for start_s, end_s in moving)
        ]
        return max(gaps_s, default=0.0) / statistics.median(self.gaps_s.values())


def cluster() -> Cluster:
    port_Bps = PORT_bps / 8 * PAYLOAD
    return Cluster("hosts", tuple(Gpu(f"host-{rank}", "cpu", rank, port_Bps, port_Bps, 10**9) for rank in range(RANKS)))


def plan_for(text: bytes, folder: Path) -> Plan:
    """The plan for a kind of text; experts wait for each row."""
    (folder / "text").write_bytes(text[: 256 * PROMPT])
    found = profile_model(shipped(f"models/{MODEL}"), [folder / "text"], ProfileOptions(RANKS, PROMPT, BATCH, 1, share=2))
    waits = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
    profile: Profile = replace(found, curves={"cpu": {**found.curves["cpu"], "expert": waits}})
    return make_plan(cluster(), [profile], PlanOptions())


def requests(texts: list[bytes], batches: int) -> list[list[int]]:
    """Prompts in batches of all ranks: a third of the batches of the first kind, then the others of the second."""
    first = batches // 3
    found = []
    for text, count in zip(texts, (first, batches - first), strict=True):
        tail = text[-count * BATCH * RANKS * PROMPT :]
        found += [[3 + byte for byte in tail[i * PROMPT : (i + 1) * PROMPT]] for i in range(count * BATCH * RANKS)]
    return found


def measured(repetitions: int, batches: int, period_s: float) -> list[str]:
    """A table with a row for each way."""
    texts, path = known_texts(), str(shipped(f"models/{MODEL}"))
    prompts, switch = requests(texts, batches), batches // 3 * NEW_TOKENS
    plain = RunOptions(max_new_tokens=NEW_TOKENS, batch=BATCH, transport="gloo")
    adapt = replace(plain, adapt=ControlOptions(period_s=period_s))
    found: dict[str, list[Steps]] = {way: [] for way in (OLD, DRY, ADAPT, NEW)}
    with network([PORT_bps] * RANKS, DEEP) as hosts, tempfile.TemporaryDirectory() as folder:
        old, new = (plan_for(text, Path(folder)) for text in texts)
        ways = {OLD: (old, plain), DRY: (old, replace(adapt, dry_run=True)), ADAPT: (old, adapt), NEW: (new, plain)}
        for number in range(repetitions):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                plan, options = ways[way]
                meeting = f"{folder}/{list(ways).index(way)}-{number}"
                shares = launch(served_on_hosts, RANKS, hosts, meeting, plan, [path], [prompts], options)
                result = merge_results([each for results in shares for each in results], (MODEL,))
                found[way].append(Steps.of(result))
                print(f"{way}: {result.seconds:.2f} s", *(each.changes for each in result.control_M), flush=True)
    tokens_M = [steps[0].result.answers_M[0].tokens for steps in found.values()]
    differ = sum(any(tokens[index] != tokens_M[0][index] for tokens in tokens_M) for index in range(len(prompts)))
    lines = [
        "| way | seconds from a period after the switch, median | throughput over the new plan's, median (worst) | "
        "longest gap while experts move, over the median gap | changes | moved MB |",
        "|" + "---|" * 6,
    ]
    after_s: dict[str, list[float]] = {way: [] for way in found}
    for number, adapted in enumerate(found[ADAPT]):
        start = int(np.searchsorted(adapted.end_s_I, adapted.end_s_I[switch - 1] + period_s))
        for way, runs in found.items():
            end_s_I = runs[number].end_s_I
            after_s[way].append(float(end_s_I[-1] - end_s_I[min(start, len(end_s_I) - 2)]))
    for way, runs in found.items():
        over = [new_s / own_s for new_s, own_s in zip(after_s[NEW], after_s[way], strict=True)]
        changes = [change for steps in runs for report in steps.result.control_M for change in report.changes]
        done = [change for change in changes if change.took_s is not None]
        gap = f"{max(steps.longest_gap for steps in runs):.2f}" if way == ADAPT else ""
        cells = (
            f"{statistics.median(after_s[way]):.2f}",
            f"{statistics.median(over):.3f} ({min(over):.3f})",
            gap,
            f"{len(done)} of {len(changes)}",
            f"{sum(change.bytes for change in done) / 1e6:.2f}",
        )
        lines.append(f"| {way} | {' | '.join(cells)} |")
    dry = [dry.result.seconds / old.result.seconds - 1 for dry, old in zip(found[DRY], found[OLD], strict=True)]
    return [
        *lines,
        "",
        f"Planning beside serving: a dry run takes {statistics.median(dry):+.1%} ({min(dry):+.1%} to {max(dry):+.1%}) of the "
        f"run without. Answers that differ between ways: {differ} of {len(prompts)}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batches", type=int, default=12, help=f"of {BATCH} requests on each rank, {NEW_TOKENS} tokens each")
    parser.add_argument("--period", type=float, default=1.0, help="seconds of a window")
    parser.add_argument("--out", type=Path, help="a file instead of bench/results/adapt-network-DATE.md")
    given = parser.parse_args()
    if reason := refusal():
        print(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    today, load = datetime.datetime.now(datetime.UTC).date().isoformat(), os.getloadavg()[0]
    lines = measured(given.repetitions, given.batches, given.period)
    text = "\n".join(
        [
            f"# Experts follow traffic that switches, {today}",
            "",
            f"`python bench/network/adapt.py --repetitions {given.repetitions} --batches {given.batches} "
            f"--period {given.period:g}` on {machine()}; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after.",
            "",
            f"{MODEL}, {RANKS} ranks with ports of {PORT_bps / 1e6:g} Mbit/s; experts wait {TOKEN_S * 1e6:g} us a row.",
            "",
            *lines,
        ]
    )
    (given.out or HERE.parent / "results" / f"adapt-network-{today}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
