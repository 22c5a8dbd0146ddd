"""Micro-batches of one model beside its whole batches, on four hosts whose network takes about half of the time.

    python bench/network/micro_batches.py [--setting NAME] [--repetitions 3] [--quick]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. One model is served by one plan in 1 to 4
micro-batches, with time slices by exchange and by layer; all ways answer the same requests, and alternate. Two cores carry four
ranks, so experts' compute is a stand-in that waits TOKEN_S a row, as in bench/interleave.py; all else is real. In the settings
named `cpu` nothing waits: experts compute on the two cores, for which micro-batches cannot make time. Ports have the rate at
which the simulator takes twice as long as without a network, for prompts. Predictions have the run's own routing and the
network as measured before it.
Results: bench/results/micro-batches-DATE.md, a section for each setting.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from net import PAYLOAD, network
from protocol import DEEP, Results, by_turns, options

from aurora.io import shipped
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.result import RunResult, merge_results
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Curve, Plan, Profile, ProfileOptions, RunOptions

from interleave import cluster, known_texts  # bench/  # isort: skip
from serving import TOKEN_S, served_on_hosts  # bench/  # isort: skip

RANKS, MODEL = 4, "mixtral-topics"
WHOLE = (1, "auto")  # a way: micro-batches and their time slice
WAYS = (WHOLE, *((parts, time_slice) for parts in (2, 3, 4) for time_slice in ("exchange", "layer")))
Way = tuple[int, str]


@dataclass(frozen=True)
class Setting:
    """Requests of a rank, how many it decodes together, tokens of a prompt and of an answer, and whether experts wait."""

    requests: int
    batch: int
    prompt: int
    new_tokens: int
    waits: bool = True

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that the batch suffices for; of decoding those by layer, of compute on the CPU the simplest."""
        fit = [way for way in WAYS if way[0] <= self.batch]
        if self.new_tokens == 1:
            return tuple(fit if self.waits else fit[:3])
        return tuple(way for way in fit if way[1] != "exchange")

    def __str__(self) -> str:
        compute = f"experts wait {TOKEN_S * 1e6:g} us a row" if self.waits else "experts compute on the CPU"
        batches = f"{self.requests} requests a rank, {self.batch} together"
        return f"{batches}, {self.prompt} tokens each and {self.new_tokens} new ones; {compute}"


SETTINGS = {
    "prompts": Setting(24, 8, 128, 1),
    "decode-2": Setting(4, 2, 8, 16),
    "decode-4": Setting(8, 4, 8, 16),
    "decode-8": Setting(16, 8, 8, 16),
    "decode-32": Setting(64, 32, 8, 16),
    "prompts-cpu": Setting(24, 8, 128, 1, waits=False),
}


def profile_for(setting: Setting, folder: Path) -> Profile:
    """Of other texts than are served, with compute times as the setting has them."""
    text = known_texts()[0][: 2 * RANKS * setting.batch * setting.prompt]
    (folder / "text").write_bytes(text)
    how = ProfileOptions(RANKS, setting.prompt, setting.batch, setting.new_tokens, share=RANKS)
    found = profile_model(shipped(f"models/{MODEL}"), [folder / "text"], how)
    if not setting.waits:
        return found
    waits = Curve(np.array([0.0, 1.0]), np.array([0.0, TOKEN_S]))
    return replace(found, curves={"cpu": {**found.curves["cpu"], "expert": waits}})


def half_rate_Bps(known: Profile) -> float:
    """The ports' rate at which a plan takes twice the simulated seconds that it takes without a network."""
    plan = make_plan(cluster(RANKS, 1e15), [known])
    alone_s, low, high = simulate_plan(plan, [known]).seconds, 1e3, 1e12
    while high / low > 1.01:
        rate = (low * high) ** 0.5
        slower = simulate_plan(replace(plan, cluster=cluster(RANKS, rate)), [known]).seconds > 2 * alone_s
        low, high = (rate, high) if slower else (low, rate)
    return high


def cut(plan: Plan, way: Way) -> Plan:
    parts, time_slice = way
    return replace(plan, options=replace(plan.options, micro_batches=parts, time_slice=time_slice))


def served(plan: Plan, known: Profile, setting: Setting, hosts: Sequence[str], meeting: str) -> tuple[RunResult, float]:
    """A run of the plan on the hosts, and its predicted seconds."""
    count = setting.requests * RANKS
    raw = known_texts()[0][-count * setting.prompt :]
    prompts = [[3 + byte for byte in raw[i * setting.prompt : (i + 1) * setting.prompt]] for i in range(count)]
    how = RunOptions(setting.new_tokens, setting.batch, "gloo", predictable=True)
    rank = partial(served_on_hosts, token_s=TOKEN_S if setting.waits else 0.0)
    shares = launch(rank, RANKS, hosts, meeting, plan, [str(shipped(f"models/{MODEL}"))], [prompts], how)
    result = merge_results([each for results in shares for each in results], plan.served_names)
    assert result.conditions is not None
    seen = replace(plan, cluster=result.conditions.cluster)
    return result, simulate_plan(seen, result.conditions.traffic([known])).seconds


def table(setting: Setting, rate_Bps: float, known: Profile, repetitions: int) -> list[str]:
    plan = make_plan(cluster(RANKS, rate_Bps * PAYLOAD), [known])
    with network([rate_Bps * 8] * RANKS, DEEP) as hosts, tempfile.TemporaryDirectory() as folder:
        served(plan, known, setting, hosts, f"{folder}/first")  # not timed
        runs: dict[Way, list[tuple[RunResult, float]]] = {way: [] for way in setting.ways}
        for number, way in by_turns(runs, repetitions):
            runs[way].append(served(cut(plan, way), known, setting, hosts, f"{folder}/{way}{number}"))
    lines = [
        "| micro-batches | seconds | throughput over whole batches, median (smallest-largest) | simulated seconds "
        "| simulated throughput | prediction error |",
        "|---|---|---|---|---|---|",
    ]
    whole_s, whole_says_s = ([pick(run) for run in runs[WHOLE]] for pick in (_measured_s, _simulated_s))
    gain = {}
    for way, found in runs.items():
        took_s, says_s = [_measured_s(run) for run in found], [_simulated_s(run) for run in found]
        gains = [a / b for a, b in zip(whole_s, took_s, strict=True)]
        gain[way] = statistics.median(gains)
        cells = (
            "none" if way == WHOLE else f"{way[0]}, by {way[1]}",
            f"{statistics.median(took_s):.2f}",
            f"{gain[way]:.2f} ({min(gains):.2f}-{max(gains):.2f})",
            f"{statistics.median(says_s):.2f}",
            f"{statistics.median(a / b for a, b in zip(whole_says_s, says_s, strict=True)):.2f}",
            f"{statistics.median(a / b - 1 for a, b in zip(says_s, took_s, strict=True)):+.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    tokens_W = [found[0][0].answers_M[0].tokens for found in runs.values()]
    differ = sum(any(tokens[index] != tokens_W[0][index] for tokens in tokens_W) for index in tokens_W[0])
    return [
        *lines,
        "",
        f"Ports of {rate_Bps * 8 / 1e6:.3g} Mbit/s. Answers that differ between ways: {differ} of {len(tokens_W[0])}. "
        f"{repetitions} repetitions.",
    ]


def _measured_s(run: tuple[RunResult, float]) -> float:
    return run[0].trace.seconds


def _simulated_s(run: tuple[RunResult, float]) -> float:
    return run[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=tuple(SETTINGS), help="repeat for several; default all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repetition, a third of the requests")
    chosen = options(parser)
    results = Results("micro-batches", "Micro-batches of one model", chosen.out)
    with tempfile.TemporaryDirectory() as folder:
        rates_Bps = {waits: half_rate_Bps(profile_for(Setting(24, 8, 128, 1, waits), Path(folder))) for waits in (True, False)}
        for name in chosen.setting or SETTINGS:
            setting = SETTINGS[name]
            known = profile_for(setting, Path(folder))
            if chosen.quick:
                setting = replace(setting, requests=-(-setting.requests // 3))
            repetitions = 1 if chosen.quick else chosen.repetitions
            results.add(f"{name}: {setting}", *table(setting, rates_Bps[setting.waits], known, repetitions))


if __name__ == "__main__":
    main()
