"""Chooses the data-parallel rank of a request from the loads of all ranks: rules by name.

All ranks step together, and a step takes as long as its busiest rank. Prompts of 8000, 500, 8000 and 500 tokens that arrive at
once on two ranks:

    rule        rank of each    tokens to compute    busiest / mean
    requests    0 1 0 1         16000   1000         1.882
    tokens      0 1 1 0          8500   8500         1.000

Equal numbers of requests are not equal work: `requests` sees two and two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class RankLoads:
    """Loads of R data-parallel ranks, as the process that sends requests to them knows them.

    Attributes:
        requests_R: requests of each rank that are not answered yet.
        prompt_tokens_R: prompt tokens of each rank that are not computed yet.
        kv_tokens_R: tokens of each rank's requests whose keys and values are kept.
        sent: requests sent so far; ties go to the rank `sent` modulo R, or the next one after it.
    """

    requests_R: list[int]
    prompt_tokens_R: list[int]
    kv_tokens_R: list[int]
    sent: int = 0

    @classmethod
    def idle(cls, ranks: int) -> "RankLoads":
        """Returns the loads of ranks without requests."""
        return cls([0] * ranks, [0] * ranks, [0] * ranks)

    def lowest(self, score: Callable[[int], int | tuple[int, int]]) -> int:
        """Returns the rank of the lowest score; of equal ones the first from rank `sent` modulo R on."""
        ranks = len(self.requests_R)
        first = self.sent % ranks
        return min(((first + offset) % ranks for offset in range(ranks)), key=score)


RankRule = Callable[[RankLoads, Sequence[int]], int]  # loads, tokens of the prompt in each rank's prefix cache -> rank


def by_requests(loads: RankLoads, _cached_R: Sequence[int]) -> int:
    """Returns the rank with the fewest requests.

    Source:
        vLLM 0.32, `v1/engine/core_client.py`, without its penalty where the KV cache is more than half full.
    """
    return loads.lowest(loads.requests_R.__getitem__)


def round_robin(loads: RankLoads, _cached_R: Sequence[int]) -> int:
    """Returns the ranks in turn."""
    return loads.sent % len(loads.requests_R)


def by_tokens(loads: RankLoads, _cached_R: Sequence[int]) -> int:
    """Returns the rank with the fewest prompt tokens to compute; of equal ones, with the fewest tokens in its KV cache."""
    return loads.lowest(lambda rank: (loads.prompt_tokens_R[rank], loads.kv_tokens_R[rank]))


def by_prefix(loads: RankLoads, cached_R: Sequence[int]) -> int:
    """Returns the rank that would have the fewest prompt tokens left of this request and of those before it.

    A rank that holds the prompt's prefix in its cache is taken unless it is busier than another by more than it saves.
    """
    return loads.lowest(lambda rank: (loads.prompt_tokens_R[rank] - cached_R[rank], loads.kv_tokens_R[rank]))
