"""Predictions of bench/vllm_settings.py: a prefill or decode step of vLLM, from what was measured apart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aurora.advisor.recommend import engine_default
from aurora.io import load_cluster, load_plan, load_profile, save
from aurora.io.engine_records import load_record, load_records
from aurora.models.loading import load_model
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.compile import compile_plan
from aurora.planner.make_plan import make_plan
from aurora.planner.workload.step_traffic import step_profile
from aurora.planner.workload.traffic import exchange_bytes, exchange_rows
from aurora.profiler.routing_counts import RoutingCounts, route_round
from aurora.simulator.interpreter import simulate
from aurora.types import Cluster, Curve, Exchange, Gpu, Network, Op, Order, Plan, PlanOptions, Profile, ProfileOptions, Program
from aurora.types.arrays import IntArray

RANKS, FEW = 4, 12
PLANNED, PLANNED_TOKENS = 24, 64  # prompts of each rank that are profiled, and their tokens
DRAWS = 6  # of a step's traffic
PROMPT = 8  # tokens of a prompt whose decode steps are timed
SMALL_BYTES = 8192  # as aurora_vllm.layer_alltoall.SMALL_BYTES, which needs vLLM
WAYS = ("stock", "online", "plan")
HOSTS = Cluster("hosts", tuple(Gpu(f"host{rank}", "cpu", rank, 12.5e6, 12.5e6, 10**10) for rank in range(RANKS)))


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


def routed(folder: Path, routing: str, words: int) -> Profile:
    """How the folder's model routes prompts of so many words, token by token; compute times are those of the records."""
    moe, rng = load_model(folder / "model"), np.random.default_rng(words)
    batches = rng.integers(words, size=(RANKS, PLANNED, PLANNED_TOKENS)).tolist()
    options = ProfileOptions(sources=RANKS, token_level=True)
    counts = RoutingCounts().add(route_round(moe, batches, 1, keep=True), batches, options, moe.top_k)
    sizes = moe.top_k, moe.row_bytes, moe.row_bytes, moe.expert_bytes, moe.other_bytes
    curves = load_records(folder / "records").curves
    profile = Profile(moe.name, moe.fingerprint(), counts.tokens_TLSE, *sizes, curves, routing=counts.routing)
    save(profile, folder / f"profile-{routing}.npz")
    return profile


def made_plan(profile: Profile) -> Plan:
    """A plan for the routing, on hosts of 100 Mbit/s."""
    return make_plan(HOSTS, [profile], PlanOptions(coactivation=True))


@dataclass(frozen=True)
class Beside:
    """What a pass takes beside its MoE layers: scheduler, sampling, head, agreement of ranks; a line over tokens of a rank."""

    fixed_s: float
    token_s: float

    @classmethod
    def of(cls, folder: Path, curves: Mapping[str, Curve]) -> "Beside":
        """From passes that were recorded, less what their layers took, and less a gate: the first layer's is not recorded."""
        rows = []
        rounds = sorted(load_rounds(folder / "rounds-apart.json"))
        for setting, some in groupby(rounds, key=lambda each: each[0]):
            ends = [own for _, own in some]
            passes = sum(map(len, ends))
            first = setting.tokens * (PROMPT if setting.phase == "decode" else 1)
            tokens = (first * len(ends) + setting.tokens * (passes - len(ends))) / passes
            files = (folder / "records" / f"{setting.phase}-{setting.tokens}").glob("rank-*.npz")
            layers_s = np.mean([(each.seconds_LP.sum(axis=1) / each.passes_L).sum() for each in map(load_record, files)])
            rows.append((tokens, sum(own[-1] for own in ends) / passes - layers_s - float(curves["gate"](tokens))))
        token_s, fixed_s = np.polyfit(*np.array(rows).T, 1)
        return cls(float(fixed_s), float(token_s)) if token_s > 0 else cls(float(np.mean(rows, axis=0)[1]), 0.0)

    def __call__(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        seconds: of each prefill or decode step, by setting and way.
        clusters: the measured links, by rate.
        profiles: by routing.
        plans: by routing.
        beside: what a pass takes beside its MoE layers.
    """

    seconds: Mapping[tuple[Setting, str], Sequence[float]]
    clusters: Mapping[int, Cluster]
    profiles: Mapping[str, Profile]
    plans: Mapping[str, Plan]
    beside: Beside

    @classmethod
    def read(cls, folder: Path) -> "Measured":
        seconds: dict[tuple[Setting, str], list[float]] = {}
        for path in sorted(folder.glob("rounds-*.json")):
            way = path.stem.split("-")[1]
            for setting, ends in load_rounds(path) if way in WAYS else ():
                own = np.diff(ends).tolist() if setting.phase == "decode" else ends[:1]
                seconds.setdefault((setting, way), []).extend(own)
        settings = {setting for setting, _ in seconds}
        clusters = {mbit: load_cluster(folder / f"cluster-{mbit}.toml") for mbit in {each.mbit for each in settings}}
        routings = {each.routing for each in settings}
        profiles = {routing: load_profile(folder / f"profile-{routing}.npz") for routing in routings}
        plans = {routing: load_plan(folder / f"plan-{routing}.json") for routing in routings}
        curves = next(iter(profiles.values())).curves["cpu"]
        return cls(seconds, clusters, profiles, plans, Beside.of(folder, curves))


def predicted_s(found: Measured, setting: Setting, way: str) -> float:
    """Predicted seconds of a pass: its layers, the mean over draws of the traffic, and what the engine does beside them."""
    profile, cluster = found.profiles[setting.routing], found.clusters[setting.mbit]
    plan = found.plans[setting.routing] if way == "plan" else engine_default(HOSTS, profile)
    program, draws_s = replace(compile_plan(plan), deduplicated_M=(True,)), []
    rng = np.random.default_rng([setting.tokens, len(setting.routing)])
    for _ in range(DRAWS):
        drawn = step_profile(profile, np.full(RANKS, setting.tokens), rng, True)
        served = replace(program, gathered_M=(True,)) if way == "stock" else ordered(program, drawn, way)
        draws_s.append(simulate(served, cluster, [drawn]).seconds)
    return float(np.mean(draws_s)) + found.beside(setting.tokens)


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
