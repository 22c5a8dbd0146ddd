"""BCC's evaluation (arXiv:1710.09990): thresholds, the tables' three schemes and ours, mixed clusters, recorded stragglers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.papers.bcc.delays import DELAYS, recorded_exists
from bench.papers.bcc.studies import (
    PAPERS_CLUSTER,
    SCHEMES,
    Adapted,
    BccOptions,
    MixedFound,
    Threshold,
    Timing,
    adapted,
    mixed,
    performed,
    simulated,
    thresholds,
)

Timings = dict[int, dict[str, list[Timing]]]  # by number of workers, then by delays
FIGURE_2 = 100  # examples and workers
FIGURE_5 = 500  # examples


@dataclass(frozen=True)
class BccResults:
    """All results of the evaluation."""

    options: BccOptions  # of the evaluation
    thresholds: tuple[Threshold, ...]  # Fig. 2
    simulated: Timings  # Tables I and II
    performed: Timings  # Tables I and II by real processes; empty if none ran
    mixed: MixedFound  # Fig. 5
    adapted: tuple[Adapted, ...]  # how much redundancy recorded stragglers ask for; empty without a recording


def reproduce(options: BccOptions, folder: Path | None, progress: Callable[[str, int, int], None]) -> BccResults:
    """Runs every study. Equal arguments give equal results, except for what real processes measure.

    `folder` has the recorded data, or is None. `progress` is called with (what, steps done, steps in all).
    """
    names = [name for name in DELAYS if "recorded" not in name or recorded_exists(folder)]
    real = [name for name in names if name in ("as in the tables", "recorded")] if options.process_iterations else []
    steps = len(options.workers) * (len(names) + len(real) * len(SCHEMES)) + 2
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("delays", done, steps)

    by_clock: Timings = {}
    by_process: Timings = {}
    for workers in options.workers:
        by_clock[workers], by_process[workers] = {}, {}
        for name in names:
            by_clock[workers][name] = simulated(name, workers, options.load, options.iterations, options.seed, folder)
            advance()
        if real:
            by_process[workers] = performed(real, workers, options, folder, advance)
    loads = [load for load in range(1, FIGURE_2 + 1) if load <= 10 or load % 5 == 0]
    curves = tuple(thresholds(FIGURE_2, loads))
    found = mixed(FIGURE_5, PAPERS_CLUSTER, options.draws, options.seed)
    advance()
    choices: list[Adapted] = []
    if recorded_exists(folder):
        for stalled in (False, True):
            choices += adapted(max(options.workers), options.iterations, options.seed, folder, stalled)
    advance()
    return BccResults(options, curves, by_clock, by_process, found, tuple(choices))


def reduction(timings: list[Timing], scheme: str, over: str) -> float:
    """Returns by what share the seconds of `scheme` are below those of the scheme `over`; 0.1 is 10 % less."""
    seconds = {timing.scheme: timing.seconds for timing in timings}
    return float(1 - seconds[scheme] / seconds[over])
