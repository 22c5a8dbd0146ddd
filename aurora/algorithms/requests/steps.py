"""Decides in which steps data-parallel ranks compute prompts: rules by name, and the interval that fits the load.

All ranks step together, so a step takes as long as its busiest rank. Where one rank computes a prompt and the others have none,
they wait for it. Prompts that wait for those of other ranks make fewer steps long. Steps of 20 ms and 0.1 ms a prompt token;
four ranks get a prompt of 2000 tokens each, one after the other:

    prompts are computed            steps take              a request that generates gets a token every
    in every step                   220 220 220 220 ms      220 ms
    in every 4th step, of all       220  20  20  20 ms       70 ms
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_INTERVAL = 16  # steps between two in which prompts are computed, at most
FILL = 0.85  # share of the tokens of a step that its prompts may take, were ranks even
RECENT_S = 10.0  # of which arrivals are taken for those to come
EvenStep = Callable[[int, int], float]  # seconds of a step, by prompt tokens and generating requests that each rank has alike


@dataclass(frozen=True)
class RanksAtStep:
    """The state of R ranks at a step.

    Attributes:
        step: steps since all ranks were idle; the same on all ranks.
        now_s: the time, in seconds.
        prompt_tokens_R: prompt tokens of each rank that are not computed, of the requests that it may serve now.
        waiting_R: prompts of each rank that are not begun.
        generating_R: requests of each rank that generate.
    """

    step: int
    now_s: float
    prompt_tokens_R: Sequence[int]
    waiting_R: Sequence[int]
    generating_R: Sequence[int]


class EveryStep:
    """Computes prompts in every step; the base of the other rules."""

    def arrived(self, at_s: float, prompt_tokens: int) -> None:
        """Counts a request that has come, at a time in seconds."""

    def open_R(self, ranks: RanksAtStep) -> list[bool]:
        """Returns for each rank if it computes prompts in this step. Called once for each step in which there are prompts."""
        return [True] * len(ranks.waiting_R)

    def scheduled(self, ranks: RanksAtStep, open_R: Sequence[bool]) -> None:
        """Takes the ranks as they are once the step's prompts are scheduled."""


@dataclass
class Aligned(EveryStep):
    """Lets prompts wait until all ranks have some, for at most `most` steps, and not while a rank generates nothing.

    Source:
        TensorRT-LLM, `attention_dp_config` with `enable_balance` and `timeout_iters`.
    """

    most: int
    held: int = 0

    def open_R(self, ranks: RanksAtStep) -> list[bool]:
        """Returns for each rank if it computes prompts in this step."""
        ready = all(ranks.prompt_tokens_R) or not all(ranks.generating_R) or self.held >= self.most
        self.held = 0 if ready else self.held + 1
        return [ready] * len(ranks.waiting_R)


@dataclass
class PrefillInterval(EveryStep):
    """Computes prompts in every `interval`-th step; a rank whose prompts could not all begin goes on at once, alone.

    Source:
        vLLM 0.32, `--prefill-schedule-interval`: `v1/engine/core.py` and `v1/core/sched/scheduler.py`.
    """

    interval: int
    full_R: list[bool] = field(default_factory=list)

    def open_R(self, ranks: RanksAtStep) -> list[bool]:
        """Returns for each rank if it computes prompts in this step."""
        full_R = self.full_R or [False] * len(ranks.waiting_R)
        due = ranks.step % self.interval == 0
        return [due or full or not generating for full, generating in zip(full_R, ranks.generating_R, strict=True)]

    def scheduled(self, ranks: RanksAtStep, open_R: Sequence[bool]) -> None:
        """Keeps which of the ranks that computed prompts have some that did not begin."""
        full_R = self.full_R or [False] * len(open_R)
        self.full_R = [
            bool(waiting) if opened else full for full, opened, waiting in zip(full_R, open_R, ranks.waiting_R, strict=True)
        ]


@dataclass
class Cadence(EveryStep):
    """Computes prompts in every k-th step, of all ranks; k is planned anew after each, from the arrivals of RECENT_S seconds.

    Args:
        max_num_batched_tokens: maximum tokens of a rank in a step.
        step_s: seconds of a step of even ranks.
        ttft_s: seconds within which a prompt of one step should have its first token; None: no bound.
    """

    max_num_batched_tokens: int
    step_s: EvenStep
    ttft_s: float | None = None
    interval: int = 1
    since: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    tokens: int = 0
    first_s: float | None = None

    def arrived(self, at_s: float, prompt_tokens: int) -> None:
        """Counts a request that has come."""
        self.first_s = at_s if self.first_s is None else self.first_s
        self.recent.append((at_s, prompt_tokens))
        self.tokens += prompt_tokens

    def open_R(self, ranks: RanksAtStep) -> list[bool]:
        """Returns for each rank if it computes prompts in this step."""
        self.since = min(self.since, ranks.step)
        ready = ranks.step - self.since >= self.interval or ranks.step == 0 or not any(ranks.generating_R)
        self.since = ranks.step if ready else self.since
        return [ready] * len(ranks.waiting_R)

    def scheduled(self, ranks: RanksAtStep, open_R: Sequence[bool]) -> None:
        """Plans the interval, once prompts were computed."""
        while self.recent and self.recent[0][0] < ranks.now_s - RECENT_S:
            self.tokens -= self.recent.popleft()[1]
        if open_R[0] and self.first_s is not None:
            seconds = min(RECENT_S, ranks.now_s - self.first_s)
            rates = (len(self.recent) / seconds, self.tokens / seconds) if seconds > 0 else (math.inf, math.inf)
            self.interval = planned_interval(ranks, *rates, self.max_num_batched_tokens, self.step_s, self.ttft_s)


def planned_interval(
    ranks: RanksAtStep,
    prompts_per_s: float,
    prompt_tokens_per_s: float,
    max_num_batched_tokens: int,
    step_s: EvenStep,
    ttft_s: float | None = None,
) -> int:
    """Returns k, so that all ranks compute prompts in every k-th step: the largest interval that keeps queues from growing.

    In an interval, k - 1 steps only generate and one computes the prompts that have come. Were ranks even, the prompts of one
    step with P = FILL x (max_num_batched_tokens - generating) tokens on each of R ranks come in P x R / rate seconds. So
    (k - 1) x step_s(0, generating) + step_s(P, generating) must not take longer. With the steps above, R = 4, P = 3400 and
    25,000 prompt tokens/s: 0.544 s, in which a step of 0.36 s and 9 of 0.02 s fit; k = 10.

    Where all ranks have a whole step's prompts waiting, they are even, and k = 1. So it is where less than one prompt comes in
    the longest interval: none would wait for another.

    Args:
        ranks: the ranks, after a step's prompts were scheduled.
        prompts_per_s: prompts that come in a second, for all ranks.
        prompt_tokens_per_s: prompt tokens that come in a second, for all ranks.
        max_num_batched_tokens: maximum tokens of a rank in a step.
        step_s: seconds of a step of even ranks, by the prompt tokens and the generating requests of each.
        ttft_s: seconds within which a prompt of one step should have its first token; None: no bound. A prompt that comes right
            after one such step waits for the next, and for its end.
    """
    generating = round(sum(ranks.generating_R) / len(ranks.generating_R))
    free = max(1, max_num_batched_tokens - generating)
    prompts = math.ceil(FILL * free)
    with_prompts_s, without_s = step_s(prompts, generating), step_s(0, generating)
    if without_s <= 0 or prompts_per_s * MOST_INTERVAL * without_s < 1 or min(ranks.prompt_tokens_R) >= free:
        return 1
    most_s = prompts * len(ranks.generating_R) / prompt_tokens_per_s if prompt_tokens_per_s else math.inf
    if ttft_s is not None:
        most_s = min(most_s, ttft_s - with_prompts_s)
    return max(1, int(min(MOST_INTERVAL, 1 + (most_s - with_prompts_s) / without_s)))
