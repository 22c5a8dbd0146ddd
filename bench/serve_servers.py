"""A served model on servers: flat and hierarchical plans on real sockets, beside the simulation of each run's own traffic.

    python bench/serve_servers.py [--repetitions 3]

Root only: 2 x 2 ranks as network namespaces, 1 Gbit/s inside a server, a NIC of 20 Mbit/s for each rank (bench/network). Two
cores carry four ranks, so experts' compute is a stand-in that waits, as in bench/interleave.py; all else is real. Runs of both
plans alternate; answers are compared with the plain model's. The simulator is given the routing of the run and the network as
measured before it. Writes bench/results/serve-servers-DATE.md.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from interleave import BATCH, MODELS, STEPS, TOKENS, known_texts, texts
from net import PAYLOAD, servers
from protocol import DEEP, Results, by_turns, options
from serving import TOKEN_S, served_on_hosts

from aurora.io import shipped
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.result import merge_results
from aurora.runtime.run import verify
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Curve, Gpu, PlanOptions, Profile, ProfileOptions, RunOptions, Servers

SERVER_G = (0, 0, 1, 1)
INSIDE_bps, NIC_bps = 1e9, 20e6
WAYS = ("flat", "hierarchical")


def cluster() -> Cluster:
    inside_Bps, nic_Bps = INSIDE_bps / 8 * PAYLOAD, NIC_bps / 8 * PAYLOAD
    gpus = tuple(Gpu(f"rank-{rank}", "cpu", server, inside_Bps, inside_Bps, 10**9) for rank, server in enumerate(SERVER_G))
    return Cluster("servers", gpus, Servers.of(SERVER_G, nic_Bps))


def profile(path: Path, folder: Path) -> Profile:
    """Of other texts of the model's kind; experts wait for each row."""
    (folder / "text").write_bytes(known_texts()[0][: 128 * TOKENS])
    options = ProfileOptions(len(SERVER_G), TOKENS, BATCH, 1, share=2, token_level=True)
    found = profile_model(path, [folder / "text"], options)
    waits = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
    return replace(found, curves={"cpu": {**found.curves["cpu"], "expert": waits}})


def measured(repetitions: int) -> list[str]:
    """A table with a row for each plan."""
    path, (prompts, _) = shipped(f"models/{MODELS[0]}"), texts(4 * BATCH * STEPS)
    served = RunOptions(max_new_tokens=1, batch=BATCH, transport="gloo", predictable=True, keep_logits=True)
    took: dict[str, list[tuple[float, float, int, int]]] = {
        way: [] for way in WAYS
    }  # seconds, simulated, NIC bytes, differences
    with (
        servers(SERVER_G, INSIDE_bps, NIC_bps, False, DEEP) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        known = profile(path, Path(folder))
        plans = {way: make_plan(cluster(), [known], PlanOptions(all_to_all=way)) for way in WAYS}
        for number, way in by_turns(WAYS, repetitions):
            plan, meeting = plans[way], f"{folder}/{way}{number}"
            shares = launch(served_on_hosts, len(SERVER_G), hosts, meeting, plan, [str(path)], [prompts], served)
            result = merge_results([each for results in shares for each in results], MODELS[:1])
            assert result.conditions is not None
            simulated = simulate_plan(replace(plan, cluster=result.conditions.cluster), result.conditions.traffic([known]))
            trace, server_G = result.trace, np.array(SERVER_G)
            crosses_X = trace.sent_X & (trace.peer_X >= 0) & (server_G[trace.rank_X] != server_G[trace.peer_X])
            wrong = len(verify(result, [path], [prompts], served)) if number == 0 else 0
            took[way].append((trace.seconds, simulated.seconds, int(trace.bytes_X[crosses_X].sum()), wrong))
            print(way, took[way][-1], flush=True)
    lines = [
        "| plan | chunks | NIC MB | seconds, median | simulated | error of each run | answers that differ |",
        "|" + "---|" * 7,
    ]
    for way, runs in took.items():
        seconds, says = (statistics.median(run[index] for run in runs) for index in (0, 1))
        errors = ", ".join(f"{run[1] / run[0] - 1:+.1%}" for run in runs)
        hierarchy, wrong = plans[way].models[0].hierarchy, sum(run[3] for run in runs)
        cells = (
            hierarchy.chunks if hierarchy else "-",
            f"{runs[0][2] / 1e6:.1f}",
            f"{seconds:.2f}",
            f"{says:.2f}",
            errors,
            wrong,
        )
        lines.append(f"| {way} | {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    chosen = options(parser)
    results = Results("serve-servers", "A served model on servers", chosen.out)
    about = (
        f"{4 * BATCH * STEPS} prompts of {TOKENS} tokens on 2 x 2 ranks, {INSIDE_bps / 1e6:g} Mbit/s inside, a NIC of "
        f"{NIC_bps / 1e6:g} Mbit/s for each rank; experts wait {TOKEN_S * 1e6:g} us a row."
    )
    results.add(MODELS[0], *measured(chosen.repetitions), "", about)


if __name__ == "__main__":
    main()
