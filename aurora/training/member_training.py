"""Training as a member of a run: its computation in each step, and the moves of its state when members join or are lost.

`run_elastic` takes the steps of members that come and go, `take_steps` those of a run with fixed ranks.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aurora.elastic.epoch_groups import Epoch
from aurora.elastic.member import OtherRun
from aurora.elastic.steps import Pause, Settlement, StateLost, Version
from aurora.errors import BadInput, RankFailed
from aurora.models.hub import model_digest
from aurora.moe.transport import Transport
from aurora.training.checkpoint import (
    CheckpointWriter,
    check_same_training,
    newest_checkpoint,
    read_experts,
    restore_dense,
    set_newer_aside,
)
from aurora.training.migration import held_by_all
from aurora.training.trained_model import export_model
from aurora.training.trainer import PreparedStep, Trainer, alike_ranks
from aurora.training.training_run import CHECKPOINTS, LOG, MODEL, CommittedStep, FinalStep, KeptSteps, TrainResult, log_step
from aurora.types import Placement, TrainOptions

LOGGER = logging.getLogger("aurora.train")


def nodes_of(members: Sequence[str], slots: int, experts: int, min_replicas: int) -> list[int]:
    """Returns the node (failure domain) of each member; replicas of an expert are placed on different nodes.

    The members of a host, whose names begin with the host's name, form a node if there are enough hosts for `min_replicas`
    replicas of each expert on different hosts. Otherwise each member is a separate node.

    Args:
        members: names of the members.
        slots: number of experts that each member holds in a layer, replicas included.
        experts: experts of a layer.
        min_replicas: least number of replicas of each expert.
    """
    hosts = [name.rpartition("-")[0] for name in members]
    among = list(dict.fromkeys(hosts))
    replicas = sum(min(slots * hosts.count(host), experts) for host in among)
    if len(among) == 1 or replicas < experts * min(min_replicas, len(among)):
        return list(range(len(members)))
    return [among.index(host) for host in hosts]


class MemberTraining:
    """StepWork of one member of a training run.

    After a change of membership, experts are placed such that few move. They are copied from replicas, with AdamW's state. If
    all replicas of an expert are lost, all members restore the last checkpoint. The last step does not train, but writes the
    model.

    Args:
        load: returns a Trainer of the model in the model's files, and the values that identify this training in checkpoints.
        path: the model's folder.
        options: options of the training.
        output: the run's folder.
        connect: returns the transport of the epoch that begins.
        on_final: called with each step once all members know that it is committed.
        prepare: prepares the trainer's next step; None: its own `prepare`.
        digest: digest of the model's files before `load`; OtherRun is raised if they are others when they are read. None: they
            are not compared.

    Attributes:
        step: number of steps that were applied to the held state; -1: no state is held.
        steps: number of steps of the run, including the last one, which writes the model.
        remarks: one sentence per file that could not be used or written.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Trainer, Mapping[str, Any]]],
        path: str,
        options: TrainOptions,
        output: Path,
        connect: Callable[[], Transport],
        on_final: Callable[[FinalStep], None],
        prepare: Callable[[], PreparedStep] | None = None,
        digest: str | None = None,
    ) -> None:
        self._digest = digest
        self._load, self._path, self._options, self._output = load, path, options, output
        self._connect, self._on_final, self._prepare = connect, on_final, prepare
        self._trainer, about = load()
        self._check_files()
        self._about = dict(about)
        self._writer = CheckpointWriter(output / CHECKPOINTS, self._about)
        self.step, self.steps = -1, options.steps + 1
        self._prepared: PreparedStep | None = None
        self._committed: FinalStep | None = None  # the last step, until all know that it is
        self._moved = 0  # experts, since the last step
        self._since_s: float | None = None  # when the last step was committed; None: it has committed none, or missed some
        self._planning_s = 0.0  # of the last `begin`
        self._saved: int | None = None  # steps of the checkpoint that was read or written last
        self._resumes: bool | None = None  # from checkpoints that were there at the start; None: not known yet
        self._remarks: list[str] = []

    @property
    def remarks(self) -> list[str]:
        """A sentence for each file that could not be used or written."""
        return self._remarks + self._writer.failures

    def restore(self) -> int:
        """Restores the newest complete checkpoint, or the model's files if there is none. Returns its number of steps.

        Raises:
            BadInput: if a run is resumed and none of its checkpoints is complete, or one belongs to another training.
        """
        checkpoint, flaws = newest_checkpoint(self._output / CHECKPOINTS)
        self._remarks += flaws
        if self._resumes is None:
            self._resumes = self._options.resume and (checkpoint is not None or bool(flaws))
        if checkpoint is None and self._resumes:
            raise BadInput(f"`resume`: expected a complete checkpoint, found none: {'; '.join(flaws) or self._output}")
        self._committed = None
        self.step = 0 if checkpoint is None else checkpoint.steps
        if checkpoint is not None:
            check_same_training(checkpoint, self._about)
            if self.step > self._options.steps:
                raise BadInput(
                    f"`steps`: the checkpoint in {self._output} has {self.step} already, found {self._options.steps}"
                )
            restore_dense(self._trainer.state, checkpoint)
        elif self._trainer.state.steps:
            self._trainer, _ = self._load()
            self._check_files()
        self._trainer.state.forget_experts()
        self._saved = self.step
        return self.step

    def begin(self, epoch: Epoch, settlement: Settlement) -> None:
        """Moves state so that the epoch's members hold all of it; see StepWork."""
        self._epoch, self._transport = epoch, self._connect()
        trainer, transport, version = self._trainer, self._transport, settlement.version
        state, (slots, min_replicas) = trainer.state, trainer.slots_among(len(epoch.members))
        cluster = alike_ranks(nodes_of(epoch.members, slots, state.layers[0].count, min_replicas))
        trainer.join(transport, cluster)
        host = epoch.members[epoch.rank].rpartition("-")[0]
        stale = [rank for rank, name in enumerate(epoch.members) if name in settlement.stale]
        holders = [rank for rank in range(len(epoch.members)) if rank not in stale]
        self._logs = epoch.members[holders[0]].rpartition("-")[0] == host  # who has seen the last step logs
        if epoch.rank in stale:
            self.step, self._committed, self._since_s, self._saved = version.step, None, None, None
            state.forget_experts()
        else:
            state.take_back()
        state.continue_after(self.step)
        self._agree(holders)
        if epoch.rank == 0 and not version.epoch:  # all have read their checkpoint
            aside = set_newer_aside(self._output / CHECKPOINTS, version.step)
            for remark in [*self._remarks, *aside] if aside else ():
                LOGGER.warning("%s", remark)
            self._remarks += aside
        held_R = held_by_all(state, transport)
        lost_L = [set(range(layer.count)).difference(*held_L) for layer, *held_L in zip(state.layers, *held_R, strict=True)]
        if any(lost_L) and version.epoch:
            raise StateLost(f"rank {epoch.rank}: no rank holds expert {min(set().union(*lost_L))}")
        began_s = time.perf_counter()
        placement = trainer.planned()
        self._planning_s = time.perf_counter() - began_s
        if self.step:
            self._read_lost(lost_L, placement)
        self._moved += trainer.place(placement, stale)
        if not self.step:  # experts have been read from the model's files
            self._check_files()
        self._since_s = self._since_s or time.perf_counter()

    def _check_files(self) -> None:
        """Raises OtherRun if the model's files have changed since the digest was taken that the other members know."""
        if self._digest is not None and (found := model_digest(self._path)) != self._digest:
            raise OtherRun(f"{self._path}: expected `model` {self._digest[:16]} as when training began, found {found[:16]}")

    def _agree(self, holders: list[int]) -> None:
        """Counts the tokens of experts alike on all members. Raises RankFailed if they went back to different checkpoints."""
        layers = self._trainer.state.layers
        tokens_LE = torch.tensor([layer.tokens_E.tolist() for layer in layers])
        told_RX = self._transport.gather(torch.cat([torch.tensor([self.step]), tokens_LE.flatten()]))
        steps = sorted(set(told_RX[holders, 0].tolist()))
        if len(steps) > 1:
            checkpoints = f"checkpoints of steps {steps}; do all write to the same folder?"
            raise RankFailed(f"rank {self._epoch.rank}: members have gone back to {checkpoints}")
        for layer, tokens_E in zip(layers, told_RX[holders[0], 1:].view(tokens_LE.shape), strict=True):
            layer.tokens_E[:] = tokens_E.numpy()

    def _read_lost(self, lost_L: list[set[int]], placement: Placement) -> None:
        """Reads from the checkpoint of this step the experts that no member holds and this one is to hold."""
        state, rank = self._trainer.state, self._epoch.rank
        wanted_L = [sorted(lost & set(slots_G[rank])) for lost, slots_G in zip(lost_L, placement.slots_LG, strict=True)]
        if not any(wanted_L):
            return
        checkpoint, remarks = newest_checkpoint(self._output / CHECKPOINTS, self.step)
        if checkpoint is None:
            raise BadInput(f"{self._output}: the checkpoint of step {self.step} is gone; {'; '.join(remarks)}")
        for number, experts in enumerate(read_experts(state, checkpoint, wanted_L)):
            state.hold(number, (*state.layers[number].held, *experts), experts)

    def prepare(self) -> None:
        """Computes the next step with the other members; before that, moves experts if a rebalance is due and pays off."""
        trainer, options = self._trainer, self._options
        if self.step == options.steps:
            folder = self._output / MODEL
            export_model(trainer.state, trainer.placement, self._transport, self._path, options.dtype, folder)
            return
        if options.rebalance_every is not None and self.step and self.step % options.rebalance_every == 0:
            self._moved += trainer.rebalance()
        self._prepared = (self._prepare or trainer.prepare)()
        self._transport.wait()  # until the GPU has ended the step: the members commit what they vote for

    def commit(self) -> None:
        """Applies the prepared step, after reporting the step before, which all members now know to be committed."""
        self.report()
        self.step += 1
        prepared, self._prepared = self._prepared, None
        if prepared is None:  # it has written the model
            return
        self._trainer.commit(prepared)
        now_s = time.perf_counter()
        assert self._since_s is not None
        step = CommittedStep(
            prepared.step, prepared.loss, prepared.router_loss, prepared.gradient_norm, now_s - self._since_s, self._moved
        )
        self._committed = FinalStep(Version(self._epoch.number, self.step), step)
        self._moved, self._since_s = 0, now_s

    def report(self) -> None:
        """Reports the last step, which all members know to be committed, and saves a checkpoint if one is due after it."""
        if self._committed is not None:
            self._on_final(replace(self._committed, ranks=len(self._epoch.members), logs=self._logs))
        self._committed = None
        trainer, steps, every = self._trainer, self._options.steps, self._options.checkpoint_every
        due = self.step == steps or (self.step < steps and every is not None and self.step % every == 0)
        if due and self.step != self._saved:
            self._writer.save(trainer.state, trainer.placement, self._epoch.rank)
            self._saved = self.step

    def paused(self, pause: Pause) -> None:
        """Adds the pause that preceded the last step to that step's record."""
        if self._committed is not None:
            pause = replace(pause, planning_s=self._planning_s, moves_s=pause.moves_s - self._planning_s)
            self._committed = replace(self._committed, step=replace(self._committed.step, pause=pause))

    def discard(self) -> None:
        """Drops the prepared step, if there is one."""
        self._trainer.discard()
        self._prepared = None

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._writer.wait()


def take_steps(
    load: Callable[[], tuple[Trainer, Mapping[str, Any]]],
    path: str,
    options: TrainOptions,
    output: Path,
    transport: Transport,
    members: Sequence[str],
    prepare: Callable[[], PreparedStep] | None = None,
    told: Callable[[CommittedStep], CommittedStep] = lambda step: step,
) -> TrainResult:
    """Trains as one rank of a run with fixed ranks: from the newest checkpoint, if there is one, to the model's files.

    A collective call of the ranks of `transport`.

    Args:
        load, path, options, output, prepare: as in MemberTraining.
        transport: carries tensors between the ranks.
        members: name of each rank, as in `nodes_of`.
        told: called with each step; returns the step to be logged.

    Returns:
        The result, the same on all ranks except for seconds and remarks.
    """
    steps = KeptSteps()

    def log(final: FinalStep) -> None:
        final = replace(final, step=told(final.step))
        steps.take(final)
        if transport.rank == 0:
            steps.remarks += log_step(output / LOG, final.step)

    work = MemberTraining(load, path, options, output, lambda: transport, log, prepare)
    version = Version(0, work.restore())
    work.begin(Epoch(1, tuple(members), {}, transport.rank), Settlement(version, frozenset(), frozenset()))
    while work.step < work.steps:
        work.prepare()
        work.commit()
        work.report()
    work.close()
    transport.gather(torch.zeros(1, dtype=torch.uint8))  # nobody leaves before the model is written
    steps.remarks += work.remarks
    return steps.result(output, options, len(members))
