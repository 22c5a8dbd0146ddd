"""Routing counts: hooks record each forward pass's choices, and rounds of passes add up to windows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel
from aurora.types import STAGES, CoActivation, Profile, ProfileOptions, TokenRouting
from aurora.types.arrays import IntArray

Batches = list[list[list[int]]]  # of one round: by source, its prompts
Kept = tuple[NDArray[Any], IntArray, IntArray, IntArray]  # experts_ULK, source_U, window_U, sequence_U


@dataclass(frozen=True)
class ForwardPass:
    """Routing of one forward pass of one source rank."""

    source: int  # the rank
    step: int  # 0 for the prefill, n for the n-th decode pass
    counts_LE: IntArray  # (L, E) int64, the tokens of each expert
    experts_ULK: NDArray[Any] | None  # (U, L, K) uint8 or uint16, each token's experts; None if they are not recorded
    prompt_U: IntArray  # (U,) int64, the prompt in the batch that each token belongs to

    @property
    def stage(self) -> str:
        """One of STAGES: prefill or decode."""
        return STAGES[min(self.step, 1)]


def next_round(prompts: Iterator[list[int]], options: ProfileOptions) -> Batches:
    """Returns the next round of prompts by source, dealt out round robin."""
    some = list(islice(prompts, options.sources * options.batch))
    return [some[source :: options.sources] for source in range(options.sources)]


def keeps_choices(options: ProfileOptions) -> bool:
    """Returns whether each token's experts are recorded, not only their counts."""
    return options.token_level or options.coactivation


@contextmanager
def record_choices(model: MoeModel) -> Iterator[list[torch.Tensor]]:
    """Context manager that yields a list; each forward pass fills it anew with, for each layer, its tokens' experts (N, K).

    The hooks compute and copy nothing, so they neither wait for the device nor change the output.
    """
    chosen_L: list[torch.Tensor] = [torch.empty(0)] * len(model.layers)

    def hook(layer: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...]) -> None:
            chosen_L[layer] = args[1]

        return keep

    handles = [layer.experts.register_forward_pre_hook(hook(number)) for number, layer in enumerate(model.layers)]
    try:
        yield chosen_L
    finally:
        for handle in handles:
            handle.remove()


def count_choices(chosen_PL: Sequence[Sequence[torch.Tensor]], experts: int) -> tuple[torch.Tensor, IntArray]:
    """Counts the choices of P forward passes.

    Args:
        chosen_PL: for each pass the list that `record_choices` filled, (N, K) for each layer.
        experts: number of experts of a layer.

    Returns:
        (experts_ULK, counts_PLE): (U, L, K) the experts of all tokens, pass by pass, on the device of `chosen_PL`; and
        (P, L, E) int64, the tokens of each expert.
    """
    chosen_ULK = torch.stack([torch.cat(of_layer) for of_layer in zip(*chosen_PL, strict=True)], dim=1)
    passes, layers, device = len(chosen_PL), len(chosen_PL[0]), chosen_ULK.device
    tokens_P = torch.tensor([len(chosen_L[0]) for chosen_L in chosen_PL], device=device)
    pass_U = torch.arange(passes, device=device).repeat_interleave(tokens_P, output_size=len(chosen_ULK))
    first_UL = (pass_U[:, None] * layers + torch.arange(layers, device=device)) * experts
    counts = torch.bincount((chosen_ULK + first_UL[:, :, None]).flatten(), minlength=passes * layers * experts)
    return chosen_ULK, counts.cpu().numpy().reshape(passes, layers, experts)


def route_round(model: MoeModel, batches: Sequence[Sequence[list[int]]], new_tokens: int, keep: bool) -> list[ForwardPass]:
    """Serves one round and returns the routing of each of its forward passes.

    Prompts of different lengths are padded; padding is not counted. A batch's passes are counted at its end, all at once.
    """
    narrow = np.uint8 if model.experts <= 256 else np.uint16
    made = []
    with record_choices(model) as chosen_L:
        for source, prompts in enumerate(batches):
            if not prompts:
                continue
            # No end-of-text token, so that a profile's windows keep their size.
            batch = GreedyBatch(model.model, prompts, [new_tokens] * len(prompts), eos=None, pad=0)
            lengths = [len(prompt) for prompt in prompts]
            real_N = None if (mask_BT := batch.mask_BT) is None else mask_BT.flatten()
            batch.step()
            chosen_PL = [list(chosen_L) if real_N is None else [chosen_NK[real_N] for chosen_NK in chosen_L]]
            for _ in range(1, new_tokens):
                batch.step()
                chosen_PL.append(list(chosen_L))
            chosen_ULK, counts_PLE = count_choices(chosen_PL, model.experts)
            kept_ULK = chosen_ULK.cpu().numpy().astype(narrow) if keep else None
            done = 0
            for step, counts_LE in enumerate(counts_PLE):
                prompt_U = np.repeat(np.arange(len(prompts)), lengths if step == 0 else 1)
                own_ULK = None if kept_ULK is None else kept_ULK[done : done + len(prompt_U)]
                made.append(ForwardPass(source, step, counts_LE, own_ULK, prompt_U))
                done += len(prompt_U)
    return made


@dataclass(frozen=True)
class RoutingCounts:
    """Counts of all whole rounds so far. They never change: `add` returns new counts."""

    windows: tuple[IntArray, ...] = ()  # for each window, (L, S, E) int64, the tokens by layer, source and expert
    stages: tuple[str, ...] = ()  # the stage of each window, one of STAGES
    prompts: int = 0  # how many prompts were served
    kept: tuple[Kept, ...] = ()  # each token's experts, pass by pass; empty if they are not recorded
    coactivation: CoActivation | None = None  # how often experts are chosen at the same time; None if this is not counted

    @classmethod
    def of(cls, profile: Profile, prompts: int) -> Self:
        """Returns the counts in a profile that was made from `prompts` prompts, so that counting can go on."""
        assert profile.stage_T is not None
        kept: tuple[Kept, ...] = ()
        if (routing := profile.routing) is not None:
            assert routing.sequence_U is not None
            kept = ((routing.experts_ULK, routing.source_U, routing.window_U, routing.sequence_U),)
        return cls(tuple(profile.tokens_TLSE), profile.stage_T, prompts, kept, profile.coactivation)

    @property
    def rounds(self) -> int:
        """The number of prefill windows: one per round unless windows have a given size."""
        return self.stages.count(STAGES[0])

    @property
    def tokens_TLSE(self) -> IntArray:
        """(T, L, S, E) int64: the tokens by window, layer, source and expert."""
        return np.stack(self.windows)

    @property
    def routing(self) -> TokenRouting | None:
        """Each token's experts; None if they are not recorded."""
        return TokenRouting(*(np.concatenate(parts) for parts in zip(*self.kept, strict=True))) if self.kept else None

    def add(
        self, passes: Sequence[ForwardPass], batches: Sequence[Sequence[list[int]]], options: ProfileOptions, top_k: int
    ) -> Self:
        """Returns the counts with one more round: its passes, as `route_round` returns them for its prompts by source.

        Windows hold either prefill or decode passes. A window closes at the end of the pass that fills it.
        """
        windows, stages, kept = list(self.windows), list(self.stages), list(self.kept)
        sources, (layers, experts) = len(batches), passes[0].counts_LE.shape
        sums = [self.coactivation] if self.coactivation else []
        for step in sorted({each.step for each in passes}):
            of_step = [each for each in passes if each.step == step]
            stage = of_step[0].stage
            at = _open_window(windows, stages, stage, options.window, top_k)
            if at == len(windows):
                windows.append(np.zeros((layers, sources, experts), dtype=np.int64))
                stages.append(stage)
            counts_LSE = windows[at].copy()
            for each in of_step:
                counts_LSE[:, each.source] += each.counts_LE
                if options.token_level and each.experts_ULK is not None:
                    source_U = np.full(len(each.prompt_U), each.source)
                    # Prompt i of the corpus went to source i mod S of its round.
                    sequence_U = self.prompts + each.prompt_U * sources + each.source
                    kept.append((each.experts_ULK, source_U, np.full_like(source_U, at), sequence_U))
                if options.coactivation and each.experts_ULK is not None:
                    sums.append(CoActivation.of(each.experts_ULK, experts))
            windows[at] = counts_LSE
        served = self.prompts + sum(map(len, batches))
        return type(self)(tuple(windows), tuple(stages), served, tuple(kept), CoActivation.sum(sums) if sums else None)


def _open_window(windows: list[IntArray], stages: list[str], stage: str, window: int | None, top_k: int) -> int:
    """The index of the window for the next pass of `stage`: the stage's last window unless it is full, else a new one."""
    if window is not None and stage in stages:
        last = len(stages) - 1 - stages[::-1].index(stage)
        if int(windows[last][0].sum()) < window * top_k:
            return last
    return len(windows)
