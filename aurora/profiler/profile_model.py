"""Profiles a model: counts its routing on text, and times its phases on this machine. An interrupted count can be continued.

Hooks record the choices of each forward pass. A round serves one batch of prompts per source rank; rounds form windows.
"""

import datetime
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.attention import known_kv_bytes
from aurora.algorithms.workload.load_statistics import LEVEL, MIN_ROUNDS, contiguous_interval
from aurora.errors import BadInput
from aurora.io.prompts import check_corpus
from aurora.models.decoding import GreedyBatch
from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import Corpus
from aurora.profiler.compute_timing import measure_curves
from aurora.profiler.import_routing import file_digest
from aurora.runtime.distributed.launcher import start_fork_server
from aurora.types import STAGES, Profile, ProfileOptions, TokenRouting
from aurora.types.arrays import IntArray
from aurora.types.profile import CurvesByKind
from aurora.types.read_numbers import whole_number

Batches = list[list[list[int]]]  # of one round: by source, its prompts
Kept = tuple[NDArray[Any], IntArray, IntArray, IntArray | None]  # experts_ULK, source_U, window_U, sequence_U


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
    """Takes the next batch of prompts for every source rank; returns the batches by rank, dealt round robin."""
    some = list(islice(prompts, options.sources * options.batch))
    return [some[source :: options.sources] for source in range(options.sources)]


@contextmanager
def record_choices(model: MoeModel) -> Iterator[list[torch.Tensor]]:
    """Context manager that yields a list; each forward pass overwrites it with, per layer, the experts (N, K) of its tokens.

    Its hooks compute and copy nothing, so they neither wait for the device nor change the output.
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


def count_choices(chosen_TL: Sequence[Sequence[torch.Tensor]], experts: int) -> tuple[torch.Tensor, IntArray]:
    """Counts the choices of P forward passes.

    Args:
        chosen_TL: for each pass the list that `record_choices` filled, (N, K) for each layer.
        experts: number of experts of a layer.

    Returns:
        (experts_ULK, counts_TLE): (U, L, K) the experts of all tokens, pass by pass, on the device of `chosen_TL`; and
        (P, L, E) int64, the tokens of each expert.
    """
    chosen_ULK = torch.stack([torch.cat(of_layer) for of_layer in zip(*chosen_TL, strict=True)], dim=1)
    passes, layers, device = len(chosen_TL), len(chosen_TL[0]), chosen_ULK.device
    tokens_T = torch.tensor([len(chosen_L[0]) for chosen_L in chosen_TL], device=device)
    pass_U = torch.arange(passes, device=device).repeat_interleave(tokens_T, output_size=len(chosen_ULK))
    first_UL = (pass_U[:, None] * layers + torch.arange(layers, device=device)) * experts
    counts = torch.bincount((chosen_ULK + first_UL[:, :, None]).flatten(), minlength=passes * layers * experts)
    return chosen_ULK, counts.cpu().numpy().reshape(passes, layers, experts)


def route_round(model: MoeModel, batches: Sequence[Sequence[list[int]]], new_tokens: int, keep: bool) -> list[ForwardPass]:
    """Serves one round of prompts. Returns the routing of each of its forward passes.

    Prompts of different lengths are padded; padding is not counted. All passes of a batch are counted together at its end.
    """
    narrow = np.uint8 if model.experts <= 256 else np.uint16
    passes = []
    with record_choices(model) as chosen_L:
        for source, prompts in enumerate(batches):
            if not prompts:
                continue
            # No end-of-text token, so that a profile's windows keep their size.
            batch = GreedyBatch(model.model, prompts, [new_tokens] * len(prompts), eos=None, pad=0)
            lengths = [len(prompt) for prompt in prompts]
            real_N = None if (mask_BT := batch.mask_BT) is None else mask_BT.flatten()
            batch.step()
            chosen_TL = [list(chosen_L) if real_N is None else [chosen_NK[real_N] for chosen_NK in chosen_L]]
            for _ in range(1, new_tokens):
                batch.step()
                chosen_TL.append(list(chosen_L))
            chosen_ULK, counts_TLE = count_choices(chosen_TL, model.experts)
            kept_ULK = chosen_ULK.cpu().numpy().astype(narrow) if keep else None
            begin = 0
            for step, counts_LE in enumerate(counts_TLE):
                prompt_U = np.repeat(np.arange(len(prompts)), lengths if step == 0 else 1)
                own_ULK = None if kept_ULK is None else kept_ULK[begin : begin + len(prompt_U)]
                passes.append(ForwardPass(source, step, counts_LE, own_ULK, prompt_U))
                begin += len(prompt_U)
    return passes


@dataclass(frozen=True)
class RoutingCounts:
    """Routing counts of all completed rounds so far, as an immutable value: `add` returns new counts."""

    windows: tuple[IntArray, ...] = ()  # for each window, (L, S, E) int64, the tokens by layer, source and expert
    stages: tuple[str, ...] = ()  # the stage of each window, one of STAGES
    prompts: int = 0  # how many prompts were served
    kept: tuple[Kept, ...] = ()  # each token's experts, pass by pass; empty if they are not recorded

    @classmethod
    def of(cls, begun: Profile, job: str) -> Self:
        """Returns the counts of an interrupted profile, to go on from; BadInput if they are of another job (see `job_of`)."""
        if begun.provenance.get("job") != job or begun.stage_T is None:
            whose = "the interrupted counts of this model, text and options, found those of others"
            raise BadInput(f"profile: expected {whose}; remove the file to start afresh")
        served = whole_number(begun.provenance["interrupted"].removeprefix("after ").removesuffix(" prompts"))
        routing = begun.routing
        kept = () if routing is None else ((routing.experts_ULK, routing.source_U, routing.window_U, routing.sequence_U),)
        return cls(tuple(begun.tokens_TLSE), begun.stage_T, served, kept)

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
        """Returns the counts with one more round added: `passes` is the result of `route_round(model, batches, ...)`.

        Windows hold either prefill or decode passes. A window closes at the end of the pass that fills it.
        """
        windows, stages, kept = list(self.windows), list(self.stages), list(self.kept)
        sources, (layers, experts) = len(batches), passes[0].counts_LE.shape
        for step in sorted({forward.step for forward in passes}):
            of_step = [forward for forward in passes if forward.step == step]
            stage = of_step[0].stage
            at = _open_window(windows, stages, stage, options.window, top_k)
            if at == len(windows):
                windows.append(np.zeros((layers, sources, experts), dtype=np.int64))
                stages.append(stage)
            counts_LSE = windows[at].copy()
            for forward in of_step:
                counts_LSE[:, forward.source] += forward.counts_LE
                if options.token_level and forward.experts_ULK is not None:
                    source_U = np.full(len(forward.prompt_U), forward.source)
                    # Prompt i of the corpus went to source i mod S of its round.
                    sequence_U = self.prompts + forward.prompt_U * sources + forward.source
                    kept.append((forward.experts_ULK, source_U, np.full_like(source_U, at), sequence_U))
            windows[at] = counts_LSE
        served = self.prompts + sum(map(len, batches))
        return type(self)(tuple(windows), tuple(stages), served, tuple(kept))


def _open_window(windows: list[IntArray], stages: list[str], stage: str, window: int | None, top_k: int) -> int:
    """The index of the window for the next pass of `stage`: the stage's last window unless it is full, else a new one."""
    if window is not None and stage in stages:
        last = len(stages) - 1 - stages[::-1].index(stage)
        if int(windows[last][0].sum()) < window * top_k:
            return last
    return len(windows)


CHECK_AGAIN = 1.1  # precision is checked again after this many times the rounds of the last check


def profile_model(
    model: str | Path,
    text: Sequence[str | Path],
    options: ProfileOptions = ProfileOptions(),
    progress: Progress = no_progress,
    begun: Profile | None = None,
) -> Profile:
    """Counts how a model routes tokens, and times its gate, experts and aggregation on this machine.

    A KeyboardInterrupt ends the counting: the profile then has the rounds that were complete, and "interrupted" in its
    provenance. Counting can go on from it.

    Args:
        model: the folder of a transformers MoE model.
        text: files of text, prompts or chats (.txt, .jsonl) that the model serves.
        options: number of source ranks, length of prompts, when to stop, and more.
        progress: called with (name of the work, amount done, whole amount).
        begun: a profile of the same model, text and options whose counting was interrupted, to go on from; None: there is none.

    Returns:
        The Profile: (token, expert) pairs by window, layer, source rank and expert, and compute curves of this GPU kind.

    Raises:
        BadInput: if the folder holds no MoE model, or there is less than one prompt for each source rank, or `begun` is of
            another model, text or options.
        MissingDependency: if torch or transformers is not installed.
        KeyboardInterrupt: if it is interrupted before the first round is complete.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> options = aurora.ProfileOptions(sources=2, prompt_tokens=16, limit=4)
        >>> aurora.profile(shipped("models/mixtral-topics"), [shipped("models/train.py")], options).tokens_TLSE.shape[1:]
        (4, 2, 8)
    """
    if not text:
        raise BadInput("profile: expected at least one text file, found none")
    check_corpus(text)
    start_fork_server()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = load_model(model, device)
    corpus = Corpus(opened.tokenizer, opened.vocabulary, text, options.prompt_tokens)
    provenance = _provenance(opened, text, options, device)
    prompts, job = islice(corpus, options.limit), job_of(opened.fingerprint(), provenance["text"], options)
    counts = RoutingCounts() if begun is None else RoutingCounts.of(begun, job)
    batches = next_round(islice(prompts, counts.prompts, None), options)
    if begun is None:
        _check_enough(batches, text, options)
        progress("timing phases", 0, 1)
        most = max(sum(map(len, of_source)) for of_source in batches)
        timed = measure_curves(model, max_tokens=2 * most, sequence_tokens=options.prompt_tokens, processes=options.share)
        progress("timing phases", 1, 1)
        curves, provenance = timed.kinds, {**provenance, **timed.provenance}
    else:
        before = {name: said for name, said in begun.provenance.items() if name not in ("interrupted", "job")}
        curves, provenance = begun.curves, {**before, **provenance}
    checked = 0.0
    try:
        while any(batches):
            passes = route_round(opened, batches, options.max_new_tokens, options.token_level)
            counts = counts.add(passes, batches, options, opened.top_k)
            fraction = (counts.prompts, options.limit) if options.limit else (corpus.read_bytes, corpus.size_bytes)
            progress("counting tokens", *fraction)
            if options.precision is not None and counts.rounds >= max(MIN_ROUNDS, checked * CHECK_AGAIN):
                checked = counts.rounds
                if _half_width(_profile(opened, counts, curves, provenance), options) <= options.precision:
                    break
            batches = next_round(prompts, options)
    except KeyboardInterrupt:
        if not counts.prompts:
            raise
        provenance |= {"interrupted": f"after {counts.prompts} prompts", "job": job}
    served = f"{counts.prompts} of {options.prompt_tokens} tokens at most, {options.max_new_tokens} new tokens each"
    made = _profile(opened, counts, curves, {**provenance, "prompts": served})
    return made if options.precision is None else replace(made, provenance={**made.provenance, **_precision(made, options)})


def _profile(model: MoeModel, counts: RoutingCounts, curves: CurvesByKind, provenance: Mapping[str, str]) -> Profile:
    """The Profile of a model's counts."""
    return Profile(
        model=model.name,
        fingerprint=model.fingerprint(),
        tokens_TLSE=counts.tokens_TLSE,
        top_k=model.top_k,
        dispatch_bytes=model.row_bytes,
        combine_bytes=model.row_bytes,
        expert_bytes=model.expert_bytes,
        other_bytes=model.other_bytes,
        curves=curves,
        provenance=provenance,
        routing=counts.routing,
        stage_T=counts.stages,
        dense_layers=model.dense_layers,
        expert_groups=model.expert_groups,
        kv_bytes=known_kv_bytes(model.model.config.to_dict()),
    )


def job_of(fingerprint: str, text: str, options: ProfileOptions) -> str:
    """Returns a hash of all inputs that determine the counts; options on timing, and on when counting ends, are left out."""
    counted = replace(options, precision=None, seed=0, share=1)
    return hashlib.sha256(repr((fingerprint, text, counted)).encode()).hexdigest()


def _half_width(profile: Profile, options: ProfileOptions) -> float:
    """Half of the interval of the bottleneck's load, relative, which options.precision is compared with; takes a resampling."""
    return contiguous_interval(profile, options.seed).half_width


def _precision(profile: Profile, options: ProfileOptions) -> dict[str, str]:
    """The precision that was reached, as an entry of provenance."""
    half_width, tokens = _half_width(profile, options), int(profile.tokens_TLSE[:, 0].sum()) // profile.top_k
    known = f"the bottleneck of experts in order on {options.sources} ranks is known within {half_width:.2%}"
    more = "" if half_width <= (asked := options.precision or 0.0) else f"; {asked:.2%} wants more text"
    return {"precision": f"{known} at {LEVEL:.0%} after {tokens} tokens{more}"}


def _check_enough(first: Batches, files: Sequence[str | Path], options: ProfileOptions) -> None:
    """Raise BadInput unless the first round has a prompt for each source."""
    count = sum(map(len, first))
    if count < options.sources:
        names = ", ".join(map(str, files))
        if not count:
            raise BadInput(f"{names}: too little text for one prompt of {options.prompt_tokens} tokens")
        raise BadInput(
            f"{names}: expected a prompt of {options.prompt_tokens} tokens for each of {options.sources} sources, found {count}"
        )


def _provenance(model: MoeModel, files: Sequence[str | Path], options: ProfileOptions, device: str) -> dict[str, str]:
    return {
        "tool": "aurora profile",
        "architecture": type(model.model).__name__,
        "text": ", ".join(f"{Path(f).name} sha256:{file_digest(f)}" for f in files),
        "compute": f"{options.share} processes at a time on {os.cpu_count()} cores, {platform.machine()}, {device}",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
