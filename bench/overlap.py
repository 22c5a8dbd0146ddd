"""Experts that compute while rows of other groups travel, beside whole batches and micro-batches: `python -m bench.overlap`.

    python -m bench.overlap [--measure] [--repetitions 2]

Without `--measure` all is simulated, in two minutes: which way is fastest by the share of the network, the rows of an expert
and the attention of a layer; and what the groups of experts, their sequence and the order of transfers do on drawn traffic
that no plan has seen, beside a bound that no way of overlapping whole experts beats. With it, in five minutes of an idle
machine, a model is served on four hosts (network namespaces with limited ports, bench/network; root) for decode steps whose
experts wait as long as a GPU would read their weights; all else is real. All ways answer the same requests, and alternate. The
predictions have the run's own routing and the network as measured before it. Results: bench/results/overlap-DATE.md, a section
for each part.
"""

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent / "network"), str(Path(__file__).parent)]
from net import PAYLOAD, network, refusal  # noqa: E402
from protocol import DEEP, Results, by_turns  # noqa: E402
from serving import served_on_hosts  # noqa: E402

from aurora.algorithms.alltoall import expert_groups as grouping  # noqa: E402
from aurora.algorithms.workload.serving_gpus import replica_tokens  # noqa: E402
from aurora.io import shipped  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.profiler.profile_model import profile_model  # noqa: E402
from aurora.runtime.distributed.launcher import launch  # noqa: E402
from aurora.runtime.result import merge_results  # noqa: E402
from aurora.simulator.interpreter import simulate_plan  # noqa: E402
from aurora.types import Cluster, Curve, Gpu, Order, Plan, PlanOptions, Profile, ProfileOptions, RunOptions  # noqa: E402
from aurora.types.arrays import IntArray  # noqa: E402

ROW_S = 1e-6  # of an expert's row, as simulated; a port's rate follows from the share of the network
RANKS, EXPERTS, TOP_K, LAYERS, WINDOWS = 8, 64, 8, 4, 2
SHARES = (0.25, 0.5, 0.75)  # of the network, in the time of whole batches
GROUPS, PARTS = (2, 4, 8), (2, 3, 4)
WEIGHTS_S, TOKEN_S = 4e-3, 5e-5  # that an expert's weights and each row wait, where it is measured
HOSTS, HELD, REQUESTS, BATCH, PROMPT, NEW = 4, 8, 32, 32, 4, 12


def cluster(ranks: int, rate_Bps: float, startup_s: float = 0.0) -> Cluster:
    gpus = (Gpu(f"host-{i}", "cpu", i, rate_Bps, rate_Bps, 10**12, startup_s=startup_s) for i in range(ranks))
    return Cluster("bench", tuple(gpus))


def drawn(tokens: int, ridge: float, attention: float, seed: int = 0) -> Profile:
    """Traffic and times: `tokens` a rank, experts of Zipf popularity 0.5, drawn alike for each window.

    ridge: rows of an expert that compute as long as its weights are read. attention: all else than experts over the experts'
    time of whole batches; half of it does not depend on tokens.
    """
    rng = np.random.default_rng(seed)
    share_E = 1 / np.arange(1, EXPERTS + 1) ** 0.5
    share_LE = np.stack([rng.permutation(share_E / share_E.sum()) for _ in range(LAYERS)])
    made = np.stack([[rng.multinomial(tokens * TOP_K, share_E, RANKS) for share_E in share_LE] for _ in range(WINDOWS)])
    expert = Curve(np.array([0.0, 1.0, ridge + 1, 1e9]), np.array([0.0, ridge, ridge + 1, 1e9]) * ROW_S)
    half_s = attention / 2 * float(expert(made.sum(axis=2)).sum()) / RANKS / LAYERS / WINDOWS
    gate = Curve(np.array([0.0, 1.0, tokens + 1]), np.array([0.0, half_s, 2 * half_s]))
    curves = {"gate": gate, "expert": expert, "aggregate": Curve(np.array([1.0]), np.array([1e-9]))}
    return Profile("drawn", "0" * 16, made, TOP_K, 2048, 4096, 10**6, 0, {"cpu": curves})


def at_share(profile: Profile, share: float, startups: float, order: str = "auto") -> Plan:
    """A plan for ports with which the network takes a share of whole batches' time, a part `startups` of it for start-ups."""
    options = PlanOptions(order=order)
    free = make_plan(cluster(profile.sources, 1e18), [profile], options)
    alone_s, low, high = simulate_plan(free, profile).seconds, 1e3, 1e15
    network_s = alone_s * share / (1 - share) / profile.layers / profile.windows
    startup_s = network_s * startups / (2 * profile.sources + 1)
    while high / low > 1.01:
        rate = (low * high) ** 0.5
        took_s = simulate_plan(replace(free, cluster=cluster(profile.sources, rate, startup_s)), profile).seconds
        low, high = (rate, high) if took_s > alone_s / (1 - share) else (low, rate)
    return make_plan(cluster(profile.sources, high, startup_s), [profile], options)


def cut(plan: Plan, parts: int, time_slice: str) -> Plan:
    return replace(plan, options=replace(plan.options, micro_batches=parts, time_slice=time_slice))


def regions() -> Iterator[str]:
    """Yields a table: throughput over whole batches of the best overlap and the best micro-batches, in two orders."""
    yield "| rows of an expert / rows as weights | attention | start-ups | network | overlap | micro-batches |"
    yield "|---|---|---|---|---|---|"
    for (tokens, ridge), attention, startups, share in product(((512, 1), (64, 64), (16, 256)), (0.1, 0.5), (0.0, 0.2), SHARES):
        profile = drawn(tokens, ridge, attention)
        plan = at_share(profile, share, startups)
        plans = plan, in_order(plan, Order.all_at_once(RANKS))
        whole_s = min(simulate_plan(each, profile).seconds for each in plans)
        over = {f"{k} groups": min(simulate_plan(each, profile, overlap=k).seconds for each in plans) for k in GROUPS}
        micro = {
            f"{parts} by {time_slice}": min(simulate_plan(cut(each, parts, time_slice), profile).seconds for each in plans)
            for parts, time_slice in product(PARTS, ("exchange", "layer"))
        }
        best = (f"{whole_s / min(ways.values()):.2f} ({min(ways, key=ways.__getitem__)})" for ways in (over, micro))
        rows = tokens * TOP_K * RANKS // EXPERTS
        yield f"| {rows} / {ridge} | {attention:.0%} | {startups:.0%} | {share:.0%} | {' | '.join(best)} |"


def in_order(plan: Plan, order: Order) -> Plan:
    """Returns the plan with one order for all its dispatches, and the reversed one for its combines."""
    (model,) = plan.models
    layers = len(model.dispatch_L)
    return replace(plan, models=(replace(model, dispatch_L=(order,) * layers, combine_L=(order.reversed,) * layers),))


def bound_s(plan: Plan, profile: Profile) -> float:
    """Returns seconds that no way of overlapping beats in which each expert computes all of its rows at once.

    A layer begins on all ranks together, because they exchange counts. A rank's port then carries its dispatch and its combine;
    its GPU waits for the rows of one expert at least, computes, and the rows of one expert at least still go back.
    """
    total_s, seconds_G = 0.0, np.zeros(len(plan.cluster))
    rates_2G = np.array([(gpu.out_Bps, gpu.in_Bps) for gpu in plan.cluster.gpus]).T
    for window, layer in np.ndindex(profile.windows, profile.layers):
        tokens_SE, split_EG = profile.tokens_TLSE[window, layer], plan.models[0].placement.split_EG(layer)
        rows_SP, _, gpu_P = replica_tokens(tokens_SE, split_EG)
        away_SP = np.where(np.arange(len(rows_SP))[:, None] == gpu_P, 0, rows_SP)
        there_P, sent_S = away_SP.sum(axis=0), away_SP.sum(axis=1)
        came_G, takes_P = np.bincount(gpu_P, there_P), profile.seconds("expert", plan.cluster.gpus[0], rows_SP.sum(axis=0))
        there, back = profile.dispatch_bytes, profile.combine_bytes
        port_G = np.maximum((there * sent_S + back * came_G) / rates_2G[0], (there * came_G + back * sent_S) / rates_2G[1])
        ends_P = there_P * (there / rates_2G[1][gpu_P] + back / rates_2G[0][gpu_P])
        least_G = np.array([ends_P[gpu_P == gpu].min() for gpu in range(len(port_G))])
        gate_s_G = profile.seconds("gate", plan.cluster.gpus[0], tokens_SE.sum(axis=1) // profile.top_k)
        total_s += float((seconds_G + gate_s_G).max())
        seconds_G = np.maximum(port_G, least_G + np.bincount(gpu_P, takes_P))
    return total_s + float(seconds_G.max())


def slots_in_sequence(load_P: IntArray, gpu_P: IntArray, groups: int) -> IntArray:
    held_G = np.bincount(gpu_P)
    nth_P = np.empty_like(gpu_P)
    nth_P[np.argsort(gpu_P, kind="stable")] = np.arange(len(gpu_P)) - np.repeat(held_G.cumsum() - held_G, held_G)
    return nth_P * groups // held_G[gpu_P]


def in_random_groups(load_P: IntArray, gpu_P: IntArray, groups: int) -> IntArray:
    return DEALT(np.random.default_rng(0).permutation(len(load_P)), gpu_P, groups)


def resequenced(load_P: IntArray, gpu_P: IntArray, groups: int, first: int) -> IntArray:
    """Groups of equal loads, of each GPU the smallest (first = 1) or the largest (- 1) first."""
    group_P = DEALT(load_P, gpu_P, groups)
    load_GK = np.zeros((gpu_P.max() + 1, groups))
    np.add.at(load_GK, (gpu_P, group_P), load_P)
    return (first * load_GK).argsort(axis=1, kind="stable").argsort(axis=1)[gpu_P, group_P]


DEALT = grouping.expert_groups
GROUPINGS: dict[str, Callable[[IntArray, IntArray, int], IntArray]] = {
    "equal loads, as in the product": DEALT,
    "the same, the smallest first": partial(resequenced, first=1),
    "the same, the largest first": partial(resequenced, first=-1),
    "slots in sequence": slots_in_sequence,
    "at random": in_random_groups,
}


def groupings(groups: int = 4, draws: int = 3) -> Iterator[str]:
    """Yields a table: groupings and orders on traffic that the plan was not made from; the network takes half of the time."""
    orders = ("openshop-best", "random", "spread-out", "all-at-once")
    yield f"| rows / rows as weights | groups | {' | '.join(orders)} | best over the bound |"
    yield f"|---|---|{'---|' * len(orders)}---|"
    for (tokens, ridge), (name, grouped) in product(((64, 64), (16, 256)), GROUPINGS.items()):
        gains, gaps = [], []
        for seed in range(draws):
            known, later = drawn(tokens, ridge, 0.1, seed).at_windows([0]), drawn(tokens, ridge, 0.1, seed).at_windows([1])
            plans = [at_share(known, 0.5, 0.0, order) for order in orders]
            whole_s = simulate_plan(plans[0], later).seconds
            with mock.patch.object(grouping, "expert_groups", grouped):
                took_s = [
                    simulate_plan(replace(plan, cluster=plans[0].cluster), later, overlap=groups).seconds for plan in plans
                ]
            gains.append([whole_s / each for each in took_s])
            gaps.append(min(took_s) / bound_s(plans[0], later))
        cells = (*(f"{gain:.2f}" for gain in np.mean(gains, axis=0)), f"{np.mean(gaps):.2f}")
        yield f"| {tokens * TOP_K * RANKS // EXPERTS} / {ridge} | {name} | {' | '.join(cells)} |"


def made_model(folder: Path) -> Path:
    """Makes a Mixtral with more experts and wider rows than those of profiles/, of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = shipped("models/mixtral-topics")
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(base)
    config.num_local_experts, config.hidden_size, config.head_dim = HELD * HOSTS, 256, 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measured(share: float, folder: Path, repetitions: int) -> Iterator[str]:
    """Yields a table of ways on four hosts, in a network that takes about a share of whole batches' time."""
    path = made_model(folder / "model")
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 250, (HOSTS * REQUESTS, PROMPT)).tolist()
    (folder / "text").write_bytes(bytes(rng.integers(97, 122, HOSTS * REQUESTS * PROMPT).tolist()))
    known = profile_model(path, [folder / "text"], ProfileOptions(HOSTS, PROMPT, BATCH, NEW, share=HOSTS))
    read = Curve(np.array([0.0, 1.0, 2.0]), np.array([0.0, WEIGHTS_S + TOKEN_S, WEIGHTS_S + 2 * TOKEN_S]))
    known = replace(known, curves={"cpu": {**known.curves["cpu"], "expert": read}})
    plan = at_share(known, share, 0.0)
    rate_Bps = plan.cluster.gpus[0].out_Bps
    ways = {"whole": (plan, 1), **{f"overlap, {groups} groups": (plan, groups) for groups in GROUPS[:2]}}
    ways |= {f"2 micro-batches, by {each}": (cut(plan, 2, each), 1) for each in ("exchange", "layer")}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    answers, rank = [], partial(served_on_hosts, token_s=TOKEN_S, weights_s=WEIGHTS_S)
    with network([rate_Bps * 8 / PAYLOAD] * HOSTS, DEEP) as hosts, tempfile.TemporaryDirectory() as meeting:
        for number, way in [(-1, "whole"), *by_turns(ways, repetitions)]:  # the first is not counted
            cut_plan, overlap = ways[way]
            how = RunOptions(NEW, BATCH, "gloo", predictable=True, overlap=overlap)
            shares = launch(rank, HOSTS, hosts, f"{meeting}/{way}{number}", cut_plan, [str(path)], [prompts], how)
            result = merge_results([each for results in shares for each in results], cut_plan.served_names)
            traffic, seen = result.conditions.traffic([known]), replace(cut_plan, cluster=result.conditions.cluster)
            said_s = simulate_plan(seen, traffic, overlap=overlap).seconds
            free_s = simulate_plan(replace(seen, cluster=cluster(HOSTS, 1e15)), traffic).seconds
            answers.append(result.answers_M[0].tokens)
            if number >= 0:
                found[way].append((result.trace.seconds, said_s, 1 - free_s / said_s))
    yield "| way | seconds | throughput over whole batches, median (smallest-largest) | predicted | error of the seconds |"
    yield "|---|---|---|---|---|"
    whole_s, whole_said_s, part = zip(*found["whole"], strict=True)
    for way, runs in found.items():
        took_s, said_s, _ = zip(*runs, strict=True)
        gains, said = ([a / b for a, b in zip(*pair, strict=True)] for pair in ((whole_s, took_s), (whole_said_s, said_s)))
        error = statistics.median(a / b - 1 for a, b in zip(said_s, took_s, strict=True))
        gain = f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})"
        yield f"| {way} | {statistics.median(took_s):.2f} | {gain} | {statistics.median(said):.2f} | {error:+.1%} |"
    yield ""
    differ = sum(any(each[index] != answers[0][index] for each in answers) for index in answers[0])
    yield f"Ports of {rate_Bps * 8 / 1e6:.3g} Mbit/s; the network takes {statistics.median(part):.0%} of whole batches', as"
    yield f"predicted. Answers that differ between ways: {differ} of {len(answers[0])}. {repetitions} repetitions, interleaved."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--share", type=float, action="append", help="of the network, measured; default: all three")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file instead of the one in bench/results")
    chosen = parser.parse_args()
    results = Results("overlap", "Experts that compute while rows of other groups travel", chosen.out)
    if not chosen.measure:
        results.add("Simulated: which way is the fastest", *regions())
        results.add("Simulated: groups and orders", *groupings())
        return
    if reason := refusal():
        sys.exit(f"skipped: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the network
    with tempfile.TemporaryDirectory() as folder:
        for share in chosen.share or SHARES:
            results.add(f"Measured: decode steps, a network of {share:.0%}", *measured(share, Path(folder), chosen.repetitions))


if __name__ == "__main__":
    main()
