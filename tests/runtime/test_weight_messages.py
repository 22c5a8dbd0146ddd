"""Experts' weights travel between ranks, whole or in slices, and arrive as they were; pieces of work grow by what earlier ones took."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from aurora.models.loading import expert_parameters, hold_experts
from aurora.runtime.between_steps import GROWTH, WorkPieces
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.weight_messages import ExpertTransfer, WeightMessages, expert_transfers, transfer_bytes
from aurora.types import Placement
from aurora.types.options import LENGTHENED

EXPERTS, RANKS, LAYERS = 5, 3, 2


class TwoWeights(nn.Module):
    """Experts with two parameters of different dtypes; each expert's values tell its number."""

    def __init__(self, layer):
        super().__init__()
        self.num_experts = EXPERTS
        number_E = 10 * layer + torch.arange(EXPERTS)[:, None, None]
        self.up = nn.Parameter((number_E + torch.rand(EXPERTS, 3, 7)).to(torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter((number_E + torch.rand(EXPERTS, 2, 3)).to(torch.float16), requires_grad=False)


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
    layers_R = [[DistributedExperts(TwoWeights(layer)) for layer in range(LAYERS)] for _ in range(RANKS)]
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


def test_the_context_counts_the_tokens_that_need_experts():
    from aurora.runtime.layer_context import LayerContext

    context = LayerContext(0, None, None, None)
    index_NK = torch.tensor([[0, 1], [1, 2], [1, 0]])
    context.count_tokens(index_NK, 0)
    context.tokens_LE = torch.zeros(2, 4, dtype=torch.int64)
    context.count_tokens(index_NK, 1)
    context.mask = torch.tensor([True, False, True])
    context.count_tokens(index_NK, 0)
    assert np.array_equal(context.tokens_LE, [[2, 2, 0, 0], [2, 3, 1, 0]])


def test_pieces_grow_until_a_step_can_wait_for_no_more():
    """At 1000 a second, beside steps of 1 s: a tenth of it is never exceeded, and most of it is used in the end."""
    pieces, found = WorkPieces(4), []
    for _ in range(8):
        found.append(pieces.next(10**6, 1.0))
        pieces.record(found[-1] / 1000)
    assert found[0] == 4
    assert all(after <= GROWTH * before for before, after in pairwise(found))
    assert 0.5 * LENGTHENED < found[-1] / 1000 <= LENGTHENED


def test_slow_work_comes_in_the_least_pieces_and_a_rest_tells_nothing():
    pieces = WorkPieces(1)
    assert pieces.next(5, 1.0) == 1
    pieces.record(10.0)
    assert pieces.next(4, 1.0) == 1
    pieces.record(1e-3)
    assert pieces.next(1, 1.0) == 1  # of two, so what it takes is mostly start-up
    pieces.record(10.0)
    assert pieces.next(100, 1.0) == 2


def test_other_work_leaves_less_for_a_piece_or_nothing():
    """At 1000 a second, beside steps of 1 s: 0.07 s are meant to be used in all."""
    pieces = WorkPieces(4)
    assert pieces.next(10**6, 1.0, other_s=1e-6) == 0  # what was never timed comes alone
    assert not pieces.fits(1.0, 0.0)
    for _ in range(8):
        pieces.record(pieces.next(10**6, 1.0) / 1000)
    assert pieces.seconds(30) == pytest.approx(0.03)
    assert pieces.seconds(1) == pytest.approx(0.004)
    assert pieces.next(10**6, 1.0, other_s=0.05) == pytest.approx(20, abs=1)
    assert pieces.fits(1.0, 0.06)
    assert not pieces.fits(1.0, 0.07)
    assert pieces.next(10**6, 1.0, other_s=0.07) == 0


def test_a_rest_tells_how_long_pieces_take_until_a_whole_one_does():
    pieces = WorkPieces(100)
    assert pieces.next(10, 1.0) == 10
    pieces.record(1.0)
    assert pieces.seconds(10) == pytest.approx(10.0)
    assert pieces.next(1000, 1.0) == 100
    pieces.record(0.1)
    assert pieces.seconds(100) == pytest.approx(0.1)
