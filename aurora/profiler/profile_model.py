"""`aurora profile`: a model and text become a Profile."""

import datetime
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from aurora.errors import BadInput
from aurora.models.corpus import Corpus
from aurora.models.loading import MoeModel, load_model
from aurora.planner.make_plan import contiguous_intervals
from aurora.planner.workload.load_statistics import LEVEL, MIN_ROUNDS
from aurora.profiler.compute_timing import measure_curves
from aurora.profiler.partial_profile import job_of, read_partial, save_partial
from aurora.profiler.redundant_counting import CountingWorkers, count_with_workers
from aurora.profiler.routing_counts import RoutingCounts
from aurora.profiler.routing_hooks import Batches, next_round, route_round
from aurora.runtime.distributed.launcher import start_fork_server
from aurora.types import Profile, ProfileOptions
from aurora.types.profile import CurvesByKind

SAVE_S = 60.0  # between two savings of what is counted so far
LOOK = 1.1  # precision is looked at when there are so many times the rounds of the last look


def profile_model(
    path: str | Path,
    files: Sequence[str | Path],
    options: ProfileOptions = ProfileOptions(),
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    partial: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Profile:
    """Time the model's phases on this machine, then serve the files' prompts through it in this process, counting.

    partial: where what is counted so far is kept as a valid profile, every SAVE_S and when interrupted; KeyboardInterrupt then
    says so. Where one lies already, counting goes on from it. Raises BadInput where the path is no MoE model, there is less
    than one prompt a source, or the partial profile is of another model, text or options.
    """
    if not files:
        raise BadInput("profile: expected at least one text file, found none")
    start_fork_server()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, device)
    corpus = Corpus(model.tokenizer, model.vocabulary, files, options.prompt_tokens)
    prompts = islice(corpus, options.limit)
    about = _provenance(model, files, options, device)
    job = job_of(model.fingerprint(), about["text"], options)
    if partial is not None and partial.exists():
        unfinished, begun = read_partial(partial, job)
        curves, about = unfinished.curves, {**unfinished.provenance, **about}
        first: Batches = []
        for _ in islice(prompts, begun.prompts):
            pass
    else:
        begun, first = RoutingCounts(), next_round(prompts, options)
        _check_enough(first, files, options)
        curves, about = _timed(path, first, options, about, progress)
    state, saved_s, looked, half_width = begun, clock(), 0, None
    try:
        for state in _states(model, begun, first, prompts, options):
            done = (state.prompts, options.limit) if options.limit else (corpus.read_bytes, corpus.size_bytes)
            progress("counting tokens", *done)
            if options.precision is not None and state.rounds >= max(MIN_ROUNDS, looked * LOOK):
                looked, half_width = state.rounds, _half_width(_profile(model, curves, state, about), options.seed)
                if half_width <= options.precision:
                    break
            if partial is not None and clock() - saved_s >= SAVE_S:
                save_partial(_profile(model, curves, state, about), state.prompts, job, partial)
                saved_s = clock()
    except KeyboardInterrupt:
        if partial is None or not state.prompts:
            raise KeyboardInterrupt("nothing is kept") from None
        save_partial(_profile(model, curves, state, about), state.prompts, job, partial)
        kept = f"{partial} keeps the counts of {state.prompts} prompts; the same command goes on from there"
        raise KeyboardInterrupt(kept) from None
    about["prompts"] = _served(state, options)
    if options.precision is not None:
        if half_width is None or looked < state.rounds:
            half_width = _half_width(_profile(model, curves, state, about), options.seed)
        tokens = int(state.tokens_TLSE[:, 0].sum()) // model.top_k
        known = f"the bottleneck of experts in order on {options.sources} ranks is known within {half_width:.2%} at {LEVEL:.0%}"
        more = "" if half_width <= options.precision else f"; {options.precision:.2%} wants more text"
        about["precision"] = f"{known} after {tokens} tokens{more}"
    return _profile(model, curves, state, about)


def profile_with_workers(
    path: str | Path,
    files: Sequence[str | Path],
    options: ProfileOptions,
    fleet: CountingWorkers,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Profile:
    """What profile_model counts, counted by the fleet's workers, and then the phases' times on this machine.

    Under torchrun every rank calls this and only rank 0 returns. Raises as profile_model and collect do, and BadInput for
    options.precision, which is known only where rounds come one after the other.
    """
    if not files:
        raise BadInput("profile: expected at least one text file, found none")
    if options.precision is not None:
        raise BadInput("`precision`: expected no `workers`, who count all of the text at once and cannot stop early")
    start_fork_server()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, device)
    first = next_round(islice(Corpus(model.tokenizer, model.vocabulary, files, options.prompt_tokens), options.limit), options)
    _check_enough(first, files, options)
    state = count_with_workers(model, path, files, options, fleet)
    curves, about = _timed(path, first, options, _provenance(model, files, options, device), progress)
    return _profile(model, curves, state, {**about, "prompts": _served(state, options)})


def _timed(
    path: str | Path,
    first: Batches,
    options: ProfileOptions,
    about: Mapping[str, str],
    progress: Callable[[str, int, int], None],
) -> tuple[CurvesByKind, dict[str, str]]:
    """The phases' curves, up to twice what a source holds of the `first` round, and `about` with how they were measured."""
    progress("timing phases", 0, 1)
    most = max(sum(map(len, prompts)) for prompts in first)
    measured = measure_curves(str(path), tokens=most * 2, length=options.prompt_tokens, share=options.share)
    progress("timing phases", 1, 1)
    return measured.kinds, {**about, **measured.provenance}


def _served(state: RoutingCounts, options: ProfileOptions) -> str:
    return f"{state.prompts} of {options.prompt_tokens} tokens at most, {options.max_new_tokens} new tokens each"


def _states(
    model: MoeModel, state: RoutingCounts, first: Batches, prompts: Iterator[list[int]], options: ProfileOptions
) -> Iterator[RoutingCounts]:
    """What is counted after each further round, until the prompts end."""
    keep = options.token_level or options.coactivation
    batches = first or next_round(prompts, options)
    while any(batches):
        passes = route_round(model, batches, options.max_new_tokens, keep)
        state = state.add(passes, batches, options.window, model.top_k, options.token_level, options.coactivation)
        yield state
        batches = next_round(prompts, options)


def _check_enough(first: Batches, files: Sequence[str | Path], options: ProfileOptions) -> None:
    found = sum(map(len, first))
    if found < options.sources:
        names = ", ".join(map(str, files))
        if not found:
            raise BadInput(f"{names}: too little text for one prompt of {options.prompt_tokens} tokens")
        raise BadInput(
            f"{names}: expected a prompt of {options.prompt_tokens} tokens for each of {options.sources} sources, found {found}"
        )


def _profile(model: MoeModel, curves: CurvesByKind, state: RoutingCounts, about: Mapping[str, str]) -> Profile:
    return Profile(
        model=model.name,
        fingerprint=model.fingerprint(),
        tokens_TLSE=state.tokens_TLSE,
        top_k=model.top_k,
        dispatch_bytes=model.row_bytes,
        combine_bytes=model.row_bytes,
        expert_bytes=model.expert_bytes,
        other_bytes=model.other_bytes,
        curves=curves,
        provenance=about,
        routing=state.routing,
        stage_T=state.stages,
        coactivation=state.coactivation,
    )


def _provenance(model: MoeModel, files: Sequence[str | Path], options: ProfileOptions, device: str) -> dict[str, str]:
    return {
        "tool": "aurora profile",
        "architecture": type(model.model).__name__,
        "text": ", ".join(f"{Path(f).name} sha256:{_sha256(Path(f))}" for f in files),
        "compute": f"{options.share} processes at a time on {os.cpu_count()} cores, {platform.machine()}, {device}",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _half_width(profile: Profile, seed: int) -> float:
    return contiguous_intervals(profile, seed).bottleneck.half_width


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
