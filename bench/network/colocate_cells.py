"""Cells of bench/network/colocate_ways.py: how their requests are served in each way, and how that is simulated.

What the simulator is given is measured with one model at a time, apart from the ways that it predicts: the network, the routing
of a cell's requests, and `runtime_profile`, compute as it is while all ranks of the machine compute at once.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from interleave import MODELS, cluster, known_texts  # noqa: E402
from net import PAYLOAD  # noqa: E402
from serving import served_jobs  # noqa: E402
from ways import (  # noqa: E402
    BY_EXCHANGE,
    BY_LAYER,
    IN_SEQUENCE,
    MICRO_BATCHES,
    THREE_MODELS,
    TIME_SLICED,
    ServedSteps,
    faster,
    one_after_the_other,
    overlapped,
    served_steps,
)

from aurora.io import shipped  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.result import RunResult, merge_results  # noqa: E402
from aurora.simulator.interpreter import simulate_plan  # noqa: E402
from aurora.types import Cluster, Curve, Plan, Profile, RunOptions, Trace  # noqa: E402
from aurora.types.profile import OVERHEAD  # noqa: E402
from aurora.types.trace import TRACE_PHASES  # noqa: E402

RANKS, REQUESTS, PARTS = 4, 2, 2  # prompts of a rank in a step, and its micro-batches
OF = (0, 1, 0)  # which of MODELS each model is
SKEWS = ("own prompts", "one prompt")
STEPS = {4: 8, 32: 6, 128: 3, 512: 3}
TOGETHER = {TIME_SLICED: ((0, 1), "step"), BY_EXCHANGE: ((0, 1), "exchange"), BY_LAYER: ((0, 1), "layer")}
TIMED_TOKENS, TIMED_STEPS = (8, 32, 128, 256), 4  # of a rank while compute is timed; the first step warms up
NO_LIMIT = cluster(RANKS, 1e15)
REST = ("gate", "aggregate", "head")
Served = dict[str, ServedSteps]


@dataclass
class Cell:
    """A setting: its models' prompts and plans, and what was measured and simulated there.

    Attributes:
        token_s: seconds that a row's experts wait in place of a GPU's work; 0: they compute on the CPU.
        plan_M: a plan of each model by itself.
        two, three: plans of two models and of three at once.
        seen: the cluster with the network as measured.
        slice_of: the time slice that the simulator finds faster, by way.
        alone_M, ways: (measured, simulated), of each model by itself, and by way.
        phases: (measured, simulated), by way, seconds of a rank in experts, in other compute, and in exchanges of counts.
        network: share of the simulated time of one model after the other that a network without limits saves.
    """

    batch: int
    port_bps: float
    skew: str
    token_s: float
    prompts_M: list[list[list[int]]]
    plan_M: list[Plan]
    two: Plan
    three: Plan
    traffic_M: list[Profile] = field(default_factory=list)
    seen: Cluster | None = None
    slice_of: dict[str, str] = field(default_factory=dict)
    alone_M: tuple[list[ServedSteps], list[ServedSteps]] = field(default_factory=lambda: ([], []))
    ways: tuple[Served, Served] = field(default_factory=lambda: ({}, {}))
    phases: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = field(default_factory=lambda: ({}, {}))
    network: float = 0.0

    def gains(self, simulated: bool = False) -> dict[str, float]:
        """By way, the time that its requests take one model after the other over its own."""
        alone_M = self.alone_M[simulated]
        return {
            way: sum(alone.seconds for alone in alone_M[: len(each.ends_M)]) / each.seconds
            for way, each in self.ways[simulated].items()
        }

    def add(self, simulated: bool, way: str, trace: Trace, parts: int = 1) -> None:
        """Adds what was served in a way, after what is there already."""
        ways, phases, own = (
            self.ways[simulated],
            self.phases[simulated],
            served_steps(trace, [0] * parts if parts > 1 else None),
        )
        ways[way] = one_after_the_other([*([ways[way]] if way in ways else []), own])
        took_s = (*(phase_s(trace, *names).sum() / RANKS for names in (("expert",), REST)), counts_s(trace))
        phases[way] = phases.get(way, 0.0) + np.array(took_s)


@dataclass(frozen=True)
class Job:
    """A run: some of OF under a plan, with prompts for each."""

    models: tuple[int, ...]
    prompts_M: list[list[list[int]]]
    plan: Plan
    predictable: bool = False


def prompts(batch: int, skew: str) -> list[list[list[int]]]:
    """For each of OF as many prompts as its steps take, from the end of what it knows; the third's lie before the first's."""
    length, count = batch // REQUESTS, RANKS * REQUESTS * STEPS[batch]
    known, found = known_texts(), []
    for number, model in enumerate(OF):
        text = known[model][: len(known[model]) - (length * count if number >= len(known) else 0)]
        ids = [3 + byte for byte in text[-length * count :]]
        own = [ids[i * length : (i + 1) * length] for i in range(count)]
        found.append(own if skew == SKEWS[0] else own[:1] * count)
    return found


def perform(hosts: Sequence[str], jobs: Sequence[Job], token_s: float) -> list[RunResult]:
    """Runs jobs one after the other, in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        given = [
            (
                job.plan,
                [str(shipped(f"models/{MODELS[OF[model]]}")) for model in job.models],
                job.prompts_M,
                RunOptions(1, REQUESTS, "gloo", predictable=job.predictable),
            )
            for job in jobs
        ]
        shares = launch(served_jobs, RANKS, list(hosts), folder, given, token_s)
    return [
        merge_results([result for share in shares for result in share[n]], [MODELS[OF[model]] for model in job.models])
        for n, job in enumerate(jobs)
    ]


def phase_s(trace: Trace, *phases: str, first_step: int = 0) -> np.ndarray:
    """(X,) the seconds of each event of some phases of a trace, from a step on."""
    own_X = np.isin(trace.phase_X, [TRACE_PHASES.index(phase) for phase in phases]) & (trace.step_X >= first_step)
    return np.asarray((trace.end_s_X - trace.start_s_X)[own_X])


def counts_s(trace: Trace) -> float:
    """Seconds of all exchanges of counts, each on the rank that comes to it last, as the others wait for that one."""
    own_X = trace.phase_X == TRACE_PHASES.index("counts")
    _, of_X = np.unique(np.stack([trace.model_X, trace.step_X, trace.layer_X])[:, own_X], axis=1, return_inverse=True)
    least_s = np.full(int(of_X.max()) + 1, np.inf)
    np.minimum.at(least_s, of_X.ravel(), phase_s(trace, "counts"))
    return float(least_s.sum())


def runtime_profile(hosts: Sequence[str], known: Profile, model: int, token_s: float) -> Profile:
    """A profile with compute as the runtime takes it while all ranks serve this model alone, from other texts than cells have.

    What experts take beyond the profile's curve (rows that are permuted, calls) is its OVERHEAD. The rest of compute, spread
    over the layers, is its gate.
    """
    text, plan = known_texts()[model], make_plan(NO_LIMIT, [known])
    jobs = []
    for tokens in TIMED_TOKENS:
        length, count = tokens // REQUESTS, RANKS * REQUESTS * TIMED_STEPS
        ids = [3 + byte for byte in text[len(text) // 2 : len(text) // 2 + length * count]]
        jobs.append(Job((model,), [[ids[i * length : (i + 1) * length] for i in range(count)]], plan, True))
    gate_s, beyond_s = [], []
    for result in perform(hosts, jobs, token_s):
        assert result.conditions is not None
        says = simulate_plan(plan, result.conditions.traffic([known]))
        events = RANKS * (TIMED_STEPS - 1) * known.layers
        timed = partial(phase_s, first_step=1)
        gate_s.append(timed(result.trace, *REST).sum() / events)
        beyond_s.append(max(0.0, (timed(result.trace, "expert").sum() - timed(says, "expert").sum()) / events))
    at_X = np.array(TIMED_TOKENS, dtype=np.float64)
    nothing = Curve(at_X[:1], np.zeros(1))
    curves = {"gate": Curve(at_X, np.array(gate_s)), "aggregate": nothing}
    beyond = Curve(at_X * RANKS * known.top_k, np.array(beyond_s))
    return replace(known, curves={"cpu": {**known.curves["cpu"], **curves, OVERHEAD: beyond}})


def sliced(plan: Plan, time_slice: str) -> Plan:
    return replace(plan, options=replace(plan.options, time_slice=time_slice))


def measure(hosts: Sequence[str], cells: Sequence[Cell], known: Sequence[Profile]) -> None:
    """Runs cells of one bandwidth and one kind of experts.

    Each model serves alone first; the simulator is given the routing of that and the network as measured before each.
    """
    token_s = cells[0].token_s
    told = [runtime_profile(hosts, each, model, token_s) for model, each in enumerate(known)]
    alone = [(cell, Job((m,), [cell.prompts_M[m]], cell.plan_M[m], True)) for cell in cells for m in range(len(OF))]
    clusters: list[Cluster] = []
    for (cell, job), result in zip(alone, perform(hosts, [job for _, job in alone], token_s), strict=True):
        assert result.conditions is not None
        (model,) = job.models
        cell.traffic_M += result.conditions.traffic([told[OF[model]]])
        clusters.append(result.conditions.cluster)
        cell.alone_M[False].append(served_steps(result.trace))
        if model < 2:
            cell.add(False, IN_SEQUENCE, result.trace)
    for cell in cells:
        cell.seen = typical(clusters)
        simulate_ways(cell)
    jobs = [(cell, *each) for cell in cells for each in ways_of(cell)]
    for (cell, way, _), result in zip(jobs, perform(hosts, [job for *_, job in jobs], token_s), strict=True):
        cell.add(False, way, result.trace, PARTS if way == MICRO_BATCHES else 1)


def typical(clusters: Sequence[Cluster]) -> Cluster:
    """One network as measured several times, with the median start-up and rate: a busy machine misses single ones by far."""
    first = clusters[0]
    startup_s, out_Bps, in_Bps = (
        float(np.median([getattr(each.gpus[0], name) for each in clusters])) for name in ("startup_s", "out_Bps", "in_Bps")
    )
    return replace(first, gpus=tuple(replace(gpu, startup_s=startup_s, out_Bps=out_Bps, in_Bps=in_Bps) for gpu in first.gpus))


def ways_of(cell: Cell) -> list[tuple[str, Job]]:
    """The runs of a cell in each way; those with micro-batches are of one model each."""
    micro, three = cell.slice_of[MICRO_BATCHES], cell.slice_of[THREE_MODELS]
    halves = [sliced(plan.with_micro_batches(PARTS), micro) for plan in cell.plan_M[:2]]
    return [
        *((way, Job(models, cell.prompts_M[: len(models)], sliced(cell.two, of))) for way, (models, of) in TOGETHER.items()),
        *((MICRO_BATCHES, Job((m,), [cell.prompts_M[m]], plan)) for m, plan in enumerate(halves)),
        (THREE_MODELS, Job((0, 1, 2), cell.prompts_M, sliced(cell.three, three))),
    ]


def simulate_ways(cell: Cell) -> None:
    """Simulates each way on the traffic and the network as measured with one model alone."""
    assert cell.seen is not None
    plan_M = [replace(plan, cluster=cell.seen) for plan in cell.plan_M]
    two, three = (replace(plan, cluster=cell.seen) for plan in (cell.two, cell.three))
    pairs = list(zip(plan_M, cell.traffic_M, strict=True))
    traces = [simulate_plan(plan, [traffic]) for plan, traffic in pairs]
    cell.alone_M[True].extend(map(served_steps, traces))
    for trace in traces[:2]:
        cell.add(True, IN_SEQUENCE, trace)
    free = [simulate_plan(replace(plan, cluster=NO_LIMIT), [traffic]).seconds for plan, traffic in pairs[:2]]
    cell.network = 1 - sum(free) / cell.ways[True][IN_SEQUENCE].seconds
    for way, (models, of) in TOGETHER.items():
        cell.add(True, way, simulate_plan(sliced(two, of), cell.traffic_M[: len(models)]))
    cell.ways[True][MICRO_BATCHES], cell.slice_of[MICRO_BATCHES] = faster(
        lambda of: one_after_the_other([overlapped(plan, traffic, PARTS, of) for plan, traffic in pairs[:2]])
    )
    _, cell.slice_of[THREE_MODELS] = faster(lambda of: served_steps(simulate_plan(sliced(three, of), cell.traffic_M)))
    cell.add(True, THREE_MODELS, simulate_plan(sliced(three, cell.slice_of[THREE_MODELS]), cell.traffic_M))


def cells_at(mbps: float, batches: Sequence[int], skews: Sequence[str], known: Sequence[Profile], token_s: float) -> list[Cell]:
    """Cells of one bandwidth, with the plans that all of them share."""
    ports = cluster(RANKS, mbps * 1e6 / 8 * PAYLOAD)
    models = [known[number] for number in OF]
    plans = [make_plan(ports, [each]) for each in models], make_plan(ports, models[:2]), make_plan(ports, models)
    return [Cell(batch, mbps * 1e6, skew, token_s, prompts(batch, skew), *plans) for batch in batches for skew in skews]
