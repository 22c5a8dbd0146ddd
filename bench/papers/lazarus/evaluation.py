"""Lazarus' evaluation (arXiv:2407.04656 §6) by formulas and replays: every figure, the paper's and ours."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aurora.algorithms.recovery import fewest_moves, migration_schedule, recover
from aurora.algorithms.replicas.failure_resilient import place_for_failures
from aurora.types import Cluster, FailureDomains, Gpu
from aurora.types.arrays import FloatArray
from bench.papers.lazarus.generated_traces import every, hourly, spot
from bench.papers.lazarus.greedy_relabelling import greedy_moves
from bench.papers.lazarus.jobs import BATCH, DEEPSEEK_V3, JOBS, NODES, SLOTS
from bench.papers.lazarus.membership_traces import MembershipEvent, changes, limited, load_failures, shifted
from bench.papers.lazarus.model_survival import model_survival
from bench.papers.lazarus.recovery_moves import recovery_moves
from bench.papers.lazarus.training_failures import SYSTEMS, Replay, System, TrainingJob, busiest, replay
from bench.papers.ranges import Range
from bench.papers.recorded_data import is_recorded, recorded_file

TRACE, TRACE_FROM_S, SPOT_S = "spot_bamboo/g4dn-trace.csv", 600.0, 4800.0
PORT_BPS = 6.25e9  # two of the testbed's nodes share 100 Gbps
EXPERT_BYTES = {"GPT-S": 63_000_000, "GPT-L": 112_000_000}  # weights and optimizer states, as Table 2's text says
METHODS = ("aurora", "mro", "spread", "compact")
DRAWS, LARGE_DRAWS = 10, 3
SLOW_START_S, SLOW_STORAGE = 180.0, 4.0


@dataclass(frozen=True)
class LazarusFigure:
    """One number of a figure or table: the paper's and ours."""

    figure: str  # which figure or table
    case: str  # what is measured
    way: str  # by which system or method
    paper: float | None  # as the paper gives it, None where it does not
    ours: Range  # the mean; lowest and highest too where it is of several draws


@dataclass(frozen=True)
class LazarusEvaluation:
    """All results of the evaluation."""

    found: list[LazarusFigure]  # the figures' numbers
    recorded: bool  # whether the spot trace is the recorded one
    spot: Mapping[str, Mapping[str, list[tuple[float, int, float]]]]  # by job and system: time_s, nodes used, samples a second


def reproduce(folder: Path | None, progress: Callable[[str, int, int], None]) -> LazarusEvaluation:
    """Runs the study of every figure. Equal arguments give equal results.

    `folder` has the recorded spot trace; without it a trace is generated. `progress` is called with (what, done, in all).
    """
    recorded, trace = spot_trace(folder)
    runs = {name: {system: replay(job, how, trace, SPOT_S) for system, how in SYSTEMS.items()} for name, job in JOBS.items()}
    parts = (_plans, _theorem, _model, _single_failures, _rates, lambda: _spot(runs), _skew, _one_layer, _tutel, _moves, _large)
    found: list[LazarusFigure] = []
    for number, part in enumerate(parts):
        progress("figures", number, len(parts))
        found += part()
    progress("figures", len(parts), len(parts))
    rates = {name: {system: run.rates for system, run in by.items()} for name, by in runs.items()}
    return LazarusEvaluation(found, recorded, rates)


def time_in_steps(made: LazarusEvaluation) -> float:
    """Returns which part of the spot trace the replay of our GPT-S spends in steps, Fig. 11."""
    return sum(
        one.ours.mean or 0.0 for one in made.found if (one.figure, one.case, one.way) == ("11", "GPT-S, aurora", "compute")
    )


def spot_trace(folder: Path | None) -> tuple[bool, list[MembershipEvent]]:
    """Returns whether `folder` has the recorded spot trace, and it or a generated one."""
    if not is_recorded(folder, TRACE):
        return False, limited(spot(NODES, SPOT_S, 0), NODES)
    return True, limited(shifted(changes(load_failures(recorded_file(folder, TRACE))), TRACE_FROM_S), NODES)


Figures = Iterator[LazarusFigure]


def figure_of(name: str, case: str, way: str, paper: float | None, ours: float | list[float]) -> LazarusFigure:
    """Returns one number of a figure, or the mean over draws with the lowest and the highest."""
    over = Range(min(ours), float(np.mean(ours)), max(ours)) if isinstance(ours, list) else Range(None, float(ours), None)
    return LazarusFigure(name, case, way, paper, over)


def _hot(ratio: float) -> FloatArray:
    """(1, 8) loads: one expert gets `ratio` times the mean."""
    load_E = np.ones(8)
    load_E[0] = ratio * 7 / (8 - ratio)
    return load_E[None]


def _plans() -> Figures:
    """Fig. 4: four experts of 2, 3, 3 and 12 replicas on five nodes of four slots, three of which fail."""
    for way in METHODS:
        p_K = place_for_failures(np.ones(4), FailureDomains.equal(5, 4), way, replicas=[2, 3, 3, 12]).survival_L[0].p_K
        yield figure_of("4", "3 of 5 nodes failed", way, 0.7 if way == "mro" else None, p_K[2])


def _theorem() -> Figures:
    """Where Theorem 1 fails: four nodes of three slots, four experts of three replicas."""
    for way in ("mro", "aurora"):
        p_K = place_for_failures(np.ones(4), FailureDomains.equal(4, 3), way, replicas=[3, 3, 3, 3]).survival_L[0].p_K
        for failures in (1, 2):
            claim = 1.0 if way == "mro" else None
            yield figure_of("Theorem 1", f"{failures} of 4 nodes failed", way, claim, p_K[failures - 1])


def _model() -> Figures:
    """Fig. 8: from how many sets of failed nodes all experts of all layers are left."""
    claims = {("GPT-L", 4, "mro"): 0.41, ("GPT-L", 4, "spread"): 0.12}
    for name in ("GPT-S", "GPT-L"):
        load_LE = JOBS[name].load_LE
        for way in METHODS:
            made = place_for_failures(load_LE, FailureDomains.equal(NODES, SLOTS), way, min_replicas=2)
            for failures in range(1, NODES // 2 + 1):
                p = model_survival(made.slots_LN, failures)
                yield figure_of("8", f"{name}, {failures} failed", way, claims.get((name, failures, way)), p)


def _one_layer() -> Figures:
    """Fig. 10b: the same for a layer with one expert at 2 or 4 times the mean."""
    for ratio in (2, 4):
        for way in METHODS:
            made = place_for_failures(_hot(ratio), FailureDomains.equal(NODES, SLOTS), way, min_replicas=2)
            for failures in range(1, NODES // 2 + 1):
                yield figure_of("10b", f"{ratio}:1, {failures} failed", way, None, made.survival_L[0].p_K[failures - 1])


def _ratios(
    job: TrainingJob, traces: list[list[MembershipEvent]], end_s: float, ours: System, others: Mapping[str, System]
) -> dict[str, list[float]]:
    """Samples of `ours` over each other system's, one value per trace."""
    base = [replay(job, ours, trace, end_s).samples for trace in traces]
    return {
        name: [first / replay(job, how, trace, end_s).samples for first, trace in zip(base, traces, strict=True)]
        for name, how in others.items()
    }


def _single_failures() -> Figures:
    """Fig. 6 and 7: samples against DeepSpeed while a node fails every 5 or 40 minutes until half are left."""
    claims = {
        ("6", "GPT-S", "DS"): 2.8, ("6", "GPT-S", "DS(FT)"): 1.4, ("6", "GPT-L", "DS"): 5.7, ("6", "GPT-L", "DS(FT)"): 2.8,
        ("7", "GPT-S", "DS"): 1.6, ("7", "GPT-L", "DS"): 2.3,
    }  # fmt: skip
    slow = {
        f"{name}, slow restarts": replace(job, storage_Bps=job.storage_Bps / SLOW_STORAGE, start_s=SLOW_START_S)
        for name, job in JOBS.items()
    }
    for figure, minutes, longer in (("6", 5, 1), ("7", 40, 4)):
        traces = [every(minutes * 60, NODES, seed, NODES // 2) for seed in range(DRAWS)]
        others = {name: replace(SYSTEMS[name], interval=SYSTEMS[name].interval * longer) for name in ("DS", "DS(FT)")}
        for name, job in (JOBS | slow).items():
            ratios = _ratios(job, traces, minutes * 360, SYSTEMS["aurora"], {"lazarus": SYSTEMS["lazarus"]} | others)
            for way, over in ratios.items():
                yield figure_of(figure, name, way, claims.get((figure, name, way)), over)


def _rates() -> Figures:
    """Steps and samples a second that the paper states."""
    trace = every(300, NODES, 0, NODES // 2)
    for name, claim in (("GPT-S", 2926), ("GPT-L", 1996)):
        run = replay(JOBS[name], SYSTEMS["aurora"], trace, 1800)
        step_s = float(np.mean([used * BATCH / rate for _, used, rate in run.rates]))
        yield figure_of("Rates", f"{name}: steps in Fig. 6's 30 minutes", "aurora", claim, run.seconds["compute"] / step_s)
    for way, claim in (("aurora", 45), ("DS", 34)):
        rate = replay(JOBS["GPT-M"], SYSTEMS[way], trace, 60).rates[0][2]
        yield figure_of("Rates", "GPT-M: samples a second on 10 nodes", way, claim, rate)


def _spot(runs: Mapping[str, Mapping[str, Replay]]) -> Figures:
    """Fig. 9 and 11: samples and the parts of the time on 80 minutes of a spot trace."""
    claims = {("GPT-S", "DS"): 2.3, ("GPT-L", "DS"): 3.4, ("GPT-S", "DS(FT)"): 1.2, ("GPT-L", "DS(FT)"): 1.8}
    parts = {("GPT-L", "DS(FT)", "restart"): 0.27, ("GPT-S", "DS(FT)", "restart"): 0.0}
    for name, by in runs.items():
        for way in ("lazarus", "DS", "DS(FT)"):
            yield figure_of("9", name, way, claims.get((name, way)), by["aurora"].samples / by[way].samples)
    for name, by in runs.items():
        for system in ("aurora", "DS", "DS(FT)"):
            for phase, seconds in by[system].seconds.items():
                yield figure_of("11", f"{name}, {system}", phase, parts.get((name, system, phase)), seconds / SPOT_S)


def _skew() -> Figures:
    """Fig. 10a: a layer's throughput with one expert at 1 to 4 times the mean, against its own when all are equal."""
    for way in ("aurora", "lazarus", "DS"):
        top = {ratio: busiest(replace(JOBS["GPT-S"], load_LE=_hot(ratio)), SYSTEMS[way], NODES) for ratio in (1, 2, 3, 4)}
        for ratio, busy in top.items():
            yield figure_of("10a", f"{ratio}:1", way, None if way == "DS" else 1.0, top[1] / busy)


def _tutel() -> Figures:
    """Fig. 12: 16 nodes, one fails every 5 minutes until half are left."""
    claims = {("GPT-S", "Tutel(FT)"): 1.8, ("GPT-S", "Tutel"): 2.1, ("GPT-L", "Tutel(FT)"): 3.9, ("GPT-L", "Tutel"): 4.0}
    traces = [every(300, 16, seed, 8) for seed in range(DRAWS)]
    others = {name: SYSTEMS[name] for name in ("Tutel", "Tutel(FT)")}
    for name, job in JOBS.items():
        for way, over in _ratios(job, traces, 2700, SYSTEMS["aurora"], others).items():
            yield figure_of("12", name, way, claims.get((name, way)), over)


def _moves() -> Figures:
    """Table 2: replicas moved and the seconds of their transfers after 2 to 5 of 10 nodes failed.

    By MRO also with greedy relabelling, the paper's.
    """
    cluster = Cluster("ten", tuple(Gpu(f"g{n}", "3090", n, PORT_BPS, PORT_BPS, 24 * 10**9) for n in range(NODES)))
    failure_domains = FailureDomains.equal(NODES, SLOTS)
    cases = (("GPT-S", 2, 11, 2.3), ("GPT-S", 3, 52, 3.0), ("GPT-L", 4, 160, 7.6), ("GPT-L", 5, 55, 7.8))
    for name, lost, replicas, seconds in cases:
        load_LE = JOBS[name].load_LE
        for way, method, relabel in (
            ("aurora", "aurora", fewest_moves), ("mro", "mro", fewest_moves), ("mro, greedy", "mro", greedy_moves)
        ):  # fmt: skip
            held = place_for_failures(load_LE, failure_domains, method, min_replicas=2).slots_LN
            moved, took = [], []
            for seed in range(DRAWS):
                alive_N = np.ones(NODES, dtype=bool)
                alive_N[np.random.default_rng(seed).permutation(NODES)[:lost]] = False
                made = recover(held, alive_N, load_LE, failure_domains, 2, method, relabel=relabel)
                found = recovery_moves(held, alive_N, made, EXPERT_BYTES[name])
                moved.append(float(found.moved))
                took.append(migration_schedule(found.bytes_NN, cluster, np.random.default_rng(0)).makespan_s)
            for what, claim, over in (("replicas", replicas, moved), ("seconds", seconds, took)):
                yield figure_of(
                    "Table 2", f"{name}, {lost} lost: {what}", way, claim if relabel is greedy_moves else None, over
                )


def _large() -> Figures:
    """Fig. 13: time to train as many samples of DeepSeek V3, over that of the paper's method."""
    claims = {(64, 0.01): (2.9, 3.9), (64, 0.15): (3.6, 14.5), (32, 0.05): (2.9, 4.5), (128, 0.05): (3.5, 10.6)}
    others = {name: SYSTEMS[name] for name in ("DS(FT)", "DS")}
    for (nodes, rate), papers in claims.items():
        traces = [hourly(nodes, rate, 24, seed) for seed in range(LARGE_DRAWS)]
        ratios = _ratios(DEEPSEEK_V3, traces, 24 * 3600, SYSTEMS["lazarus"], others)
        for (way, over), claim in zip(ratios.items(), papers, strict=True):
            yield figure_of("13", f"{nodes * 8} GPUs, {rate:.0%} an hour", way, claim, over)
