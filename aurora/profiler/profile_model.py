"""Profile of a model: its routing counted on text, and its phases timed on this machine; kept unfinished, to go on from."""

import datetime
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.io.prompts import check_corpus
from aurora.models.loading import MoeModel, load_model
from aurora.models.prompts import Corpus
from aurora.planner.workload.attention import known_kv_bytes
from aurora.planner.workload.load_statistics import LEVEL, MIN_ROUNDS, contiguous_load_intervals
from aurora.profiler.compute_timing import measure_curves
from aurora.profiler.import_routing import file_digest
from aurora.profiler.routing_counts import Batches, RoutingCounts, keeps_choices, next_round, route_round
from aurora.runtime.distributed.launcher import start_fork_server
from aurora.types import Profile, ProfileOptions
from aurora.types.profile import CurvesByKind

CHECK_AGAIN = 1.1  # precision is checked again after this many times the rounds of the last check

Progress = Callable[[str, int, int], None]  # what, done, in all
SAVE_S = 60.0  # from one saving of the counts to the next


def profile_model(
    model: str | Path,
    text: Sequence[str | Path],
    options: ProfileOptions = ProfileOptions(),
    progress: Progress = lambda _what, _done, _total: None,
    partial: str | Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Profile:
    """Measures how a model routes tokens, and how long its gate, experts and aggregation take on this machine.

    Args:
        model: the folder of a transformers MoE model.
        text: files of text, prompts or chats (.txt, .jsonl) that are served through it.
        options: how many source ranks the prompts are divided over, their length, when to stop.
        partial: a file that keeps the counts so far; if it exists already, counting goes on from it.
        progress: called with (what is being done, how much of it is done, how much there is in all).
        clock: returns seconds of any origin; by it `partial` is saved every minute.

    Returns:
        The Profile: (token, expert) pairs by window, layer, source rank and expert, and compute curves of this GPU kind.

    Raises:
        BadInput: if the folder holds no MoE model, or there is less than one prompt for each source rank.
        MissingDependency: if torch or transformers is not installed.

    Example:
        >>> import aurora
        >>> from aurora.io import shipped
        >>> options = aurora.ProfileOptions(sources=2, prompt_tokens=16, limit=4)
        >>> aurora.profile(shipped("models/mixtral-topics"), [shipped("models/train.py")], options).tokens_TLSE.shape[1:]
        (4, 2, 8)
    """
    opened, corpus, provenance = _open(model, text, options)
    prompts = islice(corpus, options.limit)
    unfinished = PartialProfile(
        None if partial is None else Path(partial), job_of(opened.fingerprint(), provenance["text"], options), clock
    )
    if (resumed := unfinished.load()) is not None:
        before, counts = resumed
        builder = _Builder(opened, before.curves, {**before.provenance, **provenance})
        first: Batches = []
        for _ in islice(prompts, counts.prompts):
            pass
    else:
        counts, first = RoutingCounts(), next_round(prompts, options)
        _check_enough(first, text, options)
        builder = _timed(model, opened, first, options, provenance, progress)
    precision = _Precision(options, builder)
    unfinished.begin()
    try:
        rounds = _rounds(opened, counts, first, prompts, options)
        for counts in rounds:
            done = (counts.prompts, options.limit) if options.limit else (corpus.read_bytes, corpus.size_bytes)
            progress("counting tokens", *done)
            if precision.reached(counts):
                break
            unfinished.save_if_due(builder.profile, counts)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(unfinished.save_interrupted(builder.profile, counts)) from None
    return builder.profile(counts, prompts=_served(counts, options), **precision.provenance(counts))


@dataclass(frozen=True)
class _Builder:
    """Makes a Profile of counts and of everything that is known before counting."""

    model: MoeModel
    curves: CurvesByKind
    provenance: Mapping[str, str]

    def profile(self, counts: RoutingCounts, **more: str) -> Profile:
        """The Profile of the counts, with further entries of provenance."""
        return Profile(
            model=self.model.name,
            fingerprint=self.model.fingerprint(),
            tokens_TLSE=counts.tokens_TLSE,
            top_k=self.model.top_k,
            dispatch_bytes=self.model.row_bytes,
            combine_bytes=self.model.row_bytes,
            expert_bytes=self.model.expert_bytes,
            other_bytes=self.model.other_bytes,
            curves=self.curves,
            provenance={**self.provenance, **more},
            routing=counts.routing,
            stage_T=counts.stages,
            coactivation=counts.coactivation,
            dense_layers=self.model.dense_layers,
            expert_groups=self.model.expert_groups,
            kv_bytes=known_kv_bytes(self.model.model.config.to_dict()),
        )


class _Precision:
    """Compares the precision of the bottleneck's load with options.precision."""

    def __init__(self, options: ProfileOptions, builder: _Builder) -> None:
        self._options, self._builder = options, builder
        self._checked_rounds, self._half_width = 0, float("inf")

    def reached(self, counts: RoutingCounts) -> bool:
        """Returns True once the counts are precise enough; checked at growing intervals, since a check costs a resampling."""
        if self._options.precision is None or counts.rounds < max(MIN_ROUNDS, self._checked_rounds * CHECK_AGAIN):
            return False
        self._check(counts)
        return self._half_width <= self._options.precision

    def provenance(self, counts: RoutingCounts) -> dict[str, str]:
        """The precision as an entry of provenance."""
        wanted = self._options.precision
        if wanted is None:
            return {}
        if self._checked_rounds < counts.rounds:
            self._check(counts)
        tokens = int(counts.tokens_TLSE[:, 0].sum()) // self._builder.model.top_k
        known = f"the bottleneck of experts in order on {self._options.sources} ranks is known within {self._half_width:.2%}"
        more = "" if self._half_width <= wanted else f"; {wanted:.2%} wants more text"
        return {"precision": f"{known} at {LEVEL:.0%} after {tokens} tokens{more}"}

    def _check(self, counts: RoutingCounts) -> None:
        """Estimate the half-width of the bottleneck's interval."""
        self._checked_rounds = counts.rounds
        self._half_width = contiguous_load_intervals(self._builder.profile(counts), self._options.seed).bottleneck.half_width


def _open(path: str | Path, files: Sequence[str | Path], options: ProfileOptions) -> tuple[MoeModel, Corpus, dict[str, str]]:
    """The model on this machine's device, the text, and the provenance that is known before anything is measured."""
    if not files:
        raise BadInput("profile: expected at least one text file, found none")
    check_corpus(files)
    start_fork_server()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, device)
    corpus = Corpus(model.tokenizer, model.vocabulary, files, options.prompt_tokens)
    return model, corpus, _provenance(model, files, options, device)


def _timed(
    path: str | Path,
    model: MoeModel,
    first: Batches,
    options: ProfileOptions,
    provenance: Mapping[str, str],
    progress: Progress,
) -> _Builder:
    """Time the phases, up to twice the largest number of tokens of a source in the `first` round."""
    progress("timing phases", 0, 1)
    most = max(sum(map(len, prompts)) for prompts in first)
    measured = measure_curves(path, max_tokens=most * 2, sequence_tokens=options.prompt_tokens, processes=options.share)
    progress("timing phases", 1, 1)
    return _Builder(model, measured.kinds, {**provenance, **measured.provenance})


def _served(counts: RoutingCounts, options: ProfileOptions) -> str:
    """The prompts served, as an entry of provenance."""
    return f"{counts.prompts} of {options.prompt_tokens} tokens at most, {options.max_new_tokens} new tokens each"


def _rounds(
    model: MoeModel, counts: RoutingCounts, first: Batches, prompts: Iterator[list[int]], options: ProfileOptions
) -> Iterator[RoutingCounts]:
    """Yield the counts after each further round, until the prompts end."""
    batches = first or next_round(prompts, options)
    while any(batches):
        passes = route_round(model, batches, options.max_new_tokens, keeps_choices(options))
        counts = counts.add(passes, batches, options, model.top_k)
        yield counts
        batches = next_round(prompts, options)


def _check_enough(first: Batches, files: Sequence[str | Path], options: ProfileOptions) -> None:
    """Raise BadInput unless the first round has a prompt for each source."""
    found = sum(map(len, first))
    if found < options.sources:
        names = ", ".join(map(str, files))
        if not found:
            raise BadInput(f"{names}: too little text for one prompt of {options.prompt_tokens} tokens")
        raise BadInput(
            f"{names}: expected a prompt of {options.prompt_tokens} tokens for each of {options.sources} sources, found {found}"
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


def job_of(fingerprint: str, text: str, options: ProfileOptions) -> str:
    """Returns a hash of everything that decides what is counted.

    It leaves out the precision at which counting ends, and the options of timing.
    """
    counted = replace(options, precision=None, seed=0, share=1)
    return hashlib.sha256(repr((fingerprint, text, counted)).encode()).hexdigest()


class PartialProfile:
    """The file that keeps the counts of a job so far."""

    def __init__(self, path: Path | None, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._job, self._clock, self._saved_s = path, job, clock, 0.0

    def load(self) -> tuple[Profile, RoutingCounts] | None:
        """Returns the profile so far and its counts; None if there is no file yet."""
        if self._path is None or not self._path.exists():
            return None
        profile = load_profile(self._path)
        if profile.provenance.get("job") != self._job or not profile.provenance.get("served", "").isdecimal():
            whose = "another model's, text's or options' unfinished counts"
            raise BadInput(f"{self._path}: keeps {whose}; remove it to start afresh")
        provenance = {name: said for name, said in profile.provenance.items() if name not in ("partial", "served", "job")}
        return replace(profile, provenance=provenance), RoutingCounts.of(profile, int(profile.provenance["served"]))

    def begin(self) -> None:
        """Starts the clock: the first saving is due in SAVE_S seconds."""
        self._saved_s = self._clock()

    def save_if_due(self, build: Callable[[RoutingCounts], Profile], counts: RoutingCounts) -> None:
        """Saves build(counts) if the last saving is at least SAVE_S ago."""
        if self._path is not None and self._clock() - self._saved_s >= SAVE_S:
            self._save(build(counts), counts.prompts, self._path)
            self._saved_s = self._clock()

    def save_interrupted(self, build: Callable[[RoutingCounts], Profile], counts: RoutingCounts) -> str:
        """Saves build(counts) unless nothing is counted. Returns a sentence for the user."""
        if self._path is None or not counts.prompts:
            return "nothing is kept"
        self._save(build(counts), counts.prompts, self._path)
        return f"{self._path} keeps the counts of {counts.prompts} prompts; the same command goes on from there"

    def _save(self, profile: Profile, prompts: int, path: Path) -> None:
        """Write the profile with what `load` needs to go on from it."""
        unfinished = {"partial": f"the first {prompts} prompts", "served": str(prompts), "job": self._job}
        save(replace(profile, provenance={**profile.provenance, **unfinished}), path)
