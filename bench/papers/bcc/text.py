"""Markdown page of the evaluation, and its numbers as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.papers.bcc.delays import MEAN_S, NETWORK_S, RECEIVE_S, SHIFT_S
from bench.papers.bcc.evaluation import FIGURE_2, FIGURE_5, BccResults, Timings, reduction
from bench.papers.bcc.studies import Adapted, MixedFound, Timing
from bench.papers.bcc.waiting import formula, waiting
from bench.papers.page import show_pictures, table, template

PAPER = {  # workers: scheme -> threshold, communication, computation and total seconds; Tables I and II
    50: {"uncoded": (50, 28.556, 0.230, 28.786), "cyclic": (41, 12.031, 1.959, 13.990), "bcc": (11, 3.043, 1.162, 4.205)},
    100: {"uncoded": (100, 31.567, 1.453, 33.020), "cyclic": (91, 24.698, 4.784, 29.482), "bcc": (25, 7.246, 1.685, 8.931)},
}
CLAIMS = {50: (0.854, 0.699), 100: (0.730, 0.697)}  # BCC's time less than uncoded, than cyclic; §III.C
SAVED = 0.2928  # §IV.C


def as_markdown(found: BccResults, pictures: Sequence[str]) -> str:
    """Returns the page; its last section is there with recorded stragglers only."""
    *sections, last = template(__file__).split("\n## ")
    mixed = found.mixed
    filled = "\n## ".join([*sections, last] if found.adapted else sections).format(
        options=found.options,
        shift_ms=SHIFT_S * 1e3,
        mean_ms=MEAN_S * 1e3,
        network_ms=NETWORK_S * 1e3,
        receive_ms=RECEIVE_S * 1e3,
        headlines=_headlines(found),
        tables=_tables(found),
        figure_2=FIGURE_2,
        fig_2=_fig_2(found),
        figure_5=FIGURE_5,
        fig_5=_fig_5(mixed),
        mixed=mixed,
        paper=SAVED,
        recovering=1 - mixed.recovery.mean_s / mixed.balanced_s,
        p2=mixed.p2_s / mixed.even_s,
        balanced=mixed.balanced_s / mixed.even_s,
        gap=mixed.recommended_s / mixed.bounds_s[0] - 1,
        adapted=_adapted(found.adapted),
    )
    return filled.rstrip("\n") + "\n" + show_pictures(pictures)


def _headlines(found: BccResults) -> str:
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
    return table(["workers", "delays", "", "paper", "clock", "processes"], rows)


def _tables(found: BccResults) -> str:
    tables = []
    for workers, by_delays in found.simulated.items():
        rows = [
            ["EC2", "paper", scheme, "-", "-", f"{threshold}", "100", f"{total:.2f}", f"{compute:.2f}", "-", "-"]
            for scheme, (threshold, _, compute, total) in PAPER.get(workers, {}).items()
        ]
        for delays, timings in by_delays.items():
            for how, some in (("clock", timings), ("processes", found.performed[workers].get(delays, []))):
                rows += [[delays, how, *_timing(timing, workers, found.options.load)] for timing in some]
        said = f"{workers} workers and batches. K: messages waited for, by formula, exactly on average, and found."
        columns = "delays,,scheme,K formula,K exact,K,iterations,s,computing s,gradient off by,loss"
        tables.append(f"{said}\n\n{table(columns.split(','), rows)}")
    return "\n".join(tables)


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


def _fig_2(found: BccResults) -> str:
    rows = [
        [str(one.load), one.scheme, *map(_number, (one.formula, one.exact, FIGURE_2 / one.load, one.communication)),
         f"{one.impossible:.2g}"]
        for one in sorted(found.thresholds, key=lambda one: one.load)
        if one.load in (1, 2, 5, 10, 20, 50, 100)
    ]  # fmt: skip
    return table(["load", "scheme", "K formula", "K exact", "K bound", "L exact", "not recoverable"], rows)


def _fig_5(one: MixedFound) -> str:
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
    return table(["", "seconds"], list(seconds.items()))


def _adapted(found: Sequence[Adapted]) -> str:
    rows = [
        [one.stragglers, one.work, f"{one.chosen}", f"{one.chosen_s:.3f}", f"{one.random_s:.3f}", f"{one.best}",
         f"{one.best_s:.3f}", f"{one.uncoded_s:.3f}"]
        for one in found
    ]  # fmt: skip
    columns = ["stragglers", "a worker's time", "chosen", "s", "random groups s", "best", "s", "uncoded s"]
    return table(columns, rows)


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
