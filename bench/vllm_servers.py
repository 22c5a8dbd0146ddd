"""The vLLM plugin's all-to-all over servers of namespaces: answers as one rank's, exchanges as the simulator predicts.

    .venv-vllm/bin/python bench/vllm_servers.py [--tokens 1400] [--repetitions 5] [--shared-nic]

Needs what `make test-vllm` installs, and root (bench/network/net.py); elsewhere it says why it is skipped. Two servers of two
ranks, 1 Gbit/s inside and NICs of 100 Mbit/s between them, DP4. A random Qwen3-MoE of two layers, top-4 of 16 experts, is
served by a plan in two hops, then without hops. One prompt a rank is prefilled again and again. A hierarchical exchange takes
from the first rank's start to the last one's end, with all copies of gateways; it is predicted for its bytes, from the moments
at which the ranks came. The start-up of a transfer is what a step of a decode step's exchange takes, of one token a rank: these
are in hops here, too. Results: bench/results/vllm-servers-DATE.md.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "network"), str(HERE.parent)]
from net import PAYLOAD, servers  # noqa: E402
from protocol import DEEP, Results, options  # noqa: E402
from vllm import answers, model, run, slowest  # bench/vllm.py  # noqa: E402

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order  # noqa: E402
from aurora.algorithms.network.switch import Switch  # noqa: E402
from aurora.io import save  # noqa: E402
from aurora.io.engine_records import load_records  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.types import Cluster, Gpu, Hierarchy, Network, Order, PlanOptions  # noqa: E402
from aurora.types import servers as fabric_of_servers  # noqa: E402
from aurora.types.arrays import IntArray  # noqa: E402

SERVER_G = (0, 0, 1, 1)
INSIDE_BPS, NIC_BPS = 1e9, 100e6
LAYERS, HIDDEN, EXPERTS, TOP_K = 2, 512, 16, 4
LARGE_BYTES = 1 << 20  # of all pairs together: of a prefill's exchange, not of a decode step's
NOTED = """
import json, os, time
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup
start = WorkerStartup.start
def start_and_note(self, worker):
    start(self, worker)
    from aurora.moe import server_layout
    from aurora_vllm import layer_alltoall
    layer_alltoall.SMALL_BYTES = 0
    class Noted(server_layout.RowPerServer):
        exchanges = []
        def dispatch(self, exchange):
            began_s = time.perf_counter()
            rows = super().dispatch(exchange)
            self.note("dispatch", began_s, self.sizes_SRR * rows.shape[1])
            return rows
        def combine(self, answers, exchange):
            began_s = time.perf_counter()
            sums = super().combine(answers, exchange)
            back_SRR = self.sizes_SRR[::-1].swapaxes(1, 2)
            self.note("combine", began_s, back_SRR * (answers.shape[1] * answers.element_size()))
            return sums
        def note(self, phase, began_s, bytes_SRR):
            self.exchanges.append((phase, began_s, time.perf_counter(), bytes_SRR.tolist()))
    server_layout.RowPerServer = Noted
WorkerStartup.start = start_and_note
"""
WRITTEN = """
import json, os
from aurora.moe.server_layout import RowPerServer
with open(os.environ["NOTES"] + os.environ["RANK"], "w") as file:
    json.dump(RowPerServer.exchanges, file)
"""


Noted = tuple[str, float, float, list[list[list[int]]]]  # phase, begin and end by time.perf_counter, bytes of each step


def predicted_s(order: Order, bytes_SGG: IntArray, begin_s_G: list[float], network: Network) -> float:
    """Seconds from the first rank's start to the end of all transfers, if ranks come to the exchange at these times."""
    switch, first_s = Switch(network), min(begin_s_G)
    steps = [switch.open(order, bytes_GG) for bytes_GG in bytes_SGG]

    def join(step: int, rank: int) -> None:
        while step < len(steps) and switch.join(steps[step], rank):
            step += 1

    for rank in np.argsort(begin_s_G).tolist():
        while switch.now_s < begin_s_G[rank] - first_s:
            for step, other in switch.run(begin_s_G[rank] - first_s):
                join(step + 1, other)
        join(0, rank)
    while switch.busy:
        for step, other in switch.run():
            join(step + 1, other)
    return switch.now_s


def span_s(exchange: Sequence[Noted], since: Callable[[Iterable[float]], float] = min) -> float:
    """Seconds of an exchange that all ranks noted, from the first start, or the last one, to the last end."""
    return max(end_s for _, _, end_s, _ in exchange) - since(begin_s for _, begin_s, _, _ in exchange)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1400, help="of the prompt of each rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shared-nic", action="store_true", help="one NIC for a server, instead of one for each rank")
    args = options(parser)
    results = Results("vllm-servers", "The vLLM plugin on servers", args.out)
    ranks, rng = len(SERVER_G), np.random.default_rng(0)
    inside_Bps, nic_Bps = (bps / 8 * PAYLOAD for bps in (INSIDE_BPS, NIC_BPS))
    gpus = tuple(Gpu(f"rank{rank}", "cpu", server, inside_Bps, inside_Bps, 10**10) for rank, server in enumerate(SERVER_G))
    fabric = fabric_of_servers(SERVER_G, [inside_Bps] * ranks, [inside_Bps] * ranks, nic_Bps, args.shared_nic)
    cluster = Cluster("servers", gpus, fabric=fabric)
    hierarchy = Hierarchy(np.array(SERVER_G))
    with (
        tempfile.TemporaryDirectory() as temporary,
        servers(SERVER_G, INSIDE_BPS, NIC_BPS, args.shared_nic, DEEP) as names,
    ):
        folder = Path(temporary)
        model(folder / "model", HIDDEN, EXPERTS, LAYERS, TOP_K)
        prompts = [rng.integers(1, 250, args.tokens).tolist() for _ in range(ranks)]
        shared: dict[str, object] = {"model": str(folder / "model"), "prompts": prompts}
        shared |= {"max_model_len": 2048, "max_num_batched_tokens": 2048}
        seen = {"aurora": {"record": str(folder / "seen")}}
        run(folder / "alone", None, 1, {**shared, "additional_config": seen, "commands": [["write"]]})
        alone = answers(folder / "alone", 1)
        profile = load_records(folder / "seen")
        profile = replace(profile, tokens_TLSE=profile.tokens_TLSE.repeat(ranks, axis=2))
        save(make_plan(cluster, [profile], PlanOptions()), folder / "plan.json")
        times = {}
        for all_to_all in ("hierarchical", "flat"):
            settings = {"plan": str(folder / "plan.json"), "order": "online", "all_to_all": all_to_all, "required": True}
            job = {**shared, "additional_config": {"aurora": settings}, "repeat": args.repetitions + 1}
            job |= {"before": NOTED, "after": WRITTEN, "environ": {"NOTES": str(folder / f"{all_to_all}-")}}
            times[all_to_all] = slowest(run(folder / all_to_all, names, ranks, job))
            if answers(folder / all_to_all, ranks) != alone:
                raise SystemExit(f"{all_to_all}: answers differ from those of one rank")
        notes_R = [json.loads((folder / f"hierarchical-{rank}").read_text()) for rank in range(ranks)]

    ratios: dict[str, list[float]] = {"dispatch": [], "combine": []}
    per_pass: list[tuple[float, float]] = []  # measured and predicted seconds of all exchanges of a prefill
    exchanges: list[tuple[Noted, ...]] = list(zip(*notes_R, strict=True))
    large = [each for each in exchanges if np.sum(each[0][3]) >= LARGE_BYTES]
    startup_s = statistics.median(span_s(each, max) for each in exchanges if np.sum(each[0][3]) < LARGE_BYTES) / hierarchy.steps
    network = replace(cluster.network, startup_s_G=np.full(ranks, startup_s))
    for number, each in enumerate(large):
        phase, begin_s_G, bytes_SGG = each[0][0], [noted[1] for noted in each], np.array(each[0][3])
        if phase == "dispatch":
            order = hierarchical_order(bytes_SGG.sum(axis=0), hierarchy, cluster.network, rng=np.random.default_rng(0))
        else:
            order = order.reversed
        measured, predicted = span_s(each), predicted_s(order, bytes_SGG, begin_s_G, network)
        ratios[phase].append(predicted / measured - 1)
        if number % (2 * LAYERS) == 0:
            per_pass.append((0.0, 0.0))
        per_pass[-1] = per_pass[-1][0] + measured, per_pass[-1][1] + predicted
    per_pass = per_pass[-args.repetitions :]
    nics = "one NIC a server" if args.shared_nic else "a NIC for each rank"
    lines = [f"{hierarchy.chunks} chunks; answers equal one rank's. Start-up {1e3 * startup_s:.1f} ms.", ""]
    lines += ["| | measured, ms | predicted, ms | error |", "|---|---|---|---|"]
    for number, (measured, predicted) in enumerate(per_pass):
        error = f"{predicted / measured - 1:+.1%}"
        lines.append(f"| exchanges of prefill {number} | {1e3 * measured:.0f} | {1e3 * predicted:.0f} | {error} |")
    for phase, errors in ratios.items():
        lines.append(f"| {phase}, median of {len(errors)} | | | {statistics.median(errors):+.1%} |")
    found = [statistics.median(each["prefill"] for each in times[name]) * 1e3 for name in ("hierarchical", "flat")]
    lines += ["", f"A prefill took {found[0]:.0f} ms in two hops, {found[1]:.0f} ms without (medians of {args.repetitions})."]
    results.add(f"2 x 2 ranks, {nics}, {args.tokens} tokens a rank", *lines)


if __name__ == "__main__":
    main()
