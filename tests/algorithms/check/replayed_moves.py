"""Replays the rows by which a hierarchical dispatch and its combine carry every token."""

import numpy as np

from aurora.errors import BrokenPlan


def check_moves(moves_X5, rank_UK, source_U, server_G):
    """Checks the rows of a hierarchical dispatch, and of the combine that goes back the same way.

    Dispatch: a rank sends a token only after the step in which it received it. Every rank that computes for a token receives it
    exactly once, and no rank receives it in vain. A server other than the source's receives it from outside once.

    Combine, which has the same rows in reverse: every rank sends, once for a token and server, the sum of its own result and
    of all results that it has received. All results reach the source.

    Args:
        moves_X5: (X, 5) int64: step, source, destination, token, and the server for which the token is sent, of every row.
        rank_UK: (U, K) int64, the rank that computes each of the K chosen experts of each token.
        source_U: (U,) int64, the rank that each token starts on.
        server_G: (G,) int64, the server of each rank.

    Raises:
        BrokenPlan: if any of this fails.
    """
    by_token = np.lexsort((moves_X5[:, 0], moves_X5[:, 4], moves_X5[:, 3]))
    error, token, rank = _replay(moves_X5[by_token], rank_UK, source_U, server_G)
    if error:
        raise BrokenPlan(f"hierarchical all-to-all, token {token}: {_ERRORS[error].format(rank=rank, server=server_G[rank])}")


_ERRORS = (
    "",
    "rank {rank} sends it before it has it",
    "rank {rank} gets it more than once",
    "server {server} gets it more than once",
    "rank {rank} needs it and does not get it",
    "rank {rank} gets it for nothing",
    "rank {rank} gets back another number of choices than the token has",
)


def _replay(moves_X5, rank_UK, source_U, server_G):
    """(error, token, rank) of the first thing that is wrong, by number in _ERRORS; moves are by token, server and step."""
    ranks, servers = len(server_G), server_G.max() + 1
    got_G, sends_G, choices_G = np.full(ranks, -1), np.zeros(ranks, np.bool_), np.zeros(ranks, np.int64)
    needs_N = np.zeros(servers, np.int64)
    first = 0
    for token in range(len(rank_UK)):
        source = source_U[token]
        needs_N[:] = 0
        for rank in rank_UK[token]:
            needs_N[server_G[rank]] += 1
        for server in range(servers):
            stop, crossed = first, server == server_G[source]
            while stop < len(moves_X5) and moves_X5[stop, 3] == token and moves_X5[stop, 4] == server:
                stop += 1
            if stop == first and needs_N[server] == 0:
                continue
            got_G[:], sends_G[:], choices_G[:] = -2, False, 0  # -2: not yet
            got_G[source] = -1
            for row in range(first, stop):
                step, src, dst = moves_X5[row, 0], moves_X5[row, 1], moves_X5[row, 2]
                if got_G[src] == -2 or got_G[src] >= step:
                    return 1, token, src
                if got_G[dst] != -2:
                    return 2, token, dst
                if server_G[src] != server_G[dst]:
                    if server_G[dst] != server:
                        return 5, token, dst
                    if crossed:
                        return 3, token, dst
                    crossed = True
                got_G[dst], sends_G[src] = step, True
            for rank in rank_UK[token]:
                if server_G[rank] == server:
                    if got_G[rank] == -2:
                        return 4, token, rank
                    choices_G[rank] += 1
            for row in range(first, stop):
                rank = moves_X5[row, 2]
                if choices_G[rank] == 0 and not sends_G[rank]:
                    return 5, token, rank
            for row in range(stop - 1, first - 1, -1):  # the combine: the same rows backwards
                src, dst = moves_X5[row, 1], moves_X5[row, 2]
                choices_G[src] += choices_G[dst]
                choices_G[dst] = 0
            if choices_G[source] != needs_N[server]:
                return 6, token, source
            first = stop
    return 0, 0, 0
