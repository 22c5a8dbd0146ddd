"""Module trees that share their weights: nothing is held twice, and each tree answers by itself."""

import pytest
import torch

from aurora.models.loading import expert_parameters, load_model, with_same_weights
from aurora.models.own_weights import load_without_experts
from aurora.runtime.model_worker import ModelWorker
from aurora.types import Placement, RunOptions
from tests.models.architectures import SERVED, build

TOKENS = torch.tensor([[5, 40, 7, 99, 31]])


def addresses(model):
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", SERVED)
def test_trees_have_the_same_tensors_and_answers(name, tmp_path):
    model = load_model(build(name, tmp_path / name))
    copy = with_same_weights(model)
    assert copy.model is not model.model
    assert not {id(module) for module in copy.model.modules()} & {id(module) for module in model.model.modules()}
    assert addresses(copy.model) == addresses(model.model)
    assert [layer.block in [*copy.model.modules()] for layer in copy.layers] == [True] * len(model.layers)
    with torch.inference_mode():
        assert torch.equal(copy.model(TOKENS).logits, model.model(TOKENS).logits)


def test_workers_hold_a_ranks_experts_once_however_many_there_are(mixtral):
    model = load_without_experts(mixtral)
    held = Placement((((0, 3), (1, 2, 4, 5, 6, 7)),) * len(model.layers))
    trees = [model, *(with_same_weights(model) for _ in range(2))]
    first, *others = [ModelWorker(tree, RunOptions()) for tree in trees]
    first.hold(held, 0)
    alone = {parameter.data_ptr(): parameter.nbytes for parameter in trees[0].model.parameters()}
    for worker in others:
        worker.share_experts(first)
    all_trees = {parameter.data_ptr(): parameter.nbytes for tree in trees for parameter in tree.model.parameters()}
    assert all_trees == alone
    for layer, theirs in zip(others[0].layers, first.layers, strict=True):
        assert layer.held == (0, 3)
        assert [w.shape[0] for _, w in expert_parameters(layer.local)] == [
            w.shape[0] for _, w in expert_parameters(theirs.local)
        ]
