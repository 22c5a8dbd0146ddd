"""Experts that no rank holds any longer: which slots they take, and which names of weights are an expert's."""

import numpy as np
import pytest
from aurora_vllm.vllm_internals.held_experts import EXPERT, fill_slots

from aurora.errors import BadInput


@pytest.mark.parametrize(
    ("held", "experts", "filled", "after"),
    [
        ([0, 1, 2, 3], 4, set(), [0, 1, 2, 3]),
        ([0, 1, 0, 1], 4, {2, 3}, [0, 1, 2, 3]),
        ([3, 3, 3, 1], 4, {1, 2}, [3, 2, 0, 1]),
    ],
)
def test_an_expert_in_no_slot_takes_one_of_an_expert_in_several(held, experts, filled, after):
    held_P = np.array(held)
    assert fill_slots(held_P, experts) == filled
    assert held_P.tolist() == after


def test_every_expert_has_a_slot_after_any_loss():
    rng = np.random.default_rng(3)
    for _ in range(200):
        experts = int(rng.integers(1, 12))
        held_P = rng.integers(0, experts, experts + int(rng.integers(0, 8)))
        before_P = held_P.copy()
        filled = fill_slots(held_P, experts)
        assert {*held_P.tolist()} == {*range(experts)}
        assert {*np.flatnonzero(held_P != before_P).tolist()} == filled
        assert len(filled) == experts - len({*before_P.tolist()}), "no expert that was there moves"


def test_too_few_slots_are_said():
    with pytest.raises(BadInput, match="have slots for 3 of 4 experts in a layer"):
        fill_slots(np.array([0, 1, 2]), 4)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", ("3", "17.gate_proj.weight", "17")),
        ("model.layers.0.block_sparse_moe.experts.2.w1.weight", ("0", "2.w1.weight", "2")),
        ("language_model.layers.12.mlp.experts.gate_up_proj", ("12", "gate_up_proj", None)),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", None),
        ("model.layers.3.self_attn.q_proj.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
    ],
)
def test_names_of_experts_weights(name, found):
    match = EXPERT.search(name)
    assert (match and match.groups()) == found
