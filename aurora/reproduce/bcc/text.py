"""Markdown page of the evaluation, and its numbers as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from aurora.reproduce.bcc.delays import MEAN_S, NETWORK_S, RECEIVE_S, SHIFT_S
from aurora.reproduce.bcc.evaluation import FIGURE_2, FIGURE_5, BccResults, Timings, reduction
from aurora.reproduce.bcc.studies import Timing
from aurora.reproduce.bcc.waiting import formula, waiting
from aurora.reproduce.page import page, table

PAPER = {  # workers: scheme -> threshold, communication, computation and total seconds; Tables I and II
    50: {"uncoded": (50, 28.556, 0.230, 28.786), "cyclic": (41, 12.031, 1.959, 13.990), "bcc": (11, 3.043, 1.162, 4.205)},
    100: {"uncoded": (100, 31.567, 1.453, 33.020), "cyclic": (91, 24.698, 4.784, 29.482), "bcc": (25, 7.246, 1.685, 8.931)},
}
CLAIMS = {50: (0.854, 0.699), 100: (0.730, 0.697)}  # BCC's time less than uncoded, than cyclic; §III.C
SAVED = 0.2928  # §IV.C

SETUP = f"""\
As many batches as workers; a worker holds one (uncoded) or {{load}} of them. The paper gives no delays of single
workers, so **as in the tables** has four constants, by least squares from the twelve seconds of Tables I and II: a
worker computes for {SHIFT_S * 1e3:g} ms a batch and Exp(mean {MEAN_S * 1e3:g} ms a batch), its message travels for
Exp(mean {NETWORK_S * 1e3:g} ms), and the master takes {RECEIVE_S * 1e3:g} ms for each message, one at a time. That
these totals come near the paper's is therefore no finding; which scheme waits for how many, and what follows for the
time, is. **free receipt** is the same without the master's time. **recorded** replaces the journey by times of training
steps that Alibaba's PAI recorded (two jobs of ten workers, CC BY 4.0; mean as before): each of our workers goes on as
one of these twenty did, so that a slow worker stays slow; **recorded, shuffled** deals the same times anew. **balanced**
is ours: BCC's groups, each given to equally many workers. BCC draws again where it missed a batch; all schemes meet the
same kinds of delays."""


PROCESSES = """\
Processes: gradient descent by Nesterov's method, {points} points a batch (the paper: 100) of {features} features. The
drawn delays are slept, {stretch:g} times as long, and the seconds are as measured, over {stretch:g}; the sums are real,
and cyclic repetition encodes and decodes. Off by: the largest difference of any iteration's gradient from the serial
one, over its largest entry. Loss: at zero, and in the end. Processes have one placement, where the clock has the mean
of ten, and share this machine's cores, which adds to every one of their seconds."""

FIG_5 = """\
Less than load balancing: {saved:.1%} as the figure counts, {recovering:.1%} by when the sum is recoverable, where it
is (the paper: {paper:.2%}, between the two); with probability {unrecoverable:.2f} all workers miss an example. P2
takes {p2:.1f} and load balancing {balanced:.1f} times as long as the even split: by mu alone the five workers get 51
examples each, which they cannot begin to answer before 20 x 51 seconds, though with a = 20 all workers are about
equally fast. What is recommended is the quickest of the allocations that assign every example to one worker, the even
split among them, {gap:.1%} above Theorem 2's lower bound as P2's loads evaluate it."""

ADAPTED = """\
The load that a replay of the first quarter of the iterations chooses from 1, 2, 5 and 10, and what the rest takes with
it, the groups dealt by the speeds seen in that quarter, or at random; with the best load and the speeds of hindsight;
and with one batch each. Seconds an iteration, a recorded step being 1 on average. Recorded stragglers alone ask for no
copies where time grows with the load; where they persist, copies beside quick workers hide them, and where they do not,
speeds seen say nothing."""

WHY = """\
BCC waits for as many as its formula says, 11.4 and 29.3; the paper measured 11 and 25, and 25.1 is what balanced groups
wait for. By the clock with delays as in the tables BCC saves what the paper's runs did, within two points, and balanced
saves more than that in all four.
Where recorded times take the journey's place, waiting for fewer saves little by itself: the slowest of 100
such workers takes 1.3 times the mean, an exponential's slowest of 100 takes 5.2 times it. What is left is the master's
time for messages that it need not receive. That a slow worker stays slow changes little for groups drawn at random, and
is worth knowing (below)."""


def as_markdown(found: BccResults, pictures: Sequence[str]) -> str:
    """Returns the Markdown page of the evaluation."""
    lines = [
        SETUP.format(load=found.options.load),
        "",
        *_headlines(found),
        *_tables(found),
        *_fig_2(found),
        *_fig_5(found),
        *_adapted(found),
    ]
    source = "The paper: arXiv:1710.09990. `aurora reproduce bcc` writes this page."
    return page("BCC's evaluation, ours beside", source, lines, pictures)


def _headlines(found: BccResults) -> list[str]:
    rows = []
    for workers, by_delays in found.simulated.items():
        for delays, timings in by_delays.items():
            real = found.performed[workers].get(delays)
            for scheme in ("bcc", "balanced"):
                for over, claim in zip(("uncoded", "cyclic"), CLAIMS.get(workers, (None, None)), strict=True):
                    printed = f"{claim:.1%}" if claim and scheme == "bcc" and delays == "as in the tables" else "-"
                    measured = f"{reduction(real, scheme, over):.1%}" if real else "-"
                    clock = f"{reduction(timings, scheme, over):.1%}"
                    rows.append([str(workers), delays, f"{scheme} less than {over}", printed, clock, measured])
    said = f"Time less over {found.options.iterations} iterations by the simulated clock, and by real processes where they ran."
    columns = ["workers", "delays", "", "paper", "clock", "processes"]
    return ["## Headlines", "", said, "", *table(columns, rows), WHY, ""]


def _tables(found: BccResults) -> list[str]:
    options = found.options
    lines = ["## Tables I and II", ""]
    for workers, by_delays in found.simulated.items():
        rows = [
            ["EC2", "paper", scheme, "-", "-", f"{threshold}", "100", f"{total:.2f}", f"{compute:.2f}", "-", "-"]
            for scheme, (threshold, _, compute, total) in PAPER.get(workers, {}).items()
        ]
        for delays, timings in by_delays.items():
            for how, some in (("clock", timings), ("processes", found.performed[workers].get(delays, []))):
                rows += [[delays, how, *_timing(timing, workers, options.load)] for timing in some]
        said = f"{workers} workers and batches. K: messages waited for, by formula, exactly on average, and found."
        columns = "delays,,scheme,K formula,K exact,K,iterations,s,computing s,gradient off by,loss"
        lines += [said, "", *table(columns.split(","), rows)]
    return [*lines, PROCESSES.format(points=options.points, features=options.features, stretch=options.stretch), ""]


def _timing(timing: Timing, workers: int, load: int) -> list[str]:
    load = 1 if timing.scheme == "uncoded" else load
    return [
        timing.scheme,
        _number(formula(timing.scheme, workers, workers, load)),
        f"{waiting(timing.scheme, workers, workers, load).threshold:.1f}",
        f"{timing.waited:.1f}",
        str(timing.iterations),
        f"{timing.seconds:.2f}",
        f"{timing.compute_s:.2f}",
        "-" if timing.error is None else f"{timing.error:.1e}",
        "-" if timing.losses is None else f"{timing.losses[0]:.4f}, {timing.losses[1]:.4f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _fig_2(found: BccResults) -> list[str]:
    rows = [
        [str(one.load), one.scheme, *map(_number, (one.formula, one.exact, FIGURE_2 / one.load, one.communication)),
         f"{one.impossible:.2g}"]
        for one in sorted(found.thresholds, key=lambda one: one.load)
        if one.load in (1, 2, 5, 10, 20, 50, 100)
    ]  # fmt: skip
    return [
        "## Fig. 2",
        "",
        f"{FIGURE_2} examples and workers. Exact: the mean over all draws and orders of finishing from which the sum is",
        "recoverable; the formulas are for sufficiently many workers. Not recoverable: the probability that all workers miss",
        "a batch.",
        "",
        *table(["load", "scheme", "K formula", "K exact", "K bound", "L exact", "not recoverable"], rows),
    ]


def _fig_5(found: BccResults) -> list[str]:
    one = found.mixed
    seconds = {
        f"P2's loads, to floor(m log m) = {one.wanted} results, as the figure counts": f"{one.p2_s:.1f}",
        "load-balanced shares, all of them": f"{one.balanced_s:.1f}",
        "P2's loads drawn at random, until the sum is recoverable, where it is": (
            f"{one.recovery.mean_s:.1f} ± {one.recovery.error_s:.1f}"
        ),
        "even split, all of them": f"{one.even_s:.1f}",
        f"recommended: {one.recommended}": f"{one.recommended_s:.1f}",
        "Theorem 2, lower and upper": f"{one.bounds_s[0]:.1f}, {one.bounds_s[1]:.1f}",
        "no allocation below (Markov)": f"{one.lower_bound_s:.1f}",
    }
    explained = FIG_5.format(
        saved=one.saved,
        paper=SAVED,
        recovering=1 - one.recovery.mean_s / one.balanced_s,
        unrecoverable=one.unrecoverable,
        p2=one.p2_s / one.even_s,
        balanced=one.balanced_s / one.even_s,
        gap=one.recommended_s / one.bounds_s[0] - 1,
    )
    said = f"100 workers, {FIGURE_5} examples, a = 20, mu = 1 (95 workers) and 20 (5)."
    return ["## Fig. 5", "", said, "", *table(["", "seconds"], seconds.items()), explained, ""]


def _adapted(found: BccResults) -> list[str]:
    if not found.adapted:
        return []
    rows = [
        [one.stragglers, one.work, f"{one.chosen}", f"{one.chosen_s:.3f}", f"{one.random_s:.3f}", f"{one.best}",
         f"{one.best_s:.3f}", f"{one.uncoded_s:.3f}"]
        for one in found.adapted
    ]  # fmt: skip
    columns = ["stragglers", "a worker's time", "chosen", "s", "random groups s", "best", "s", "uncoded s"]
    return ["## How much redundancy recorded stragglers ask for", "", ADAPTED, "", *table(columns, rows)]


def as_json(found: BccResults) -> dict[str, Any]:
    """Returns the page's numbers for JSON; timings are keyed by number of workers and then by delays."""

    def timings(by_workers: Timings) -> dict[str, Any]:
        return {str(w): {name: [asdict(t) for t in some] for name, some in by.items()} for w, by in by_workers.items()}

    return {
        "schema": 1,
        "paper": "arXiv:1710.09990",
        "options": asdict(found.options),
        "thresholds": [asdict(one) for one in found.thresholds],
        "clock": timings(found.simulated),
        "processes": timings(found.performed),
        "mixed": {**asdict(found.mixed), "saved": found.mixed.saved},
        "redundancy": [asdict(one) for one in found.adapted],
    }
