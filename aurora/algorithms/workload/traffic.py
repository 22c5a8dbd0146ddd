"""Traffic of a profile's layers under a placement: rows from rank to rank, counted from tokens or estimated from counts."""

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from aurora.algorithms.alltoall.hierarchical import HierarchicalRows, hierarchical_rows, step_rows
from aurora.algorithms.workload.serving_gpus import replica_tokens, serving_gpus, tokens_to_gpus
from aurora.types import Hierarchy, Profile
from aurora.types.arrays import FloatArray, IntArray

GATHERS = 3  # exchanges of an allgather: hidden states, weights and expert numbers, one after the other


def layer_traffic(profile: Profile, layer: int, split_EG: FloatArray) -> IntArray:
    """Returns (G, G) int64 rows of one layer's flat dispatch over the whole profile; arguments as in `exchange_rows`."""
    return np.asarray(exchange_rows(profile, layer, split_EG)[0])


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
        profile: the recorded routing. Source rank g sits on GPU g. If it has only counts, the rows of hierarchical all-to-alls
            are estimated, see `expected_tokens`.
        layer: index of the MoE layer.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
        deduplicated: whether a token is sent once to a GPU that holds several of its experts; in flat all-to-alls replicas are
            not allowed.
        hierarchy: the servers and chunks of a hierarchical all-to-all, whose tokens are deduplicated; None if it is flat.
        window: index of the window; None: all windows as one all-to-all.

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
    """Converts rows to bytes: returns (S, G, G) int64 bytes of each step of a dispatch, or of its combine.

    Args:
        rows_SGG: rows of the dispatch, as `exchange_rows` returns them.
        profile: the model, for the bytes of a row.
        phase: "dispatch" or "combine".
        deduplicated: whether a row is a token instead of a (token, expert) pair.
    """
    if phase == "dispatch":
        return rows_SGG * profile.row_bytes(deduplicated)
    return rows_SGG[::-1].transpose(0, 2, 1) * profile.combine_bytes


def gathered_bytes(profile: Profile, layer: int, window: int, phase: str, server_G: IntArray | None = None) -> IntArray:
    """Returns (S, G, G) int64 bytes of an allgather ("dispatch") or a reduce-scatter ("combine"), as in vLLM.

    The allgather has three steps: hidden states, router weights, expert numbers (4 bytes each). In the reduce-scatter every
    rank gets the partial sums of its tokens. On one server each rank sends to every other. On several, the bytes go around
    `nccl_rings`, an equal part in each: a rank passes on all but its successor's, so that a NIC of R ranks on servers of P GPUs
    carries (R - 1) / P ranks' bytes.

    Args:
        profile: the model and its traffic.
        layer: index of the MoE layer.
        window: index of the window.
        phase: "dispatch" or "combine".
        server_G: (G,) int64, the server of each rank; None: all on one.
    """
    tokens_S = profile.tokens_TLSE[window, layer].sum(axis=1) // profile.top_k
    sizes = [profile.combine_bytes]
    if phase == "dispatch":
        sizes = [profile.dispatch_bytes, *[4 * profile.top_k] * (GATHERS - 1)]
    bytes_XS = np.array(sizes)[:, None] * tokens_S
    sent_XSS = bytes_XS[:, :, None] * (1 - np.eye(len(tokens_S), dtype=np.int64))
    if server_G is not None:
        sent_XSS[:] = 0
        next_CS = nccl_rings(server_G)
        for ring, next_S in enumerate(next_CS):
            passed_XS = bytes_XS.sum(axis=1, keepdims=True) - bytes_XS[:, next_S]
            upto_XS, before_XS = (passed_XS * part // len(next_CS) for part in (ring + 1, ring))
            sent_XSS[:, np.arange(len(next_S)), next_S] += upto_XS - before_XS
    return np.asarray(sent_XSS.swapaxes(1, 2) if phase == "combine" else sent_XSS)


def nccl_rings(server_G: IntArray) -> IntArray:
    """Returns (C, G) int64: the rank that each rank passes bytes to in each of NCCL's C rings, one for each GPU of a server.

    A ring visits the ranks of each server one after the other. Each ring enters and leaves a server by other GPUs' NICs, so
    that all NICs are used: on servers of 2 GPUs the rings are 0, 1, 2, 3 and 1, 0, 3, 2.
    """
    members_N = [np.flatnonzero(server_G == server) for server in np.unique(server_G)]
    next_CG = np.empty((max(map(len, members_N)), len(server_G)), dtype=np.int64)
    for ring, next_G in enumerate(next_CG):
        visited_G = np.concatenate([np.roll(members, -ring) for members in members_N])
        next_G[visited_G] = np.roll(visited_G, -1)
    return next_CG


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
    """Places experts in index order, equally many on each GPU, one more on the first ones if they do not divide.

    Returns (E, G) float64, the share of each expert's tokens that each GPU takes, 0 or 1.
    """
    share_G = experts // gpus + (np.arange(gpus) < experts % gpus)
    return np.eye(gpus)[np.repeat(np.arange(gpus), share_G)]


def contiguous_bytes(profile: Profile, layer: int) -> IntArray:
    """Returns (S, S) int64 bytes of one layer's dispatch under `contiguous_split` on as many GPUs as source ranks."""
    return layer_traffic(profile, layer, contiguous_split(profile.experts, profile.sources)) * profile.dispatch_bytes


class CountedTokens(NamedTuple):
    """The tokens of a layer whose profile has counts per expert, but no token-level routing.

    Attributes:
        tokens_SE: (S, E) int64, tokens from each source rank to each expert.
        top_k: experts per token.
    """

    tokens_SE: IntArray
    top_k: int

    @classmethod
    def of(cls, profile: Profile, layer: int, window: int | None = None) -> Self:
        """Returns the tokens of one layer of a profile, in one window or in all of them."""
        windows = slice(None) if window is None else slice(window, window + 1)
        tokens_SE = profile.tokens_TLSE[windows, layer].sum(axis=0)
        return cls(tokens_SE, profile.top_k)


KnownTokens = tuple[IntArray, IntArray]  # the experts (U, K) of each token and the rank (U,) that it starts on


def known_or_counted(profile: Profile, layer: int, window: int | None = None) -> KnownTokens | CountedTokens:
    """Returns the tokens of one layer of a profile: one by one if it has token-level routing, otherwise as counts.

    `window` is the index of the window; None: all windows.
    """
    return CountedTokens.of(profile, layer, window) if profile.routing is None else profile.routing.layer(layer, window)


def hierarchical_steps(tokens: KnownTokens | CountedTokens, split_EG: FloatArray, hierarchy: Hierarchy) -> IntArray:
    """Returns (S, G, G) int64, the rows from rank to rank in each step of a hierarchical dispatch.

    Args:
        tokens: the tokens, known one by one or counted.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes, as in `server_split`.
        hierarchy: the servers and the number of chunks.
    """
    return steps_by_chunks(tokens, split_EG, hierarchy.server_G)(hierarchy)


def steps_by_chunks(
    tokens: KnownTokens | CountedTokens, split_EG: FloatArray, server_G: IntArray
) -> Callable[[Hierarchy], IntArray]:
    """Returns a function from a Hierarchy over server_G to its `hierarchical_steps`, to compare numbers of chunks.

    Work that does not depend on the chunks is done once. Other arguments as in `hierarchical_steps`.
    """
    if isinstance(tokens, CountedTokens):
        needed = _needed_tokens(tokens, split_EG, server_G)
        return lambda hierarchy: step_rows(_in_pieces(*needed, hierarchy), hierarchy)
    experts_UK, source_U = tokens
    rank_UK = serving_gpus(experts_UK, source_U, split_EG, server_G)
    return lambda hierarchy: step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)


def _in_pieces(sent_GN: IntArray, needed_GG: IntArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """The rows of a hierarchical dispatch, estimated from counts: those of `_needed_tokens`, divided evenly over the pieces."""
    return HierarchicalRows(sent_GN, np.diff(hierarchy.piece_starts(needed_GG), axis=2).swapaxes(1, 2))


def _needed_tokens(tokens: CountedTokens, split_EG: FloatArray, server_G: IntArray) -> tuple[IntArray, IntArray]:
    """(G, N) and (G, G) int64, estimated tokens of each rank that need each server, and each rank."""
    tokens_SP, _, gpu_P = replica_tokens(tokens.tokens_SE, split_EG, server_G)
    at_server, at_rank = (
        expected_tokens(tokens_SP, at_P, places, tokens.top_k)
        for at_P, places in ((server_G[gpu_P], int(server_G.max()) + 1), (gpu_P, len(server_G)))
    )
    return at_server, at_rank


def expected_tokens(tokens_SP: IntArray, at_P: IntArray, places: int, top_k: int) -> IntArray:
    """Estimates, from counts of experts alone, the tokens of each source that need experts of each server.

    Each token is taken to choose each expert on its own, as often as counted: of T tokens, T (1 - prod(1 - tokens / T)) need a
    server with these experts. It is no less than the choices of its experts over the most that one token can make there. Where
    tokens choose experts of a server together, fewer need it.

    Args:
        tokens_SP: (S, P) int64, tokens from each source rank to each expert, or part of one.
        at_P: (P,) int64, the server of each, numbered from zero. GPUs can take the place of servers.
        places: number of servers, N.
        top_k: experts per token.

    Returns:
        (S, N) int64 tokens.
    """
    all_S1 = tokens_SP.sum(axis=1, keepdims=True) // top_k
    chosen_NS, missed_NS = np.zeros((places, len(tokens_SP))), np.ones((places, len(tokens_SP)))
    share_PS = (tokens_SP / np.maximum(all_S1, 1)).T
    np.add.at(chosen_NS, at_P, share_PS)
    np.multiply.at(missed_NS, at_P, 1 - np.minimum(share_PS, 1))
    most_N1 = np.minimum(top_k, np.bincount(at_P, minlength=places).clip(1))[:, None]
    return np.asarray(np.rint(all_S1 * np.maximum(1 - missed_NS, chosen_NS / most_N1).T), dtype=np.int64)


def group_tokens(tokens_SE: IntArray, group_E: IntArray, groups: int) -> IntArray:
    """Returns (S, J) int64, tokens_SE (S, E) summed over the experts of each of J groups; group_E (E,) is the group of each."""
    tokens_SJ = np.zeros((len(tokens_SE), groups), dtype=np.int64)
    np.add.at(tokens_SJ.T, group_E, tokens_SE.T)
    return tokens_SJ
