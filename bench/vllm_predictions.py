"""Predictions of bench/vllm_settings.py: a prefill or decode step of vLLM, from what was measured apart."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aurora.advisor.recommend import engine_default
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.workload.traffic import GATHERS, exchange_bytes, exchange_rows
from aurora.io import load_cluster, load_plan, load_profile, save
from aurora.io.plugin_records import TIMED, load_record
from aurora.models.loading import MoeModel, load_model
from aurora.planner.plan import make_plan
from aurora.profiler.merge_records import load_records
from aurora.profiler.profile_model import RoutingCounts, route_round
from aurora.simulator.interpreter import simulate
from aurora.types import (
    PHASES,
    TRACE_PHASES,
    Cluster,
    Curve,
    Exchange,
    Gpu,
    Network,
    Op,
    Order,
    Plan,
    PlanOptions,
    Profile,
    ProfileOptions,
    Program,
    TokenRouting,
)
from aurora.types.arrays import IntArray

RANKS, FEW, WORDS = 4, 12, 256
ROUTINGS = {"skewed": FEW, "even": WORDS}  # words of prompts
PLANNED, PLANNED_TOKENS = 24, 64  # prompts of each rank that are profiled, and their tokens
DRAWS = 6  # of a step's traffic; the steps of an answer
PROMPT = 4  # tokens of a prompt whose decode steps are timed
SMALL_BYTES = 8192  # as aurora_vllm.layer_alltoall.SMALL_BYTES, which needs vLLM
CALLS = {"stock": GATHERS + 1, "online": 3, "plan": 3}  # collective calls of a layer: counts, dispatch, combine
WAYS = tuple(CALLS)
HOSTS = Cluster("hosts", tuple(Gpu(f"host{rank}", "cpu", rank, 5e7, 5e7, 10**10) for rank in range(RANKS)))  # of plans


class Setting(NamedTuple):
    """What is timed; tokens: of a rank in a pass."""

    mbit: int
    routing: str
    phase: str
    tokens: int


Rounds = list[tuple[Setting, list[float]]]  # of each: when each of its passes ended on the slowest rank


def save_rounds(rounds: Rounds, path: Path) -> None:
    path.write_text(json.dumps(rounds))


def load_rounds(path: Path) -> Rounds:
    return [(Setting(*setting), ends) for setting, ends in json.loads(path.read_text())]


def step_seconds(setting: Setting, ends: Sequence[float]) -> list[float]:
    """Seconds of a round's prefill, or of each of its decode steps."""
    return np.diff(ends).tolist() if setting.phase == "decode" else list(ends[:1])


def routed(folder: Path, routing: str) -> Profile:
    """How the folder's model routes prompts, token by token; compute times are those of the records.

    Returns what a plan is made for. What is predicted are other prompts, as plans fit theirs better than others.
    """
    moe, rng = load_model(folder / "model"), np.random.default_rng(ROUTINGS[routing])
    sizes = moe.top_k, moe.row_bytes, moe.row_bytes, moe.expert_bytes, moe.other_bytes
    curves, made = load_records(folder / "records").curves, {}
    for use in ("planned", "predicted"):
        counts = prompts_routed(moe, routing, (PLANNED, PLANNED_TOKENS), rng)
        made[use] = Profile(moe.name, moe.fingerprint(), counts.tokens_TLSE, *sizes, curves, routing=counts.routing)
    save(made["predicted"], folder / f"profile-{routing}.npz")
    return made["planned"]


def prompts_routed(moe: MoeModel, routing: str, shape: tuple[int, int], rng: np.random.Generator) -> RoutingCounts:
    """How a model routes drawn prompts; shape: prompts of each rank, and tokens of each."""
    batches = rng.integers(ROUTINGS[routing], size=(RANKS, *shape)).tolist()
    options = ProfileOptions(sources=RANKS, token_level=True)
    return RoutingCounts().add(route_round(moe, batches, 1, keep=True), batches, options, moe.top_k)


def made_plan(profile: Profile) -> Plan:
    """A plan for the routing, on hosts of 400 Mbit/s: a plugin that knows slower ports sends smaller pieces."""
    return make_plan(HOSTS, [profile], PlanOptions())


@dataclass(frozen=True)
class Recorded:
    """Passes of the run apart that one record is of.

    Attributes:
        passes: tokens of a rank in a pass, and how many such passes there were.
        pass_s: mean seconds of a pass.
        compute_s: seconds of gates, experts and aggregations in it, mean over ranks; the first layer's gate is not recorded.
        exchange_s: those of dispatches, which begin with the exchange of counts, and combines.
        bare_s: median seconds of a pass of the setting's tokens that was not recorded.
    """

    passes: Mapping[int, int]
    pass_s: float
    compute_s: float
    exchange_s: float
    bare_s: float

    def mean(self, seconds_of: Callable[[int], float]) -> float:
        """The mean over passes of something that depends on their tokens."""
        return sum(many * seconds_of(tokens) for tokens, many in self.passes.items()) / sum(self.passes.values())

    @classmethod
    def read(cls, folder: Path) -> "dict[Setting, Recorded]":
        found, rounds, bare_s = {}, sorted(load_rounds(folder / "rounds-apart.json")), {}
        for setting, own in load_rounds(folder / "rounds-bare.json"):
            bare_s.setdefault(setting, []).extend(step_seconds(setting, own))
        for setting, some in groupby(rounds, key=lambda each: each[0]):
            ends = [own for _, own in some]
            passes = {setting.tokens: sum(map(len, ends))}
            if setting.phase == "decode":
                passes = {setting.tokens * PROMPT: len(ends), setting.tokens: passes[setting.tokens] - len(ends)}
            files = (folder / "records" / f"{setting.phase}-{setting.tokens}").glob("rank-*.npz")
            seconds_P = np.mean(
                [(each.seconds_LP / each.passes_L[:, None]).sum(axis=0) for each in map(load_record, files)], axis=0
            )
            compute_s = float(sum(seconds_P[TIMED.index(phase)] for phase in PHASES))
            pass_s = sum(own[-1] for own in ends) / sum(passes.values())
            found[setting] = cls(
                passes, pass_s, compute_s, float(seconds_P.sum()) - compute_s, float(np.median(bare_s[setting]))
            )
        return found


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        seconds: of each prefill or decode step, by setting and way.
        recorded: of the run apart, by setting.
        clusters: the measured links, by rate.
        gathers: the same, as the all-to-all by which vLLM gathers and scatters here finds them, by rate.
        profiles: by routing.
        plans: by routing.
        moe: the model.
    """

    seconds: Mapping[tuple[Setting, str], Sequence[float]]
    recorded: Mapping[Setting, Recorded]
    clusters: Mapping[int, Cluster]
    gathers: Mapping[int, Cluster]
    profiles: Mapping[str, Profile]
    plans: Mapping[str, Plan]
    moe: MoeModel

    @classmethod
    def read(cls, folder: Path) -> "Measured":
        seconds: dict[tuple[Setting, str], list[float]] = {}
        for path in sorted(folder.glob("rounds-*.json")):
            way = path.stem.split("-")[1]
            for setting, ends in load_rounds(path) if way in WAYS else ():
                seconds.setdefault((setting, way), []).extend(step_seconds(setting, ends))
        recorded = Recorded.read(folder)
        rates = {setting.mbit for setting in [*recorded, *(setting for setting, _ in seconds)]}
        routings = {setting.routing for setting, _ in seconds}
        return cls(
            seconds,
            recorded,
            *({mbit: load_cluster(folder / f"{name}-{mbit}.toml") for mbit in rates} for name in ("cluster", "gathers")),
            {routing: load_profile(folder / f"profile-{routing}.npz") for routing in routings},
            {routing: load_plan(folder / f"plan-{routing}.json") for routing in routings},
            load_model(folder / "model"),
        )


class Predictions:
    """Seconds of passes: MoE layers as the simulator has them, and what it leaves out.

    That is known from the run apart. Records say how many times as long as simulated exchanges in an order take
    (`exchange_ratio`), beside what each of them waits for whatever its bytes. What a pass that is not recorded takes beyond
    that is a line over tokens, of which records say how much is in collective calls: `call_s` is what a call takes longer in
    the engine than when links are measured, which the plugin computes for it, or waits for as ranks share cores and come at
    different times. It is that of decode steps, and the same for all calls of all ways. The rest, `beside_s`, is the
    scheduler, sampling, the head, and the agreement of ranks.
    """

    def __init__(self, found: Measured) -> None:
        self._found, calls, rows, self._lines = found, [], [], []
        self._drawn: dict[tuple[str, str, int], list[Profile]] = {}
        layers = next(iter(found.profiles.values())).layers
        simulated = {
            setting: [
                recorded.mean(lambda tokens, own=setting, part=part: self.layers_s(own._replace(tokens=tokens), "online")[part])
                for part in range(2)
            ]
            for setting, recorded in found.recorded.items()
        }
        exchanges = np.array([(simulated[setting][1], recorded.exchange_s) for setting, recorded in found.recorded.items()])
        self.exchange_ratio = max(1.0, float(np.polyfit(*exchanges.T, 1)[0]))
        for setting, recorded in found.recorded.items():
            gate_s = recorded.mean(lambda tokens, curve=self._gate(setting): float(curve(tokens)))
            compute_s, exchange_s = simulated[setting]
            beside_s = recorded.pass_s - recorded.compute_s - recorded.exchange_s - gate_s
            left_s = recorded.bare_s - self._known_s(setting, "online")
            rows.append((setting.tokens, left_s))
            if setting.phase == "decode":
                in_calls_s = recorded.exchange_s - self.exchange_ratio * exchange_s
                calls.append(left_s * in_calls_s / (in_calls_s + beside_s) / (CALLS["online"] * layers))
            seconds = (recorded.pass_s, recorded.compute_s + gate_s, compute_s, recorded.exchange_s, exchange_s, beside_s)
            cells = [setting.phase, setting.tokens, *(f"{each * 1e3:.1f}" for each in (*seconds, recorded.bare_s, left_s))]
            self._lines.append(f"| {' | '.join(map(str, cells))} |")
        self.call_s = max(0.0, float(np.mean(calls)))
        token_s, fixed_s = np.polyfit(*np.array(rows).T, 1)
        self.beside_s = np.array([token_s, fixed_s - CALLS["online"] * layers * self.call_s])

    def _gate(self, setting: Setting) -> Curve:
        return self._found.profiles[setting.routing].curves["cpu"]["gate"]

    def __call__(self, setting: Setting, way: str) -> float:
        """Predicted seconds of a pass."""
        calls = CALLS[way] * self._found.profiles[setting.routing].layers
        return self._known_s(setting, way) + calls * self.call_s + float(np.polyval(self.beside_s, setting.tokens))

    def _known_s(self, setting: Setting, way: str) -> float:
        """Seconds of the MoE layers. Gathers were measured as they are, all ranks at once."""
        compute_s, exchange_s = self.layers_s(setting, way)
        return compute_s + exchange_s * (1.0 if way == "stock" else self.exchange_ratio)

    def layers_s(self, setting: Setting, way: str) -> tuple[float, float]:
        """Simulated seconds of the MoE layers, the mean over draws of the traffic: of a rank's compute, and of all else."""
        found, seconds = self._found, []
        profile = found.profiles[setting.routing]
        plan = found.plans[setting.routing] if way == "plan" else engine_default(HOSTS, profile)
        program = replace(compile_plan(plan, gathered=way == "stock"), deduplicated_M=(True,))
        for drawn in self._steps(setting):
            served = program if way == "stock" else ordered(program, drawn, way)
            links = found.gathers if way == "stock" else found.clusters
            trace = simulate(served, links[setting.mbit], [drawn])
            computes_X = np.isin(trace.phase_X, [TRACE_PHASES.index(phase) for phase in PHASES])
            compute_s = float((trace.end_s_X - trace.start_s_X)[computes_X].sum()) / RANKS
            seconds.append((compute_s, trace.seconds - compute_s))
        compute_s, exchange_s = np.mean(seconds, axis=0).tolist()
        return compute_s, exchange_s

    def _steps(self, setting: Setting) -> list[Profile]:
        """Drawn traffic of a step: a prompt on each rank, whose tokens attend to each other, or a token of many answers."""
        key = setting.routing, setting.phase, setting.tokens
        if key not in self._drawn:
            profile = self._found.profiles[setting.routing]
            rng, self._drawn[key] = np.random.default_rng([setting.tokens, len(setting.routing)]), []
            for draw in range(DRAWS):
                decode = setting.phase == "decode"
                shape = (setting.tokens, PROMPT + 1 + draw) if decode else (1, setting.tokens)
                routing = prompts_routed(self._found.moe, setting.routing, shape, rng).routing
                assert routing is not None
                if decode:  # the last token of each prompt, which is what a step adds
                    last = slice(shape[1] - 1, None, shape[1])
                    routing = TokenRouting(routing.experts_ULK[last], routing.source_U[last], routing.window_U[last])
                tokens_TLSE = routing.tokens_TLSE(1, RANKS, profile.experts)
                self._drawn[key].append(replace(profile, tokens_TLSE=tokens_TLSE, routing=routing))
        return self._drawn[key]

    def lines(self) -> list[str]:
        """What the run apart says."""
        token_s, fixed_s = self.beside_s
        head = "compute recorded, ms | simulated, ms | exchanges recorded, ms | simulated, ms | beside MoE layers, ms"
        head += " | a pass not recorded, ms | beyond what is simulated, ms"
        return [
            f"From the run apart: {fixed_s * 1e3:.2f} ms and {token_s * 1e3:.4f} ms a token beside MoE layers; "
            f"{self.call_s * 1e3:.2f} ms of each collective call beyond measured links; exchanges in an order take "
            f"{self.exchange_ratio:.2f} times their simulated seconds. A decode record has its prefills, too.",
            "",
            f"| phase | tokens of a rank | pass, ms | {head} |",
            "|---" * 10 + "|",
            *self._lines,
        ]


def ordered(program: Program, drawn: Profile, way: str) -> Program:
    """The program with the orders that the plugin takes for a batch."""
    at_once, ops_L = order_of("all-at-once", np.zeros((RANKS, RANKS), dtype=np.int64)), []
    for layer, ops in enumerate(program.ops_ML[0]):
        split_EG = program.placements_M[0].split_EG(layer)
        rows_SGG = exchange_rows(drawn, layer, split_EG, deduplicated=True, window=0)
        bytes_GG = exchange_bytes(rows_SGG, drawn, "dispatch", True)[0]
        if bytes_GG.max() < SMALL_BYTES:
            ops = with_order(ops, at_once)
        elif way == "online":
            ops = with_order(ops, order_of("openshop", bytes_GG))
        ops_L.append(ops)
    return replace(program, ops_ML=(tuple(ops_L),))


def order_of(name: str, bytes_GG: IntArray) -> Order:
    return ORDER[name](bytes_GG, Network.equal(RANKS), rng=np.random.default_rng(0))


def with_order(ops: tuple[Op, ...], order: Order) -> tuple[Op, ...]:
    """A layer's operations with this order of the dispatch, and backwards of the combine."""
    orders = {"dispatch": order, "combine": order.reversed}
    return tuple(replace(op, order=orders[op.phase]) if isinstance(op, Exchange) else op for op in ops)
