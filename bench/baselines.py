"""Baselines of elastic training on the same spot trace: checkpoint-restart, fixed-size groups, and whole replicas.

All are played with this project's own membership; see `compared` for what is emulated.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spot import Played, SpotRun, Training
from tables import Table

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.steps import Settlement, StateLost
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.checkpoint import CheckpointWriter
from aurora.training.member_training import MemberTraining
from aurora.training.trainer import PreparedStep, Trainer, alike_ranks, load_trainer
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray
from bench.papers.lazarus.membership_traces import MembershipEvent, shifted

EXPERTS, SLOTS = 8, 3  # experts of a layer, and how many of them a node's memory takes
WHOLE = -(-EXPERTS // SLOTS)  # nodes that hold all experts of a layer
GROUP = next(size for size in range(WHOLE, EXPERTS + 1) if EXPERTS % size == 0)  # the same, all as many
NODE_S = 4.0  # seconds that one node would take to compute a global batch
SETTLE_S = 1.0  # of a restart, beside the start of processes: connections, and reading the checkpoint
CHANGES = 8  # of the trace, after the nodes that are there at first
APART = 5  # restarts between two changes at least
BOUND = (
    f"With changes {APART} restarts apart, restarts take at most a part of {1 / APART:.2f} of the time: without them training "
    f"is {1 / (1 - 1 / APART):.2f} times as fast at most. What exceeds that is work that was done twice, and checkpoints."
)
RESTART = "checkpoint-restart"
START = """import sys
from aurora.training.data import read_samples
from aurora.training.trainer import load_trainer
from aurora.types import TrainOptions
model, text, length, ranks = sys.argv[1:]
options = TrainOptions(length=int(length))
load_trainer(model, "cpu", read_samples(model, [text], options.length), options)[0].warm_up(int(ranks))
"""

Timed = list[tuple[float, MembershipEvent]]  # changes, each with its time


class CappedOptions(TrainOptions):
    """Options of nodes whose memory takes SLOTS experts of a layer: where fewer nodes are left, so are fewer replicas."""

    def min_replicas_among(self, ranks: int) -> int:
        """Returns how many replicas each expert has at least if this many ranks train."""
        return max(1, min(super().min_replicas_among(ranks), ranks * SLOTS // EXPERTS))


class Restarting(MemberTraining):
    """Checkpoint-restart: at each change all members start anew from the last checkpoint, and all wait for each checkpoint.

    Args:
        args: of MemberTraining.
        start_s: seconds until processes that are started anew could join.
    """

    def __init__(self, *args: Any, start_s: float) -> None:
        super().__init__(*args)
        self._start_s = start_s

    def begin(self, epoch: Epoch, settlement: Settlement, groups: list[Any]) -> None:
        """Goes back to the last checkpoint; see StepWork."""
        if settlement.version.epoch:
            self._connect(epoch, groups).gather(torch.zeros(1))  # nobody leaves before all have come
            raise StateLost(f"rank {epoch.rank}: starts anew")
        time.sleep(self._start_s)
        super().begin(epoch, settlement, groups)

    def commit(self) -> None:
        """Performs the prepared step; see StepWork."""
        super().commit()
        self._writer.wait()


@dataclass(frozen=True)
class _Way:
    """One of the ways that are compared: its name, the nodes of a member, how to train, and what members do."""

    name: str
    nodes: int
    options: TrainOptions
    training: Training = MemberTraining


def in_groups(trace: Sequence[tuple[float, MembershipEvent]], size: int) -> Timed:
    """Returns the changes of groups of `size` nodes: a group is lost with a node of it, and nodes in none make new ones."""
    groups: dict[str, list[str]] = {}
    spare, found, made = list[str](), Timed(), 0
    for at_s, change in trace:
        lost = [name for name, nodes in groups.items() if not set(nodes).isdisjoint(change.removed)]
        spare += [node for name in lost for node in groups.pop(name)]
        spare = [node for node in spare if node not in change.removed] + list(change.added)
        new = list[str]()
        while len(spare) >= size:
            new.append(f"group{made}")
            groups[new[-1]], spare, made = spare[:size], spare[size:], made + 1
        if lost or new:
            found.append((at_s, MembershipEvent(change.time_s, tuple(lost), tuple(new))))
    return found


def apart(trace: Sequence[MembershipEvent], least_s: float) -> Timed:
    """Returns a trace compressed: the median of its gaps becomes least_s, and none is shorter, or longer than twice that."""
    gap_s = np.diff([change.time_s for change in trace])
    kept_s = least_s * np.clip(gap_s / np.median(gap_s), 1.0, 2.0)
    kept_s[0] = least_s / 2
    return list(zip([0.0, *np.cumsum(kept_s).tolist()], trace, strict=True))


def node_seconds(trace: Sequence[tuple[float, MembershipEvent]], end_s: float) -> float:
    """Returns the sum of the seconds for which each node was there."""
    there, total, until_s = 0, 0.0, [at_s for at_s, _ in trace[1:]] + [end_s]
    for (at_s, change), next_s in zip(trace, until_s, strict=True):
        there += len(change.added) - len(change.removed)
        total += there * (next_s - at_s)
    return total


def computing(node_s: float, trainer: Trainer) -> None:
    """Makes each step take at least as long as members compute that would each take node_s seconds alone."""
    prepare = trainer.prepare

    def waiting() -> PreparedStep:
        began_s = time.monotonic()
        prepared = prepare()
        time.sleep(max(0.0, began_s + node_s / trainer._transport.ranks - time.monotonic()))
        return prepared

    trainer.prepare = waiting  # type: ignore[method-assign]


def start_seconds(path: Path, text: Path, options: TrainOptions) -> float:
    """Returns how long a process takes from its start, alone on this machine, until it could join."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", START, path, text, str(options.length), str(options.ranks)], check=True)
    return time.monotonic() - began_s


def checkpoint_seconds(path: Path, samples_NT: IntArray, options: TrainOptions) -> float:
    """Returns how long a checkpoint takes (median of five)."""
    trainer, about = load_trainer(str(path), "cpu", samples_NT, options)
    trainer.join(MemoryTransport(Memory(1, options.timeout_s), 0), alike_ranks([0]))
    trainer.place(trainer.planned())
    taken_s = []
    with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
        for _ in range(5):
            began_s = time.monotonic()
            writer = CheckpointWriter(Path(folder), about)
            writer.save(trainer.state, trainer.placement, 0)
            writer.wait()
            taken_s.append(time.monotonic() - began_s)
    return float(np.median(taken_s))


def _played(
    way: _Way, trace: Sequence[tuple[float, MembershipEvent]], seconds: float, path: Path, samples_NT: IntArray
) -> Played:
    """Plays a way through the trace of its members."""
    with tempfile.TemporaryDirectory(prefix="aurora-elastic-") as folder:
        adapt = partial(computing, NODE_S / way.nodes)
        return SpotRun(
            path, samples_NT, way.options, Path(folder), trace, adapt=adapt, training=way.training, seconds=seconds
        ).play()  # fmt: skip


def _ways(base: TrainOptions, start_s: float) -> list[_Way]:
    """The ways that are compared, ours first."""
    base = replace(base, min_replicas=base.ranks)  # for members that hold all experts
    capped = CappedOptions(**{**vars(base), "min_replicas": 3})
    return [
        _Way("aurora", 1, capped),
        _Way(RESTART, 1, capped, partial(Restarting, start_s=start_s)),
        _Way(f"fixed-size groups of {GROUP}", GROUP, base),
        _Way(f"whole replicas on {WHOLE} nodes", WHOLE, base),
    ]


def compared(
    path: Path, text: Path, samples_NT: IntArray, base: TrainOptions, trace: Sequence[MembershipEvent], quick: bool
) -> list[str]:
    """Throughput on a spot trace, beside baselines.

    Args:
        path, text, samples_NT: the model, what it is trained on, and the samples of that.
        base: how to train, on as many ranks as the trace has nodes.
        trace: the recorded trace.
        quick: whether only two changes are played.
    """
    trace = shifted(trace, trace[2].time_s)[:3] if quick else trace[: CHANGES + 1]
    start_s, checkpoint_s = start_seconds(path, text, base), checkpoint_seconds(path, samples_NT, base)
    restart_s, nodes = start_s + SETTLE_S, len(trace[0].added)
    timed = apart(trace, APART * restart_s)
    seconds = timed[-1][0] + APART * restart_s
    interval_s = math.sqrt(2 * checkpoint_s * (seconds / (len(timed) - 1) + restart_s)) - checkpoint_s
    every = max(1, round(interval_s / (NODE_S / nodes)))
    table = Table(
        "Baselines on a spot trace",
        "way | changes | killed | joined | steps committed | steps done twice | median pause s | samples/s | of what the nodes "
        "could compute | aurora's is times",
        f"{nodes} nodes at first, {len(timed) - 1} changes in {seconds:.0f} s. Computing is emulated: a step takes {NODE_S:g} "
        "s over the number of nodes that compute, in which the ranks really compute, and wait for the rest. A node's memory "
        f"takes {SLOTS} of {EXPERTS} experts of a layer.\n\n"
        f"Checkpoint-restart: at each change all go back to the last checkpoint, after {start_s:.1f} s; so long a process "
        f"takes to start on this machine alone. A checkpoint takes {checkpoint_s:.3f} s, so the best interval is "
        f"{interval_s:.1f} s, {every} steps (Young, Daly); all ways have the same. Groups and whole replicas: each is one "
        "member that holds all experts and computes as fast as its nodes; it is lost with any of them, and nodes beyond a "
        "multiple idle. Groups have as many nodes as divide the experts evenly. All meet at torchft's lighthouse; its "
        "Manager is not run. In favour of the baselines: what nodes of a group tell each other takes no time, and members that "
        "are to join have been started before.",
    )
    could = base.batch * node_seconds(timed, seconds) / NODE_S / seconds
    first, remarks = 0.0, list[str]()
    for way in _ways(replace(base, steps=10**6, checkpoint_every=every), start_s):
        changes = timed if way.nodes == 1 else in_groups(timed, way.nodes)
        done = _played(way, changes, seconds, path, samples_NT)
        samples = base.batch * max(0, done.committed - 1) / seconds
        first = first or samples
        pauses_s = [pause.seconds for pause in done.pauses.values()]
        pause = f"{np.median(pauses_s):.2f}" if pauses_s else "none"
        counts = done.events, done.killed, done.joined, done.committed, done.redone, pause
        times = f"{first / samples:.2f}" if samples else "no step"
        table.add(way.name, *counts, f"{samples:.1f}", f"{samples / could:.2f}", times)
        remarks += [f"{way.name}: {said}" for said in done.false_deaths + done.remarks]
        if done.events < len(changes) - 1 or done.late_s > 1.0:
            remarks.append(f"{way.name}: {done.events} of {len(changes) - 1} changes came, up to {done.late_s:.1f} s late.")
        if way.name == RESTART and pauses_s:
            least_s = min(later_s - at_s for (at_s, _), (later_s, _) in pairwise(timed[1:]))
            remarks.append(f"Changes are at least {least_s / max(pauses_s):.1f} of the longest restart apart.")
    return [*table.lines, "", *remarks, BOUND]
