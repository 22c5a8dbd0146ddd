"""Chooses the data-parallel rank of a request by tokens, from what one API server or the proxy of `aurora vllm` knows."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from aurora.algorithms.requests.ranks import RankLoads, by_tokens

PRECISE = 1_000_000  # parts of a KV cache


@dataclass
class RankPrompts:
    """Prompts that an API server has sent to one rank, and what the rank's running step leaves of them.

    A rank computes prompts in the sequence in which they came. vLLM says of each only when it is computed as a whole, and of
    each step of the rank when it ends. With prompts of 300, 900 and 200 tokens before a step of 1,000, 500 tokens are left
    while it runs: 200 of the second and the third. Prompts that come during a step begin in the next.

    Args:
        most_tokens: maximum tokens of a step.
        most_requests: maximum requests that have begun.
    """

    most_tokens: int
    most_requests: int
    _left: dict[str, int] = field(default_factory=dict)

    def sent(self, name: str, tokens: int) -> None:
        """Adds a prompt."""
        self._left[name] = tokens

    def stepped(self, computing: Container[str], requests: int) -> None:
        """Begins the next step: takes its tokens from the prompts.

        Args:
            computing: names of the prompts that are not computed as a whole.
            requests: the rank's unfinished requests.
        """
        self._left = {name: left for name, left in self._left.items() if name in computing}
        generating = requests - len(self._left)
        free, slots = self.most_tokens - generating, self.most_requests - generating
        for name, left in list(self._left.items())[: max(0, slots)]:
            taken = min(left, free)
            self._left[name], free = left - taken, free - taken

    def left(self, computing: Container[str]) -> list[int]:
        """Returns the tokens that are left of each prompt in `computing`."""
        return [left for name, left in self._left.items() if name in computing]


def chosen_rank(
    prompts: Iterable[tuple[int, int]], published_R: Sequence[tuple[int, int, float]], servers: int, sent: int
) -> int:
    """Returns the rank of the next request: the one with the fewest prompt tokens to compute, then the least used KV cache.

    Other API servers' prompts are known by their number alone, which is published about ten times a second. They count as
    long as this server's on average.

    Args:
        prompts: (rank, tokens left) of each prompt that this API server has sent, and that is not computed yet.
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
