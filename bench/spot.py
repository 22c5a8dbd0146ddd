"""Elastic training on a spot trace: nodes of the trace are processes that are killed (-9), and that join when it says so."""

import multiprocessing.connection
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.lighthouse import Lighthouse
from aurora.elastic.member import Member
from aurora.elastic.steps import NOTHING, Pause, Version, run_elastic
from aurora.errors import AuroraError, RankFailed
from aurora.moe.transport import Transport
from aurora.runtime.distributed.launcher import RankInfo, describe_error, end_processes, start_process
from aurora.training.elastic_run import MemberFinished
from aurora.training.member_training import MemberTraining
from aurora.training.trainer import Trainer, load_trainer
from aurora.training.training_run import FinalStep
from aurora.types import TrainOptions
from aurora.types.arrays import IntArray
from bench.papers.lazarus.membership_traces import MembershipEvent

PREPARED = "prepared"  # member to player: it can join at once
JOIN = "join"  # player to member
AHEAD = 3  # changes whose nodes are started before their time: starts do not get shorter when a trace is compressed
SETTLE_S = 30.0  # for all members to end after the first
POLL_S = 0.1
STEP_S = 0.1  # until the first step is measured

Adapt = Callable[[Trainer], None]  # changes a trainer that a member has loaded; picklable
Training = Callable[..., MemberTraining]  # with the arguments of MemberTraining; picklable


def name_of(rank: int) -> str:
    """Returns the name of a member."""
    return f"rank-{rank:04d}"


def spot_member(
    connection: multiprocessing.connection.Connection,
    rank_info: RankInfo,
    path: str,
    samples_NT: IntArray,
    options: TrainOptions,
    output: Path,
    adapt: Adapt | None,
    training: Training,
    initial: int,
) -> None:
    """Prepares, waits until it may join, and trains; tells the player of each step."""

    def load() -> tuple[Trainer, dict[str, Any]]:
        trainer, about = load_trainer(path, "cpu", samples_NT, options)
        if adapt is not None:
            adapt(trainer)
        trainer.warm_up(options.ranks)
        return trainer, about

    try:
        name = name_of(rank_info.rank)
        member = Member(
            (rank_info.host, rank_info.port), name, timeout_s=rank_info.timeout_s, expected=initial, least=options.min_ranks
        )

        def connect(epoch: Epoch, _groups: list[Any]) -> Transport:
            connection.send(epoch)
            return member.transport()

        work = training(
            load,
            path,
            options,
            output,
            connect,
            connection.send,
        )
        connection.send(PREPARED)
        connection.recv()
        run_elastic(member, work, work.paused)
        work.close()
        member.close()
        connection.send(MemberFinished(tuple(work.remarks)))
    except AuroraError as error:
        connection.send(error)
    except BaseException as error:
        connection.send(RankFailed(describe_error(error)))


@dataclass
class _Node:
    """A node of the trace: a process."""

    rank: int
    process: Any
    connection: Any
    prepared: bool = False
    arrived: bool = False  # whether it has told of a step after the last change
    since: int | None = None  # the first epoch in which it was


@dataclass
class Played:
    """What became of a run.

    Attributes:
        losses: by step its loss, as it was committed last.
        epochs: the epochs in which steps were committed.
        redone: steps that were final and then done again.
        restarts: how often step 0 was one of them.
        events: changes of the trace that were played.
        killed, joined: processes.
        pauses: by epoch the longest pause of its members before it.
        false_deaths: members that were left out of an epoch and nobody had killed.
        committed: steps of the newest state that was told of.
        late_s: how long after its time a change came at most, if changes came by time.
        seconds: from the first step to the last.
        remarks: of members.
    """

    losses: dict[int, float] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    redone: int = 0
    restarts: int = 0
    events: int = 0
    killed: int = 0
    joined: int = 0
    pauses: dict[int, Pause] = field(default_factory=dict)
    false_deaths: list[str] = field(default_factory=list)
    committed: int = 0
    late_s: float = 0.0
    seconds: float = 0.0
    remarks: list[str] = field(default_factory=list)


def steps_of(trace: Sequence[MembershipEvent], steps: int, first: int = 10) -> list[tuple[int, MembershipEvent]]:
    """Returns a trace compressed: each change with the step after which it comes, from `first` to shortly before the end."""
    last_s = trace[-1].time_s
    return [(first + int(change.time_s / last_s * (steps - 2 * first)), change) for change in trace]


class SpotRun:
    """Plays a trace. The next change comes when its step is committed, and not before those of the last have arrived.

    Args:
        path, samples_NT, options, output: as of `train_elastic`.
        changes: the changes with their steps, as `steps_of` returns them; the first has the nodes that are there at the start.
        seed: moments of kills within a step.
        adapt: what each member does with its trainer.
        to_the_end: whether all steps are taken; if not, the run ends when those that the last change concerns have arrived.
        before: called before each change, with the change and the nodes that are there, by rank.
        training: what members do in each step.
        seconds: if given, changes come so many seconds after the first step instead, and the run ends after so many.
    """

    def __init__(
        self,
        path: Path,
        samples_NT: IntArray,
        options: TrainOptions,
        output: Path,
        changes: Sequence[tuple[float, MembershipEvent]],
        seed: int = 0,
        adapt: Adapt | None = None,
        to_the_end: bool = True,
        before: Callable[[MembershipEvent, list[str]], None] = lambda change, names: None,
        training: Training = MemberTraining,
        seconds: float | None = None,
    ) -> None:
        self._before, self._to_the_end, self._seconds = before, to_the_end, seconds
        self._args = str(path), samples_NT, options, output, adapt, training, len(changes[0][1].added)
        self._options, self._changes, self._dice = options, list(changes), random.Random(seed)
        self.played = Played()
        self._versions: dict[int, Version] = {}  # by step that of its last commit
        self._newest = NOTHING
        self._nodes: dict[str, _Node] = {}
        self._standby: dict[str, _Node] = {}
        self._starting: dict[str, tuple[int, Future[Any]]] = {}
        self._background = ThreadPoolExecutor(1)
        self._ended: list[tuple[Any, Any]] = []
        self._next_rank, self._step_s = 0, STEP_S
        self._over = 0  # the epoch that the last change has ended
        self._began_s = self._last_s = 0.0
        self._lighthouse = Lighthouse()

    def play(self) -> Played:
        """Plays all changes, and trains to the end."""
        try:
            _, first = self._changes.pop(0)
            self._start_ahead([first])
            while not self._prepared(first):
                self._hear()
            self._join(first.added)
            ended_s = None
            while (self._nodes or self._seconds) and (ended_s is None or time.monotonic() < ended_s):
                if self._hear() and ended_s is None:
                    ended_s = time.monotonic() + SETTLE_S
                if ended_s is None and self._due():
                    self._change(self._changes.pop(0)[1])
                if not (self._changes or self._to_the_end) and all(node.arrived for node in self._nodes.values()):
                    break
                if self._seconds is not None and self._elapsed_s > self._seconds:
                    break
        finally:
            self._adopt(wait=True)
            everyone = [*self._nodes.values(), *self._standby.values()]
            self._lighthouse.close()  # before members are ended: they are not lost
            end_processes([(node.process, node.connection) for node in everyone] + self._ended)
            self._background.shutdown()
        self.played.seconds = self._last_s - self._began_s
        return self.played

    @property
    def _elapsed_s(self) -> float:
        """Seconds since the first step; none before it."""
        return time.monotonic() - self._began_s if self._began_s else 0.0

    def _note(self, epoch: Epoch, node: _Node) -> None:
        """Takes note of an epoch that a node is in."""
        node.since = node.since or epoch.number
        for other in self._nodes.values():
            if other.since is not None and other.since < epoch.number and name_of(other.rank) not in epoch.members:
                self.played.false_deaths.append(f"{name_of(other.rank)} is not in epoch {epoch.number}")

    def _start_ahead(self, changes: Sequence[MembershipEvent]) -> None:
        """Starts the processes of nodes that are to join in these changes. No member waits meanwhile."""
        ranks, (host, port) = self._options.ranks, self._lighthouse.address
        for name in (name for change in changes for name in change.added):
            if not any(name in each for each in (self._starting, self._standby, self._nodes)):
                rank, self._next_rank = self._next_rank, self._next_rank + 1
                info = RankInfo(rank, ranks, host, port, self._options.timeout_s, rank, ranks, launched=True)
                args = info, spot_member, *self._args
                self._starting[name] = rank, self._background.submit(start_process, *args)

    def _adopt(self, wait: bool = False) -> None:
        """Takes over processes that have started."""
        for name, (rank, started) in list(self._starting.items()):
            if wait or started.done():
                del self._starting[name]
                self._standby[name] = _Node(rank, *started.result())

    def _prepared(self, change: MembershipEvent) -> bool:
        """Whether all nodes that join in a change can join at once."""
        return all(name in self._standby and self._standby[name].prepared for name in change.added)

    def _due(self) -> bool:
        """Whether the next change is to come now."""
        if not self._changes:
            return False
        planned, change = self._changes[0]
        self._start_ahead([change for _, change in self._changes[:AHEAD]])
        if not self._prepared(change):
            return False
        now = max(self.played.losses, default=-1) if self._seconds is None else self._elapsed_s
        if now < planned or not all(node.arrived for node in self._nodes.values()):
            return False
        if self._seconds is not None:
            self.played.late_s = max(self.played.late_s, now - planned)
        return True

    def _change(self, change: MembershipEvent) -> None:
        """Kills those that leave, somewhere within a step, and lets those join that come."""
        time.sleep(self._dice.uniform(0.0, self._step_s))
        self._before(change, sorted(self._nodes, key=lambda name: self._nodes[name].rank))
        for name in change.removed:
            node = self._nodes.pop(name)
            os.kill(node.process.pid, signal.SIGKILL)
            self._ended.append((node.process, node.connection))
        for node in self._nodes.values():
            node.arrived = False
        self._over = max(self.played.epochs)
        self._join(change.added)
        self.played.events += 1
        self.played.killed += len(change.removed)
        self.played.joined += len(change.added)

    def _join(self, names: Sequence[str]) -> None:
        for name in names:
            self._nodes[name] = self._standby.pop(name)
            self._nodes[name].connection.send(JOIN)

    def _hear(self) -> bool:
        """Handles what members say. Returns whether one has finished."""
        self._adopt()
        named = {node.connection: (name, node) for name, node in [*self._nodes.items(), *self._standby.items()]}
        finished = False
        for connection in multiprocessing.connection.wait(list(named), POLL_S):
            name, node = named[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise SystemExit(f"{name}, rank {node.rank}, has ended by itself") from None
            match message:
                case AuroraError():
                    raise message
                case MemberFinished(remarks):
                    self.played.remarks += remarks
                    self._ended.append((self._nodes.pop(name).process, connection))
                    finished = True
                case Epoch():
                    self._note(message, node)
                case FinalStep():
                    node.arrived |= message.version.epoch > self._over
                    self._final(message)
                case _:
                    node.prepared = True
        return finished

    def _final(self, message: FinalStep) -> None:
        """Takes note of a committed step."""
        played, step, version = self.played, message.step, message.version
        self._last_s = time.monotonic()
        self._began_s = self._began_s or self._last_s
        played.epochs.add(version.epoch)
        if (pause := step.pause) is None:
            self._step_s = step.seconds
        elif version.epoch not in played.pauses or played.pauses[version.epoch].seconds < pause.seconds:
            played.pauses[version.epoch] = pause
        self._newest = max(self._newest, version)
        played.committed = self._newest.step
        before = self._versions.get(step.step)
        if before is None or version > before:
            played.redone += before is not None
            played.restarts += before is not None and step.step == 0
            self._versions[step.step], played.losses[step.step] = version, step.loss
            if step.step % 50 == 0:
                print(f"step {step.step}: {played.events} changes, {self._last_s - self._began_s:.0f} s", flush=True)
