"""`aurora run --adapt` on real sockets: traffic switches while a model is served, and experts follow it.

    python bench/network/adapt.py [--setting NAME] [--repetitions 3] [--batches 4] [--period 1.0] [--quick]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Four ranks have ports of 200 Mbit/s each; in the
setting `servers` they are on two servers with slower NICs between them, and all-to-alls are hierarchical. Two cores
carry them, so experts' compute is a stand-in that waits TOKEN_S a row, as in bench/interleave.py; all else is real. A third of
the batches asks for text of one kind, the rest for another, for which the model chooses other experts. Ways: the plan for the
first kind as it is; the same in a dry run, which shows what planning beside serving costs; the same with --adapt; and the plan
for the second kind. A plan knows other texts of its kind, and what the model answers to them. All ways serve the same requests
in the same steps, and alternate. Throughput counts from one period after the switch. A gap is the time between the ends of two
steps that each bring a token; those of prompts are left out. Answers of the first repetition are compared.
Results: bench/results/adapt-network-DATE.md, a section for each setting.
"""

import argparse
import os
import pydoc_data.topics
import statistics
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from net import PAYLOAD, network, servers
from protocol import DEEP, Results, by_turns, options

from aurora.io import shipped
from aurora.planner.plan import make_plan
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.result import RunResult, merge_results
from aurora.types import TRACE_PHASES, Cluster, ControlOptions, Gpu, PlacementChange, Plan, PlanOptions, RunOptions
from aurora.types import servers as fabric_of_servers

from serving import served_on_hosts, waiting_profile  # bench/  # isort: skip

RANKS, PORT_bps, TOKEN_S = 4, 200e6, 400e-6
SERVERS = (0, 0, 1, 1)
PROMPT, NEW_TOKENS, BATCH = 32, 48, 8
PLANNED = 64  # prompts that a plan knows
OLD, DRY, ADAPT, NEW = "plan of the old traffic", "the same, dry run", "the same, --adapt", "plan of the new traffic"
NEITHER, DECIDED, MOVING = TIMES = "neither of these", "after a window", "while experts move"


@dataclass(frozen=True)
class Setting:
    """A model, the kinds of text before and after the switch, a GPU's slots, the speeds of the GPUs, and the rate of NICs."""

    model: str
    kinds: tuple[str, str]
    slots: int
    speeds: tuple[float, ...] = (1.0,) * RANKS
    nic_bps: float | None = None  # each GPU's, between SERVERS; None: all are on one switch

    @property
    def cluster(self) -> Cluster:
        port_Bps = PORT_bps / 8 * PAYLOAD
        gpus = [Gpu(f"host-{rank}", "host", rank, port_Bps, port_Bps, 10**9, speed) for rank, speed in enumerate(self.speeds)]
        ports, fabric = [port_Bps] * RANKS, None
        if self.nic_bps is not None:
            fabric = fabric_of_servers(SERVERS, ports, ports, self.nic_bps / 8 * PAYLOAD)
        return Cluster("hosts", tuple(gpus), fabric)

    def network(self) -> AbstractContextManager[list[str]]:
        """The hosts of the ranks."""
        if self.nic_bps is None:
            return network([PORT_bps] * RANKS, DEEP)
        return servers(SERVERS, PORT_bps, self.nic_bps, False, DEEP)

    def __str__(self) -> str:
        speeds = "" if len(set(self.speeds)) == 1 else f", GPUs of speeds {', '.join(f'{each:g}' for each in self.speeds)}"
        nics = "" if self.nic_bps is None else f", NICs of {self.nic_bps / 1e6:g} Mbit/s between two servers"
        return f"{self.model}, {self.slots} slots a GPU, first {self.kinds[0]}, then {self.kinds[1]}{speeds}{nics}"

    def plan(self, prompts: list[list[int]]) -> Plan:
        """The plan for traffic of this kind."""
        profile = waiting_profile(shipped(f"models/{self.model}"), prompts, NEW_TOKENS, RANKS, TOKEN_S)
        all_to_all = "auto" if self.nic_bps is None else "hierarchical"
        return make_plan(self.cluster, [profile], PlanOptions(slots_per_gpu=self.slots, all_to_all=all_to_all))


SETTINGS = {
    "replicas": Setting("mixtral-topics", ("prose", "tables"), 3),
    "mixed": Setting("qwen3moe-stdlib", ("source", "tables"), 2, (1.0, 1.0, 0.5, 0.5)),
    "servers": Setting("mixtral-topics", ("prose", "tables"), 3, nic_bps=100e6),
}


def kinds_of_text() -> dict[str, bytes]:
    """What every Python has: prose (its reference), source (its library), tables (character sets, a line for each byte)."""
    library = Path(os.__file__).parent
    files = {"source": sorted(library.glob("*.py")), "tables": sorted(library.glob("encodings/cp*.py"))}
    texts = {kind: "\n".join(file.read_text() for file in each) for kind, each in files.items()}
    texts["prose"] = "\n".join(pydoc_data.topics.topics.values())
    return {kind: text.encode("ascii", "ignore") for kind, text in texts.items()}


def prompts_of(text: bytes, count: int) -> list[list[int]]:
    """So many prompts from anywhere in a text, none twice."""
    at = np.random.default_rng(0).permutation(len(text) // PROMPT)[:count] * PROMPT
    return [[3 + byte for byte in text[begin : begin + PROMPT]] for begin in at.tolist()]


@dataclass(frozen=True)
class Served:
    """A run, and when each of its steps ended."""

    result: RunResult

    @cached_property
    def end_s_I(self) -> np.ndarray:
        trace = self.result.trace
        heads_X = (trace.phase_X == TRACE_PHASES.index("head")) & (trace.peer_X < 0)
        end_s_I = np.zeros(int(trace.step_X.max()) + 1)
        np.maximum.at(end_s_I, trace.step_X[heads_X], trace.end_s_X[heads_X])
        return end_s_I

    @cached_property
    def gap_s_I(self) -> np.ndarray:
        """Seconds since the step before; NaN where the step before brought another batch's token."""
        gap_s_I = np.diff(self.end_s_I, prepend=np.nan)
        gap_s_I[::NEW_TOKENS] = np.nan
        return gap_s_I

    @cached_property
    def when_I(self) -> np.ndarray:
        """Whether there is a decision after a window between the step before and this one, or experts move, or NEITHER."""
        when_I = np.full(len(self.end_s_I), NEITHER, dtype=object)
        decided_s = [window.at_s for report in self.result.control_M for window in report.series]
        when_I[np.searchsorted(self.end_s_I[:-1], decided_s)] = DECIDED
        for change in self.changes:
            end_s = change.at_s + change.took_s
            when_I[1:][(change.at_s <= self.end_s_I[1:]) & (self.end_s_I[:-1] <= end_s)] = MOVING
        return when_I

    @property
    def changes(self) -> list[PlacementChange]:
        """Those that were performed."""
        return [each for report in self.result.control_M for each in report.changes if each.took_s is not None]


def served(setting: Setting, repetitions: int, batches: int, period_s: float) -> dict[str, list[Served]]:
    """The runs of each way, which serve the same requests."""
    texts, path, first = kinds_of_text(), str(shipped(f"models/{setting.model}")), batches // 3
    plain = RunOptions(max_new_tokens=NEW_TOKENS, batch=BATCH, transport="gloo")
    adapt = replace(plain, adapt=ControlOptions(period_s=period_s))
    runs: dict[str, list[Served]] = {OLD: [], DRY: [], ADAPT: [], NEW: []}
    plans, requests = [], []
    with setting.network() as hosts, tempfile.TemporaryDirectory() as folder:
        for kind, count in zip(setting.kinds, (first, batches - first), strict=True):
            prompts = prompts_of(texts[kind], PLANNED + count * BATCH * RANKS)
            plans.append(setting.plan(prompts[:PLANNED]))
            requests += prompts[PLANNED:]
        old, new = plans
        ways = {OLD: (old, plain), DRY: (old, replace(adapt, dry_run=True)), ADAPT: (old, adapt), NEW: (new, plain)}
        for number, way in by_turns(ways, repetitions):
            plan, chosen = ways[way]
            meeting = f"{folder}/{list(ways).index(way)}-{number}"
            waits = partial(served_on_hosts, token_s=TOKEN_S)
            shares = launch(waits, RANKS, hosts, meeting, plan, [path], [requests], chosen)
            runs[way].append(Served(merge_results([each for results in shares for each in results], (setting.model,))))
            result = runs[way][-1].result
            print(f"{way}: {result.seconds:.2f} s", *(each.changes for each in result.control_M), flush=True)
    return runs


def longest(runs: list[Served], when: str) -> str:
    """The longest gap at such times, over the median gap at no such time."""
    found = [
        np.nanmax(each.gap_s_I[each.when_I == when], initial=0.0) / np.nanmedian(each.gap_s_I[each.when_I == NEITHER])
        for each in runs
    ]
    return f"{max(found):.2f}" if max(found) else ""


def delays(adapted: Served, new: Served, start: int, switched_s: float) -> tuple[float, float, float] | None:
    """How long after the switch the first change was in force, and throughput over the new plan's before and after that.

    Steps count from `start` on. None if nothing changed after the switch.
    """
    in_force_s = [each.at_s + each.took_s for each in adapted.changes if each.at_s > switched_s and each.took_s is not None]
    if not in_force_s:
        return None
    first = max(int(np.searchsorted(adapted.end_s_I, in_force_s[0])), start + 1)
    over = (np.diff(each.end_s_I[[start, first, -1]]) for each in (new, adapted))
    before, after = next(over) / next(over)
    return in_force_s[0] - switched_s, float(before), float(after)


def table(setting: Setting, repetitions: int, batches: int, period_s: float) -> list[str]:
    """The section of a setting, a row for each way."""
    runs = served(setting, repetitions, batches, period_s)
    after_s: dict[str, list[float]] = {way: [] for way in runs}
    delays_X: list[tuple[float, float, float]] = []
    for number, adapted in enumerate(runs[ADAPT]):
        switched_s = adapted.end_s_I[batches // 3 * NEW_TOKENS - 1]
        start = int(np.searchsorted(adapted.end_s_I, switched_s + period_s))
        for way, each in runs.items():
            after_s[way].append(float(each[number].end_s_I[-1] - each[number].end_s_I[start]))
        found = delays(adapted, runs[NEW][number], start, switched_s)
        delays_X += [] if found is None else [found]
    lines = [
        "| way | seconds from a period after the switch, median | throughput over the new plan's, median (worst) | longest gap "
        f"over the median: {' | '.join(TIMES)} | changes | moved MB |",
        "|" + "---|" * (5 + len(TIMES)),
    ]
    for way, each in runs.items():
        over = [new_s / own_s for new_s, own_s in zip(after_s[NEW], after_s[way], strict=True)]
        performed = [change for run in each for change in run.changes]
        cells = (
            f"{statistics.median(after_s[way]):.2f}",
            f"{statistics.median(over):.3f} ({min(over):.3f})",
            *(longest(each, when) for when in TIMES),
            len(performed),
            f"{sum(change.bytes for change in performed) / 1e6:.2f}",
        )
        lines.append(f"| {way} | {' | '.join(map(str, cells))} |")
    dry = [dry.result.seconds / old.result.seconds - 1 for dry, old in zip(runs[DRY], runs[OLD], strict=True)]
    tokens_M = [each[0].result.answers_M[0].tokens for each in runs.values()]
    differ = sum(any(tokens[index] != tokens_M[0][index] for tokens in tokens_M) for index in tokens_M[0])
    follows = [] if not delays_X else [
        "With --adapt the first change after the switch was in force {:.2f} s after it; throughput is {:.3f} of the new plan's "
        "until then, {:.3f} from then on (medians).".format(*map(statistics.median, zip(*delays_X, strict=True))),
        "",
    ]  # fmt: skip
    return [
        *lines,
        "",
        *follows,
        f"Planning beside serving: a dry run takes {statistics.median(dry):+.1%} ({min(dry):+.1%} to {max(dry):+.1%}) of the "
        f"run without. Answers that differ between ways: {differ} of {len(tokens_M[0])}. {repetitions} repetitions of "
        f"{batches} batches of {BATCH} requests a rank, windows of {period_s:g} s; experts wait {TOKEN_S * 1e6:g} us a row.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=tuple(SETTINGS), help="repeat for several; default all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help=f"of {BATCH} requests on each rank, {NEW_TOKENS} tokens each")
    parser.add_argument("--period", type=float, default=1.0, help="seconds of a window")
    parser.add_argument("--quick", action="store_true", help="one repetition of three batches")
    chosen = options(parser)
    repetitions, batches = (1, 3) if chosen.quick else (chosen.repetitions, chosen.batches)
    results = Results("adapt-network", "Experts follow traffic that switches", chosen.out)
    for name in chosen.setting or SETTINGS:
        results.add(str(SETTINGS[name]), *table(SETTINGS[name], repetitions, batches, chosen.period))


if __name__ == "__main__":
    main()
