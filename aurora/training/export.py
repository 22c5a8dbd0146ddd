"""Writes what was trained as a transformers checkpoint, with all experts, for `from_pretrained` and `aurora run`."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from aurora.errors import BadInput
from aurora.models.hub import model_folder
from aurora.models.loading import LOADING, load_transformers
from aurora.moe.transport import Transport
from aurora.planner.alltoall.registry import ORDER
from aurora.training.state import TrainState
from aurora.training.tensor_exchange import exchange_tensors
from aurora.types import Network, Placement

ROOT = 0  # the rank that writes


def export_model(
    state: TrainState, placement: Placement, transport: Transport, source: str | Path, dtype: torch.dtype, folder: Path
) -> None:
    """Writes the trained model; what was in the folder before is replaced. A collective call: all ranks make it.

    Args:
        state: what this rank trains.
        placement: which rank holds which experts.
        transport: carries the experts to the rank that writes.
        source: the model that training began with; its config and tokenizer are kept.
        dtype: dtype of the weights.
        folder: where to write; whole or not at all.

    Raises:
        BadInput: if the folder cannot be written; on the rank that writes.
    """
    experts_L = [_collected(state, placement, layer, transport) for layer in range(len(state.layers))]
    if transport.rank != ROOT:
        return
    weights = {name: trained.weights.detach() for name, trained in state.dense.items()}
    for name, named in zip(state.names_L, experts_L, strict=True):
        weights |= {f"{name}.{parameter}": whole for parameter, whole in named.items()}
    transformers, home = load_transformers(), model_folder(source)
    with LOADING:
        model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=dtype)
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
    mine = [each[0] for expert in experts_R[rank] for each in state.expert(layer, expert).values()]
    outgoing_R = [mine if peer == ROOT != rank else [] for peer in range(ranks)]
    like_R = [[*likes.values()] * len(own) if rank == ROOT != peer else [] for peer, own in enumerate(experts_R)]
    order = ORDER["openshop"](1 - np.eye(ranks, dtype=np.int64), Network.equal(ranks), rng=np.random.default_rng(0))
    found_R = exchange_tensors(transport, order, outgoing_R, like_R, next(iter(likes.values())))
    if rank != ROOT:
        return {}
    found_R[ROOT] = mine
    whole = {name: like.new_empty(len(holder_E), *like.shape) for name, like in likes.items()}
    for experts, found in zip(experts_R, map(iter, found_R), strict=True):
        for expert in experts:
            for each in whole.values():
                each[expert] = next(found)
    return whole
