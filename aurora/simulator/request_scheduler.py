"""Continuous batching with chunked prefill, step by step: which tokens of which requests a data-parallel rank computes."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RankScheduler:
    """The scheduler of one data-parallel rank, as vLLM's: every request that generates gets its token first, then prompts.

    Prompts fill what is left of the step's tokens, first come first served. A prompt that does not fit is cut, and goes on in
    the next step before any other prompt begins.

    Args:
        max_num_batched_tokens: tokens of a step at most.
        max_num_seqs: requests at most that generate or whose prompt has begun.

    Attributes:
        generating: how many requests generate.
        prompts: of the requests whose prompt is not computed, the number and the tokens that are left of it, in sequence.
        begun: whether some of the first prompt is computed.

    Source:
        vLLM, `v1/core/sched/scheduler.py` and, for `score`, `v1/engine/core_client.py`.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    generating: int = 0
    prompts: deque[tuple[int, int]] = field(default_factory=deque)
    begun: bool = False

    @property
    def score(self) -> int:
        """How loaded the rank is: a new request goes to the rank with the lowest score."""
        return 4 * (len(self.prompts) - self.begun) + self.generating + self.begun

    def prefill(self) -> tuple[int, list[int]]:
        """Schedules the prompts of the next step. Returns their tokens, and the requests whose prompt ends in it.

        These generate from then on, and are counted so.
        """
        ended: list[int] = []
        left = budget = self.max_num_batched_tokens - self.generating
        while self.prompts and left and (self.begun or self.generating + len(ended) < self.max_num_seqs):
            request, tokens = self.prompts.popleft()
            computed = min(tokens, left)
            left -= computed
            self.begun = computed < tokens
            if self.begun:
                self.prompts.appendleft((request, tokens - computed))
            else:
                ended.append(request)
        self.generating += len(ended)
        return budget - left, ended
