"""Module trees that share their weights: one for each micro-batch of a model that a rank serves."""

import copy
from dataclasses import replace

from aurora.models.loading import MoeModel, find_moe_layers


def with_same_weights(model: MoeModel) -> MoeModel:
    """Returns the model with a module tree of its own, of which all parameters and buffers are the same tensors.

    The copy takes no memory for weights, and what one tree's modules are replaced by does not change the other. Experts that
    are still in the model's files are read by the same readers.

    Args:
        model: a model whose experts modules have not been replaced.
    """
    shared = [*model.model.parameters(), *model.model.buffers()]
    shared += [reader for layer in model.layers if (reader := getattr(layer.experts, "reader", None)) is not None]
    tree = copy.deepcopy(model.model, {id(each): each for each in shared})
    return replace(model, model=tree, layers=find_moe_layers(tree))
