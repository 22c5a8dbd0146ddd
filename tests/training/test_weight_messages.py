"""Experts' weights travel between ranks, whole or in slices, and arrive as they were."""

import pytest
import torch
from torch import nn

from aurora.models.loading import expert_parameters, hold_experts
from aurora.training.weight_messages import ExpertTransfer, WeightMessages, expert_transfers, transfer_bytes
from aurora.types import Placement

EXPERTS, RANKS, LAYERS = 5, 3, 2


class TwoWeights(nn.Module):
    """Experts with two parameters of different dtypes; each expert's values tell its number."""

    def __init__(self, layer):
        super().__init__()
        self.num_experts = EXPERTS
        number_E = 10 * layer + torch.arange(EXPERTS)[:, None, None]
        self.up = nn.Parameter((number_E + torch.rand(EXPERTS, 3, 7)).to(torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter((number_E + torch.rand(EXPERTS, 2, 3)).to(torch.float16), requires_grad=False)


class Layer:
    """One rank's experts of a layer, all of them."""

    def __init__(self, layer):
        self.local = TwoWeights(layer)

    def empty_weights(self):
        return {name: whole.new_empty(whole.shape[1:]) for name, whole in expert_parameters(self.local)}

    def weights(self, expert):
        return {name: parameter[expert] for name, parameter in expert_parameters(self.local)}


def weights_of(experts, slot):
    return {name: parameter[slot].clone() for name, parameter in expert_parameters(experts)}


def test_experts_come_from_the_holder_that_sent_least_or_from_the_checkpoint():
    wanted = Placement.evenly((((0, 1), (2, 3), (0, 1, 4)),))
    held_R = [(((0, 1),),), (((0, 1, 2),),), (((),),)]
    found = expert_transfers([wanted], held_R, [100])
    assert found == [
        ExpertTransfer(0, 0, 3, None, 1),
        ExpertTransfer(0, 0, 0, 0, 2),
        ExpertTransfer(0, 0, 1, 1, 2),
        ExpertTransfer(0, 0, 4, None, 2),
    ]
    assert transfer_bytes(found, [100], 3).tolist() == [[0, 0, 100], [0, 0, 100], [0, 0, 0]]


@pytest.mark.parametrize("size", [7, 64, 10**6])
def test_weights_travel_in_slices(size):
    """Several experts for one pair, none for another, one from a checkpoint."""
    torch.manual_seed(0)
    layers_R = [[Layer(layer) for layer in range(LAYERS)] for _ in range(RANKS)]
    sources = [ExpertTransfer(0, 0, 3, 0, 1), ExpertTransfer(0, 1, 3, 0, 1), ExpertTransfer(0, 1, 0, 2, 0)]
    transfers = [*sources, ExpertTransfer(0, 0, 4, None, 2)]
    messages_R = [WeightMessages([layers], transfers, rank, RANKS) for rank, layers in enumerate(layers_R)]
    assert {messages.bytes for messages in messages_R} == {2 * 2 * (21 + 6)}
    for begin in range(0, messages_R[0].bytes, size):
        cuts_R = [messages.cut(begin, begin + size) for messages in messages_R]
        for to, (_, recvs) in enumerate(cuts_R):
            for source, (sends, _) in enumerate(cuts_R):
                assert len(sends[to]) == len(recvs[source]) <= size
                recvs[source].copy_(sends[to])
    arrived = [(rank, move, weights) for rank, messages in enumerate(messages_R) for move, weights in messages.arrived()]
    assert [(rank, move) for rank, move, _ in arrived] == [(0, sources[2]), (1, sources[0]), (1, sources[1])]
    for _, move, weights in arrived:
        sent = weights_of(layers_R[move.source][move.layer].local, move.expert)
        assert weights.keys() == sent.keys()
        assert all(torch.equal(weights[name], sent[name]) for name in sent)


def test_new_weights_are_written_in_place_where_all_others_keep_their_slots():
    experts, other = TwoWeights(0), TwoWeights(1)
    before = [weights_of(experts, slot) for slot in range(EXPERTS)]
    memory = experts.up.data_ptr()
    hold_experts(experts, [0, 1, weights_of(other, 2), 3, 4])
    assert experts.up.data_ptr() == memory
    hold_experts(experts, [1, 0, 2])
    assert experts.up.data_ptr() != memory
    after = [before[1], before[0], weights_of(other, 2)]
    for slot, expected in enumerate(after):
        assert all(torch.equal(expected[name], found) for name, found in weights_of(experts, slot).items())
