"""Two models that share GPUs: what taking turns costs and what it gains. `python bench/interleave.py [--repetitions 3]`

Writes bench/results/interleave-DATE.md. Cost: one model alone on two ranks over gloo, with turns among threads, with turns
among processes, and with none; runs alternate, and a ratio is of two runs of one round. Gain: two models on four hosts (network
namespaces behind a router, bench/network; root only), one after the other and together, on the same plan. Two cores carry four
ranks, so experts' compute is a stand-in: it is done, and then waited for until TOKEN_S a row are over, as a GPU's time takes no
time of the host's; all else (attention, routing, permutation, TCP) is real. Turns at the ports go by exchange and by layer, of
which `aurora plan` takes what the simulator finds faster. Utilisation and seconds stand beside the simulator's, which is given
the routing of the run and the network as measured before it.
"""

import argparse
import datetime
import os
import pydoc_data.topics
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "network")]
from net import PAYLOAD, network, refusal  # noqa: E402
from protocol import DEEP, by_turns  # noqa: E402
from serving import TOKEN_S, NoArbiter, served_alone, served_on_hosts  # noqa: E402

from aurora.advisor.simulated_choice import with_time_slice  # noqa: E402
from aurora.io import shipped  # noqa: E402
from aurora.planner.make_plan import make_plan  # noqa: E402
from aurora.profiler.profile_model import profile_model  # noqa: E402
from aurora.reports.compare import Comparison, compare  # noqa: E402
from aurora.reports.trace_times import summarise  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.port_arbiter import PortArbiter, thread_port_arbiters  # noqa: E402
from aurora.runtime.process_port_arbiter import ProcessPortArbiter, colocation_folder  # noqa: E402
from aurora.runtime.result import RunResult, merge_results  # noqa: E402
from aurora.simulator.interpreter import simulate_plan  # noqa: E402
from aurora.types import Cluster, Curve, Gpu, Plan, PlanOptions, Profile, ProfileOptions, RunOptions, Trace  # noqa: E402

MODELS = ("mixtral-topics", "qwen3moe-stdlib")
TOKENS, BATCH, STEPS = 128, 8, 3
PORT_bps = 17e6
CALLS = 3000
SHARED = f"bench{os.getpid()}"
AMONG_PROCESSES = RunOptions(interleave="processes", colocate=SHARED)
ALONE = {"no turns": None, "among threads": RunOptions(), "among processes": AMONG_PROCESSES}
TOGETHER = {
    "one after the other": (RunOptions(interleave="off"), "exchange"),
    "together, by exchange": (RunOptions(), "exchange"),
    "together, by layer": (RunOptions(), "layer"),
    "together, by layer, among processes": (AMONG_PROCESSES, "layer"),
}


def known_texts() -> list[bytes]:
    """What each model knows."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    known = ("\n".join(pydoc_data.topics.topics.values()), "\n".join(file.read_text() for file in files))
    return [text.encode("ascii", "ignore") for text in known]


def texts(count: int) -> list[list[list[int]]]:
    """Prompts of TOKENS tokens for each model, from the end of what it knows."""
    raw = [text[-count * TOKENS :] for text in known_texts()]
    return [[[3 + byte for byte in part[i * TOKENS : (i + 1) * TOKENS]] for i in range(count)] for part in raw]


def profiles(ranks: int, folder: Path) -> list[Profile]:
    found = []
    for name, text in zip(MODELS, known_texts(), strict=True):
        (folder / "text").write_bytes(text[: 128 * TOKENS])
        options = ProfileOptions(ranks, TOKENS, BATCH, 1, share=2)
        found.append(profile_model(shipped(f"models/{name}"), [folder / "text"], options))
    return found


def cluster(ranks: int, rate_Bps: float) -> Cluster:
    return Cluster("bench", tuple(Gpu(f"host-{i}", "cpu", i, rate_Bps, rate_Bps, 10**9) for i in range(ranks)))


def alone(plan: Plan, repetitions: int) -> list[str]:
    """Median seconds of each of ALONE, and ratios within rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ALONE}
    paths, prompts = [str(shipped(f"models/{MODELS[0]}"))], [texts(16)[0]]
    for _, name in by_turns(ALONE, repetitions):
        options = replace(ALONE[name] or RunOptions(), max_new_tokens=24, transport="gloo")
        shares = launch(served_alone, 2, ALONE[name] is not None, plan, paths, prompts, options)
        result = merge_results([result for results in shares for result in results], MODELS[:1])
        seconds[name].append(result.seconds)
        passes = int(result.trace.step_X.max()) + 1
    base = seconds["no turns"]
    layer_s, cost_s = statistics.median(base) / passes / len(plan.models[0].dispatch_L), turns_s()
    lines = [
        "| turns | a layer's turns, us | over a layer without | run, s, median | over none, median (smallest-largest) |",
        "|---|---|---|---|---|",
    ]
    for name, took in seconds.items():
        over = [a / b - 1 for a, b in zip(took, base, strict=True)]
        spread = f"{statistics.median(over):+.1%} ({min(over):+.1%} to {max(over):+.1%})"
        cost = f"{cost_s[name] * 1e6:.1f} | {cost_s[name] / layer_s:.2%}"
        lines.append(f"| {name} | {cost} | {statistics.median(took):.3f} | {spread} |")
    return [*lines, "", f"A layer without turns takes {layer_s * 1e6:.0f} us: the run's median by its passes and layers."]


def turns_s() -> dict[str, float]:
    """By name of ALONE: what a layer's turns cost one model that never waits, three computing and two exchanging; the median of
    calls that take turns among the ways."""
    with tempfile.TemporaryDirectory() as folder:
        (of_thread,), of_process = thread_port_arbiters(1), ProcessPortArbiter(Path(folder), 0)
        ways: dict[str, PortArbiter] = dict(zip(ALONE, (NoArbiter(), of_thread, of_process), strict=True))
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(CALLS):
            for name, arbiter in ways.items():
                began_s = time.perf_counter()
                for _ in range(3):
                    arbiter.start_compute()
                    arbiter.stop_compute()
                for _ in range(2):
                    with arbiter.exchange():
                        pass
                took[name].append(time.perf_counter() - began_s)
        of_process.leave()
    return {name: statistics.median(each) for name, each in took.items()}


def together(plan: Plan, known: list[Profile], repetitions: int) -> list[str]:
    runs: dict[str, list[tuple[RunResult, Trace, Comparison]]] = {name: [] for name in TOGETHER}
    paths, prompts = [str(shipped(f"models/{name}")) for name in MODELS], texts(4 * BATCH * STEPS)
    with network([PORT_bps] * 4, DEEP) as hosts, tempfile.TemporaryDirectory() as folder:
        for repetition, name in by_turns(TOGETHER, repetitions):
            of_way, time_slice = TOGETHER[name]
            served = replace(plan, options=replace(plan.options, time_slice=time_slice))
            options = replace(of_way, max_new_tokens=1, batch=BATCH, transport="gloo", predictable=True)
            meeting = f"{folder}/{name}{repetition}"
            shares = launch(served_on_hosts, 4, hosts, meeting, served, paths, prompts, options)
            result = merge_results([result for results in shares for result in results], MODELS)
            assert result.conditions is not None
            seen = replace(served, cluster=result.conditions.cluster)
            traffic = result.conditions.traffic(known)
            predicted = simulate_plan(seen, traffic, interleave=options.interleave != "off")
            runs[name].append((result, predicted, compare(predicted, result.trace)))
    slow = [found.trace.seconds for found, _, _ in runs["one after the other"]]
    lines = [
        "| | seconds | throughput, median (smallest-largest) | simulated seconds | simulated throughput "
        "| utilisation, simulated | network error, median / worst | compute error, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    slow_predicted = [predicted.seconds for _, predicted, _ in runs["one after the other"]]
    for name, found in runs.items():
        took, says = [r.trace.seconds for r, _, _ in found], [p.seconds for _, p, _ in found]
        gains = [a / b for a, b in zip(slow, took, strict=True)]
        traces = zip(*((r.trace, p) for r, p, _ in found), strict=True)
        used = [statistics.median(summarise(trace, plan.cluster).utilisation for trace in each) for each in traces]
        errors = [c.network for _, _, c in found]
        cells = (
            name,
            f"{statistics.median(took):.2f}",
            f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})",
            f"{statistics.median(says):.2f}",
            f"{statistics.median(a / b for a, b in zip(slow_predicted, says, strict=True)):.2f}",
            f"{used[0]:.0%}, {used[1]:.0%}",
            f"{statistics.median(e.median for e in errors if e):.1%} / {max(e.worst for e in errors if e):.1%}",
            f"{statistics.median(c.compute.median for _, _, c in found if c.compute):.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    free = replace(seen, cluster=cluster(4, 1e15))
    share = 1 - simulate_plan(free, traffic, interleave=False).seconds / statistics.median(slow_predicted)
    seen_by = [found.conditions.cluster.gpus[0] for found, _, _ in runs["one after the other"] if found.conditions]
    startup_s, rate = (statistics.median(each) for each in ((g.startup_s for g in seen_by), (g.out_Bps for g in seen_by)))
    lines += [
        "",
        f"Without a network one after the other would take {share:.0%} less, says the simulator; the plan chose turns by "
        f"{plan.options.time_slice}. Measured before serving: "
        f"{startup_s * 1e3:.2f} ms a message, {rate / plan.cluster.gpus[0].out_Bps:.1%} of the ports' payload rate.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        four = profiles(4, Path(folder))
    waits = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
    known = [replace(p, curves={"cpu": {**p.curves["cpu"], "expert": waits}}) for p in four]
    two = replace(four[0], tokens_TLSE=np.array(four[0].tokens_TLSE[:, :, :2]))
    cost = alone(make_plan(cluster(2, 1e9), [two]), 2 * repetitions + 1)
    print("\n".join(cost), flush=True)
    why = refusal()
    plan = with_time_slice(make_plan(cluster(4, PORT_bps / 8 * PAYLOAD), known, PlanOptions()), known)
    gain = [f"skipped: {why}"] if why else together(plan, known, repetitions)
    command = f"python bench/interleave.py --repetitions {repetitions}"
    text = "\n".join(
        [
            f"# Models that take turns, {today}",
            "",
            f"`{command}` on {machine()}; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after.",
            "",
            "## One model alone, two ranks over gloo on loopback, 16 prompts of 128 tokens, 24 new ones",
            "",
            *cost,
            "",
            f"## Two models, four hosts of {PORT_bps / 1e6:g} Mbit/s as network namespaces",
            "",
            f"Of each model {4 * BATCH * STEPS} prompts of {TOKENS} tokens, planned on other texts of its kind. "
            f"Experts' compute lasts {TOKEN_S * 1e6:g} us a row, waiting in place of a GPU's; all else is real. Throughput",
            "is over one after the other, within a round.",
            "",
            *gain,
        ]
    )
    shutil.rmtree(colocation_folder(SHARED), ignore_errors=True)
    out = HERE / "results" / f"interleave-{today}.md"
    out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
