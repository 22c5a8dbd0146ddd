"""Imports routing that an engine recorded, as a Profile."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.io.routing_dumps import RecordedRouting, Where, read_dump
from aurora.planner.workload.model_config import Shape
from aurora.planner.workload.source_ranks import deal_counts, sources_of, windows_of
from aurora.types import CoActivation, Profile, TokenRouting
from aurora.types.arrays import IntArray


def import_profile(
    files: Sequence[Path],
    form: str,
    config: Mapping[str, Any],
    sources: int,
    window: int | None = None,
    wheres: Sequence[Where] = (),
    coactivation: bool = False,
) -> Profile:
    """Makes a Profile of recorded routing; compute times are estimated from the model's shape.

    Each file, and each selection of a CSV's rows, is a domain of traffic. A domain's tokens are dealt evenly to ranks that
    serve no other domain. If there are more domains than `sources`, domains share a rank.

    Args:
        files: files of one format and one model.
        form: the format, one of ROUTING_FORMATS.
        config: the model's transformers config.json.
        sources: source ranks that the tokens are dealt to.
        window: tokens of all sources in a window; None: each recorded step is a window.
        wheres: selections of a CSV's rows by their values in columns; empty: all rows.
        coactivation: whether to count which experts tokens choose together; for token-level files only.

    Raises:
        BadInput: if a file is not of the format or not of the model, files differ in their layers, or a number is below one.
    """
    if not files or sources < 1 or (window is not None and window < 1):
        raise BadInput(f"import: expected files, sources and a window above zero, found {len(files)}, {sources} and {window}")
    shape = Shape.of(config)
    domains = [read_dump(path, form, shape, where) for path, where in product(files, wheres or ({},))]
    if len(layers := {each.which for each in domains}) > 1:
        raise BadInput(f"import: expected the same layers in every file, found {' and '.join(sorted(layers))}")
    about = {
        "tool": f"aurora import --format {form}",
        "traffic": ", ".join(f"{path.name} sha256:{file_digest(path)}" for path in files),
        "sources": f"{len(domains)} domains dealt to {sources} sources, which the files do not name",
    }
    if any(wheres):
        about["where"] = "; ".join(", ".join(f"{column}={value}" for column, value in where.items()) for where in wheres)
    if domains[0].experts_ULK is None:
        if coactivation:
            raise BadInput(f"`coactivation`: expected every token's choices, found counts alone in {form}")
        return shape.profile(_counted(domains, sources, window, shape.top_k), about)
    routing = _routing(domains, sources, window)
    tokens_TLSE = routing.tokens_TLSE(int(routing.window_U.max()) + 1, sources, shape.experts)
    return shape.profile(
        tokens_TLSE, about, routing, CoActivation.of(routing.experts_ULK, shape.experts) if coactivation else None
    )


def _counted(domains: Sequence[RecordedRouting], sources: int, window: int | None, top_k: int) -> IntArray:
    """(T, L, S, E) int64: the domains' counts; step t of every domain falls into the same window."""
    steps = max(len(each.counts_TLE) for each in domains)
    _, layers, experts = domains[0].counts_TLE.shape
    tokens_TLSE = np.zeros((steps, layers, sources, experts), dtype=np.int64)
    for number, each in enumerate(domains):
        own = sources_of(number, len(domains), sources)
        tokens_TLSE[: len(each.counts_TLE), :, own] += deal_counts(each.counts_TLE, len(own))
    window_T = windows_of(tokens_TLSE.sum(axis=(2, 3)).max(axis=1) // top_k, window)
    merged = np.zeros((int(window_T.max()) + 1, layers, sources, experts), dtype=np.int64)
    np.add.at(merged, window_T, tokens_TLSE)
    return merged


def _routing(domains: Sequence[RecordedRouting], sources: int, window: int | None) -> TokenRouting:
    """Token-level routing: sequences are dealt round robin; a window ends with a sequence. Without `window` there is one."""
    experts, source, at, sequence = [], [], [], []
    before = 0
    for number, each in enumerate(domains):
        assert each.experts_ULK is not None
        assert each.lengths_Q is not None
        own = sources_of(number, len(domains), sources)
        sequences_Q = np.arange(len(each.lengths_Q))
        alike = None if window is None else -(-window // len(domains))
        window_Q = np.zeros_like(sequences_Q) if alike is None else windows_of(each.lengths_Q, alike)
        experts.append(each.experts_ULK)
        source.append(np.repeat(own[sequences_Q % len(own)], each.lengths_Q))
        at.append(np.repeat(window_Q, each.lengths_Q))
        sequence.append(np.repeat(before + sequences_Q, each.lengths_Q))
        before += len(sequences_Q)
    return TokenRouting(*(np.concatenate(parts) for parts in (experts, source, at, sequence)))


def file_digest(path: str | Path) -> str:
    """Returns the first 16 digits of a file's sha256, or raises BadInput."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
