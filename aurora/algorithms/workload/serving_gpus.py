"""Serving GPUs: chooses the GPU that computes each (token, expert) pair if experts have replicas.

In a hierarchical all-to-all, the servers that a token is sent to must be known before tokens are counted. So all tokens for an
expert that start on one server are computed on one server, which depends on the placement only. Replicas inside that server
share the tokens as in flat all-to-alls.
"""

import numpy as np

from aurora.algorithms.workload import serving_gpus_core as core
from aurora.types.arrays import FloatArray, IntArray

DIGITS = 9  # of a server's share that are compared; sums of shares differ beyond them


def server_split(split_EG: FloatArray, server_G: IntArray) -> FloatArray:
    """Returns the split of each expert's tokens over GPUs, separately for the tokens that start on each server.

    The GPUs of the server that serves these tokens (`serving_servers`) take parts in proportion to their shares.

    Args:
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
        server_G: (G,) int64, the server of each GPU.

    Returns:
        (N, E, G) float64, the share that GPU g takes of the tokens for expert e that start on server n.
    """
    inside_EG, serving_NE = _served_inside(split_EG, server_G)
    return np.where(serving_NE[:, :, None] == server_G, inside_EG, 0.0)


def _served_inside(split_EG: FloatArray, server_G: IntArray) -> tuple[FloatArray, IntArray]:
    """(E, G) the part of its server's share of an expert that each GPU takes, and (N, E) as of `serving_servers`."""
    ranks_N = np.bincount(server_G)
    share_EN = split_EG @ (server_G[:, None] == np.arange(len(ranks_N)))
    with np.errstate(invalid="ignore"):
        inside_EG = split_EG / share_EN[:, server_G]
    return inside_EG, serving_servers(share_EN, ranks_N / len(server_G))


def serving_servers(share_EN: FloatArray, weight_N: FloatArray) -> IntArray:
    """Returns (N, E) int64, the server that serves the tokens for expert e that start on server n.

    A server with a share of an expert serves the tokens that start on it. The other servers, in sequence, are each served by
    the holder with the largest remaining share: its share minus what it serves so far, with equally many tokens on all ranks.
    Ties go to the first.

    Args:
        share_EN: (E, N) float64, the share of each expert's tokens that each server takes.
        weight_N: (N,) float64, number of ranks of each server / number of all ranks.
    """
    servers = len(weight_N)
    serving_NE = np.where(share_EN.T > 0, np.arange(servers)[:, None], -1)
    left_EN = np.where(share_EN > 0, share_EN - weight_N, -np.inf)
    for server in range(servers):
        away_X = np.flatnonzero(serving_NE[server] < 0)
        chosen_X = left_EN[away_X].round(DIGITS).argmax(axis=1)
        serving_NE[server, away_X] = chosen_X
        left_EN[away_X, chosen_X] -= weight_N[server]
    return serving_NE


def serving_gpus(experts_UK: IntArray, source_U: IntArray, split_EG: FloatArray, server_G: IntArray) -> IntArray:
    """Returns (U, K) int64, the GPU that computes each of the K chosen experts of each token, in hierarchical all-to-alls.

    Each rank divides its own tokens for an expert, in their sequence, over the GPUs of the server that serves them
    (`server_split`), cut as in flat all-to-alls (`replica_tokens`).

    Args:
        experts_UK: (U, K) int64, the experts of each token.
        source_U: (U,) int64, the rank that each token starts on.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
        server_G: (G,) int64, the server of each GPU.
    """
    experts = len(split_EG)
    if is_unreplicated(split_EG):
        return np.asarray(split_EG.argmax(axis=1)[experts_UK])
    split_NEG = server_split(split_EG, server_G)
    server_U1 = server_G[source_U][:, None]
    gpu_UK = split_NEG.argmax(axis=2)[server_U1, experts_UK]
    divided_UK = (split_NEG.max(axis=2) < 1)[server_U1, experts_UK]
    pair_X = (source_U[:, None] * experts + experts_UK)[divided_UK]
    tokens_SE = np.bincount(pair_X, minlength=len(server_G) * experts).reshape(-1, experts)
    tokens_SP, _, gpu_P = replica_tokens(tokens_SE, split_EG, server_G)
    served_X = np.empty_like(pair_X)
    served_X[np.argsort(pair_X, kind="stable")] = np.repeat(np.tile(gpu_P, len(tokens_SP)), tokens_SP.ravel())
    gpu_UK[divided_UK] = served_X
    return np.asarray(gpu_UK)


def tokens_to_gpus(tokens_SE: IntArray, split_EG: FloatArray) -> IntArray:
    """Returns (S, G) int64: the (token, expert) pairs that each source sends to each GPU in flat all-to-alls.

    Args:
        tokens_SE: (S, E) int64, tokens from each source to each expert.
        split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.
    """
    tokens_SP, _, gpu_P = replica_tokens(tokens_SE, split_EG)
    tokens_GS = np.zeros((split_EG.shape[1], len(tokens_SE)), dtype=np.int64)
    np.add.at(tokens_GS, gpu_P, tokens_SP.T)
    return np.ascontiguousarray(tokens_GS.T)


def served_split(tokens_SE: IntArray | FloatArray, split_EG: FloatArray, server_G: IntArray) -> FloatArray:
    """Returns (E, G) float64, the share of each expert's tokens that each GPU serves in hierarchical all-to-alls.

    Args:
        tokens_SE: (S, E), tokens of each expert from each rank.
        split_EG: (E, G) float64, as in `server_split`.
        server_G: (G,) int64, the server of each GPU.
    """
    if is_unreplicated(split_EG):
        return split_EG
    return np.asarray(np.einsum("ne,neg->eg", from_servers(tokens_SE, server_G), server_split(split_EG, server_G)))


def replica_tokens(
    tokens_SE: IntArray, split_EG: FloatArray, server_G: IntArray | None = None
) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the tokens of each replica, by their shares; in hierarchical all-to-alls as by `serving_gpus`.

    A source's tokens for an expert are cut at the running sum of its replicas' shares. Whether a cut is rounded up or down
    depends on the source's number. So all ranks compute the same division without communication, every token is sent exactly
    once, and sources with few tokens do not all choose the same GPU.

    Args:
        tokens_SE: (S, E) int64, tokens of each expert from each rank.
        split_EG: (E, G) float64, as in `server_split`.
        server_G: (G,) int64, the server of each GPU; None: all-to-alls are flat.

    Returns:
        (S, P) int64, tokens of each replica from each rank; (P,) int64, the expert of each replica, rising; and (P,) its GPU.
    """
    expert_P, gpu_P = np.nonzero(split_EG)
    if (split_EG[expert_P, gpu_P] == 1).all():
        return tokens_SE[:, expert_P], expert_P, gpu_P
    share_NP, server_S = split_EG[expert_P, gpu_P][None], np.zeros(len(tokens_SE), dtype=np.int64)
    if server_G is not None:
        inside_EG, serving_NE = _served_inside(split_EG, server_G)
        share_NP = np.where(serving_NE[:, expert_P] == server_G[gpu_P], inside_EG[expert_P, gpu_P], 0.0)
        server_S = server_G
    return core.replica_tokens(*map(np.ascontiguousarray, (tokens_SE, share_NP, server_S, expert_P))), expert_P, gpu_P


def from_servers(tokens_SE: IntArray | FloatArray, server_G: IntArray) -> FloatArray:
    """Returns (N, E) float64, the part of each expert's tokens that starts on each server.

    For an expert without tokens it is each server's part of all ranks. tokens_SE (S, E) are tokens from rank to expert.
    """
    ranks_N = np.bincount(server_G)
    tokens_NE = (np.arange(len(ranks_N))[:, None] == server_G) @ np.asarray(tokens_SE, dtype=np.float64)
    total_E, even_N1 = tokens_NE.sum(axis=0), ranks_N[:, None] / len(server_G)
    return np.asarray(np.divide(tokens_NE, total_E, out=np.tile(even_N1, len(total_E)), where=total_E > 0))


def is_unreplicated(split_EG: FloatArray) -> bool:
    """Returns whether every expert is computed on a single GPU; split_EG (E, G) are the shares that GPUs take."""
    return bool((split_EG == 1).any(axis=1).all())
