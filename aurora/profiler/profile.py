"""`aurora profile`: a model and text become a Profile."""

import datetime
import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aurora.errors import BadInput
from aurora.models.loading import load_model
from aurora.models.prompts import cut_prompts
from aurora.profiler.compute import measure_curves
from aurora.profiler.routing import count_routing
from aurora.ranks.launcher import prepare
from aurora.types import Profile, ProfileOptions


def profile_model(
    path: str | Path,
    files: Sequence[str | Path],
    options: ProfileOptions = ProfileOptions(),
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Profile:
    """Serve the files' text through the model in this process, counting; then time its phases on this machine.

    Raises BadInput where the path is no MoE model or there is less than one prompt of text.
    """
    if not files:
        raise BadInput("profile: expected at least one text file, found none")
    prepare()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, device)
    prompts = cut_prompts(model.tokenizer, files, options.prompt_tokens)[: options.limit]
    if len(prompts) < options.sources:
        raise BadInput(
            f"{', '.join(map(str, files))}: expected a prompt of {options.prompt_tokens} tokens for each of "
            f"{options.sources} sources, found {len(prompts)}"
        )
    rounds = -(-len(prompts) // (options.sources * options.batch))
    total, done = rounds * options.sources, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("counting tokens", done, total)

    tokens_TLSE, choices = count_routing(
        model,
        prompts,
        sources=options.sources,
        batch=options.batch,
        new_tokens=options.max_new_tokens,
        token_level=options.token_level,
        advance=advance,
    )
    progress("timing phases", 0, 1)
    most = int(tokens_TLSE.sum(axis=3).max()) // model.top_k
    kind, curves = measure_curves(str(path), tokens=most * 2, length=options.prompt_tokens, share=options.share)
    progress("timing phases", 1, 1)
    return Profile(
        model=model.name,
        fingerprint=model.fingerprint(),
        tokens_TLSE=tokens_TLSE,
        top_k=model.top_k,
        dispatch_bytes=model.row_bytes,
        combine_bytes=model.row_bytes,
        expert_bytes=model.expert_bytes,
        other_bytes=model.other_bytes,
        curves={kind: curves},
        provenance={
            "tool": "aurora profile",
            "architecture": type(model.model).__name__,
            "text": ", ".join(f"{Path(f).name} sha256:{_sha256(Path(f))}" for f in files),
            "prompts": f"{len(prompts)} of {options.prompt_tokens} tokens, {options.max_new_tokens} new tokens each",
            "compute": f"{options.share} processes at a time on {os.cpu_count()} cores, {platform.machine()}, {device}",
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        choices=choices,
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
