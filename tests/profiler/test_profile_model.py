"""Profiles of real models against counting by hand."""

import numpy as np
import pytest
import torch

from aurora.errors import BadInput
from aurora.models.loading import load_model
from aurora.models.prompts import Corpus
from aurora.profiler.profile_model import count_choices, profile_model, record_choices
from aurora.types import PHASES, ProfileOptions
from tests.models.architectures import SERVED, build


@pytest.mark.parametrize("name", SERVED)
def test_hooks_see_every_choice_and_change_nothing(name, tmp_path):
    model = load_model(build(name, tmp_path / name))
    ids = torch.randint(3, 259, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model.model(input_ids=ids).logits
        with record_choices(model) as chosen_L:
            during = model.model(input_ids=ids).logits
        after = model.model(input_ids=ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    chosen_ULK, (counts_LE,) = count_choices([chosen_L], model.experts)
    assert chosen_ULK.shape == (3 * 17, len(model.layers), model.top_k)
    assert (counts_LE.sum(axis=1) == 3 * 17 * model.top_k).all()
    assert counts_LE.shape == (len(model.layers), model.experts)


def test_counts_equal_the_routers_own_choices(mixtral):
    """Against the logits that transformers itself reports."""
    model = load_model(mixtral)
    ids = torch.randint(3, 259, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), record_choices(model) as chosen_L:
        logits = model.model(input_ids=ids, output_router_logits=True).router_logits
    counts_LE = count_choices([chosen_L], model.experts)[1][0]
    for layer, expected in enumerate(logits):
        chosen = expected.topk(model.top_k, dim=-1).indices.flatten()
        assert counts_LE[layer].tolist() == torch.bincount(chosen, minlength=model.experts).tolist()


def test_a_profile_holds_one_window_a_forward_pass(mixtral, text):
    """9 prompts of 50 tokens on 2 sources, 2 at a time: rounds of 4, 4 and 1 prompts, 3 passes each."""
    options = ProfileOptions(sources=2, prompt_tokens=50, batch=2, max_new_tokens=3, limit=9)
    steps = []
    made = profile_model(mixtral, [text], options, lambda what, done, total: steps.append((what, done, total)))
    assert made.tokens_TLSE.shape == (9, 4, 2, 8)
    per_source = made.tokens_TLSE.sum(axis=3)[:, 0] // made.top_k
    assert per_source.tolist() == [[100, 100], [2, 2], [2, 2]] * 2 + [[50, 0], [1, 0], [1, 0]]
    assert (made.tokens_TLSE.sum(axis=3) == made.tokens_TLSE.sum(axis=3)[:, :1]).all()
    assert steps[-1][1] == steps[-1][2]
    model = load_model(mixtral)
    assert made.fingerprint == model.fingerprint()
    assert made.dispatch_bytes == 64 * 4
    assert made.expert_bytes == 3 * 64 * 56 * 4
    total = sum(p.numel() * 4 for p in model.model.parameters())
    assert made.other_bytes + made.expert_bytes * 8 * 4 == total
    (curves,) = made.curves.values()
    for phase in PHASES:
        assert curves[phase].tokens_X[-1] >= made.tokens_TLSE.sum(axis=3).max()
        assert (curves[phase].seconds_X > 0).all()
        assert (np.diff(curves[phase].seconds_X) >= 0).all()
    assert {"tool", "text", "torch", "date", "compute"} <= set(made.provenance)


def test_decode_windows_count_the_tokens_that_are_generated(mixtral, text):
    """Teacher-forcing the generated text in one pass sends the same tokens to the same experts."""
    from aurora.models.decoding import greedy_decode

    model = load_model(mixtral)
    prompt = prompts_of(model, text, 40)[0]
    made = profile_model(mixtral, [text], ProfileOptions(sources=1, prompt_tokens=40, max_new_tokens=5, limit=1))
    tokens, _ = greedy_decode(model.model, prompt, 5, eos=None)
    with torch.inference_mode(), record_choices(model) as chosen_L:
        model.model(input_ids=torch.tensor([prompt + tokens[:-1]]))
    assert made.load_LE.tolist() == count_choices([chosen_L], model.experts)[1][0].tolist()
    assert made.stage_T == ("prefill", "decode", "decode", "decode", "decode")


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_token_level_routing_is_the_routers_own(name, text, request):
    """Three prompts on two sources, prefill and two more tokens; the last source is left idle in the second round."""
    path = request.getfixturevalue(name)
    options = ProfileOptions(sources=2, prompt_tokens=30, batch=1, max_new_tokens=3, limit=3, token_level=True)
    made = profile_model(path, [text], options)
    routing = made.routing  # whose counts a profile checks against tokens_TLSE
    assert routing.experts_ULK.dtype == np.uint8
    assert np.bincount(routing.window_U * 2 + routing.source_U).tolist() == [30, 30, 1, 1, 1, 1, 30, 0, 1, 0, 1]
    model = load_model(path)
    with torch.inference_mode(), record_choices(model) as chosen_L:
        model.model(input_ids=torch.tensor([prompts_of(model, text, 30)[1]]))
    for layer, expected in enumerate(chosen_L):
        found = routing.layer(layer, 0)[0][routing.layer(layer, 0)[1] == 1]
        assert np.sort(found, axis=1).tolist() == np.sort(expected.numpy(), axis=1).tolist()
    assert routing.lengths_Q.tolist() == [32, 32, 32]
    assert routing.sequence_U.tolist() == [0] * 30 + [1] * 30 + [0, 1, 0, 1] + [2] * 32


def prompts_of(model, text, length):
    return list(Corpus(model.tokenizer, model.vocabulary, [text], length))


def test_too_little_text(mixtral, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(BadInput, match=r"short\.txt: too little text for one prompt of 128 tokens"):
        profile_model(mixtral, [tmp_path / "short.txt"])
    (tmp_path / "some.txt").write_text("x" * 200)
    with pytest.raises(BadInput, match="expected a prompt of 128 tokens for each of 4 sources, found 1"):
        profile_model(mixtral, [tmp_path / "some.txt"])
    with pytest.raises(BadInput, match="at least one text file"):
        profile_model(mixtral, [])
