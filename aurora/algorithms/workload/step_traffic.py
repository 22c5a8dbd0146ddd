"""Makes the traffic of single steps from a profile: draws tokens for each rank, or cuts windows into micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.types import Plan, Profile, TokenRouting
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.profile import step_sizes

ASIDE = 5  # blocks of windows, of which two are kept aside


def drawn_windows(profile: Profile, tokens_TS: IntArray, rng: np.random.Generator, token_level: bool = False) -> Profile:
    """Draws windows whose tokens choose experts with the frequencies of the profile.

    Args:
        profile: the recorded routing; its windows are taken together.
        tokens_TS: (T, S) int64, tokens of each source rank in each window.
        rng: for the draws.
        token_level: draw recorded tokens with all their choices, instead of (token, expert) pairs by the experts' shares.

    Returns:
        The profile with these windows. Sources without recorded tokens draw from those of all sources.

    Raises:
        BadInput: with `token_level`, if the profile holds no token-level routing.
    """
    if token_level:
        routing = _drawn_tokens(profile.required_routing, np.asarray(tokens_TS), rng)
        tokens_TLSE = routing.tokens_TLSE(len(tokens_TS), profile.sources, profile.experts)
        return replace(profile, tokens_TLSE=tokens_TLSE, routing=routing, stage_T=None)
    share_LSE = _shares_LSE(profile)
    tokens_TLSE = np.stack([_drawn_pairs(share_LSE, tokens_S, profile.top_k, rng) for tokens_S in tokens_TS])
    return replace(profile, tokens_TLSE=tokens_TLSE, routing=None, stage_T=None)


def drawn_steps(profile: Profile, step_tokens: tuple[int, int] | None, seed: int) -> Profile:
    """Draws one window for each size in `step_sizes(*step_tokens)`, with equally many tokens of each source.

    Args:
        profile: the recorded routing; its windows are taken together. If it has token-level routing, whole tokens are drawn.
        step_tokens: (fewest, most) tokens of all sources in a step; None: the profile itself is returned.
        seed: random seed of the draws.
    """
    if step_tokens is None:
        return profile
    sources = np.arange(profile.sources)
    tokens_TS = np.array([size // len(sources) + (sources < size % len(sources)) for size in step_sizes(*step_tokens)])
    return drawn_windows(profile, tokens_TS, np.random.default_rng(seed), profile.routing is not None)


def set_aside(profile: Profile, seed: int) -> tuple[Profile, Profile, str]:
    """Divides traffic in two: one part to make plans from, and one held out to compare plans on.

    Windows are divided into ASIDE blocks of consecutive windows; every second block is held out. If there are fewer than ASIDE
    windows, half of the tokens, drawn at random, are held out.

    Args:
        profile: the traffic.
        seed: random seed for the draw of tokens.

    Returns:
        (planned, aside, words): the two parts, and a description of the held-out part.
    """
    rng, blocks, windows = np.random.default_rng(seed), np.arange(profile.windows) * ASIDE // profile.windows, profile.windows
    aside_T, routing = blocks % 2 == 1, profile.routing
    whole = replace(profile, stage_T=None)
    said = f"{aside_T.sum()} of {windows} windows kept aside" if windows >= ASIDE else "half of the tokens, kept aside"
    if routing is None:
        if windows >= ASIDE:
            return whole.at_windows(np.flatnonzero(~aside_T)), whole.at_windows(np.flatnonzero(aside_T)), said
        half_TLSE = rng.binomial(profile.tokens_TLSE, 0.5)
        return replace(whole, tokens_TLSE=profile.tokens_TLSE - half_TLSE), replace(whole, tokens_TLSE=half_TLSE), said
    aside_U = aside_T[routing.window_U] if windows >= ASIDE else rng.random(len(routing.window_U)) < 0.5
    parts = []
    for some_U in (~aside_U, aside_U):
        windows_X, window_U = np.unique(routing.window_U[some_U], return_inverse=True)
        part = TokenRouting(routing.experts_ULK[some_U], routing.source_U[some_U], window_U)
        counts_TLSE = part.tokens_TLSE(len(windows_X), profile.sources, profile.experts)
        parts.append(replace(whole, tokens_TLSE=counts_TLSE, routing=part))
    return parts[0], parts[1], said


def _shares_LSE(profile: Profile) -> FloatArray:
    """(L, S, E) the share of each expert among a source's pairs in a layer."""
    tokens_LSE = profile.tokens_TLSE.sum(axis=0).astype(np.float64)
    silent_LS = ~tokens_LSE.any(axis=2)
    if silent_LS.any():
        all_LSE = np.broadcast_to(tokens_LSE.sum(axis=1, keepdims=True), tokens_LSE.shape)
        tokens_LSE = np.where(silent_LS[:, :, None], all_LSE, tokens_LSE)
        tokens_LSE[~tokens_LSE.any(axis=2)] = 1.0
    return np.asarray(tokens_LSE / tokens_LSE.sum(axis=2, keepdims=True))


def _drawn_pairs(share_LSE: FloatArray, tokens_S: IntArray, top_k: int, rng: np.random.Generator) -> IntArray:
    """(L, S, E) pairs, `top_k` for each token; an expert gets no token twice, so its pairs are at most the source's tokens."""
    most_S1 = np.asarray(tokens_S)[:, None]
    missing_LS = np.broadcast_to(tokens_S * top_k, share_LSE.shape[:2])
    pairs_LSE, left_LSE = np.zeros(share_LSE.shape, dtype=np.int64), share_LSE
    while missing_LS.any():
        pairs_LSE += rng.multinomial(missing_LS, left_LSE)
        missing_LS = np.maximum(pairs_LSE - most_S1, 0).sum(axis=2)
        pairs_LSE = np.minimum(pairs_LSE, most_S1)
        free_LSE = pairs_LSE < most_S1
        left_LSE = np.where(free_LSE, share_LSE, 0.0)
        left_LSE = np.where((left_LSE.sum(axis=2, keepdims=True) > 0), left_LSE, free_LSE)  # only experts without a share
        left_LSE = left_LSE / np.maximum(left_LSE.sum(axis=2, keepdims=True), 1e-300)
    return pairs_LSE


def _drawn_tokens(routing: TokenRouting, tokens_TS: IntArray, rng: np.random.Generator) -> TokenRouting:
    """Recorded tokens of each source, drawn with replacement, window by window."""
    everywhere_U, rows = np.arange(len(routing.source_U)), []
    own_S = [np.flatnonzero(routing.source_U == source) for source in range(tokens_TS.shape[1])]
    for tokens_S in tokens_TS.tolist():
        rows += [rng.choice(own_U if len(own_U) else everywhere_U, many) for own_U, many in zip(own_S, tokens_S, strict=True)]
    window_X, source_X = np.divmod(np.arange(tokens_TS.size), tokens_TS.shape[1])
    window_U, source_U = (np.repeat(each_X, tokens_TS.ravel()) for each_X in (window_X, source_X))
    return TokenRouting(routing.experts_ULK[np.concatenate(rows)], source_U, window_U)


def micro_batches(profile: Profile, parts: int) -> list[Profile]:
    """Cuts every window of a profile into micro-batches.

    Each rank's tokens in a window are dealt to the micro-batches in turn, so that these differ by at most one token, and their
    counts sum to the profile's. If only counts are known, (token, expert) pairs are dealt in the sequence of the experts'
    numbers, so that each micro-batch gets about equally many tokens of every expert.

    Args:
        profile: the traffic.
        parts: number of micro-batches of a window.

    Returns:
        One profile per part, each with all windows; the profile itself for one part. Parts that get no token in any window are
        left out.
    """
    if parts == 1:
        return [profile]
    if profile.routing is None:
        counts = [_dealt(profile.tokens_TLSE, profile.top_k, part, parts) for part in range(parts)]
        return [replace(profile, tokens_TLSE=part_TLSE) for part_TLSE in counts if part_TLSE.any()]
    return [_routed(profile, routing) for routing in _dealt_tokens(profile.routing, profile.sources, parts)]


def cut_traffic(plan: Plan, profiles: Sequence[Profile]) -> tuple[Plan, Sequence[Profile]]:
    """Cuts traffic into a plan's micro-batches; returns (plan, profiles), one profile per micro-batch.

    Both are returned unchanged if the plan has no micro-batches, or there are several profiles (of several models, or already
    cut). If no rank has enough tokens in any window, the returned plan has fewer micro-batches.

    Args:
        plan: the plan.
        profiles: the traffic, one profile per model of the plan, or one per micro-batch.
    """
    if plan.options.micro_batches < 2 or len(profiles) > 1:
        return plan, profiles
    cut = micro_batches(profiles[0], plan.options.micro_batches)
    return plan.with_micro_batches(len(cut)), cut


def _dealt(tokens_TLSE: IntArray, top_k: int, part: int, parts: int) -> IntArray:
    """(T, L, S, E) int64: one part of the (token, expert) pairs.

    The pairs of a rank, in the sequence of experts, are dealt to its U tokens in turn, so that a token's experts differ, and
    token u goes to part u mod `parts`.
    """
    upto_TLSE = tokens_TLSE.cumsum(axis=3)
    tokens_TLS1 = -(-upto_TLSE[..., -1:] // top_k)

    def before(pairs: IntArray) -> IntArray:
        """Counts those of a rank's first pairs that are of tokens of the part."""
        rounds, rest = np.divmod(pairs, np.maximum(tokens_TLS1, 1))
        return np.asarray(rounds * ((tokens_TLS1 + parts - 1 - part) // parts) + (rest + parts - 1 - part) // parts)

    return before(upto_TLSE) - before(upto_TLSE - tokens_TLSE)


def _dealt_tokens(routing: TokenRouting, sources: int, parts: int) -> list[TokenRouting]:
    """Token-level routing of each part, of those that have tokens."""
    rank_U = routing.window_U * sources + routing.source_U
    _, first, many = np.unique(rank_U, return_index=True, return_counts=True)
    part_U = (np.arange(len(rank_U)) - np.repeat(first, many)) % parts
    routings = []
    for part in range(parts):
        own_U = part_U == part
        if own_U.any():
            sequence_U = None if routing.sequence_U is None else routing.sequence_U[own_U]
            chosen = routing.experts_ULK[own_U], routing.source_U[own_U], routing.window_U[own_U]
            routings.append(TokenRouting(*chosen, sequence_U))
    return routings


def _routed(profile: Profile, routing: TokenRouting) -> Profile:
    """The profile with the tokens of `routing` alone, in all of its windows."""
    tokens_TLSE = routing.tokens_TLSE(profile.windows, profile.sources, profile.experts)
    return replace(profile, tokens_TLSE=tokens_TLSE, routing=routing)
