"""Checkpoints of training.

Each rank writes one shard in the background, and beside it the SHA-256 of the shard; ranks do not wait for each other,
and need no process group. A checkpoint is complete if all of its shards exist and have their SHA-256.
torch.distributed.checkpoint reads it on any number of ranks.
"""

import hashlib
import json
import logging
import re
import shutil
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from aurora.errors import BadInput, first_line
from aurora.io.files import naming, write_text, write_whole
from aurora.training.state import ExpertState, TrainState
from aurora.types import Placement

STEP = re.compile(r"step-([0-9]{8})-of-[1-9][0-9]{0,5}")
KEPT = 2  # complete checkpoints; older ones are removed
LOG = logging.getLogger("aurora.train")


@dataclass(frozen=True)
class WholeCheckpoint:
    """Complete checkpoint: all of its shards exist.

    Attributes:
        steps: number of steps that were taken before it.
        folder: the folder of its shards.
        about: values that identify the training, from `CheckpointWriter`.
    """

    steps: int
    folder: Path
    about: dict[str, Any]


class CheckpointWriter:
    """Writes one rank's shards of a run's checkpoints.

    Args:
        folder: folder of the run's checkpoints; each checkpoint is a subfolder.
        about: values that identify the training, written to each shard.

    Attributes:
        failures: one sentence per shard that could not be written; training continues.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._folder, self._about = folder, about
        self._writing: threading.Thread | None = None
        self.failures: list[str] = []

    def save(self, state: TrainState, placement: Placement, rank: int) -> None:
        """Copies this rank's part of the state, and writes it in the background, after the last shard has been written.

        An expert is written by the first rank that holds it; the other parameters are divided over all ranks.

        Args:
            state: the weights and optimizer state that this rank holds.
            placement: the experts of each rank.
            rank: this rank.
        """
        self.wait()
        dense = list(state.dense.items())[rank :: placement.gpus]
        tensors = {_dense_key(name): trained.state for name, trained in dense}
        for number, layer in enumerate(state.layers):
            first_E = placement.holds_EG(number).argmax(axis=1)
            mine = [expert for expert in layer.held if first_E[expert] == rank]
            tensors |= _expert_keys(number, {expert: state.expert(number, expert) for expert in mine})
        copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self._writing = threading.Thread(
            target=self._write, args=(copies, state.steps, rank, placement.gpus), name="aurora-checkpoint"
        )
        self._writing.start()

    def wait(self) -> None:
        """Waits until the last shard is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, copies: dict[str, torch.Tensor], steps: int, rank: int, ranks: int) -> None:
        folder = self._folder / f"step-{steps:08d}-of-{ranks}"
        shard, flaw = folder / f"shard-{rank}.safetensors", f"{folder}: shard {rank} of {ranks} was not written"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(shard, lambda file: save_file(copies, file.name, {"aurora": json.dumps(self._about)}))
            write_text(_digest_file(shard), f"{_digest(shard)}  {shard.name}\n")
            flaw = "older checkpoints are kept"
            if rank == 0:
                _remove_older(self._folder)
        except (OSError, SafetensorError, BadInput) as error:
            self.failures.append(f"{flaw}: {error}")
            LOG.warning("%s: %s; training goes on", flaw, error)  # now: a run that is killed has no end to tell it at


def newest_checkpoint(folder: Path, steps: int | None = None) -> tuple[WholeCheckpoint | None, list[str]]:
    """Returns the newest complete checkpoint of a run.

    Args:
        folder: folder of the run's checkpoints.
        steps: accept only a checkpoint with this number of steps; None: any.

    Returns:
        (the checkpoint or None; one sentence per newer, incomplete checkpoint, which names a missing or damaged shard).

    Raises:
        BadInput: if a shard that is there cannot be read; this does not mean that it is damaged.
    """
    remarks: list[str] = []
    for number, path in reversed(begun_checkpoints(folder)):
        if steps in (None, number):
            if flaw := _flaw(path):
                remarks.append(flaw)
                continue
            with safe_open(path / "shard-0.safetensors", framework="pt") as file:
                return WholeCheckpoint(number, path, json.loads(file.metadata()["aurora"])), remarks
    return None, remarks


def begun_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns (number of steps, folder) of all checkpoints of a run, complete or not, the newest last.

    Raises:
        BadInput: if the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    with naming(folder):
        named = [(STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(step[1]), path) for step, path in named if step)


def set_newer_aside(folder: Path, steps: int) -> list[str]:
    """Renames a run's checkpoints of more than `steps` steps, so that their shards do not mix with those written later.

    Returns:
        One sentence per renamed checkpoint.

    Raises:
        BadInput: if one cannot be renamed.
    """
    remarks = []
    for later, path in begun_checkpoints(folder):
        if later > steps:
            aside = next(name for number in count(1) if not (name := path.with_name(f"{path.name}.aside-{number}")).exists())
            with naming(path):
                path.rename(aside)
            remarks.append(f"{path}: training goes on from step {steps}; this newer checkpoint is kept as {aside.name}")
    return remarks


def restore_dense(state: TrainState, checkpoint: WholeCheckpoint) -> None:
    """Loads a rank's state outside experts from a checkpoint, which may have been written by more or fewer ranks.

    Args:
        state: the rank's state, changed in place; `TrainState.continue_after` must be called afterwards.
        checkpoint: the checkpoint.

    Raises:
        BadInput: if a tensor is missing or has another shape.
    """
    tensors = {_dense_key(name): torch.empty_like(trained.state) for name, trained in state.dense.items()}
    _load(checkpoint, tensors)
    for name, trained in state.dense.items():
        trained.hold(tensors[_dense_key(name)])


def read_experts(
    state: TrainState, checkpoint: WholeCheckpoint, experts_L: Sequence[Sequence[int]]
) -> list[dict[int, ExpertState]]:
    """Reads some experts' states (weights and AdamW state) from a checkpoint. Returns them by layer and expert.

    Args:
        state: the rank's state, for names and shapes.
        checkpoint: the checkpoint.
        experts_L: for each layer, the experts to read.

    Raises:
        BadInput: as `restore_dense`.
    """
    states_L: list[dict[int, ExpertState]] = [
        {expert: state.likes(number) for expert in experts} for number, experts in enumerate(experts_L)
    ]
    _load(
        checkpoint,
        {key: tensor for number, states in enumerate(states_L) for key, tensor in _expert_keys(number, states).items()},
    )
    return states_L


def check_same_training(checkpoint: WholeCheckpoint, about: dict[str, Any]) -> None:
    """Raises BadInput unless a checkpoint belongs to the training that `about` identifies; see CheckpointWriter."""
    for name, value in about.items():
        if (saved := checkpoint.about.get(name)) != value:
            raise BadInput(f"{checkpoint.folder}: was made with {name} {saved}, expected {value}")


def _load(checkpoint: WholeCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
    """Fills tensors from a checkpoint, by key."""
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that no process group is used
            load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint.folder)), no_dist=True)
    except CheckpointException as error:
        raise BadInput(f"{checkpoint.folder}: cannot be loaded: {first_line(error.failures[0][0])}") from None


def _dense_key(name: str) -> str:
    return f"dense.{name}"


def _expert_keys(layer: int, states: dict[int, ExpertState]) -> dict[str, torch.Tensor]:
    """The tensors of a layer's experts by their keys in a checkpoint."""
    return {f"experts.{layer}.{expert}.{name}": state for expert, named in states.items() for name, state in named.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_file(shard: Path) -> Path:
    """The file that says a shard's SHA-256, as `sha256sum` writes it."""
    return shard.with_suffix(".sha256")


def _flaw(folder: Path) -> str:
    """Returns a sentence on the first missing or damaged shard of a checkpoint; empty: it is complete.

    Raises:
        BadInput: if a shard cannot be read.
    """
    ranks = int(folder.name.rpartition("-")[2])
    for rank in range(ranks):
        shard = folder / f"shard-{rank}.safetensors"
        if not (shard.is_file() and _digest_file(shard).is_file()):
            return f"{folder}: shard {rank} of {ranks} is missing"
        with naming(shard):
            if not _digest_file(shard).read_text(errors="replace").startswith(_digest(shard)):
                return f"{shard}: is damaged: expected the SHA-256 in {_digest_file(shard).name}"
    return ""


def _remove_older(folder: Path) -> None:
    """Removes the checkpoints that are older than the KEPT newest complete ones, whose shards are read for that.

    Raises:
        BadInput: if one cannot be read; none is removed then.
    """
    begun = [path for _, path in begun_checkpoints(folder)]
    complete = [path for path in begun if not _flaw(path)]
    for path in begun[: begun.index(complete[-KEPT])] if len(complete) > KEPT else ():
        shutil.rmtree(path, ignore_errors=True)
