"""Plans that serve traffic they were not made from: `python bench/robust.py [--quick]` writes bench/results/robust-DATE.md.

Each case plans from some tokens and serves others. Placements are judged as engines serve: each replica of an expert takes the
same part of its load. The figure is the fullest GPU's load over the mean GPU's.
"""

import argparse
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from joint_bound import joint_bound
from machine import machine
from routed_tasks import MIXTRAL, OLMOE, ROOT, Source, Traffic, counted, deepseek, drifting
from tables import Table, write

from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.registry import place
from aurora.io import load_cluster, shipped
from aurora.planner.options import choices
from aurora.planner.plan import make_plan
from aurora.types import Cluster, GpuSlots, Placement, PlanOptions

PORT_Bps = 400e9  # fast, so that load decides
OWN, APART, MIX, PLANNED = "own: same tokens", "own: other tokens", "mix", "planned for"
OTHER, UNPLANNED = "another task", "nobody planned for"
SAMPLES = {f"from {100 * share:g} %": share for share in (0.001, 0.01, 0.1)}  # of a task's tokens
KINDS = (OWN, APART, *SAMPLES, MIX, PLANNED, OTHER, UNPLANNED)
KINDS_BY_GPUS = {8: KINDS, 16: KINDS, 32: (OWN, PLANNED), 64: (PLANNED,)}
FEW_GPUS = 16  # up to here with all layers; beyond with one, since plans take longer
PLAN = "plan"  # in its default
AIMS = [aim for aim in choices(PlanOptions(), False)["aim"] if aim in ("own", "sum") and aim != PlanOptions().aim]
METHODS = ("contiguous", "EPLB", "balanced", "place", PLAN, *(f"plan --aim {aim}" for aim in AIMS))
MOST_TASKS = 3  # of a source: planned for alone, or left out
ENOUGH_SLOTS = 4  # experts a GPU, from which plans for several domains reach NEAR
NEAR = 1.08  # of max / mean load
CLOSE = 1.02  # against EPLB, contiguous or a bound
TIE = 1 + 1e-9


@dataclass(frozen=True)
class Case:
    """What is planned from, one profile for each domain, and what is served."""

    kind: str
    made_from: list[Traffic]
    served: list[Traffic]


@dataclass
class Found:
    """Figures of one source on some GPUs with some slots, by kind of case and method: one for each plan, task and layer."""

    source: str
    gpus: int
    slots: int
    experts: int
    ratios: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    by_window: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of a layer's plan

    def mean(self, kind: str, method: str) -> float:
        return float(np.mean(self.ratios[kind, method]))

    @property
    def where(self) -> str:
        return f"{self.source} | {self.gpus} x {self.slots}"


def cases(source: Source, draws: int) -> Iterator[Case]:
    """Every case of a source; `draws` samples of each size for a task."""
    rng = np.random.default_rng(1)
    tasks = list(source.tasks.values())
    for task in tasks[:MOST_TASKS]:
        yield Case(OWN, [task], [task])
        halves = [task.at(part) for part in np.array_split(np.arange(len(task)), 2)]
        yield Case(APART, halves[:1], halves[1:])
        yield Case(APART, halves[1:], halves[:1])
    for kind, share in SAMPLES.items():
        for task in tasks[:MOST_TASKS]:
            for _ in range(draws):
                size = max(1, round(share * len(task)))
                first = int(rng.integers(len(task) - size))
                inside = slice(first, first + size)
                yield Case(kind, [task.at(inside)], [task.at(np.delete(np.arange(len(task)), inside))])
    yield Case(MIX, [mixed(tasks)], tasks)
    yield Case(PLANNED, tasks, tasks)
    for left_out, task in enumerate(tasks[:MOST_TASKS]):
        yield Case(OTHER, [tasks[left_out - 1]], [task])
        if len(tasks) > 2:
            yield Case(UNPLANNED, tasks[:left_out] + tasks[left_out + 1 :], [task])


def mixed(tasks: list[Traffic]) -> Traffic:
    """The tasks' sequences in turn, at each task's pace, as one stream."""
    first = np.cumsum([0, *(int(task.sequence_U[-1]) + 1 for task in tasks)])
    when_U = np.concatenate([task.sequence_U / (task.sequence_U[-1] + 1) for task in tasks])
    order_U = np.argsort(when_U, kind="stable")
    sequence_U = np.concatenate([task.sequence_U + begin for task, begin in zip(tasks, first, strict=False)])
    return Traffic(np.concatenate([task.experts_ULK for task in tasks])[order_U], sequence_U[order_U])


def cluster_of(gpus: int) -> Cluster:
    """The paper's equal GPUs, as many as asked for, with fast ports."""
    paper = load_cluster(shipped("clusters/paper-equal-8.toml"))
    made = [replace(paper.gpus[0], name=f"gpu{g}", node=g // 8, out_Bps=PORT_Bps, in_Bps=PORT_Bps) for g in range(gpus)]
    return replace(paper, gpus=tuple(made))


def placements(source: Source, case: Case, cluster: Cluster, slots: int, found: Found) -> dict[str, list[np.ndarray]]:
    """The part of each expert's load on each GPU, (E, G) for every layer, by method."""
    gpus, layers = len(cluster), case.made_from[0].layers
    load_LE = np.sum([traffic.loads_LE(source.experts) for traffic in case.made_from], axis=0)
    even_J, rng = np.full(gpus, source.experts // gpus), np.random.default_rng(0)
    made = {name: [np.eye(gpus)[PLACE[name](load_E, even_J, rng)] for load_E in load_LE] for name in ("contiguous", "balanced")}
    for name, method in (("EPLB", "eplb"), ("place", "equal-split")):
        placed = place(load_LE, GpuSlots.equal(gpus, slots), method)
        made[name] = [placed.placement.split_EG(layer) for layer in layers]
        found.seconds[name].append(placed.seconds / len(layers))
    first, *further = (source.profile(traffic, gpus) for traffic in case.made_from)
    options = PlanOptions(slots_per_gpu=slots, order="all-at-once")
    for name, chosen in {PLAN: options, **{f"plan --aim {aim}": replace(options, aim=aim) for aim in AIMS}}.items():
        began_s = time.perf_counter()
        plan = make_plan(cluster, [first], chosen, domains=further)
        found.seconds[name].append((time.perf_counter() - began_s) / len(layers))
        made[name] = [evenly(plan.models[0].placement, layer) for layer in layers]
    return made


def evenly(placement: Placement, layer: int) -> np.ndarray:
    """(E, G): the load of each expert divided evenly over its replicas."""
    holds_EG = placement.holds_EG(layer)
    return holds_EG / holds_EG.sum(axis=1, keepdims=True)


def fullest(load_XE: np.ndarray, split_EG: np.ndarray) -> np.ndarray:
    """(X,): the fullest GPU's load over the mean GPU's."""
    load_XG = load_XE @ split_EG
    return load_XG.max(axis=1) / load_XG.mean(axis=1)


def bounds_L(source: Source, case: Case, slots: GpuSlots) -> np.ndarray:
    """(L,): what no placement's mean over the served tasks of max / mean load is below; these are the tasks planned for.

    The largest of the mean of the tasks' own bounds, the bound of their summed shares, and, where an expert alone exceeds the
    mean GPU's load, the bound for all tasks jointly.
    """
    share_DLE = np.stack([task.loads_LE(source.experts) for task in case.served]).astype(np.float64)
    share_DLE /= share_DLE.sum(axis=2, keepdims=True)
    apart_DL = [(one := place(share_LE, slots, "equal-split")).bound_L / one.mean_load_L for share_LE in share_DLE]
    summed = place(share_DLE.mean(axis=0), slots, "equal-split")
    joint_L = [
        joint_bound(share_DE, slots.gpus, int(slots.slots_G[0])) if share_DE.max() * slots.gpus > 1 else 1.0
        for share_DE in share_DLE.swapaxes(0, 1)
    ]
    return np.max([np.mean(apart_DL, axis=0), summed.bound_L / summed.mean_load_L, joint_L], axis=0)


def measure(source: Source, gpus: int, slots: int, draws: int, kinds: tuple[str, ...]) -> Found:
    """Every case of a source on so many GPUs with so many slots."""
    found = Found(source.name, gpus, slots, source.experts)
    cluster = cluster_of(gpus)
    for case in cases(source, draws):
        if case.kind not in kinds:
            continue
        made = placements(source, case, cluster, slots, found)
        for served in case.served:
            load_LE = served.loads_LE(source.experts)
            windows_TLE = np.stack([window.loads_LE(source.experts) for window in served.windows()])
            for method, split_LEG in made.items():
                for layer, split_EG in enumerate(split_LEG):
                    found.ratios[case.kind, method].append(float(fullest(load_LE[layer : layer + 1], split_EG)[0]))
                    found.by_window[case.kind, method].append(float(fullest(windows_TLE[:, layer], split_EG).mean()))
        if case.kind in (OWN, PLANNED):
            found.ratios[case.kind, "bound"] += len(case.served) * bounds_L(source, case, GpuSlots.equal(gpus, slots)).tolist()
    return found


def spare(experts: int, gpus: int) -> list[int]:
    """Slots of each GPU: its share of the experts, and an eighth and a quarter more, as whole slots."""
    even = experts // gpus
    return sorted({even + -(-even * eighths // 8) for eighths in (0, 1, 2)})


def tables(results: list[Found]) -> list[list[str]]:
    """For each kind of case, figures by source, GPUs and slots; the last row is their mean over all plans, tasks and layers."""
    made = []
    for kind in KINDS:
        rows = [found for found in results if found.ratios[kind, PLAN]]
        if not rows:
            continue
        table = Table(kind[:1].upper() + kind[1:], " | ".join(("source", "GPUs x slots", "figures", *METHODS, "bound")))
        for found in rows:
            cells = [f"{found.mean(kind, method):.3f}" for method in METHODS]
            bound = f"{found.mean(kind, 'bound'):.3f}" if found.ratios[kind, "bound"] else ""
            table.add(found.where, len(found.ratios[kind, PLAN]), *cells, bound)
        table.add(
            "all", "", sum(len(f.ratios[kind, PLAN]) for f in rows), *(f"{over_all(rows, kind, m):.3f}" for m in METHODS), ""
        )
        made.append(table.lines)
    return made


def over_all(results: list[Found], kind: str, method: str, by_window: bool = False) -> float:
    """The mean over all cases, tasks and layers; NaN where there are none."""
    figures = [one for found in results for one in (found.by_window if by_window else found.ratios)[kind, method]]
    return float(np.mean(figures)) if figures else float("nan")


def summary(results: list[Found]) -> list[list[str]]:
    """Means over everything: of all tokens served, and window by window; and what a layer's plan takes."""
    whole = Table("Means over all cases", " | ".join(("case", *METHODS)), "Load of all tokens served.")
    windows = Table("Means over all cases, window by window", " | ".join(("case", *METHODS)), "The mean over served windows.")
    for kind in KINDS:
        for table, by_window in ((whole, False), (windows, True)):
            table.add(kind, *(f"{over_all(results, kind, method, by_window):.3f}" for method in METHODS))
    timed = [method for method in METHODS if results[0].seconds[method]]
    took = Table("Milliseconds of a layer", " | ".join(("GPUs", *timed)), "Mean over all cases; other work ran too.")
    for gpus in sorted({found.gpus for found in results}):
        here = [found for found in results if found.gpus == gpus]
        took.add(gpus, *(f"{1e3 * np.mean([one for found in here for one in found.seconds[method]]):.1f}" for method in timed))
    return [whole.lines, windows.lines, took.lines]


def verdicts(results: list[Found]) -> list[str]:
    """Every target, whether it is met, and where it is missed."""
    table = Table("Targets", "target | found | met | rows that miss it, worst first")

    def add(target: str, found: str, met: bool, misses: list[tuple[float, str]]) -> None:
        worst = "; ".join(text for _, text in sorted(misses, reverse=True)[:4])
        table.add(target, found, "yes" if met else "**no**", f"{len(misses)}: {worst}" if misses else "none")

    def against(kind: str, method: str, other: str, factor: float) -> None:
        mine, others = over_all(results, kind, method), over_all(results, kind, other)
        if np.isnan(mine):
            return
        pairs = [(f.mean(kind, method), f.mean(kind, other), f.where) for f in results if f.ratios[kind, method]]
        misses = [(a / b, f"{where.replace(' | ', ' ')}: {a:.3f}, {b:.3f}") for a, b, where in pairs if a > factor * b * TIE]
        add(f"{kind}: {method} <= {factor:g} x {other}", f"{mine:.4f}, {others:.4f}", mine <= factor * others * TIE, misses)

    for kind in (OWN, APART, *SAMPLES):
        against(kind, PLAN, "EPLB", 1.0)
        against(kind, PLAN, "balanced", 1.0)
    for near, what in ((True, f"{PLAN} <= {NEAR}"), (False, f"{PLAN} <= {CLOSE} x bound")):
        rows = [found for found in results if can_be_near(found) == near]
        if rows:
            reached, proved = (over_all(rows, PLANNED, method) for method in (PLAN, "bound"))
            limits = [NEAR if near else CLOSE * found.mean(PLANNED, "bound") for found in rows]
            pairs = [(found.mean(PLANNED, PLAN), limit, found.where) for found, limit in zip(rows, limits, strict=True)]
            misses = [(a / b, f"{where.replace(' | ', ' ')}: {a:.3f}, {b:.3f}") for a, b, where in pairs if a > b * TIE]
            where = f"{ENOUGH_SLOTS} experts a GPU or more and a bound that allows it" if near else "else"
            met = reached <= (NEAR if near else CLOSE * proved) * TIE
            add(f"{PLANNED}, {where}: {what}", f"{reached:.4f}" if near else f"{reached:.4f}, {proved:.4f}", met, misses)
    for kind in (OTHER, UNPLANNED):
        against(kind, PLAN, "EPLB", CLOSE)
        against(kind, PLAN, "contiguous", CLOSE)
    for method in [name for name in ("place", "plan --aim own") if name in METHODS]:
        pairs = [pair for f in results for pair in zip(f.ratios[OWN, method], f.ratios[OWN, "EPLB"], strict=True)]
        worse = [(a / b, f"{a:.4f}, {b:.4f}") for a, b in pairs if a > b * TIE]
        add(f"{OWN}: {method}, no layer worse than EPLB", f"{len(worse)} of {len(pairs)} layers worse", not worse, worse)
    return table.lines


def can_be_near(found: Found) -> bool:
    """Whether a plan for all tasks can be expected to be NEAR on each."""
    return found.experts // found.gpus >= ENOUGH_SLOTS and CLOSE * found.mean(PLANNED, "bound") <= NEAR


def sources(quick: bool) -> list[Source]:
    """Recorded tasks, where they are present, and the drifting source."""
    domains, fiddler = "olmoe_mixtral_domains/counts_dev.csv", "mixtral_fiddler/counts_original.csv"
    made = [
        deepseek([3, 12, 22] if quick else [3, 8, 17, 22]),
        counted("OLMoE", OLMOE, domains, [7] if quick else [0, 7, 15], {"model": "olmoe-1b-7b-0924", "selection": "topk"}),
        counted("Mixtral", MIXTRAL, domains, [7] if quick else [0, 7, 15], {"model": "mixtral-8x7b-v0.1", "selection": "topk"}),
        counted("Mixtral, MMLU", MIXTRAL, fiddler, [16] if quick else [0, 8, 16, 24], {"variant": "original"}),
        drifting(1, 3 if quick else 4, 8192),
    ]
    return [source for source in made if source]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 and 16 GPUs, few layers: two minutes")
    parser.add_argument("--only", nargs="+", help="names of sources")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    jobs = [
        (source if gpus <= FEW_GPUS else source.middle_layer, gpus, slots, 1 if len(source.tasks) > 2 else 2, kinds)
        for source in sources(args.quick)
        for gpus, kinds in KINDS_BY_GPUS.items()
        if gpus <= FEW_GPUS or not args.quick
        if source.experts >= gpus and (not args.only or source.name in args.only)
        for slots in spare(source.experts, gpus)
    ]
    began_s = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as pool:
        running = [pool.submit(measure, *job) for job in sorted(jobs, key=lambda job: -job[0].experts * job[1])]
        results = []
        for each in running:
            results.append(each.result())
            print(f"{time.perf_counter() - began_s:4.0f} s: {results[-1].where}", flush=True)
    results.sort(key=lambda found: (found.source, found.gpus, found.slots))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = [
        "# Plans on traffic that they were not made from",
        "",
        f"`python bench/robust.py{' --quick' if args.quick else ''}` at commit {commit} on {machine()}: "
        f"{time.perf_counter() - began_s:.0f} s with {args.processes} processes.",
        "",
        ABOUT,
    ]
    write("robust-quick" if args.quick else "robust", about, verdicts(results), *summary(results), *tables(results))


ABOUT = """Figures are the fullest GPU's load over the mean GPU's, replicas serving even parts, as engines do; the mean over
layers, tasks and plans. EPLB's own algorithm and `place` get the summed loads of what the plan is made from, and as many slots;
`contiguous` and `balanced` hold each expert once. Cases:

- own: the plan is made from a task's tokens and serves the same tokens, or from one half of them and serves the other half;
- from 0.1, 1, 10 %: from a stretch of the task's tokens, and serves the rest of that task;
- mix: from all tasks mixed in one profile, and serves each; planned for: from all tasks as domains, and serves each;
- another task: from one task, and serves the next; nobody planned for: of three tasks or more, each is left out in turn, and
  served by the plan for the others.

Tokens of DeepSeek-V2-Lite and of the drifting source are in sequence. Of OLMoE and Mixtral only counts were recorded; their
tokens are in random order, so that their samples differ by chance alone. Compute times are in proportion to tokens, ports fast.
All cases are run on 8 and 16 GPUs; on 32 and 64 one layer and fewer cases. Slots are whole: with one or two experts a GPU, a
spare slot is more than 25 %."""


if __name__ == "__main__":
    main()
