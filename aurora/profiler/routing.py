"""Count where tokens go, by hooks: the model's output stays what it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel
from aurora.models.prompts import deal
from aurora.types import Choices
from aurora.types.arrays import IntArray

Seen = Callable[[int, torch.Tensor], None]  # a layer, and its tokens' experts (N, K)


@contextmanager
def counted_routing(model: MoeModel, seen: Seen = lambda _layer, _experts_NK: None) -> Iterator[IntArray]:
    """Inside the block, every forward pass adds to the yielded counts_LE (L, E) int64 and calls `seen` for every layer."""
    counts_LE = np.zeros((len(model.layers), model.experts), dtype=np.int64)

    def hook(layer: int) -> Callable[..., None]:
        def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            counts_LE[layer] += torch.bincount(index.flatten(), minlength=model.experts).cpu().numpy()
            seen(layer, index)

        return count

    handles = [
        layer.experts.register_forward_pre_hook(hook(number), with_kwargs=True) for number, layer in enumerate(model.layers)
    ]
    try:
        yield counts_LE
    finally:
        for handle in handles:
            handle.remove()


def count_routing(
    model: MoeModel,
    prompts: Sequence[list[int]],
    *,
    sources: int,
    batch: int,
    new_tokens: int,
    token_level: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> tuple[IntArray, Choices | None]:
    """tokens_TLSE (T, L, S, E) int64 of serving `prompts`, all of one length, dealt to `sources` ranks; token_level: and the
    choices of every token, a byte or two each.

    Every rank decodes `batch` prompts together, `new_tokens` tokens each; a window is one forward pass of all ranks, so
    each round of batches gives a prefill window and new_tokens - 1 decode windows. `advance` is called after each rank's
    batch.
    """
    dealt = deal(prompts, sources)
    rounds = -(-max(len(mine) for mine in dealt) // batch)
    tokens_TLSE = np.zeros((rounds * new_tokens, len(model.layers), sources, model.experts), dtype=np.int64)
    kept_L: list[list[NDArray[Any]]] = [[] for _ in model.layers]
    passes: list[tuple[int, int, int]] = []  # source, window, tokens
    narrow = np.uint8 if model.experts <= 256 else np.uint16

    def keep(layer: int, experts_NK: torch.Tensor) -> None:
        if token_level:
            kept_L[layer].append(experts_NK.cpu().numpy().astype(narrow))

    with counted_routing(model, keep) as counts_LE:
        for round_ in range(rounds):
            for source, mine in enumerate(dealt):
                chosen = mine[round_ * batch : (round_ + 1) * batch]
                if chosen:
                    # No end-of-text here: a profile's windows keep their size.
                    together = GreedyBatch(model.model, [prompts[i] for i in chosen], new_tokens, eos=None, pad=0)
                    for step in range(new_tokens):
                        counts_LE[:] = 0
                        together.step()
                        tokens_TLSE[round_ * new_tokens + step, :, source] = counts_LE
                        passes.append((source, round_ * new_tokens + step, int(counts_LE[0].sum()) // model.top_k))
                advance()
    if not token_level:
        return tokens_TLSE, None
    source_P, window_P, tokens_P = np.array(passes).T
    experts_ULK = np.stack([np.concatenate(kept) for kept in kept_L], axis=1)
    return tokens_TLSE, Choices(experts_ULK, np.repeat(source_P, tokens_P), np.repeat(window_P, tokens_P))
