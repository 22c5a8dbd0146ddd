"""Chooses the data-parallel rank of a request by tokens, from what one API server or the proxy of `aurora vllm` knows."""

from collections.abc import Iterable, Sequence

from aurora.algorithms.requests.ranks import RankLoads, by_tokens

PRECISE = 1_000_000  # parts of a KV cache


def chosen_rank(
    prompts: Iterable[tuple[int, int]], published_R: Sequence[tuple[int, int, float]], servers: int, sent: int
) -> int:
    """Returns the rank of the next request: the one with the fewest prompt tokens to compute, then the least used KV cache.

    Other API servers' prompts are known by their number alone, which is published about ten times a second. They count as
    long as this server's on average.

    Args:
        prompts: (rank, tokens) of each prompt that this API server has sent, and that is not computed yet.
        published_R: (requests that wait, requests that run, used part of the KV cache) of each rank, of all API servers.
        servers: number of API servers.
        sent: requests sent so far, for ties.
    """
    ranks = len(published_R)
    waiting_R, tokens_R = [0] * ranks, [0] * ranks
    for rank, tokens in prompts:
        waiting_R[rank] += 1
        tokens_R[rank] += tokens
    if servers > 1 and any(waiting_R):
        mean = sum(tokens_R) // sum(waiting_R)
        for rank, (waiting, _, _) in enumerate(published_R):
            tokens_R[rank] += mean * max(0, waiting - waiting_R[rank])
    return by_tokens(RankLoads(waiting_R, tokens_R, [round(PRECISE * used) for _, _, used in published_R], sent), ())
