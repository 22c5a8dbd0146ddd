"""A step that broke off half-way is repeated, and nobody can tell."""

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import load_model

PROMPTS = [[70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81], [90, 91, 92]]


class Cut(Exception):
    pass


def broken_off(model, batch, layer):
    """A step that ends in this layer, after its attention has seen the step's tokens."""

    def cut(*_):
        raise Cut

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(cut)
    with pytest.raises(Cut):
        batch.step()
    hook.remove()


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_a_step_that_broke_off_is_repeated(name, at, request):
    model = load_model(request.getfixturevalue(name)).model
    whole, cut = (GreedyBatch(model, PROMPTS, [6, 6], None, 0) for _ in range(2))
    for step in range(6):
        whole.step()
        if step == at:
            broken_off(model, cut, layer=1)
            assert cut.rewind()
        cut.step()
    assert cut.tokens == whole.tokens


def test_a_step_whose_end_is_refused_gives_no_token(mixtral):
    def refuse():
        raise Cut

    model = load_model(mixtral).model
    whole, cut = (GreedyBatch(model, PROMPTS, [3, 3], None, 0) for _ in range(2))
    for _ in range(3):
        whole.step()
        with pytest.raises(Cut):
            cut.step(refuse)
        assert cut.rewind()
        cut.step()
        assert cut.tokens == whole.tokens


def test_what_lies_behind_a_window_is_gone():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=2, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config).eval()
    batch = GreedyBatch(model, PROMPTS[:1], [6], None, 0)
    batch.step()
    broken_off(model, batch, layer=1)
    assert not batch.rewind()


def test_a_mask_says_what_needs_no_experts(mixtral):
    """Padding in the first pass, and prompts that are finished, by their length or their last token."""
    model = load_model(mixtral).model
    batch = GreedyBatch(model, PROMPTS, [3, 1], None, 0)
    assert batch.mask_BT.tolist() == [[True] * 12, [False] * 9 + [True] * 3]
    with pytest.raises(Cut):
        batch.step(lambda: (_ for _ in ()).throw(Cut()))
    assert batch.rewind()
    assert batch.mask_BT.tolist() == [[True] * 12, [False] * 9 + [True] * 3], "of the step that is repeated"
    batch.step()
    assert batch.mask_BT.tolist() == [[True], [False]]
    batch.step()
    ended = GreedyBatch(model, PROMPTS[:1] * 2, [3, 3], batch.tokens[0][0], 0)
    assert ended.mask_BT is None
    ended.step()
    assert ended.done
    assert ended.tokens == [batch.tokens[0][:1]] * 2
