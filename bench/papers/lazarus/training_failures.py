"""Simulates training while nodes fail and join: the same membership trace under several systems, and where the time goes.

Step times come from formulas: a step takes the time of the dense layers and the time of the busiest GPU's experts. Source of
the systems and of what they do when a node fails or joins: Lazarus (arXiv:2407.04656) §6.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from aurora.algorithms.replicas.failure_resilient import SURVIVE, aim_of, allocate
from aurora.types import FailureDomains
from aurora.types.arrays import FloatArray, IntArray
from bench.papers.lazarus.membership_traces import MembershipEvent

PHASES = ("compute", "checkpoint", "lost", "reconfigure", "restart", "idle")


@dataclass(frozen=True)
class TrainingJob:
    """A model in training, and what its steps and pauses cost."""

    load_LE: FloatArray  # (L, E) float64, each expert's share of a layer's tokens
    slots: int  # expert slots of a node, equally many on each of its GPUs
    group: int  # nodes that hold every expert once in ordinary expert parallelism
    batch: int  # samples that a node computes in a step
    dense_s: float  # seconds of a step outside the experts
    experts_s: float  # seconds of a step in the experts if all GPUs have the same load
    state_bytes: float  # size of a checkpoint
    gpus: int = 1  # GPUs of a node
    min_replicas: int = 2  # the replicas of each expert at least, as far as slots allow
    storage_Bps: float = 1.25e9  # bytes per second at which checkpoints are written and read
    start_s: float = 60.0  # seconds to start all processes, without reading the checkpoint
    reconfigure_s: float = 30.0  # seconds to go on with other nodes without a restart
    wait_s: float = 120.0  # seconds from the first node that joins to the reconfiguration that uses it

    @property
    def checkpoint_s(self) -> float:
        """Seconds to write or read a checkpoint."""
        return self.state_bytes / self.storage_Bps

    @property
    def restart_s(self) -> float:
        """Seconds to restart from a checkpoint."""
        return self.start_s + self.checkpoint_s


@dataclass(frozen=True)
class System:
    """How a training system places experts and reacts to failures."""

    method: str  # how replicas are placed, one of SURVIVE; "" for ordinary expert parallelism
    tolerant: bool  # whether training goes on without a restart if the nodes left hold every expert
    interval: int  # steps from one checkpoint to the next
    speed: float = 1.0  # steps per second relative to DeepSpeed's kernels


SYSTEMS: dict[str, System] = {
    "aurora": System("aurora", True, 250),
    "lazarus": System("mro", True, 250),
    "DS": System("", False, 50),
    "DS(FT)": System("", True, 250),
    "Tutel": System("", False, 50, 1.15),
    "Tutel(FT)": System("", True, 250, 1.15),
}


@dataclass
class Replay:
    """What a system achieved on a membership trace.

    Attributes:
        samples: samples trained and not lost.
        seconds: seconds spent in each of PHASES.
        restarts: how often training restarted after a failure.
        rates: (time_s, nodes in use, samples per second) at each change of the nodes in use.
    """

    samples: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    restarts: int = 0
    rates: list[tuple[float, int, float]] = field(default_factory=list)


def replay(job: TrainingJob, system: System, trace: Sequence[MembershipEvent], end_s: float) -> Replay:
    """Simulates a training job under one system while nodes fail and join.

    Nodes that join are used at the next restart, or `job.wait_s` seconds after the first of them joined.

    Args:
        job: the model and its costs.
        system: how experts are placed and how failures are handled.
        trace: the membership changes, by rising time.
        end_s: when the simulation ends, in seconds of the trace.
    """
    run = _TrainingRun(job, system)
    change_at = {change.time_s: change for change in trace}
    times = sorted({0.0, *change_at, *(change.time_s + job.wait_s for change in trace if change.added)})
    for now_s, until_s in pairwise([*(time_s for time_s in times if time_s < end_s), end_s]):
        run.change_members(now_s, change_at.get(now_s, MembershipEvent(now_s, (), ())))
        run.advance(until_s - now_s)
    return run.done


class _TrainingRun:
    """One job under one system: the nodes that are present, those in use, and the experts that these hold."""

    def __init__(self, job: TrainingJob, system: System) -> None:
        self.job, self.system = job, system
        self.done = Replay()
        self._pauses: list[tuple[str, float]] = []
        self._unsaved_s = self._unsaved = 0.0  # since the last checkpoint: seconds and samples
        self._present: list[str] = []
        self._used: list[str] = []
        self._held: list[list[set[int]]] = []
        self._rate = 0.0
        self._joins_s = np.inf  # when nodes that have joined are used

    def change_members(self, now_s: float, change: MembershipEvent) -> None:
        """Applies a membership change, and uses other nodes where the system does."""
        self._present = [node for node in self._present if node not in change.removed] + list(change.added)
        if change.added and self._joins_s == np.inf:
            self._joins_s = now_s + (self.job.wait_s if self._used else 0.0)
        nodes = self._next_nodes(now_s)
        if nodes != self._used:
            self._used = nodes
            self._held = _held_experts(self.job, self.system, len(nodes))
            self._rate = _samples_per_second(self.job, self.system, len(nodes))
            self.done.rates.append((now_s, len(nodes), self._rate))

    def advance(self, span_s: float) -> None:
        """Lets `span_s` seconds pass: first the pending pauses, then training with its checkpoints."""
        done, rate = self.done, self._rate
        interval_s = self.system.interval * len(self._used) * self.job.batch / rate if rate else np.inf
        while span_s > 0:
            if self._pauses:
                phase, left_s = self._pauses.pop(0)
                part_s = min(span_s, left_s)
                done.seconds[phase] += part_s
                if left_s > part_s:
                    self._pauses.insert(0, (phase, left_s - part_s))
            elif not rate:
                part_s = span_s
                done.seconds["idle"] += part_s
            elif self._unsaved_s >= interval_s:
                self._save()
                continue
            else:
                part_s = min(span_s, interval_s - self._unsaved_s)
                done.seconds["compute"] += part_s
                done.samples += part_s * rate
                self._unsaved_s += part_s
                self._unsaved += part_s * rate
            span_s -= part_s

    def _save(self) -> None:
        """Counts the work so far as saved, and adds a pause for the checkpoint."""
        self._unsaved_s = self._unsaved = 0.0
        self._pauses.append(("checkpoint", self.job.checkpoint_s))

    def _lose(self, restart_s: float) -> None:
        """Counts the work since the last checkpoint as lost, and replaces all pending pauses by a restart."""
        self.done.seconds["compute"] -= self._unsaved_s
        self.done.seconds["lost"] += self._unsaved_s
        self.done.samples -= self._unsaved
        self._unsaved_s = self._unsaved = 0.0
        self._pauses = [("restart", restart_s)]
        self.done.restarts += 1

    def _next_nodes(self, now_s: float) -> list[str]:
        """The nodes to use from now on; pauses for changing to them are added."""
        left = [node for node in self._used if node in self._present]
        if len(left) < len(self._used):
            return self._nodes_after_failure(left)
        if now_s >= self._joins_s:
            return self._nodes_after_joins()
        return self._used

    def _nodes_after_failure(self, left: list[str]) -> list[str]:
        """Reconfigures to the nodes left if the system can and they hold every expert; else restarts with all present nodes."""
        if self.system.tolerant and _hold_all_experts(self._held, [self._used.index(node) for node in left], self.job):
            self._pauses.append(("reconfigure", self.job.reconfigure_s))
            return _usable(left, self.job, self.system)
        self._joins_s = np.inf
        nodes = _usable(self._present, self.job, self.system)
        self._lose(self.job.restart_s if nodes else 0.0)
        return nodes

    def _nodes_after_joins(self) -> list[str]:
        """Uses all present nodes if more of them can be used than now."""
        self._joins_s = np.inf
        nodes = _usable(self._present, self.job, self.system)
        if len(nodes) <= len(self._used):
            return self._used
        if self._used and self.system.tolerant:
            self._pauses.append(("reconfigure", self.job.reconfigure_s))
        elif self.done.rates:
            if self._used:
                self._save()
            self._pauses.append(("restart", self.job.restart_s))
        return nodes


def _usable(nodes: list[str], job: TrainingJob, system: System) -> list[str]:
    """The nodes that the system can use: all that hold every expert between them, or whole expert-parallel groups."""
    if system.method:
        return nodes if len(nodes) * job.slots >= job.load_LE.shape[1] else []
    return nodes[: len(nodes) // job.group * job.group]


def _held_experts(job: TrainingJob, system: System, nodes: int) -> list[list[set[int]]]:
    """By layer, the experts on each node in use."""
    if not nodes:
        return []
    if not system.method:
        chunks = [set(chunk.tolist()) for chunk in np.array_split(np.arange(job.load_LE.shape[1]), job.group)]
        return [[chunks[node % job.group] for node in range(nodes)]]
    return [[set(np.flatnonzero(held_E).tolist()) for held_E in held_EN.T] for held_EN in _replicas(job, system, nodes)]


def _replicas(job: TrainingJob, system: System, nodes: int) -> tuple[IntArray, ...]:
    """By layer, (E, N) int64: the replicas of each expert on each node."""
    return _placed(system.method, job.slots, job.min_replicas, nodes, tuple(map(tuple, job.load_LE.tolist())))


@lru_cache(maxsize=256)
def _placed(
    method: str, slots: int, min_replicas: int, nodes: int, loads: tuple[tuple[float, ...], ...]
) -> tuple[IntArray, ...]:
    """As `_replicas`, with `min_replicas` lowered as far as slots require."""
    failure_domains = FailureDomains.equal(nodes, slots)
    kept_min_replicas = max(1, min(min_replicas, nodes * slots // len(loads[0])))
    make, aim = SURVIVE[method], aim_of(kept_min_replicas, failure_domains)
    return tuple(
        make(allocate(np.array(row), failure_domains, kept_min_replicas), failure_domains, aim, np.random.default_rng(0))
        for row in loads
    )


def _hold_all_experts(held: list[list[set[int]]], left: list[int], job: TrainingJob) -> bool:
    """Whether the nodes `left`, by their index in use, hold every expert of every layer."""
    return all(len(set().union(*(layer[node] for node in left))) == job.load_LE.shape[1] for layer in held)


def _samples_per_second(job: TrainingJob, system: System, nodes: int) -> float:
    """The training rate on `nodes` nodes."""
    if not nodes:
        return 0.0
    return nodes * job.batch * system.speed / (job.dense_s + job.experts_s * busiest(job, system, nodes))


def busiest(job: TrainingJob, system: System, nodes: int) -> float:
    """Returns the busiest GPU's load divided by the GPUs' mean load, averaged over layers; 1 is balanced.

    Args:
        job, system: as in `replay`.
        nodes: how many nodes are in use.
    """
    share_LE = job.load_LE / job.load_LE.sum(axis=1, keepdims=True)
    if not system.method:
        chunks = np.array_split(np.arange(job.load_LE.shape[1]), job.group * job.gpus)
        return float(np.mean([max(share_E[chunk].sum() for chunk in chunks) for share_E in share_LE]) * len(chunks))
    placed = _replicas(job, system, nodes)
    ratio_L = [
        _busiest_share(held_EN, share_E, job) * nodes * job.gpus for held_EN, share_E in zip(placed, share_LE, strict=True)
    ]
    return float(np.mean(ratio_L))


def _busiest_share(held_EN: IntArray, share_E: FloatArray, job: TrainingJob) -> float:
    """The busiest GPU's share of a layer's tokens. A node deals its replicas by load, back and forth over its GPUs."""
    part_E, busiest_share = share_E / held_EN.sum(axis=1), 0.0
    for held_E in held_EN.T:
        load_P = np.zeros(job.slots)
        load_P[: held_E.sum()] = np.sort(np.repeat(part_E, held_E))[::-1]
        load_XG = load_P.reshape(-1, job.gpus)  # a row for each slot of a GPU
        load_XG[1::2] = load_XG[1::2, ::-1].copy()
        busiest_share = max(busiest_share, float(load_XG.sum(axis=0).max()))
    return busiest_share
