"""Training while nodes come and go: one trace of membership under several systems, and where each one's time goes.

Times are by formulas: a step takes what is dense and what the busiest node's experts take. Source of the systems and of what
they do when a node fails or joins: Lazarus §6 (arXiv:2407.04656).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from aurora.planner.replication.failure_resilient import SURVIVE, aim_of
from aurora.planner.replication.replica_counts import allocate
from aurora.simulator.membership_traces import MembershipEvent
from aurora.types import FailureDomains
from aurora.types.arrays import FloatArray, IntArray

PHASES = ("compute", "checkpoint", "lost", "reconfigure", "restart", "idle")


@dataclass(frozen=True)
class TrainingJob:
    """load_LE (L, E): each expert's share of the tokens. slots: experts a node holds; group: nodes that hold every expert once
    in ordinary expert parallelism. batch: samples a node computes in a step. dense_s, experts_s: seconds of a step outside
    experts, and in them where all GPUs are equally loaded. state_bytes: of a checkpoint. gpus: of a node; slots are equal on
    them."""

    load_LE: FloatArray
    slots: int
    group: int
    batch: int
    dense_s: float
    experts_s: float
    state_bytes: float
    gpus: int = 1
    min_replicas: int = 2
    storage_Bps: float = 1.25e9
    start_s: float = 60.0
    reconfigure_s: float = 30.0
    wait_s: float = 120.0

    @property
    def checkpoint_s(self) -> float:
        return self.state_bytes / self.storage_Bps

    @property
    def restart_s(self) -> float:
        return self.start_s + self.checkpoint_s


@dataclass(frozen=True)
class System:
    """method: how replicas are placed, or "" for ordinary expert parallelism. tolerant: goes on without a restart where every
    expert is left. interval: steps from checkpoint to checkpoint. speed: of a step, against DeepSpeed's kernels."""

    method: str
    tolerant: bool
    interval: int
    speed: float = 1.0


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
    """What a system did: samples trained, seconds by phase, restarts, and (time_s, nodes used, samples a second) at each
    change."""

    samples: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    restarts: int = 0
    rates: list[tuple[float, int, float]] = field(default_factory=list)
    _pauses: list[tuple[str, float]] = field(default_factory=list)
    _unsaved_s: float = 0.0
    _unsaved: float = 0.0

    def pause(self, phase: str, seconds: float) -> None:
        """Before it goes on, so long in `phase`."""
        self._pauses.append((phase, seconds))

    def lose(self, restart_s: float) -> None:
        """Back to the last checkpoint, which takes so long."""
        self.seconds["compute"] -= self._unsaved_s
        self.seconds["lost"] += self._unsaved_s
        self.samples -= self._unsaved
        self._unsaved_s = self._unsaved = 0.0
        self._pauses = [("restart", restart_s)]
        self.restarts += 1

    def save(self, seconds: float) -> None:
        """A checkpoint of what there is."""
        self._unsaved_s = self._unsaved = 0.0
        self.pause("checkpoint", seconds)

    def advance(self, span_s: float, rate: float, interval_s: float, checkpoint_s: float) -> None:
        """Compute at `rate` samples a second after what pauses it, with a checkpoint after every interval_s of computing."""
        while span_s > 0:
            if self._pauses:
                phase, left_s = self._pauses.pop(0)
                part_s = min(span_s, left_s)
                self.seconds[phase] += part_s
                if left_s > part_s:
                    self._pauses.insert(0, (phase, left_s - part_s))
            elif not rate:
                part_s = span_s
                self.seconds["idle"] += part_s
            elif self._unsaved_s >= interval_s:
                self.save(checkpoint_s)
                continue
            else:
                part_s = min(span_s, interval_s - self._unsaved_s)
                self.seconds["compute"] += part_s
                self.samples += part_s * rate
                self._unsaved_s += part_s
                self._unsaved += part_s * rate
            span_s -= part_s


def replay(job: TrainingJob, system: System, trace: Sequence[MembershipEvent], end_s: float) -> Replay:
    """`system` through the trace until end_s. Nodes that join are used at the next restart, or once wait_s is over."""
    done = Replay()
    there: list[str] = []
    used: list[str] = []
    held: list[list[set[int]]] = []
    joins_s, rate = np.inf, 0.0
    at = {change.time_s: change for change in trace}
    times = sorted({0.0, *at, *(change.time_s + job.wait_s for change in trace if change.added)})
    for now_s, until_s in pairwise([*(time_s for time_s in times if time_s < end_s), end_s]):
        change = at.get(now_s, MembershipEvent(now_s, (), ()))
        there = [node for node in there if node not in change.removed] + list(change.added)
        left = [node for node in used if node in there]
        if change.added and joins_s == np.inf:
            joins_s = now_s + (job.wait_s if used else 0.0)
        nodes = used
        if len(left) < len(used):
            if system.tolerant and _covers(held, [used.index(node) for node in left], job):
                nodes = _usable(left, job, system)
                done.pause("reconfigure", job.reconfigure_s)
            else:
                nodes, joins_s = _usable(there, job, system), np.inf
                done.lose(job.restart_s if nodes else 0.0)
        elif now_s >= joins_s:
            joins_s = np.inf
            if len(more := _usable(there, job, system)) > len(used):
                nodes = more
                if used and system.tolerant:
                    done.pause("reconfigure", job.reconfigure_s)
                elif done.rates:
                    if used:
                        done.save(job.checkpoint_s)
                    done.pause("restart", job.restart_s)
        if nodes != used:
            used = nodes
            held, rate = _held(job, system, len(used)), _rate(job, system, len(used))
            done.rates.append((now_s, len(used), rate))
        interval_s = system.interval * len(used) * job.batch / rate if rate else np.inf
        done.advance(until_s - now_s, rate, interval_s, job.checkpoint_s)
    return done


def _usable(nodes: list[str], job: TrainingJob, system: System) -> list[str]:
    if system.method:
        return nodes if len(nodes) * job.slots >= job.load_LE.shape[1] else []
    return nodes[: len(nodes) // job.group * job.group]


def _held(job: TrainingJob, system: System, nodes: int) -> list[list[set[int]]]:
    """By layer what each node in use holds."""
    if not nodes:
        return []
    if not system.method:
        chunks = [set(chunk.tolist()) for chunk in np.array_split(np.arange(job.load_LE.shape[1]), job.group)]
        return [[chunks[node % job.group] for node in range(nodes)]]
    placed = _placed(system.method, job.slots, job.min_replicas, nodes, tuple(map(tuple, job.load_LE.tolist())))
    return [[set(np.flatnonzero(held_E).tolist()) for held_E in held_EN.T] for held_EN in placed]


@lru_cache(maxsize=256)
def _placed(
    method: str, slots: int, min_replicas: int, nodes: int, loads: tuple[tuple[float, ...], ...]
) -> tuple[IntArray, ...]:
    """By layer how many replicas of each expert each of `nodes` nodes holds, (E, N); the floor as far as there is room."""
    hosts, kept = FailureDomains.equal(nodes, slots), max(1, min(min_replicas, nodes * slots // len(loads[0])))
    make, aim = SURVIVE[method], aim_of(kept, hosts)
    return tuple(make(allocate(np.array(row), hosts, kept), hosts, aim, np.random.default_rng(0)) for row in loads)


def _covers(held: list[list[set[int]]], left: list[int], job: TrainingJob) -> bool:
    """Whether these nodes, by their places, hold every expert of every layer."""
    return all(len(set().union(*(layer[node] for node in left))) == job.load_LE.shape[1] for layer in held)


def _rate(job: TrainingJob, system: System, nodes: int) -> float:
    """Samples a second on so many nodes."""
    if not nodes:
        return 0.0
    return nodes * job.batch * system.speed / (job.dense_s + job.experts_s * busiest(job, system, nodes))


def busiest(job: TrainingJob, system: System, nodes: int) -> float:
    """The tokens of the busiest GPU over the mean, the layers' mean."""
    share_LE = job.load_LE / job.load_LE.sum(axis=1, keepdims=True)
    if not system.method:
        chunks = np.array_split(np.arange(job.load_LE.shape[1]), job.group * job.gpus)
        return float(np.mean([max(share_E[chunk].sum() for chunk in chunks) for share_E in share_LE]) * len(chunks))
    placed = _placed(system.method, job.slots, job.min_replicas, nodes, tuple(map(tuple, job.load_LE.tolist())))
    tops = [_top(held_EN, share_E, job) * nodes * job.gpus for held_EN, share_E in zip(placed, share_LE, strict=True)]
    return float(np.mean(tops))


def _top(held_EN: IntArray, share_E: FloatArray, job: TrainingJob) -> float:
    """The share of the busiest GPU: a node deals its replicas by load, forth and back over its GPUs."""
    part_E, top = share_E / held_EN.sum(axis=1), 0.0
    for held_E in held_EN.T:
        load_S = np.zeros(job.slots)
        load_S[: held_E.sum()] = np.sort(np.repeat(part_E, held_E))[::-1]
        load_RG = load_S.reshape(-1, job.gpus)
        load_RG[1::2] = load_RG[1::2, ::-1].copy()
        top = max(top, float(load_RG.sum(axis=0).max()))
    return top
