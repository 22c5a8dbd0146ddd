"""Redundant counting: several workers count a profile's routing, and slow ones are not waited for if others have their parts.

Source: BCC (arXiv:1710.09990).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import Corpus
from aurora.profiler.routing_counts import Batches, ForwardPass, RoutingCounts, keeps_choices, next_round, route_round
from aurora.runtime.distributed.aggregation_round import Watch
from aurora.runtime.distributed.aggregation_worker import Delay
from aurora.runtime.distributed.coded_aggregation import coded_sum
from aurora.runtime.distributed.launcher import RankInfo
from aurora.types import CoActivation, CountingOptions, ProfileOptions
from aurora.types.arrays import IntArray


def count_with_workers(
    model: MoeModel,
    path: str | Path,
    files: Sequence[str | Path],
    options: ProfileOptions,
    counting: CountingOptions,
    *,
    watch: Watch = lambda _reports: None,
    rank_info: RankInfo | None = None,
    delay_s: Delay | None = None,
) -> RoutingCounts:
    """Counts routing by workers that each load the model, read all of the text and serve parts of it.

    A part is every n-th batch of prompts. A worker sends its counts minus stand-in counts, which all workers invent alike from
    the prompts' lengths. Such differences add up, even in windows that no worker saw whole.
    """
    stand_in, batches = RoutingCounts(), 0
    for round_ in _rounds(model, files, options):
        stand_in = stand_in.add(_stand_in(model, round_, options), round_, options, model.top_k)
        batches += sum(map(bool, round_))
    parts = min(counting.workers, batches)
    result = coded_sum(
        _Part(str(path), tuple(map(str, files)), options, parts),
        parts,
        counting.workers,
        counting.copies,
        counting.scheme,
        like=packed(stand_in),
        rng=np.random.default_rng(counting.seed),
        timeout_s=counting.timeout_s,
        agreeing=counting.agreeing,
        delay_s=delay_s,
        watch=watch,
        rank_info=rank_info,
    )
    return unpacked(packed(stand_in) + result.total, stand_in)


@dataclass(frozen=True)
class _Part:
    """A worker's task: the counts of part `number` of `parts`, minus the stand-in counts."""

    path: str
    files: tuple[str, ...]
    options: ProfileOptions
    parts: int

    def __call__(self, number: int, _arguments: object) -> IntArray:
        model = _loaded(self.path)
        state, stand_in, before = RoutingCounts(), RoutingCounts(), 0
        for round_ in _rounds(model, self.files, self.options):
            invented = _stand_in(model, round_, self.options)
            mine: Batches = []
            for prompts in round_:
                mine.append(prompts if (before % self.parts) == number else [])
                before += bool(prompts)
            served = route_round(model, mine, self.options.max_new_tokens, keeps_choices(self.options)) if any(mine) else []
            others = [each for each in invented if not mine[each.source]]
            passes = sorted(served + others, key=lambda each: each.source)
            state = state.add(passes, round_, self.options, model.top_k)
            stand_in = stand_in.add(invented, round_, self.options, model.top_k)
        return packed(state) - packed(stand_in)


def _rounds(model: MoeModel, files: Sequence[str | Path], options: ProfileOptions) -> Iterator[Batches]:
    """Yield the rounds of prompts of a text."""
    prompts = islice(Corpus(model.tokenizer, model.vocabulary, files, options.prompt_tokens), options.limit)
    while any(round_ := next_round(prompts, options)):
        yield round_


def _stand_in(model: MoeModel, round_: Batches, options: ProfileOptions) -> list[ForwardPass]:
    """The stand-in passes of a round, as if every token chose expert 0 top_k times."""
    made = []
    for source, prompts in enumerate(round_):
        for step in range(options.max_new_tokens if prompts else 0):
            prompt_U = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts] if step == 0 else 1)
            counts_LE = np.zeros((len(model.layers), model.experts), dtype=np.int64)
            counts_LE[:, 0] = len(prompt_U) * model.top_k
            shape = (len(prompt_U), len(model.layers), model.top_k)
            experts_ULK = np.zeros(shape, np.uint8) if keeps_choices(options) else None
            made.append(ForwardPass(source, step, counts_LE, experts_ULK, prompt_U))
    return made


def packed(state: RoutingCounts) -> IntArray:
    """Returns all counts as one array (N,) int64; the arrays of two counts of the same prompts can be added."""
    arrays = [*state.windows, *(experts_ULK for experts_ULK, *_ in state.kept)]
    if state.coactivation is not None:
        arrays += [state.coactivation.together_LEE, state.coactivation.next_LEE]
    return np.concatenate([array.astype(np.int64).ravel() for array in arrays])


def unpacked(total: IntArray, like: RoutingCounts) -> RoutingCounts:
    """Returns the counts in `total` (N,), an array from `packed` or a sum of such; `like` are counts of the same prompts."""
    at = 0

    def next_like(array: NDArray[Any]) -> IntArray:
        """The next values of `total`, in the array's shape."""
        nonlocal at
        at += array.size
        return total[at - array.size : at].reshape(array.shape)

    windows = tuple(next_like(counts_LSE) for counts_LSE in like.windows)
    kept = tuple((next_like(experts_ULK), source_U, at_U, prompt_U) for experts_ULK, source_U, at_U, prompt_U in like.kept)
    coactivation = None
    if (before := like.coactivation) is not None:
        coactivation = CoActivation(next_like(before.together_LEE), next_like(before.next_LEE))
    return replace(like, windows=windows, kept=kept, coactivation=coactivation)


@lru_cache(maxsize=1)
def _loaded(path: str) -> MoeModel:
    """The model on this machine's device, loaded at most once per process."""
    return load_model(path, "cuda" if torch.cuda.is_available() else "cpu")
