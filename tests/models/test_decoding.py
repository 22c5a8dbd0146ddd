"""A mask says which tokens of a batch need no experts."""

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import load_model

PROMPTS = [[70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81], [90, 91, 92]]


def test_a_mask_says_what_needs_no_experts(mixtral):
    """Padding in the first pass, and prompts that are finished, by their length or their last token."""
    model = load_model(mixtral).model
    batch = GreedyBatch(model, PROMPTS, [3, 1], None, 0)
    assert batch.mask_BT.tolist() == [[True] * 12, [False] * 9 + [True] * 3]
    batch.step()
    assert batch.mask_BT.tolist() == [[True], [False]]
    batch.step()
    ended = GreedyBatch(model, PROMPTS[:1] * 2, [3, 3], batch.tokens[0][0], 0)
    assert ended.mask_BT is None
    ended.step()
    assert ended.done
    assert ended.tokens == [batch.tokens[0][:1]] * 2
