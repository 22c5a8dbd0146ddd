"""What a stalled worker costs `aurora profile`, and what real processes cost a sum.

`python bench/redundant_counting.py` writes bench/results/redundant-counting-DATE.md.

Every repetition profiles with and without the stall, one after the other. The stalled worker begins after nine times what it
takes for its part, so that it takes ten times as long; that is taken from the profile without stalls before. A machine with
fewer cores than workers shares them between those that work, which favours the run that has a stalled one; `--wait` seconds
beside each batch's computing stand for hosts of their own.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from machine import machine

from aurora.io import shipped
from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import Corpus
from aurora.profiler.redundant_counting import count_with_workers
from aurora.profiler.routing_counts import RoutingCounts, next_round, route_round
from aurora.types import CountingOptions, ProfileOptions
from aurora.types.arrays import IntArray
from bench.papers.bcc.studies import Injected

SETUP = """\
`python bench/redundant_counting.py --repeats {repeats} --wait {wait:g}` on {machine}. {workers} workers count mixtral-topics,
{options.limit} prompts of {options.prompt_tokens} tokens and {options.max_new_tokens} new ones each. With waits, each
worker also waits that long before it begins, as if most of its work were done on a host of its own, so that more
workers than cores do not take each other's time. Stalled: worker 1 takes ten times as long as the run without stalls
took. Load average in the end (1, 5, 15 minutes): {load}. Seconds until the counts are known, starting the processes
included; medians, with the smallest and largest ratio of a repetition beside. Same: the counts are those that
one process counts, cell for cell."""
WORKERS = 4
MODEL = shipped("models/mixtral-topics")
OPTIONS = ProfileOptions(sources=4, prompt_tokens=128, batch=2, max_new_tokens=8, limit=64)


def by_one(model: MoeModel, text: Path) -> IntArray:
    """What this process counts, round after round."""
    prompts = islice(Corpus(model.tokenizer, model.vocabulary, [text], OPTIONS.prompt_tokens), OPTIONS.limit)
    state = RoutingCounts()
    while any(batches := next_round(prompts, OPTIONS)):
        passes = route_round(model, batches, OPTIONS.max_new_tokens, keep=False)
        state = state.add(passes, batches, OPTIONS, model.top_k)
    return state.tokens_TLSE


def counted(
    model: MoeModel, text: Path, scheme: str, redundancy: int, late_s: float, wait_s: float
) -> tuple[float, list[str], IntArray]:
    """Seconds until the counts are known, starting workers included; the workers' states; the counts."""
    seen: list[list[str]] = []
    delay_W = np.full(WORKERS, wait_s)
    delay_W[1] += late_s
    options = CountingOptions(WORKERS, redundancy, scheme)
    began = time.perf_counter()
    found = count_with_workers(
        model, MODEL, [text], OPTIONS, options,
        watch=lambda reports: seen.append([report.state for report in reports]), delay_s=Injected(delay_W[None]),
    )  # fmt: skip
    return time.perf_counter() - began, seen[-1], found.tokens_TLSE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wait", type=float, default=3.0)
    args = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "| scheme | each part held by | wait s | no straggler s | one stalled s | ratio | same | the stalled one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"def line_{i}(x): return x + {i}\n" for i in range(2000)))
        model = load_model(MODEL)
        expected = by_one(model, text)
        counted(model, text, "balanced", 2, 0.0, 0.0)  # what processes are forked from is there before the clock runs
        for wait_s in (0.0, args.wait):
            for scheme, redundancy in (("balanced", 2), ("cyclic", 2)):
                pairs, same, fate = [], True, set()
                for _ in range(args.repeats):
                    plain_s, _, counts = counted(model, text, scheme, redundancy, 0.0, wait_s)
                    same &= bool((counts == expected).all())
                    late_s, states, counts = counted(model, text, scheme, redundancy, 9 * plain_s, wait_s)
                    same &= bool((counts == expected).all())
                    pairs.append((plain_s, late_s))
                    fate.add(states[1])
                    print(scheme, wait_s, f"{plain_s:.2f} {late_s:.2f}", flush=True)
                ratios = [late_s / plain_s for plain_s, late_s in pairs]
                cells = (
                    scheme,
                    f"{redundancy} of {WORKERS}",
                    f"{wait_s:g}",
                    f"{statistics.median(p for p, _ in pairs):.2f}",
                    f"{statistics.median(s for _, s in pairs):.2f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                    "yes" if same else "no",
                    ", ".join(sorted(fate)),
                )
                lines.append(f"| {' | '.join(cells)} |")
    out = Path(__file__).parent / "results" / f"redundant-counting-{today}.md"
    busy = ", ".join(f"{load:.0f}" for load in os.getloadavg())
    setup = SETUP.format(repeats=args.repeats, wait=args.wait, machine=machine(), workers=WORKERS, options=OPTIONS, load=busy)
    out.write_text("\n".join([f"# A stalled worker and `aurora profile`, {today}", "", setup, "", *lines]) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
