"""An interactive model beside a batch model on real sockets: what the one waits, and what is left for the other.

    python bench/network/priorities.py [--simulate] [--repetitions 3] [--slower 1] [--bands]
        [--experts wait]

Root only (namespaces, token buckets); elsewhere it says why it is skipped; --simulate runs anywhere. Four hosts have ports of
PORT_bps. The interactive model decodes DECODED prompts on each rank all the time; the batch model reads prompts of PROMPT
tokens, BATCH at a time on each rank. Two cores carry the ranks, so experts' compute is a stand-in that takes TOKEN_S a row: it
is done and then waited for, as in bench/interleave.py, or only waited for, so that it takes no time of the cores; all else is
real. Ways: each model alone; both alike; both with priorities. A gap is the time between the ends of two steps of the
interactive model while both serve; throughput is the batch model's in the same time. The planner
chooses preemption points.

With --slower 4 experts and ports are four times as slow, so that what the two cores compute for eight model workers, beside
experts, is a fourth of the part of a step that it was: beside GPUs, each with cores of its own, it is smaller still.
Results: bench/results/priorities-DATE.md.
"""

import argparse
import pydoc_data.topics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from net import PAYLOAD, network
from protocol import DEEP, Results, by_turns, options

from aurora import synthetic_profile
from aurora.io import shipped
from aurora.planner.options import with_preemption
from aurora.planner.plan import make_plan
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.result import merge_results
from aurora.simulator.interpreter import simulate_plan
from aurora.types import (
    PRIORITIES,
    Cluster,
    Curve,
    Gpu,
    Plan,
    Profile,
    RunOptions,
    SyntheticOptions,
    Trace,
)

from serving import served_by_model  # bench/  # isort: skip

RANKS, PORT_bps, TOKEN_S = 4, 17e6, 200e-6
MODELS = ("mixtral-topics", "qwen3moe-stdlib")
DECODED, NEW_TOKENS = 8, 128
BATCH, PROMPT, BATCHES = 4, 128, 6
GATE_S = 5e-4  # of one layer's attention and routing, in the simulator
PRIORITISED = "both, with priorities"
EXPERTS = {"compute": "Measured", "wait": "Measured, experts only wait"}  # whether the stand-in for experts computes too
OF_MODEL = {"batch": DECODED, "max_new_tokens": NEW_TOKENS}, {"batch": BATCH, "max_new_tokens": 1}  # each its own RunOptions


def cluster(slower: float) -> Cluster:
    """The hosts, with ports so many times as slow."""
    port_Bps = PORT_bps / slower / 8 * PAYLOAD
    return Cluster("hosts", tuple(Gpu(f"host-{rank}", "host", rank, port_Bps, port_Bps, 10**9) for rank in range(RANKS)))


def profiles(slower: float) -> list[Profile]:
    """A window for each step: decoding of the one model, prompts of the other; experts take TOKEN_S a row, times `slower`."""
    found = []
    for name, tokens, windows in zip(MODELS, (DECODED, BATCH * PROMPT), (NEW_TOKENS, BATCHES), strict=True):
        drawn = synthetic_profile("zipf:0.5", shipped(f"models/{name}/config.json"), SyntheticOptions(RANKS, tokens, windows))
        rest = Curve(np.array([0.0, 1.0]), np.array([GATE_S, GATE_S]))
        curves = {"gate": rest, "expert": Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S * slower])), "aggregate": rest}
        found.append(replace(drawn, curves={"host": curves}))
    return found


def gaps_s(trace: Trace, model: int) -> list[float]:
    """Seconds between the ends of a simulated model's steps."""
    of_model = trace.model_X == model
    ends_s = [trace.end_s_X[of_model & (trace.step_X == step)].max() for step in range(int(trace.step_X[of_model].max()) + 1)]
    return np.diff(ends_s).tolist()


def beside(trace: Trace) -> tuple[list[float], float]:
    """While both models serve: the interactive model's gaps, and which share of its bytes the batch model has sent a second."""
    first, second = (trace.end_s_X[trace.model_X == model].max() for model in (0, 1))
    gaps = gaps_s(trace, 0)
    sent_X = (trace.model_X == 1) * trace.bytes_X
    done = sent_X[trace.end_s_X <= first].sum() / sent_X.sum()
    return [gap for gap, end in zip(gaps, np.cumsum(gaps), strict=True) if end < second], float(done / min(first, second))


def row(way: str, gaps: list[float], alone_s: float, share: float | None) -> str:
    """A row of the table; share: of the batch model's throughput alone."""
    p50, p99 = np.percentile(gaps, (50, 99))
    return f"| {way} | {p50 * 1e3:.1f} | {p99 * 1e3:.1f} | {p99 / alone_s:.2f} | {'' if share is None else f'{share:.2f}'} |"


def table(alone: Sequence[Trace], together: Mapping[str, Trace]) -> list[str]:
    """The table of traces: each model's alone, and both models' by way."""
    gaps = gaps_s(alone[0], 0)
    alone_s = float(np.percentile(gaps, 99))
    lines = ["| way | gap p50, ms | gap p99, ms | p99 over alone | batch throughput over alone |", "|---|---|---|---|---|"]
    lines.append(row("interactive alone", gaps, alone_s, None))
    for way, trace in together.items():
        shared, rate = beside(trace)
        lines.append(row(way, shared, alone_s, rate * alone[1].seconds))
    return lines


def ways(slower: float) -> dict[str, Plan]:
    """The plan of both models, by way."""
    both = profiles(slower)
    alike = make_plan(cluster(slower), both)
    options = replace(alike.options, priorities=PRIORITIES)
    return {"both, alike": alike, PRIORITISED: with_preemption(replace(alike, options=options), both)}


def simulated(slower: float) -> list[str]:
    """What the simulator expects."""
    both = profiles(slower)
    alone = [simulate_plan(make_plan(cluster(slower), [each]), [each]) for each in both]
    return table(alone, {way: simulate_plan(plan, both) for way, plan in ways(slower).items()})


def texts() -> list[list[list[int]]]:
    """Prompts of each model, from what it knows."""
    known = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    ids = [3 + byte for byte in known]
    short = [ids[16 * i : 16 * i + 16] for i in range(RANKS * DECODED)]
    return [short, [ids[PROMPT * i : PROMPT * (i + 1)] for i in range(RANKS * BATCH * BATCHES)]]


def measured(slower: float, repetitions: int, computes: bool, bands: bool) -> list[str]:
    """The middle of some repetitions of each way, by the p99 of the interactive model, or by seconds."""
    both, prompts = ways(slower), texts()
    waits = partial(served_by_model, token_s=TOKEN_S * slower, computes=computes)
    of_model = {profile.model: own for profile, own in zip(profiles(slower), OF_MODEL, strict=True)}
    paths = [str(shipped(f"models/{name}")) for name in MODELS]
    single = [make_plan(cluster(slower), [each]) for each in profiles(slower)]
    jobs = {0: (single[0], paths[:1], prompts[:1]), 1: (single[1], paths[1:], prompts[1:])}
    jobs |= {way: (plan, paths, prompts) for way, plan in both.items()}
    found: dict[Any, list[Trace]] = {way: [] for way in jobs}
    with network([PORT_bps / slower] * RANKS, DEEP, bands=bands) as hosts, tempfile.TemporaryDirectory() as folder:
        for number, way in by_turns(jobs, repetitions):
            plan, folders, asked = jobs[way]
            options_of_run = RunOptions(max_new_tokens=NEW_TOKENS, batch=DECODED, transport="gloo")
            meeting = f"{folder}/{list(jobs).index(way)}-{number}"
            shares = launch(waits, RANKS, of_model, hosts, meeting, plan, folders, asked, options_of_run)
            result = merge_results([each for results in shares for each in results], plan.served_names)
            found[way].append(result.trace)
            print(f"{way}: {result.seconds:.2f} s", flush=True)
    middle = {
        way: sorted(traces, key=lambda trace: trace.seconds if way == 1 else np.percentile(gaps_s(trace, 0), 99))
        for way, traces in found.items()
    }
    chosen = {way: traces[len(traces) // 2] for way, traces in middle.items()}
    return table([chosen[0], chosen[1]], {way: chosen[way] for way in both})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="measure nothing")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0, help="times that experts and ports are slower")
    parser.add_argument("--bands", action="store_true", help="ports send the interactive model's packets first")
    parser.add_argument("--experts", action="append", choices=tuple(EXPERTS), help="repeat for several; default all")
    if parser.parse_known_args()[0].simulate:
        given = parser.parse_args()
        print("\n".join(simulated(given.slower)))
        return
    given = options(parser)
    results = Results("priorities", "An interactive model beside a batch model", given.out)
    preemption_s = ways(given.slower)[PRIORITISED].options.preemption_s
    assert preemption_s is not None
    ports = (
        f"{RANKS} hosts with ports of {PORT_bps / 1e6 / given.slower:g} Mbit/s; experts take {TOKEN_S * 1e6 * given.slower:g} "
        f"us a row; preemption points of {preemption_s * 1e3:g} ms."
    )
    slower = "" if given.slower == 1 else f", {given.slower:g} times as slow"
    results.add(f"Simulated{slower}", ports, "", *simulated(given.slower))
    for experts in given.experts or EXPERTS:
        lines = measured(given.slower, given.repetitions, experts == "compute", given.bands)
        results.add(f"{EXPERTS[experts]}{slower}{', ports with bands' * given.bands}", ports, "", *lines)


if __name__ == "__main__":
    main()
