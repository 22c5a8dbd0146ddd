"""See where tokens go, by hooks: the model's output stays what it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel
from aurora.types import STAGES, ProfileOptions
from aurora.types.arrays import IntArray

Batches = list[list[list[int]]]  # of one round: by source, its prompts


@dataclass(frozen=True)
class Pass:
    """One forward pass of one rank. step: 0 is the prefill. counts_LE (L, E) int64: tokens of every expert. experts_ULK
    (U, L, K) uint8 or uint16, prompt_U (U,) int64: every token's choices and which of the batch's prompts it is of, where kept.
    """

    source: int
    step: int
    counts_LE: IntArray
    experts_ULK: NDArray[Any] | None
    prompt_U: IntArray

    @property
    def stage(self) -> str:
        return STAGES[min(self.step, 1)]


def next_round(prompts: Iterator[list[int]], options: ProfileOptions) -> Batches:
    """The next prompts, dealt out one after the other."""
    some = list(islice(prompts, options.sources * options.batch))
    return [some[source :: options.sources] for source in range(options.sources)]


@contextmanager
def watched(model: MoeModel) -> Iterator[list[torch.Tensor]]:
    """Inside the block, every forward pass puts its tokens' experts (N, K) into the yielded list, one item a layer.

    Nothing is computed or copied in the pass itself, so that a device is never waited for.
    """
    chosen_L: list[torch.Tensor] = [torch.empty(0)] * len(model.layers)

    def hook(layer: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen_L[layer] = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]

        return keep

    handles = [
        layer.experts.register_forward_pre_hook(hook(number), with_kwargs=True) for number, layer in enumerate(model.layers)
    ]
    try:
        yield chosen_L
    finally:
        for handle in handles:
            handle.remove()


def counted(chosen_PL: Sequence[Sequence[torch.Tensor]], experts: int) -> tuple[torch.Tensor, IntArray]:
    """The choices (U, L, K) of P passes' tokens, one after the other, on their device; and their counts_PLE (P, L, E) int64."""
    chosen_ULK = torch.stack([torch.cat(of_layer) for of_layer in zip(*chosen_PL, strict=True)], dim=1)
    passes, layers, device = len(chosen_PL), len(chosen_PL[0]), chosen_ULK.device
    tokens_P = torch.tensor([len(chosen_L[0]) for chosen_L in chosen_PL], device=device)
    pass_U = torch.arange(passes, device=device).repeat_interleave(tokens_P, output_size=len(chosen_ULK))
    first_UL = (pass_U[:, None] * layers + torch.arange(layers, device=device)) * experts
    counts = torch.bincount((chosen_ULK + first_UL[:, :, None]).flatten(), minlength=passes * layers * experts)
    return chosen_ULK, counts.cpu().numpy().reshape(passes, layers, experts)


def route_round(model: MoeModel, batches: Sequence[Sequence[list[int]]], new_tokens: int, keep: bool) -> list[Pass]:
    """Serve one batch of prompts on each source rank, `new_tokens` tokens each, and see every forward pass of it.

    keep: every token's choices, too. Prompts of unlike lengths are padded, and padding is not counted. What a batch's passes
    chose is counted at its end, all at once.
    """
    narrow = np.uint8 if model.experts <= 256 else np.uint16
    made = []
    with watched(model) as chosen_L:
        for source, prompts in enumerate(batches):
            if not prompts:
                continue
            # No end-of-text here: a profile's windows keep their size.
            together = GreedyBatch(model.model, prompts, [new_tokens] * len(prompts), eos=None, pad=0)
            lengths = [len(prompt) for prompt in prompts]
            real_N = together.mask_BT.flatten() if len(set(lengths)) > 1 else None
            together.step()
            chosen_PL = [list(chosen_L) if real_N is None else [chosen_NK[real_N] for chosen_NK in chosen_L]]
            for _ in range(1, new_tokens):
                together.step()
                chosen_PL.append(list(chosen_L))
            chosen_ULK, counts_PLE = counted(chosen_PL, model.experts)
            kept_ULK = chosen_ULK.cpu().numpy().astype(narrow) if keep else None
            done = 0
            for step, counts_LE in enumerate(counts_PLE):
                prompt_U = np.repeat(np.arange(len(prompts)), lengths if step == 0 else 1)
                own_ULK = None if kept_ULK is None else kept_ULK[done : done + len(prompt_U)]
                made.append(Pass(source, step, counts_LE, own_ULK, prompt_U))
                done += len(prompt_U)
    return made
