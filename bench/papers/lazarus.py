"""Lazarus' headlines (arXiv:2407.04656 §6), the paper's and ours: `python -m bench.papers.lazarus -o DIR`.

Jobs and cluster are the paper's: 10 nodes of one GPU and 6 slots, at least 2 replicas, 12 layers. Its routing traces are not
public: loads are Zipf, an exponent from 0.4 to 1.6 a layer. Nothing is trained: a step takes its dense part and what the
busiest GPU's experts take; a checkpoint is written at 10 Gbps, a restart takes 60 s and reading it, a reconfiguration 30 s.
DS restarts from checkpoints; DS(FT) goes on while a whole copy of all experts is left. Theorem 1 says that no placement
recovers more often than MRO's; it does not hold where there are more experts than a node has slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from unittest.mock import patch

import numpy as np

from aurora.algorithms import recovery
from aurora.algorithms.alltoall.schedule import scheduled
from aurora.algorithms.recovery import LayerSlots, fewest_moves, holds, recover
from aurora.algorithms.replicas.failure_resilient import DEFAULT, SURVIVE, place_for_failures, ranked
from aurora.algorithms.replicas.survival_probability import all_held
from aurora.types import Cluster, FailureDomains, Gpu, Placement
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from bench.papers.headlines import Headline, write

LAYERS, BATCH, NODES, SLOTS = 12, 4, 10, 6
EXPERTS_SHARE = 0.6  # of a balanced step
GPT_M_STEP_S = NODES * BATCH / 45  # by the paper's 45 samples a second of 1.3e9 parameters; others by the root of theirs
STORAGE_BPS, START_S, RECONFIGURE_S = 1.25e9, 60.0, 30.0
PORT_BPS = 6.25e9  # two of the testbed's nodes share 100 Gbps
DRAWS = 10
METHODS = ("aurora", "mro", "spread")


def spread(count_E: IntArray, slots_N: IntArray) -> IntArray:
    """Places round robin: each replica goes to the next node with an empty slot, if possible one that lacks the expert.

    Args and returns: as in `failure_resilient.mro`.

    Source:
        The baseline of Lazarus (arXiv:2407.04656) §6.3.
    """
    held_EN = np.zeros((len(count_E), len(slots_N)), dtype=np.int64)
    empty_N, node = slots_N.copy(), 0
    for expert in ranked(count_E):
        for _ in range(int(count_E[expert])):
            turn_N = (np.arange(len(slots_N)) - node) % len(slots_N)
            node = int(np.lexsort((turn_N, held_EN[expert], empty_N == 0))[0])
            held_EN[expert, node] += 1
            empty_N[node] -= 1
            node = (node + 1) % len(slots_N)
    return held_EN


@dataclass(frozen=True)
class Job:
    """A model in training.

    Args:
        load_LE: (L, E) float64, loads of experts.
        group: nodes that hold every expert once in ordinary expert parallelism.
        parameters: number of parameters.
        expert_bytes: weights and optimizer states of an expert, as Table 2's text says.
    """

    load_LE: FloatArray
    group: int
    parameters: float
    expert_bytes: int

    @property
    def checkpoint_s(self) -> float:
        """Seconds to write or read a checkpoint, of 16 bytes a parameter."""
        return self.parameters * 16 / STORAGE_BPS


@dataclass(frozen=True)
class System:
    """How a training system places experts (a method of SURVIVE; empty: ordinary expert parallelism) and reacts to failures."""

    method: str
    tolerant: bool  # whether it goes on without a restart if the nodes left hold every expert
    interval: int  # steps from one checkpoint to the next


SYSTEMS = {"aurora": System("aurora", True, 250), "DS": System("", False, 50), "DS(FT)": System("", True, 250)}


def zipf_loads(experts: int, seed: int) -> FloatArray:
    """Returns (LAYERS, experts) loads, experts shuffled."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(0.4, 1.6, LAYERS)
    return np.array([rng.permutation((1.0 + np.arange(experts)) ** -exponent) for exponent in exponents])


JOBS = {"GPT-S": Job(zipf_loads(8, 0), 2, 521e6, 63_000_000), "GPT-L": Job(zipf_loads(16, 2), 4, 1.7e9, 112_000_000)}


class Replay:
    """A training job under one system while nodes fail one after another.

    Attributes:
        samples: samples trained and not lost.
        restarts: how often training restarted.
    """

    def __init__(self, job: Job, system: System, nodes: int = NODES) -> None:
        self.job, self.system = job, system
        self.samples, self.restarts = 0.0, 0
        self._unsaved_s = self._unsaved = self._pause_s = 0.0
        self._present = list(range(nodes))
        self._used = self._usable(self._present)

    def _usable(self, nodes: list[int]) -> list[int]:
        """The nodes that the system can use: all that hold every expert between them, or whole expert-parallel groups."""
        if self.system.method:
            return nodes if len(nodes) * SLOTS >= self.job.load_LE.shape[1] else []
        return nodes[: len(nodes) // self.job.group * self.job.group]

    def _held(self) -> tuple[LayerSlots, ...]:
        """By layer and used node, the experts that it holds."""
        experts = self.job.load_LE.shape[1]
        if self.system.method:
            return tuple(placed(self.system.method, len(self._used), tuple(map(tuple, self.job.load_LE.tolist()))))
        chunks = np.array_split(np.arange(experts), self.job.group)
        return (tuple(tuple(chunks[n % self.job.group].tolist()) for n in range(len(self._used))),) * LAYERS

    @property
    def rate(self) -> float:
        """Samples a second."""
        if not self._used:
            return 0.0
        step_s = GPT_M_STEP_S * (self.job.parameters / 1.3e9) ** 0.5
        busiest_s = EXPERTS_SHARE * step_s * busiest(self._held(), self.job.load_LE)
        return len(self._used) * BATCH / ((1 - EXPERTS_SHARE) * step_s + busiest_s)

    def fail(self, node: int) -> None:
        """Loses a node: reconfigures where the nodes left hold every expert, else restarts from the last checkpoint."""
        self._present = [present for present in self._present if present != node]
        if node not in self._used:
            return
        left = [n for n, used in enumerate(self._used) if used != node]
        survived = all(set().union(*(layer[n] for n in left)) == set().union(*layer) for layer in self._held())
        if self.system.tolerant and survived:
            self._used = self._usable([self._used[n] for n in left])
            self._pause_s += RECONFIGURE_S
            return
        self.samples -= self._unsaved
        self._unsaved = self._unsaved_s = 0.0
        self._used, self._pause_s = self._usable(self._present), START_S + self.job.checkpoint_s
        self.restarts += 1

    def advance(self, span_s: float) -> None:
        """Lets seconds pass: pauses first, then steps with their checkpoints."""
        rate = self.rate
        interval_s = self.system.interval * len(self._used) * BATCH / rate if rate else np.inf
        while span_s > 0:
            if self._pause_s > 0 or not rate:
                part_s = min(span_s, self._pause_s if rate else span_s)
                self._pause_s -= part_s
            elif self._unsaved_s >= interval_s:
                self._unsaved = self._unsaved_s = 0.0
                self._pause_s, part_s = self.job.checkpoint_s, 0.0
            else:
                part_s = min(span_s, interval_s - self._unsaved_s)
                self.samples += part_s * rate
                self._unsaved_s += part_s
                self._unsaved += part_s * rate
            span_s -= part_s


@cache
def placed(method: str, nodes: int, loads: tuple[tuple[float, ...], ...]) -> Sequence[LayerSlots]:
    """Returns the experts of each node and layer by a method of SURVIVE, with two replicas as far as slots allow."""
    least = max(1, min(2, nodes * SLOTS // len(loads[0])))
    return place_for_failures(np.array(loads), FailureDomains.equal(nodes, SLOTS), method, min_replicas=least).slots_LN


def busiest(held_LN: Sequence[LayerSlots], load_LE: FloatArray) -> float:
    """Returns the busiest node's load over the mean, averaged over layers; replicas share evenly."""
    ratios = []
    for held_N, load_E in zip(held_LN, load_LE, strict=True):
        copies_E = np.bincount([expert for held in held_N for expert in held], minlength=len(load_E))
        ratios.append(max(sum(load_E[e] / copies_E[e] for e in held) for held in held_N) * len(held_N) / load_E.sum())
    return float(np.mean(ratios))


def samples(job: Job, system: System, every_s: float, seed: int) -> float:
    """Returns the samples that a system trains while a drawn node fails every so many seconds, until half are left."""
    run = Replay(job, system)
    for node in np.random.default_rng(seed).permutation(NODES)[: NODES // 2].tolist():
        run.advance(every_s)
        run.fail(node)
    run.advance(every_s)
    return run.samples


def model_survival(slots_LN: Sequence[LayerSlots], failures: int) -> float:
    """Returns the part of all sets of so many failed nodes after which every expert of every layer is still held."""
    nodes, experts = len(slots_LN[0]), 1 + max(expert for slots_N in slots_LN for held in slots_N for expert in held)
    held_NLE = np.zeros((nodes, len(slots_LN), experts), dtype=np.bool_)
    for layer, slots_N in enumerate(slots_LN):
        for node, held in enumerate(slots_N):
            held_NLE[node, layer, list(held)] = True
    failed = np.array(list(combinations(range(nodes), failures)), dtype=np.int64)
    alive_MN = np.ones((len(failed), nodes), dtype=np.bool_)
    np.put_along_axis(alive_MN, failed, False, axis=1)
    return float(all_held(held_NLE.reshape(nodes, -1), alive_MN).mean())


@dataclass(frozen=True)
class RecoveryMoves:
    """Weights that move in a recovery.

    Attributes:
        lost_L: by layer, the experts that no alive node held; their weights come from a checkpoint.
        bytes_NN: (N, N) int64, bytes of expert weights from node to node; nodes have their numbers from before the change.
        moved: number of replicas that nodes get from other nodes.
    """

    lost_L: tuple[tuple[int, ...], ...]
    bytes_NN: IntArray
    moved: int


def moved_bytes(old_NE: IntArray, new_NE: IntArray, bytes_E: IntArray) -> IntArray:
    """Returns (N, N) bytes of expert weights that move; all holders of an expert send equal parts of it."""
    moved_NN = np.zeros((len(old_NE),) * 2, dtype=np.int64)
    for node, expert in np.argwhere((new_NE == 1) & (old_NE == 0)).tolist():
        if not len(owners := np.flatnonzero(old_NE[:, expert])):
            continue
        owners = owners[np.argsort(moved_NN[owners].sum(axis=1), kind="stable")]
        part, odd = divmod(int(bytes_E[expert]), len(owners))
        moved_NN[owners, node] += part + (np.arange(len(owners)) < odd)
    return moved_NN


def recovery_moves(
    old_LN: Sequence[LayerSlots], alive_N: BoolArray, placement: Placement, expert_bytes: int = 1
) -> RecoveryMoves:
    """Returns the weights that move to the placement that `recovered` returned for old_LN and alive_N."""
    left, bytes_E = np.flatnonzero(alive_N), np.full(placement.experts, expert_bytes, dtype=np.int64)
    bytes_NN, lost_L, moved = np.zeros((len(alive_N),) * 2, dtype=np.int64), [], 0
    for old_N, slots_G in zip(old_LN, placement.slots_LG, strict=True):
        before_NE = holds([old_N[node] for node in left.tolist()], placement.experts)
        after_NE = holds(slots_G, placement.experts)
        lost_E = before_NE.sum(axis=0) == 0
        bytes_NN[np.ix_(left, left)] += moved_bytes(before_NE, after_NE, bytes_E)
        moved += int((after_NE * (1 - before_NE) * ~lost_E).sum())
        lost_L.append(tuple(np.flatnonzero(lost_E).tolist()))
    return RecoveryMoves(tuple(lost_L), bytes_NN, moved)


def recovered(
    old_LN: Sequence[LayerSlots],
    alive_N: BoolArray,
    load_LE: FloatArray | IntArray,
    failure_domains: FailureDomains,
    min_replicas: int,
    method: str = DEFAULT,
) -> Placement:
    """Returns the placement of `recover` on those of the nodes that are alive, numbered from zero."""
    alive = np.flatnonzero(alive_N)
    domains, domain_N = np.unique(failure_domains.domain_N[alive], return_inverse=True)
    left = FailureDomains(failure_domains.slots_N[alive], domain_N, failure_domains.odds_D[domains])
    return recover([[old_N[node] for node in alive.tolist()] for old_N in old_LN], load_LE, left, min_replicas, method)


def greedy_moves(old_NE: IntArray, new_NE: IntArray, bytes_E: IntArray, alike_N: IntArray, _: None = None) -> IntArray:
    """Relabels nodes greedily: each node in turn takes the part of the new placement for which it receives the fewest bytes.

    Arguments and result are as in `fewest_moves`, by single nodes.

    Source:
        Lazarus (arXiv:2407.04656) §4.3.
    """
    arriving_NN = (new_NE * bytes_E) @ (1 - old_NE).T
    taker_N = np.full(len(old_NE), -1, dtype=np.int64)
    for node in range(len(old_NE)):
        open_N = np.flatnonzero((taker_N < 0) & (alike_N == alike_N[node]))
        taker_N[open_N[arriving_NN[open_N, node].argmin()]] = node
    return taker_N


def moves(name: str, lost: int, method: str, relabel: str) -> tuple[list[float], list[float]]:
    """Returns the replicas that move after drawn nodes are lost, and the seconds of their transfers, by draw."""
    job, domains = JOBS[name], FailureDomains.equal(NODES, SLOTS)
    cluster = Cluster("ten", tuple(Gpu(f"g{n}", "3090", n, PORT_BPS, PORT_BPS, 24 * 10**9) for n in range(NODES)))
    held_LN = placed(method, NODES, tuple(map(tuple, job.load_LE.tolist())))
    moved, took = [], []
    for seed in range(DRAWS):
        alive_N = np.ones(NODES, dtype=bool)
        alive_N[np.random.default_rng(seed).permutation(NODES)[:lost]] = False
        with patch.object(recovery, "fewest_moves", greedy_moves if relabel == "greedy" else fewest_moves):
            made = recovered(held_LN, alive_N, job.load_LE, domains, 2, method)
        found = recovery_moves(held_LN, alive_N, made, job.expert_bytes)
        moved.append(float(found.moved))
        took.append(scheduled(found.bytes_NN, cluster.network, "openshop", rng=np.random.default_rng(0))[1].makespan_s)
    return moved, took


def measured() -> Iterator[Headline]:
    """Yields each headline."""
    SURVIVE["spread"] = lambda count_E, failure_domains, aim, rng: spread(count_E, failure_domains.slots_N)
    for way in METHODS:
        p_K = place_for_failures(np.ones(4), FailureDomains.equal(5, 4), way, replicas=[2, 3, 3, 12]).survival_L[0].p_K
        yield Headline("4", f"3 of 5 nodes failed, survival by {way}", "0.7" if way == "mro" else "", [p_K[2]])
    for way in ("mro", "aurora"):
        p_K = place_for_failures(np.ones(4), FailureDomains.equal(4, 3), way, replicas=[3, 3, 3, 3]).survival_L[0].p_K
        for failures in (1, 2):
            what = f"{failures} of 4 nodes failed, survival by {way}"
            yield Headline("Theorem 1", what, "1" if way == "mro" else "", [p_K[failures - 1]])
    claims = {"mro": "0.41", "spread": "0.12"}
    for way in METHODS:
        held_LN = placed(way, NODES, tuple(map(tuple, JOBS["GPT-L"].load_LE.tolist())))
        yield Headline("8", f"GPT-L, 4 failed, survival by {way}", claims.get(way, ""), [model_survival(held_LN, 4)])
    papers = {
        ("6", "GPT-S"): ("2.8", "1.4"),
        ("6", "GPT-L"): ("5.7", "2.8"),
        ("7", "GPT-S"): ("1.6", ""),
        ("7", "GPT-L"): ("2.3", ""),
    }
    for (figure, name), stated in papers.items():
        every_s, longer = (300.0, 1) if figure == "6" else (2400.0, 4)
        own = [samples(JOBS[name], SYSTEMS["aurora"], every_s, seed) for seed in range(DRAWS)]
        for way, paper in zip(("DS", "DS(FT)"), stated, strict=True):
            system = replace(SYSTEMS[way], interval=SYSTEMS[way].interval * longer)
            over = [mine / samples(JOBS[name], system, every_s, seed) for seed, mine in enumerate(own)]
            yield Headline(figure, f"{name}, a failure every {every_s / 60:.0f} min, samples over {way}", paper, over)
    for name, lost, replicas, seconds in (("GPT-S", 3, "52", "3.0"), ("GPT-L", 4, "160", "7.6")):
        for method, relabel in (("mro", "greedy"), ("mro", ""), ("aurora", "")):
            moved, took = moves(name, lost, method, relabel)
            what = f"{name}, {lost} of {NODES} nodes lost, {method}{' and greedy relabelling' * bool(relabel)}"
            yield Headline("Table 2", f"{what}: replicas moved", replicas if relabel else "", moved)
            yield Headline("Table 2", f"{what}: seconds", seconds if relabel else "", took)


if __name__ == "__main__":
    write("lazarus", __doc__, measured)
