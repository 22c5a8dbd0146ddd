"""Two models that share GPUs: what taking turns gains. `python bench/interleave.py [--repetitions 3]`

Writes bench/results/interleave-DATE.md. Two models on four hosts (network namespaces behind a router, bench/network; root),
one after the other and together, on the same plan. Two cores carry four ranks, so experts' compute is a stand-in: it is done,
and then waited for until TOKEN_S a row are over, as a GPU's time takes no time of the host's; all else (attention, routing,
permutation, TCP) is real. Turns at the ports go by exchange and by layer, of which `aurora plan` takes what the simulator finds
faster. Utilisation and seconds stand beside the simulator's, which is given the routing of the run and the network as measured
before it. `bench/arbitration.py` measures what it costs.
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
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import machine

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "network")]
from net import PAYLOAD, network, refusal  # noqa: E402
from protocol import DEEP, by_turns  # noqa: E402
from serving import TOKEN_S, served_on_hosts  # noqa: E402

from aurora.io import shipped  # noqa: E402
from aurora.planner.choice import with_time_slice  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.profiler.profile_model import profile_model  # noqa: E402
from aurora.reports.trace_times import (  # noqa: E402
    Comparison,
    compare,
    summarise,
)
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.process_port_arbiter import colocation_folder  # noqa: E402
from aurora.runtime.result import RunResult, merge_results  # noqa: E402
from aurora.simulator.interpreter import simulate_plan  # noqa: E402
from aurora.types import Cluster, Curve, Gpu, Plan, PlanOptions, Profile, ProfileOptions, RunOptions, Trace  # noqa: E402

MODELS = ("mixtral-topics", "qwen3moe-stdlib")
TOKENS, BATCH, STEPS = 128, 8, 3
PORT_bps = 17e6
SHARED = f"bench{os.getpid()}"
AMONG_PROCESSES = RunOptions(interleave="processes", colocate=SHARED)
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


def profiles(ranks: int, folder: Path, share: int = 2) -> list[Profile]:
    found = []
    for name, text in zip(MODELS, known_texts(), strict=True):
        (folder / "text").write_bytes(text[: 128 * TOKENS])
        options = ProfileOptions(ranks, TOKENS, BATCH, 1, share=share)
        found.append(profile_model(shipped(f"models/{name}"), [folder / "text"], options))
    return found


def cluster(ranks: int, rate_Bps: float) -> Cluster:
    return Cluster("bench", tuple(Gpu(f"host-{i}", "cpu", i, rate_Bps, rate_Bps, 10**9) for i in range(ranks)))


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
            predicted = simulate_plan(seen, traffic, interleave="off" if options.interleave == "off" else "on")
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
    share = 1 - simulate_plan(free, traffic, interleave="off").seconds / statistics.median(slow_predicted)
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
