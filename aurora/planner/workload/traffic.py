"""Traffic of a profile's layers under a placement: rows from rank to rank, counted token by token or estimated from counts."""

from typing import NamedTuple, Self

import numpy as np

from aurora.planner.alltoall.hierarchical import HierarchicalRows, hierarchical_rows, step_rows
from aurora.planner.workload.server_tokens import ServerTokens
from aurora.planner.workload.serving_gpus import replica_tokens, serving_gpus, tokens_to_gpus
from aurora.types import Hierarchy, Profile
from aurora.types.arrays import FloatArray, IntArray

GATHERS = 3  # exchanges of an allgather: hidden states, weights and expert numbers, one after the other


def layer_traffic(profile: Profile, layer: int, split_EG: FloatArray, deduplicated: bool = False) -> IntArray:
    """Returns (G, G) int64 rows of one layer's flat dispatch over the whole profile; arguments as in `exchange_rows`."""
    return np.asarray(exchange_rows(profile, layer, split_EG, deduplicated=deduplicated)[0])


def exchange_rows(
    profile: Profile,
    layer: int,
    split_EG: FloatArray,
    *,
    deduplicated: bool = False,
    hierarchy: Hierarchy | None = None,
    window: int | None = None,
) -> IntArray:
    """Returns the rows of one layer's dispatch in each of its steps; a flat all-to-all has one step.

    Args:
        profile: the recorded routing. Source rank g sits on GPU g. Where it holds counts alone, the rows of hierarchical
            all-to-alls are estimated, at its `token_spread`.
        layer: which MoE layer.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
        deduplicated: whether a token is sent once to a GPU that holds several of its experts; in flat all-to-alls replicas are
            not allowed.
        hierarchy: the servers and chunks of a hierarchical all-to-all, whose tokens are deduplicated; None if it is flat.
        window: which window; None: all windows as one all-to-all.

    Returns:
        (S, G, G) int64 rows from each rank to each other in each of S steps, with zero diagonals.

    Raises:
        BadInput: with `deduplicated` and no hierarchy, if the profile holds no token-level routing.
    """
    gpus = split_EG.shape[1]
    if deduplicated:
        if hierarchy is None:
            experts_UK, source_U = profile.required_routing.layer(layer, window)
            rows_SGG = deduplicated_tokens(experts_UK, source_U, split_EG.argmax(axis=1), gpus)[None]
        else:
            rows_SGG = hierarchical_steps(known_or_counted(profile, layer, window), split_EG, hierarchy)
    else:
        windows = slice(None) if window is None else slice(window, window + 1)
        rows_SGG = tokens_to_gpus(profile.tokens_TLSE[windows, layer].sum(axis=0), split_EG)[None]
    rows_SGG[:, np.arange(gpus), np.arange(gpus)] = 0
    return np.asarray(rows_SGG)


def exchange_bytes(rows_SGG: IntArray, profile: Profile, phase: str, deduplicated: bool) -> IntArray:
    """Returns (S, G, G) int64 bytes of each step of a "dispatch" with the rows of `exchange_rows`, or of its "combine"."""
    if phase == "dispatch":
        return rows_SGG * profile.row_bytes(deduplicated)
    return rows_SGG[::-1].transpose(0, 2, 1) * profile.combine_bytes


def gathered_bytes(profile: Profile, layer: int, window: int, phase: str) -> IntArray:
    """Returns (S, G, G) int64 bytes of an engine's allgather ("dispatch") or reduce-scatter ("combine"), as vLLM's.

    Every rank sends all of its tokens to every other: hidden states, then weights, then expert numbers, 4 bytes each. On the
    way back it sends every rank its part of the sums of that rank's tokens.
    """
    tokens_S = profile.tokens_TLSE[window, layer].sum(axis=1) // profile.top_k
    rows_SS = tokens_S[:, None] * (1 - np.eye(len(tokens_S), dtype=np.int64))
    if phase == "combine":
        return np.asarray(rows_SS.T * profile.combine_bytes)[None]
    return np.stack([rows_SS * size for size in (profile.dispatch_bytes, *(4 * profile.top_k,) * (GATHERS - 1))])


def deduplicated_tokens(experts_UK: IntArray, source_U: IntArray, gpu_E: IntArray, gpus: int) -> IntArray:
    """Returns the deduplicated tokens that each source sends to each GPU.

    Args:
        experts_UK: (U, K) int, the experts of each token.
        source_U: (U,) int64, the GPU that each token starts on.
        gpu_E: (E,) int64, the GPU of each expert.
        gpus: number of GPUs.

    Returns:
        (G, G) int64, from GPU (row) to GPU; the diagonal counts the tokens that have an expert on the GPU they start on.
    """
    at_UK = np.sort(gpu_E[experts_UK], axis=1)
    first_UK = np.ones(at_UK.shape, dtype=np.bool_)
    first_UK[:, 1:] = at_UK[:, 1:] != at_UK[:, :-1]
    pairs_UK = source_U[:, None] * gpus + at_UK
    return np.bincount(pairs_UK[first_UK], minlength=gpus * gpus).reshape(gpus, gpus)


def contiguous_split(experts: int, gpus: int) -> FloatArray:
    """Places experts in index order, equally many on each GPU; a remainder goes to the first. Returns (E, G) shares, 0 or 1."""
    share_G = experts // gpus + (np.arange(gpus) < experts % gpus)
    return np.eye(gpus)[np.repeat(np.arange(gpus), share_G)]


def contiguous_bytes(profile: Profile, layer: int) -> IntArray:
    """Returns (S, S) int64 bytes of one layer's dispatch under `contiguous_split` on as many GPUs as source ranks."""
    return layer_traffic(profile, layer, contiguous_split(profile.experts, profile.sources)) * profile.dispatch_bytes


class CountedTokens(NamedTuple):
    """Tokens of a layer of which only counts are known.

    Attributes:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        top_k: experts per token.
        expert_groups: as in Profile.
        spread: one of TOKEN_SPREADS, as in Profile.
    """

    tokens_SE: IntArray
    top_k: int
    expert_groups: tuple[int, int]
    spread: str

    @classmethod
    def of(cls, profile: Profile, layer: int, window: int | None = None) -> Self:
        """Returns the tokens of one layer of a profile, in one window or in all of them."""
        windows = slice(None) if window is None else slice(window, window + 1)
        tokens_SE = profile.tokens_TLSE[windows, layer].sum(axis=0)
        return cls(tokens_SE, profile.top_k, profile.expert_groups, profile.token_spread)


KnownTokens = tuple[IntArray, IntArray]  # the experts (U, K) of each token and the rank (U,) that it starts on


def known_or_counted(profile: Profile, layer: int, window: int | None = None) -> KnownTokens | CountedTokens:
    """Returns the tokens of one layer of a profile as far as they are known, in one window or in all of them."""
    return CountedTokens.of(profile, layer, window) if profile.routing is None else profile.routing.layer(layer, window)


def hierarchical_steps(tokens: KnownTokens | CountedTokens, split_EG: FloatArray, hierarchy: Hierarchy) -> IntArray:
    """Returns (S, G, G) int64, the rows from rank to rank in each step of a hierarchical dispatch.

    Args:
        tokens: the tokens, known one by one or counted.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers and the number of chunks.
    """
    if isinstance(tokens, CountedTokens):
        return step_rows(estimated_rows(tokens, split_EG, hierarchy), hierarchy)
    experts_UK, source_U = tokens
    rank_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
    return step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)


def estimated_rows(tokens: CountedTokens, split_EG: FloatArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """Estimates the rows of a hierarchical dispatch, as `hierarchical_rows` counts them of known tokens.

    Tokens that need a server, or a GPU, are those of `ServerTokens`, divided evenly over the pieces.

    Args:
        tokens: the tokens of each expert.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers and the number of chunks.
    """
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens.tokens_SE, split_EG, hierarchy.server_G)
    groups, token_groups = tokens.expert_groups
    group_P = expert_P * groups // tokens.tokens_SE.shape[1]

    def needed(at_P: IntArray, places: int) -> IntArray:
        found = ServerTokens(tokens_SP, at_P, places, tokens.top_k, group_P, token_groups)
        return np.asarray(np.rint(getattr(found, f"{tokens.spread}_SN")), dtype=np.int64)

    sent_GN, needed_GG = needed(hierarchy.server_G[gpu_P], hierarchy.servers), needed(gpu_P, hierarchy.ranks)
    return HierarchicalRows(sent_GN, np.diff(hierarchy.piece_starts(needed_GG), axis=2).swapaxes(1, 2))
