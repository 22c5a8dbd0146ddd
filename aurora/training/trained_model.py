"""The trained model, written for `from_pretrained` and `aurora run`."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import BadInput
from aurora.models.hub import model_folder
from aurora.models.loading import LOADING, load_transformers
from aurora.moe.transport import Transport
from aurora.training.state import TrainState, exchange_tensors
from aurora.types import Network, Placement

ROOT = 0  # the rank that writes


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
