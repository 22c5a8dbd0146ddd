"""Rows of hierarchical all-to-alls: counted token by token, or estimated from counts of experts alone."""

from typing import NamedTuple, Self

import numpy as np

from aurora.planner.alltoall.hierarchical import HierarchicalRows, hierarchical_rows, step_rows
from aurora.planner.workload.server_tokens import server_tokens
from aurora.planner.workload.serving_gpus import replica_tokens, serving_gpus
from aurora.types import Hierarchy, Profile
from aurora.types.arrays import FloatArray, IntArray


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

    Tokens that need a server, or a GPU, are those of `server_tokens`, divided evenly over the pieces.

    Args:
        tokens: the tokens of each expert.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers and the number of chunks.
    """
    tokens_SP, expert_P, gpu_P = replica_tokens(tokens.tokens_SE, split_EG, hierarchy.server_G)
    groups, token_groups = tokens.expert_groups
    group_P = expert_P * groups // tokens.tokens_SE.shape[1]

    def needed(at_P: IntArray, places: int) -> IntArray:
        found = server_tokens(tokens_SP, at_P, places, tokens.top_k, group_P, token_groups)
        return np.asarray(np.rint(getattr(found, f"{tokens.spread}_SN")), dtype=np.int64)

    sent_GN, needed_GG = needed(hierarchy.server_G[gpu_P], hierarchy.servers), needed(gpu_P, hierarchy.ranks)
    return HierarchicalRows(sent_GN, np.diff(hierarchy.piece_starts(needed_GG), axis=2).swapaxes(1, 2))
