"""The steps of a run whose ranks stay: from the newest checkpoint on, with a log and checkpoints, and the model in the end."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aurora.errors import BadInput
from aurora.moe.transport import Transport
from aurora.training.checkpoint import CheckpointWriter, check_same_training, newest_checkpoint, remove_newer, restore
from aurora.training.export import export_model
from aurora.training.result import CHECKPOINTS, LOG, MODEL, CommittedStep, TrainResult, committed_step, log_step
from aurora.training.trainer import PreparedStep, Trainer
from aurora.types import TrainOptions


@dataclass(frozen=True)
class TrainingRun:
    """What a run trains, and where it writes.

    Args:
        path: the model's folder.
        about: what tells this training from others, for checkpoints.
        options, output: as in `aurora.train`.
    """

    path: str
    about: dict[str, Any]
    options: TrainOptions
    output: Path

    def take_steps(
        self,
        trainer: Trainer,
        prepare: Callable[[], PreparedStep],
        transport: Transport,
        ranks: int,
        transport_name: str,
        tell: Callable[[CommittedStep], CommittedStep] = lambda step: step,
    ) -> TrainResult:
        """Takes all steps, from the newest checkpoint on if wanted, and writes the model. A collective call.

        Args:
            trainer: has joined the transport; its experts are not placed yet.
            prepare: prepares the trainer's next step.
            transport: of the trainer.
            ranks, transport_name: for the result.
            tell: called with each committed step; returns it as it is logged.

        Returns:
            The result, the same on all ranks but for the seconds and remarks.
        """
        options, output, rank = self.options, self.output, transport.rank
        remarks = self._begin(trainer, transport)
        resumed, steps = trainer.state.steps, list[CommittedStep]()
        writer = CheckpointWriter(output / CHECKPOINTS, self.about)
        for step in range(resumed, options.steps):
            began_s = time.perf_counter()
            due = options.rebalance_every is not None and step % options.rebalance_every == 0 and step > resumed
            moved = trainer.rebalance() if due else 0
            prepared = prepare()
            trainer.commit(prepared)
            steps.append(tell(committed_step(prepared, time.perf_counter() - began_s, moved)))
            if rank == 0:
                remarks += log_step(output / LOG, steps[-1])
            every = options.checkpoint_every
            if step + 1 == options.steps or (every is not None and (step + 1) % every == 0):
                writer.save(trainer.state, trainer.placement, rank)
        writer.wait()
        dtype = getattr(torch, options.dtype)
        export_model(trainer.state, trainer.placement, transport, self.path, dtype, output / MODEL)
        transport.gather(torch.zeros(1, dtype=torch.uint8))  # nobody leaves before the model is written
        min_replicas, tokens = options.min_replicas_among(ranks), options.batch * options.length
        told = tuple(remarks + writer.failures)
        return TrainResult(output / MODEL, ranks, transport_name, min_replicas, tokens, resumed, tuple(steps), told)

    def _begin(self, trainer: Trainer, transport: Transport) -> list[str]:
        """Places the experts, with the state of the newest checkpoint if wanted. Returns what was wrong with newer ones."""
        folder, resume = self.output / CHECKPOINTS, self.options.resume
        checkpoint, remarks = newest_checkpoint(folder) if resume else (None, [])
        steps_R = transport.gather(torch.tensor([0 if checkpoint is None else checkpoint.steps]))[:, 0].tolist()
        if len(set(steps_R)) > 1:
            raise BadInput(f"{folder}: expected the same checkpoints on all ranks, found those of steps {steps_R}")
        if checkpoint is not None:
            check_same_training(checkpoint, self.about)
        if resume and transport.rank == 0:  # no rank writes before all have placed their experts
            remove_newer(folder, 0 if checkpoint is None else checkpoint.steps)
        placement = trainer.planned()
        if checkpoint is not None:
            restore(trainer.state, checkpoint, [slots_G[transport.rank] for slots_G in placement.slots_LG])
        trainer.place(placement)
        return remarks
