"""Micro-batches of a profile: every rank's tokens of a window, dealt to several parts that each make a step of their own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aurora.types import Plan, Profile, TokenRouting
from aurora.types.arrays import IntArray


def micro_batches(profile: Profile, parts: int) -> list[Profile]:
    """Cuts a profile's windows into micro-batches: part p of window t has its part of every rank's tokens in that window.

    Each rank's tokens are dealt to the parts in turn, so that parts differ by one token at most, and their counts add up to the
    profile's. Where tokens' choices are not known, tokens are taken to choose experts in the sequence of the experts' numbers,
    so that each part gets about the same tokens of every expert.

    Args:
        profile: the traffic.
        parts: how many micro-batches a window is cut into.

    Returns:
        One profile per part, each with all windows; the profile itself for one part. Parts that get no token in any window are
        left out.
    """
    if parts == 1:
        return [profile]
    if profile.routing is None:
        counts = [_dealt(profile.tokens_TLSE, profile.top_k, part, parts) for part in range(parts)]
        return [replace(profile, tokens_TLSE=part_TLSE, coactivation=None) for part_TLSE in counts if part_TLSE.any()]
    return [_routed(profile, routing) for routing in _dealt_tokens(profile.routing, profile.sources, parts)]


def cut_traffic(plan: Plan, profiles: Sequence[Profile]) -> tuple[Plan, Sequence[Profile]]:
    """Returns a plan, and the traffic of each model of its program.

    Where the plan has micro-batches, the profile is cut into them; traffic that has been cut already, as that of a run, stays
    as it is. If no rank ever has that many tokens in a window, the plan that is returned has fewer micro-batches.

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
        """How many of a rank's first pairs are of tokens of the part."""
        rounds, rest = np.divmod(pairs, np.maximum(tokens_TLS1, 1))
        return np.asarray(rounds * ((tokens_TLS1 + parts - 1 - part) // parts) + (rest + parts - 1 - part) // parts)

    return before(upto_TLSE) - before(upto_TLSE - tokens_TLSE)


def _dealt_tokens(routing: TokenRouting, sources: int, parts: int) -> list[TokenRouting]:
    """Token-level routing of each part, of those that have tokens."""
    rank_U = routing.window_U * sources + routing.source_U
    _, first, many = np.unique(rank_U, return_index=True, return_counts=True)
    part_U = (np.arange(len(rank_U)) - np.repeat(first, many)) % parts
    found = []
    for part in range(parts):
        own_U = part_U == part
        if own_U.any():
            sequence_U = None if routing.sequence_U is None else routing.sequence_U[own_U]
            chosen = routing.experts_ULK[own_U], routing.source_U[own_U], routing.window_U[own_U]
            found.append(TokenRouting(*chosen, sequence_U))
    return found


def _routed(profile: Profile, routing: TokenRouting) -> Profile:
    """The profile with the tokens of `routing` alone, in all of its windows."""
    tokens_TLSE = routing.tokens_TLSE(profile.windows, profile.sources, profile.experts)
    return replace(profile, tokens_TLSE=tokens_TLSE, routing=routing, coactivation=None)
