"""How the controller follows tasks that take turns: `python bench/control.py` writes bench/results/control-DATE.md.

Experts lie contiguously at first, with spare slots empty. An expert has 44 MB, a port 100 Gb/s, a window 10 s and
4096 tokens a GPU. Tasks are recorded (two of DeepSeek-V2-Lite, 64 experts, top-6; five of OLMoE, 64, top-8) or drawn (three,
256 experts, top-8, Zipf 1). Windows of a task differ in two ways:

- by chance: tokens are drawn from the task's mean shares;
- and by prompts: they are drawn from the shares of one of its recorded stretches of about 690 tokens, so that a window is as
  uneven as one of so few tokens. A window of thousands of prompts is nearer to the first.

The controller is compared with a clairvoyant, which rebalances for the loads of the window to come, and with one who knows the
task's mean shares before its first window, but not the chance of a window. Load is that of the slowest GPU over the mean,
layers summed, outside the first window of a task. Recorded tasks are read from AURORA_DATA (default ../shared/data) and left
out where that folder is absent.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from following import WHOLE, TakingTurns, follow
from machine import machine
from routed_tasks import OLMOE, Source, counted, deepseek
from tables import Table, today, write

from aurora.algorithms.control import controller as module
from aurora.algorithms.control.controller import CAUTION, Controller
from aurora.algorithms.gpu_slots import gpu_loads
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.types import ControlOptions, GpuSlots, Profile, SyntheticOptions
from aurora.types.placement import EMPTY

BYTES, PORT_BPS = 44_000_000, 12.5e9  # of an expert of DeepSeek-V3; of a port of 100 Gb/s
TOKENS = 4096  # of a window, for each GPU
LASTING = (10, 30, 100)  # windows of a task
TURNS = {10: 12, 30: 6, 100: 4}  # tasks that follow each other
SHAPES = {  # GPUs and slots of each
    64: ((8, 10), (16, 5), (32, 3), (64, 2)),
    256: ((8, 36), (16, 18), (32, 9), (64, 5)),
}
DRAWN = {"model_type": "drawn", "num_hidden_layers": 4, "num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 64,
         "intermediate_size": 64}  # fmt: skip
COUNTED = {"model": "olmoe-1b-7b-0924", "selection": "topk"}
EVERY = (1, 3, 10)
MODEL = (58, 256, 32, 9)  # layers, experts, GPUs, slots of each, for the time that a decision takes
NEAR, PART = 0.03, 0.25  # targets: load over clairvoyant's, bytes of EPLB's
ALIKE = 1.005  # times the controller's load, up to which EPLB is as balanced

Domains = list[Profile]


def sources() -> Iterator[tuple[str, Domains]]:
    """Models, and a profile of each of their tasks."""
    found: list[Source | None] = [
        deepseek([0, 8, 16, 25]),
        counted("OLMoE", OLMOE, "olmoe_mixtral_domains/counts_dev.csv", [0, 7, 15], COUNTED),
    ]
    for source in found:
        if source is not None:
            yield source.name, [source.profile(task, 1) for task in source.tasks.values()]
    yield "drawn", [draw_profile("zipf:1", DRAWN, SyntheticOptions(windows=12, sources=1, seed=seed)) for seed in range(3)]


def by_chance(domains: Domains) -> Domains:
    """The domains, each with all of its windows as one."""
    return [replace(each, tokens_TLSE=each.tokens_TLSE.sum(axis=0, keepdims=True), routing=None) for each in domains]


def measure(domains: Domains, gpus: int, slots: int, lasting: int) -> dict[str, tuple[float, float, float]]:
    """Of each way: load outside first windows, experts moved, and the worst load over contiguous's in WHOLE windows."""
    pairs = TOKENS * gpus * domains[0].top_k
    traffic = TakingTurns.of(domains, TURNS[lasting] * lasting, lasting, pairs, seed=lasting)
    layers, experts = traffic.load_WLE.shape[1:]
    held_LGP = contiguous(layers, experts, gpus, slots)
    ways = follow(traffic, held_LGP, GpuSlots.equal(gpus, slots), BYTES, PORT_BPS, every=EVERY)
    whole = np.full(WHOLE, 1 / WHOLE)
    contiguous_W = np.convolve(ways["as it is"].slowest_W, whole, mode="valid")
    return {
        name: (
            float(each.slowest_W[traffic.known_W].mean()),
            float(each.bytes_W.sum()) / BYTES,
            float((np.convolve(each.slowest_W, whole, mode="valid") / contiguous_W).max()),
        )
        for name, each in ways.items()
    }


def contiguous(layers: int, experts: int, gpus: int, slots: int) -> np.ndarray:
    """(L, G, P) the expert in each slot; spare slots are empty."""
    held_LGP = np.full((layers, gpus, slots), EMPTY)
    held_LGP[:, :, : experts // gpus] = np.arange(experts).reshape(gpus, -1)
    return held_LGP


def decisions(table: Table) -> None:
    """Adds what the processor works for a decision, the least of three."""
    layers, experts, *_ = MODEL
    rng = np.random.default_rng(0)
    ranked_E = (1.0 + np.arange(experts)) ** -0.8
    tasks = [rng.permuted(np.tile(ranked_E / ranked_E.sum(), (layers, 1)), axis=1) for _ in range(2)]
    found: dict[str, list[tuple[float, int]]] = {}
    for _ in range(3):
        controller = Controller(contiguous(*MODEL), BYTES)
        for what, task in (("from contiguous", 0), ("the same traffic", 0), ("another task", 1), ("the first task again", 0)):
            load_LE = rng.multinomial(2_000_000, tasks[task])
            worked_s = time.process_time()
            decision = controller.window(load_LE)
            found.setdefault(what, []).append((time.process_time() - worked_s, decision.moves))
            if decision.action != "keep":
                controller.moved()
    for what, each in found.items():
        seconds, moves = min(each)
        table.add(what, moves, f"{seconds * 1e3:.0f}")


def cautious(table: Table, name: str, domains: Domains, gpus: int, slots: int) -> None:
    """Adds rows of half, once and twice the CAUTION: time of the slowest GPU, and of moves for which serving waits."""
    for lasting in LASTING[:2]:
        traffic = TakingTurns.of(domains, 8 * lasting, lasting, TOKENS * gpus * domains[0].top_k, seed=lasting)
        for port_Bps in SLOW_BPS:
            cells = []
            for factor in (0.5, 1.0, 2.0):
                module.CAUTION = factor * CAUTION
                cells += waiting(traffic, gpus, slots, port_Bps)
            table.add(name, f"{gpus} x {slots}", lasting, f"{port_Bps * 8e-9:g}", *cells)
    module.CAUTION = CAUTION


def waiting(traffic: TakingTurns, gpus: int, slots: int, port_Bps: float) -> tuple[str, int]:
    """Time over that of balanced windows of a second, moves of half the ports' rate included; and experts moved."""
    held_LGP = contiguous(*traffic.load_WLE.shape[1:], gpus, slots)
    controller = Controller(
        held_LGP, BYTES, ControlOptions(period_s=1.0), GpuSlots.equal(gpus, slots), port_Bps * gpus, stalls=True
    )
    spent_s, moves = 0.0, 0
    for load_LE in traffic.load_WLE:
        gpu_LG = gpu_loads(load_LE[None], controller.held_LGP, np.ones(gpus))[0]
        spent_s += gpu_LG.max(axis=1).sum() / gpu_LG.mean(axis=1).sum()
        if (decision := controller.window(load_LE)).action == "move":
            moving_s = 2 * decision.bytes / (port_Bps * gpus)
            spent_s, moves = spent_s + moving_s, moves + decision.moves
            controller.moved(moving_s)
    return f"{spent_s / len(traffic.load_WLE):.3f}", moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="of the models")
    parser.add_argument("--gpus", type=int, nargs="+", default=(8, 16, 32, 64))
    parser.add_argument("--lasting", type=int, nargs="+", default=LASTING)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--caution", action="store_true", help="half and twice the CAUTION alone")
    args = parser.parse_args()
    if args.caution:
        cautions = Table("Time over that of balanced windows, and experts moved, by CAUTION", CAUTIONS)
        for name, domains in sources():
            for differ, profiles in (("chance", by_chance(domains)), ("chance, prompts", domains)):
                cautious(cautions, f"{name}, {differ}", profiles, *SHAPES[domains[0].experts][0])
        heading = [f"# How cautious the controller is, {today()}", "", f"`python bench/control.py --caution` on {machine()}."]
        write("control-caution", heading, [SERVING_WAITS], cautions.lines)
        return
    cases, jobs = [], []
    for name, domains in sources():
        if args.only not in (None, name):
            continue
        for differ, profiles in (("chance", by_chance(domains)), ("chance, prompts", domains)):
            for gpus, slots in SHAPES[domains[0].experts]:
                for lasting in args.lasting if gpus in args.gpus else ():
                    cases.append((f"{name}, {differ}", f"{gpus} x {slots}", lasting))
                    jobs.append((profiles, gpus, slots, lasting))
    planning = Table(f"A decision, {MODEL[0]} layers of {MODEL[1]} experts on {MODEL[2]} GPUs of {MODEL[3]} slots", PLANNING)
    decisions(planning)
    loads = Table("Load of the slowest GPU over the mean", LOADS)
    moved = Table("Experts moved", MOVED)
    met: dict[str, list[list[bool]]] = {}
    with ProcessPoolExecutor(args.processes) as pool:
        for case, found in zip(cases, pool.map(measure, *zip(*jobs, strict=True)), strict=True):
            ours, mean_known, best = (found[way] for way in ("controller", "mean known", "clairvoyant"))
            eplb = [found[f"EPLB every {many}"] for many in EVERY]
            over = [ours[0] / each[0] - 1 for each in (best, mean_known)]
            loads.add(
                *case,
                *(f"{each[0]:.3f}" for each in (found["as it is"], *eplb, ours, mean_known, best)),
                *(f"{each:.1%}" for each in (*over, mean_known[0] / best[0] - 1)),
            )
            parts = [ours[1] / each[1] for each in eplb]
            moved.add(*case, f"{ours[1]:.0f}", *(f"{part:.1%}" for part in parts), f"{ours[2]:.3f}")
            good = [over[0] <= NEAR, over[1] <= NEAR]
            good += [
                all(part <= PART for part, each in zip(parts, eplb, strict=True) if each[0] <= ours[0] * 1.005),
                ours[2] <= 1,
            ]
            met.setdefault(case[0], []).append(good)
    goals = Table("Targets met, of cases", GOALS)
    for name, good in met.items():
        goals.add(name, *(f"{sum(column)} of {len(good)}" for column in zip(*good, strict=True)))
    assert __doc__ is not None
    heading = [f"# Following tasks that take turns, {today()}", "", f"`python bench/control.py` on {machine()}."]
    write("control", heading, [__doc__.split("\n\n", 1)[1].strip()], goals.lines, planning.lines, loads.lines, moved.lines)


SLOW_BPS = (1.25e9, 0.3e9)  # of ports over which moves take as long as windows of a second
SERVING_WAITS = (
    "Windows of a second, in which serving waits for moves at half the ports' rate. A layer moves if it saves CAUTION times "
    "what its moves cost. All of a step counts as expert compute, which it is not in serving: there less is saved."
)
CAUTIONS = "traffic | GPUs x slots | windows a task | port, Gb/s | " + " | ".join(
    f"CAUTION {factor * CAUTION:g} | moves" for factor in (0.5, 1, 2)
)
PLANNING = "window | moves | ms of the processor"
LOADS = (
    "traffic | GPUs x slots | windows a task | contiguous | EPLB every 1 | 3 | 10 | controller | mean known | clairvoyant | "
    "controller over clairvoyant | controller over mean known | mean known over clairvoyant"
)
MOVED = (
    "traffic | GPUs x slots | windows a task | controller | of EPLB every 1 | 3 | 10 | "
    f"load over contiguous's, worst {WHOLE} windows in sequence"
)
GOALS = (
    f"traffic | within {NEAR:.0%} of clairvoyant | within {NEAR:.0%} of mean known | "
    f"bytes at most {PART:.0%} of EPLB's that is as balanced | never worse than contiguous in {WHOLE} windows"
)


if __name__ == "__main__":
    main()
