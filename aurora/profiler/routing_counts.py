"""What rounds of batches add up to, window by window: a value, so that stopping anywhere leaves whole rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aurora.profiler.routing_hooks import Pass
from aurora.types import STAGES, CoActivation, Profile, TokenRouting
from aurora.types.arrays import IntArray

Kept = tuple[NDArray[Any], IntArray, IntArray, IntArray]  # experts_ULK, source_U, window_U, sequence_U


@dataclass(frozen=True)
class RoutingCounts:
    """windows: counts (L, S, E) int64 of each. stages: which of STAGES each is of. prompts: how many were served. kept: every
    token's choices, part by part. pairs: of all tokens. The last two are empty where they are not asked for."""

    windows: tuple[IntArray, ...] = ()
    stages: tuple[str, ...] = ()
    prompts: int = 0
    kept: tuple[Kept, ...] = ()
    coactivation: CoActivation | None = None

    @classmethod
    def of(cls, profile: Profile, prompts: int) -> Self:
        """What a profile of `prompts` prompts holds, to go on from."""
        assert profile.stage_T is not None
        kept: tuple[Kept, ...] = ()
        if (routing := profile.routing) is not None:
            assert routing.sequence_U is not None
            kept = ((routing.experts_ULK, routing.source_U, routing.window_U, routing.sequence_U),)
        return cls(tuple(profile.tokens_TLSE), profile.stage_T, prompts, kept, profile.coactivation)

    @property
    def rounds(self) -> int:
        return self.stages.count(STAGES[0])

    @property
    def tokens_TLSE(self) -> IntArray:
        return np.stack(self.windows)

    @property
    def routing(self) -> TokenRouting | None:
        return TokenRouting(*(np.concatenate(parts) for parts in zip(*self.kept, strict=True))) if self.kept else None

    def add(
        self,
        passes: Sequence[Pass],
        batches: Sequence[Sequence[list[int]]],
        window: int | None,
        top_k: int,
        routing: bool,
        coactivation: bool,
    ) -> Self:
        """With one more round. window: tokens of all sources after which a window closes, at the end of a pass of all of them;
        None makes each such pass a window. Prefill and decode have windows apart."""
        windows, stages, kept = list(self.windows), list(self.stages), list(self.kept)
        sources, (layers, experts) = len(batches), passes[0].counts_LE.shape
        sums = [self.coactivation] if self.coactivation else []
        for step in sorted({each.step for each in passes}):
            together = [each for each in passes if each.step == step]
            stage = together[0].stage
            at = _open_window(windows, stages, stage, window, top_k)
            if at == len(windows):
                windows.append(np.zeros((layers, sources, experts), dtype=np.int64))
                stages.append(stage)
            counts_LSE = windows[at].copy()
            for each in together:
                counts_LSE[:, each.source] += each.counts_LE
                if routing and each.experts_ULK is not None:
                    source_U = np.full(len(each.prompt_U), each.source)
                    # Prompt i of the corpus went to source i mod S of its round.
                    sequence_U = self.prompts + each.prompt_U * sources + each.source
                    kept.append((each.experts_ULK, source_U, np.full_like(source_U, at), sequence_U))
                if coactivation and each.experts_ULK is not None:
                    sums.append(CoActivation.of(each.experts_ULK, experts))
            windows[at] = counts_LSE
        served = self.prompts + sum(map(len, batches))
        return type(self)(tuple(windows), tuple(stages), served, tuple(kept), CoActivation.sum(sums) if sums else None)


def _open_window(windows: list[IntArray], stages: list[str], stage: str, window: int | None, top_k: int) -> int:
    """The window that takes the next pass of `stage`: its last one until that is full, else a new one."""
    if window is not None and stage in stages:
        last = len(stages) - 1 - stages[::-1].index(stage)
        if int(windows[last][0].sum()) < window * top_k:
            return last
    return len(windows)
