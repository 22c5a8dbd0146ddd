"""Files that training writes: checkpoints, and in the end the model for `from_pretrained` and `aurora run`.

Each rank writes one shard of a checkpoint in the background; ranks do not wait for each other. A shard is written under a
temporary name, then renamed; its final name has its number, the number of shards, and its digest. A checkpoint is complete
("whole") if all of its shards exist and match their digests.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import BadInput
from aurora.io.files import naming
from aurora.models.hub import model_folder
from aurora.models.loading import LOADING, load_transformers
from aurora.moe.transport import Transport
from aurora.training.state import ExpertState, TrainState, exchange_tensors
from aurora.types import Network, Placement

SHARD = re.compile(r"shard-([0-9]+)-of-([0-9]+)-([0-9a-f]{16})\.safetensors")
STEP = re.compile(r"step-([0-9]{8})")
KEPT = 2  # whole checkpoints; older ones are removed
SCHEMA = 1
LOG = logging.getLogger("aurora.train")
ROOT = 0  # the rank that writes


@dataclass(frozen=True)
class WholeCheckpoint:
    """Complete checkpoint: all of its shards exist.

    Attributes:
        steps: number of steps that were taken before it.
        shards: the files of the shards.
        about: values that identify the training, from `CheckpointWriter`.
    """

    steps: int
    shards: tuple[Path, ...]
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
        ranks = placement.gpus
        tensors = {
            _dense_key(name): trained.state
            for number, (name, trained) in enumerate(state.dense.items())
            if number % ranks == rank
        }
        for number, layer in enumerate(state.layers):
            first_E = placement.holds_EG(number).argmax(axis=1)
            for expert in layer.held:
                if first_E[expert] == rank:
                    parts = state.expert(number, expert).items()
                    tensors |= {_expert_key(number, expert, name): tensor for name, tensor in parts}
        about = {"schema": SCHEMA, "steps": state.steps, **self._about}
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu).copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items()
        }
        copied = torch.cuda.current_stream().record_event() if on_gpu else None  # GPU work that is queued later waits for them
        args = copies, copied, about, rank, ranks
        self._writing = threading.Thread(target=self._write, args=args, name="aurora-checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Waits until the last shard is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(
        self, copies: dict[str, torch.Tensor], copied: torch.cuda.Event | None, about: dict[str, Any], rank: int, ranks: int
    ) -> None:
        folder = self._folder / f"step-{about['steps']:08d}"
        temporary, name = folder / f".shard-{rank}", f"shard-{rank}-of-{ranks}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if copied is not None:
                copied.synchronize()
            save_file(copies, temporary, {"aurora": json.dumps(about)})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            shard = temporary.rename(folder / f"{name}-{_digest(temporary)}.safetensors")
            for older in set(folder.glob(f"{name}-*")) - {shard}:  # whose other shards were never written
                older.unlink()
        except (OSError, SafetensorError, RuntimeError) as error:  # the last of a GPU, which ends the rank too
            self._fail(f"{folder}: shard {rank} of {ranks} was not written: {error}")
            with suppress(OSError):
                temporary.unlink()
            return
        if rank == 0:
            try:
                _remove_older(self._folder)
            except BadInput as error:
                self._fail(f"older checkpoints are kept: {error}")

    def _fail(self, failure: str) -> None:
        self.failures.append(failure)
        LOG.warning("%s; training goes on", failure)  # now: a run that is killed has no end to tell it at


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
        if steps not in (None, number):
            continue
        shards, flaw = _inspect(path)
        if flaw is None:
            with naming(shards[0]), safe_open(shards[0], framework="pt") as file:
                return WholeCheckpoint(number, shards, json.loads(file.metadata()["aurora"])), remarks
        remarks.append(flaw)
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
    read = _reader(checkpoint)
    for name, trained in state.dense.items():
        trained.hold(read(_dense_key(name), trained.state))


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
    read = _reader(checkpoint)
    states_L: list[dict[int, ExpertState]] = []
    for number, experts in enumerate(experts_L):
        likes = state.likes(number).items()
        states_L.append(
            {expert: {name: read(_expert_key(number, expert, name), like) for name, like in likes} for expert in experts}
        )
    return states_L


def check_same_training(checkpoint: WholeCheckpoint, about: dict[str, Any]) -> None:
    """Raises BadInput unless a checkpoint belongs to the training that `about` identifies; see CheckpointWriter."""
    for name, value in about.items():
        if (saved := checkpoint.about.get(name)) != value:
            raise BadInput(f"{checkpoint.shards[0].parent}: was made with {name} {saved}, expected {value}")


def _reader(checkpoint: WholeCheckpoint) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function that returns a checkpoint's tensor by its key and a tensor like it."""
    shard_of: dict[str, Path] = {}
    for shard in checkpoint.shards:
        with safe_open(shard, framework="pt") as file:
            shard_of |= dict.fromkeys(file.keys(), shard)

    def read(key: str, like: torch.Tensor) -> torch.Tensor:
        if key not in shard_of:
            raise BadInput(f"{checkpoint.shards[0].parent}: expected {key}, found none")
        with safe_open(shard_of[key], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise BadInput(f"{shard_of[key]}: expected {key} as {like.dtype} of shape {tuple(like.shape)}, found {tensor.dtype} of {tuple(tensor.shape)}")  # fmt: skip # noqa: E501
        return tensor.to(like.device)

    return read


def _dense_key(name: str) -> str:
    return f"dense.{name}"


def _expert_key(layer: int, expert: int, name: str) -> str:
    return f"experts.{layer}.{expert}.{name}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _inspect(folder: Path) -> tuple[tuple[Path, ...], str | None]:
    """Returns (the shards of a complete checkpoint, None), or ((), a sentence on a missing or damaged shard).

    Raises:
        BadInput: if the folder or a shard cannot be read.
    """
    shards: dict[int, dict[int, Path]] = {}  # by number of ranks, and rank
    with naming(folder), suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if named := SHARD.fullmatch(path.name):
                shards.setdefault(int(named[2]), {})[int(named[1])] = path
    flaw = f"{folder}: all shards are missing"
    for ranks, of_rank in shards.items():
        if (missing := next((rank for rank in range(ranks) if rank not in of_rank), None)) is not None:
            flaw = f"{folder}: shard {missing} of {ranks} is missing"
        elif (damaged := next((shard for shard in of_rank.values() if not _is_whole(shard)), None)) is not None:
            flaw = f"{damaged}: is damaged: expected a file with the digest in its name"
        else:
            return tuple(of_rank[rank] for rank in range(ranks)), None
    return (), flaw


def _is_whole(shard: Path) -> bool:
    """Returns whether a shard is a file with the digest that its name says. Raises BadInput if it cannot be read."""
    try:
        return shard.is_file() and f"-{_digest(shard)}." in shard.name
    except FileNotFoundError:
        return False
    except OSError as error:
        raise BadInput(f"{shard}: cannot be read: {error.strerror}") from None


def _remove_older(folder: Path) -> None:
    """Removes the checkpoints that are older than the KEPT newest complete ones, whose shards are read for that.

    Raises:
        BadInput: if one cannot be read; none is removed then.
    """
    begun = begun_checkpoints(folder)
    complete = 0
    while begun and complete < KEPT < complete + len(begun):  # else there is none to remove
        _, path = begun.pop()
        complete += _inspect(path)[1] is None
    if complete == KEPT:
        for _, path in begun:
            shutil.rmtree(path, ignore_errors=True)


def export_model(
    state: TrainState, placement: Placement, transport: Transport, source: str | Path, dtype: str, folder: Path
) -> None:
    """Writes the trained model to a folder, whose contents are replaced. A collective call: all ranks make it.

    Args:
        state: the state that this rank holds.
        placement: the experts of each rank.
        transport: carries the experts to rank 0, which writes.
        source: the model with which training began; its config and tokenizer are copied.
        dtype: dtype of the weights, such as "float32".
        folder: the folder; written completely or not at all.

    Raises:
        BadInput: on the writing rank, if the folder cannot be written.
    """
    experts_L = [_collected(state, placement, layer, transport) for layer in range(len(state.layers))]
    if transport.rank != ROOT:
        return
    weights = {name: trained.weights.detach() for name, trained in state.dense.items()}
    for name, named in zip(state.names_L, experts_L, strict=True):
        weights |= {f"{name}.{parameter}": whole for parameter, whole in named.items()}
    transformers, home = load_transformers(), model_folder(source)
    with LOADING:
        model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name].view(parameter.shape))
    temporary = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        transformers.AutoTokenizer.from_pretrained(home).save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder}: cannot be written: {error}") from None


def _collected(state: TrainState, placement: Placement, layer: int, transport: Transport) -> dict[str, torch.Tensor]:
    """The weights (E, *shape) of a layer's experts by name on the rank that writes; empty on the others."""
    rank, ranks = transport.rank, transport.ranks
    likes = {name: like[0] for name, like in state.likes(layer).items()}
    holder_E = placement.holds_EG(layer).argmax(axis=1)
    experts_R = [np.flatnonzero(holder_E == peer).tolist() for peer in range(ranks)]
    mine = [tensor[0] for expert in experts_R[rank] for tensor in state.expert(layer, expert).values()]
    outgoing_R = [mine if peer == ROOT != rank else [] for peer in range(ranks)]
    like_R = [[*likes.values()] * len(experts) if rank == ROOT != peer else [] for peer, experts in enumerate(experts_R)]
    order = ORDER["openshop"](1 - np.eye(ranks, dtype=np.int64), Network.equal(ranks), rng=np.random.default_rng(0))
    arrived_R = exchange_tensors(transport, order, outgoing_R, like_R, next(iter(likes.values())))
    if rank != ROOT:
        return {}
    arrived_R[ROOT] = mine
    whole = {name: like.new_empty(len(holder_E), *like.shape) for name, like in likes.items()}
    for experts, tensors in zip(experts_R, map(iter, arrived_R), strict=True):
        for expert in experts:
            for weights in whole.values():
                weights[expert] = next(tensors)
    return whole
