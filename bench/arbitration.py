"""What port arbitration costs one model that shares its GPUs with nobody. `python bench/arbitration.py [--rounds 60]`

Writes bench/results/arbitration-DATE.md. One model serves on two ranks over gloo, without arbitration, with that of threads,
and with that of processes: alone, and beside a model that does nothing. The same ranks serve the same prompts in all ways, one
after the other within a round, in changing sequence; a ratio is of two runs of one round. Beside it is what a layer's calls
take by themselves: three computing and two exchanging, without waiting.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from tables import today

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "network")]
from interleave import BATCH, MODELS, TOKENS, cluster, known_texts  # noqa: E402

from aurora.algorithms.compile import compile_plan  # noqa: E402
from aurora.io import shipped  # noqa: E402
from aurora.planner.plan import make_plan  # noqa: E402
from aurora.profiler.profile_model import profile_model  # noqa: E402
from aurora.runtime.distributed.launcher import RankInfo, launch  # noqa: E402
from aurora.runtime.layer_context import LayerContext  # noqa: E402
from aurora.runtime.model_worker import ModelWorker, Request  # noqa: E402
from aurora.runtime.phase_recorder import PhaseRecorder  # noqa: E402
from aurora.runtime.port_arbiter import PortArbiter, thread_port_arbiters  # noqa: E402
from aurora.runtime.process_port_arbiter import ProcessPortArbiter  # noqa: E402
from aurora.runtime.serving_rank import load_models  # noqa: E402
from aurora.runtime.transports.process_groups import default_process_group, new_process_group  # noqa: E402
from aurora.runtime.transports.shaped import tcp_transports  # noqa: E402
from aurora.types import Plan, ProfileOptions, RunOptions, TraceRecorder  # noqa: E402

CALLS, PROMPTS, NEW_TOKENS = 3000, 4, 8
NONE, THREADS, ALONE, BESIDE = "none", "threads", "processes, alone", "processes, beside an idle model"
WAYS = (NONE, THREADS, ALONE, BESIDE)


class NoArbiter:
    """The PortArbiter interface without arbitration."""

    exclusive = True

    def start_compute(self, level: int = 0) -> None: ...

    def yield_to_priority(self, on_yield: Callable[[], None]) -> bool:
        return False

    def stop_compute(self) -> None: ...

    def exchange(self, hold_port: bool = False) -> Any:
        return nullcontext()

    def leave(self) -> None: ...

    def pause(self) -> None: ...

    def join(self, gather: Any, first: bool, slices: int | None = None) -> None: ...

    def abort(self, error: BaseException) -> None: ...


def joined(folder: Path, rank: int, wait: Callable[[], object]) -> list[ProcessPortArbiter]:
    """Arbiters of one rank in a folder: alone in one of its own, and beside an idle model; `wait` waits for all ranks."""
    found: list[ProcessPortArbiter] = []
    for name, slot in ((ALONE, 0), (BESIDE, 0), (BESIDE, 1)):
        (folder / name).mkdir(exist_ok=True)
        if rank == 0:
            found.append(ProcessPortArbiter(folder / name, 0))
        wait()
        if rank:
            found.append(ProcessPortArbiter(folder / name, rank, slot))
        wait()
    return found


def serve_rounds(
    rank_info: RankInfo, plan: Plan, prompts: list[list[int]], folder: Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round by way, on one rank."""
    torch.set_num_threads(1)
    options = RunOptions(NEW_TOKENS, batch=BATCH)
    (model,) = load_models(plan, [str(shipped(f"models/{MODELS[0]}"))], [prompts], options, "cpu")
    worker, program, rank = ModelWorker(model, options), compile_plan(plan), rank_info.rank
    worker.hold(plan.models[0].placement, rank)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with default_process_group(rank_info) as heartbeats:
        groups = [new_process_group("gloo", options.timeout_s)]
        (transport,) = tcp_transports(groups, plan.cluster, rank, False, heartbeats)
        alone, beside, idle = joined(folder, rank, lambda: transport.gather(torch.zeros(1)))
        ways: dict[str, PortArbiter] = {NONE: NoArbiter(), THREADS: thread_port_arbiters(1)[0], ALONE: alone, BESIDE: beside}
        recorder = PhaseRecorder(TraceRecorder("measured", program.names_M, rank_info.ranks, 1), rank, 0, 0.0, None, False)
        for number in range(rounds + 1):
            for way in np.roll(WAYS, number)[:: 1 if number % 2 else -1].tolist():
                context = LayerContext(0, transport, ways[way], recorder)
                context.leave = lambda: None  # type: ignore[method-assign]
                worker.set_program(program, context)
                worker.waiting.extend(Request(index, prompt) for index, prompt in enumerate(prompts))
                transport.gather(torch.zeros(1))
                began_s = time.perf_counter()
                worker.serve()
                transport.gather(torch.zeros(1))
                if number:  # the first round warms up
                    took[way].append(time.perf_counter() - began_s)
        for arbiter in (alone, beside, idle):
            arbiter.leave()
    return took


def layer_calls(folder: Path) -> dict[str, float]:
    """Median seconds of the calls of one layer, by way."""
    alone, beside, idle = joined(folder, 0, lambda: None)
    ways: dict[str, PortArbiter] = {NONE: NoArbiter(), THREADS: thread_port_arbiters(1)[0], ALONE: alone, BESIDE: beside}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(CALLS):
        for way, arbiter in ways.items():
            began_s = time.perf_counter()
            for _ in range(3):
                arbiter.start_compute()
                arbiter.stop_compute()
            for _ in range(2):
                with arbiter.exchange():
                    pass
            took[way].append(time.perf_counter() - began_s)
    for each in (alone, beside, idle):
        each.leave()
    return {way: statistics.median(each) for way, each in took.items()}


def over_none(took: dict[str, list[float]], way: str) -> str:
    """Median of a way's seconds over those without arbitration in the same round, and its 95 % interval by order statistics."""
    ratios = sorted(a / b - 1 for a, b in zip(took[way], took[NONE], strict=True))
    half = 0.98 * len(ratios) ** 0.5
    low, high = max(0, round(len(ratios) / 2 - half)), min(len(ratios) - 1, round(len(ratios) / 2 + half))
    return f"{statistics.median(ratios):+.2%} ({ratios[low]:+.2%} to {ratios[high]:+.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"arbitration-{today()}.md")
    chosen, load = parser.parse_args(), os.getloadavg()[0]
    text = known_texts()[0]
    prompts = [[3 + byte for byte in text[-(i + 1) * TOKENS : len(text) - i * TOKENS]] for i in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_bytes(text[: 64 * TOKENS])
        known = profile_model(shipped(f"models/{MODELS[0]}"), [folder / "text"], ProfileOptions(2, TOKENS, BATCH, 1))
        plan = make_plan(cluster(2, 1e9), [known])
        (folder / "calls").mkdir()
        calls_s = layer_calls(folder / "calls")
        from arbitration import serve_rounds as ranks  # ranks find a function of this module, not of __main__

        took = launch(ranks, 2, plan, prompts, folder, chosen.rounds)[0]
    lines = [
        f"# What port arbitration costs one model, {today()}",
        "",
        f"`python bench/arbitration.py --rounds {chosen.rounds}` on {machine()}; load average {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after. Two ranks over gloo on loopback, {PROMPTS} prompts of {TOKENS} tokens on each, "
        f"{NEW_TOKENS} new ones.",
        "",
        "| arbitration | run, s, median | over none in the same round, median (its 95 % interval) | a layer's calls, us |",
        "|---|---|---|---|",
        *(
            f"| {way} | {statistics.median(took[way]):.4f} | {over_none(took, way)} | {calls_s[way] * 1e6:.1f} |"
            for way in WAYS
        ),
    ]
    chosen.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
