"""Checkpoints of a training run: each rank writes one shard, in the background, and no rank waits for another.

A shard is written under a temporary name and renamed to one that tells which of how many shards it is, and its digest. A
checkpoint is whole when all of its shards are there and are what their names say.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aurora.errors import BadInput
from aurora.training.state import TrainState
from aurora.types import Placement

SHARD = re.compile(r"shard-(\d+)-of-(\d+)-([0-9a-f]{16})\.safetensors")
STEP = re.compile(r"step-(\d{8})")
KEPT = 2  # whole checkpoints; older ones are removed
SCHEMA = 1


@dataclass(frozen=True)
class WholeCheckpoint:
    """A whole checkpoint.

    Attributes:
        steps: how many steps were taken.
        shards: its files.
        about: what is trained, as `CheckpointWriter` was told.
    """

    steps: int
    shards: tuple[Path, ...]
    about: dict[str, Any]


class CheckpointWriter:
    """Writes one rank's shards of a run's checkpoints.

    Args:
        folder: where checkpoints lie, a folder each.
        rank, ranks: this rank and the number of ranks.
        about: what is trained; kept in each shard.

    Attributes:
        failures: a sentence for each shard that could not be written; training goes on.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, about: dict[str, Any]) -> None:
        self._folder, self._rank, self._ranks, self._about = folder, rank, ranks, about
        self._writing: threading.Thread | None = None
        self.failures: list[str] = []

    def save(self, state: TrainState, placement: Placement) -> None:
        """Copies this rank's part of the state, and writes it in the background; waits for the shard before.

        Each expert is written by the first of the ranks that hold it, each other parameter by one of all ranks.
        """
        self.wait()
        tensors = {
            _dense_key(name): trained.state.cpu().clone()
            for number, (name, trained) in enumerate(state.dense.items())
            if number % self._ranks == self._rank
        }
        for number, layer in enumerate(state.layers):
            first_E = placement.holds_EG(number).argmax(axis=1)
            for expert in layer.held:
                if first_E[expert] == self._rank:
                    parts = state.expert(number, expert).items()
                    tensors |= {_expert_key(number, expert, name): each.cpu().contiguous().clone() for name, each in parts}
        about = {"schema": SCHEMA, "steps": state.steps, **self._about}
        self._writing = threading.Thread(target=self._write, args=(tensors, about), name="aurora-checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Waits until the last shard is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        folder = self._folder / f"step-{about['steps']:08d}"
        temporary = folder / f".shard-{self._rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, {"aurora": json.dumps(about)})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.rename(folder / f"shard-{self._rank}-of-{self._ranks}-{_digest(temporary)}.safetensors")
            if self._rank == 0:
                _remove_older(self._folder)
        except (OSError, SafetensorError) as error:
            self.failures.append(f"{folder}: shard {self._rank} of {self._ranks} was not written: {error}")
            with suppress(OSError):
                temporary.unlink()


def newest_checkpoint(folder: Path) -> tuple[WholeCheckpoint | None, list[str]]:
    """Finds the newest whole checkpoint of a run.

    Returns:
        The checkpoint, None if there is none; and a sentence for each newer one that is not whole.
    """
    found = []
    for steps, path in reversed(_steps_in(folder)):
        shards = _shards_in(path)
        if not shards:
            found.append(f"{path}: shards are missing")
        elif broken := [shard for shard in shards if f"-{_digest(shard)}." not in shard.name]:
            found.append(f"{broken[0]}: is not what was written")
        else:
            with safe_open(shards[0], framework="pt") as file:
                return WholeCheckpoint(steps, shards, json.loads(file.metadata()["aurora"])), found
    return None, found


def begun_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, whole or not, the newest last."""
    return [path for _, path in _steps_in(folder)]


def remove_newer(folder: Path, steps: int) -> None:
    """Removes a run's checkpoints of more than so many steps, whose shards would be mixed with those that are written next."""
    for later, path in _steps_in(folder):
        if later > steps:
            shutil.rmtree(path, ignore_errors=True)


def restore(state: TrainState, checkpoint: WholeCheckpoint, held_L: Sequence[Sequence[int]]) -> None:
    """Makes a rank train what a checkpoint holds, whatever ranks have written it.

    Args:
        state: what the rank trains.
        checkpoint: the checkpoint.
        held_L: by layer, the experts that the rank holds from now on.

    Raises:
        BadInput: if a tensor is missing or has another shape.
    """
    opened: dict[str, Any] = {}
    for shard in checkpoint.shards:
        with safe_open(shard, framework="pt") as file:
            opened |= dict.fromkeys(file.keys(), shard)

    def read(key: str, like: torch.Tensor) -> torch.Tensor:
        if key not in opened:
            raise BadInput(f"{checkpoint.shards[0].parent}: expected {key}, found none")
        with safe_open(opened[key], framework="pt") as file:
            found: torch.Tensor = file.get_tensor(key)
        if found.shape != like.shape or found.dtype != like.dtype:
            raise BadInput(f"{opened[key]}: expected {key} as {like.dtype} of shape {tuple(like.shape)}, found {found.dtype} of {tuple(found.shape)}")  # fmt: skip # noqa: E501
        return found.to(like.device)

    for name, trained in state.dense.items():
        trained.hold(read(_dense_key(name), trained.state))
    for number, held in enumerate(held_L):
        likes = state.likes(number)
        arrived = {
            expert: {name: read(_expert_key(number, expert, name), like) for name, like in likes.items()} for expert in held
        }
        state.hold(number, held, arrived)
    state.continue_after(checkpoint.steps)


def _dense_key(name: str) -> str:
    return f"dense.{name}"


def _expert_key(layer: int, expert: int, name: str) -> str:
    return f"experts.{layer}.{expert}.{name}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _steps_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, whole or not, by the number of steps, ascending."""
    if not folder.is_dir():
        return []
    return sorted((int(found[1]), path) for path in folder.iterdir() if (found := STEP.fullmatch(path.name)))


def _shards_in(folder: Path) -> tuple[Path, ...]:
    """The shards of a checkpoint; empty unless all are there."""
    shards = {(int(f[1]), int(f[2])): path for path in folder.iterdir() if (f := SHARD.fullmatch(path.name))}
    for ranks in {ranks for _, ranks in shards}:
        if all((rank, ranks) in shards for rank in range(ranks)):
            return tuple(shards[rank, ranks] for rank in range(ranks))
    return ()


def _remove_older(folder: Path) -> None:
    """Removes the checkpoints that are older than the KEPT newest whole ones."""
    whole = 0
    for _, path in reversed(_steps_in(folder)):
        if whole < KEPT:
            whole += bool(_shards_in(path))
        else:
            shutil.rmtree(path, ignore_errors=True)
