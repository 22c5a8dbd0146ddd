"""Ways to spread requests over data-parallel ranks, by name: rules for the rank of a request and for the steps of prompts."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from aurora.algorithms.requests.ranks import RankRule, by_prefix, by_requests, by_tokens, round_robin
from aurora.algorithms.requests.steps import Aligned, Cadence, EvenStep, EveryStep, PrefillInterval
from aurora.errors import BadInput, check_one_of
from aurora.types import RequestOptions

ALIGNED_STEPS = 8  # that prompts wait for those of other ranks, if nothing else is said


@dataclass(frozen=True)
class Dispatch:
    """A way to spread requests over ranks.

    Attributes:
        rank: the rule that chooses a request's rank.
        steps: makes the rule that chooses the steps in which prompts are computed, from N of "name:N".
        number: N where the name stands alone; None: the name takes no number.
        least: the least N.
    """

    rank: RankRule
    steps: Callable[[int], EveryStep] | None = None
    number: int | None = None
    least: int = 0


DISPATCH: dict[str, Dispatch] = {
    "requests": Dispatch(by_requests),
    "round-robin": Dispatch(round_robin),
    "tokens": Dispatch(by_tokens),
    "prefix": Dispatch(by_prefix),
    "aligned": Dispatch(by_tokens, Aligned, ALIGNED_STEPS),
    "interval": Dispatch(by_tokens, PrefillInterval, 1, 1),
    "cadence": Dispatch(by_tokens),
}


def dispatch_of(options: RequestOptions, ranks: int, step_s: EvenStep) -> tuple[RankRule, EveryStep]:
    """Returns the rules that `options.dispatch` names: that of ranks, and that of steps.

    Args:
        options: `dispatch`, and for a planned cadence `max_num_batched_tokens` and `ttft_s`.
        ranks: number of data-parallel ranks.
        step_s: seconds of a step of even ranks.

    Raises:
        BadInput: if there is no such way, its number is too small or not expected, or a single rank would wait for others.
    """
    name, colon, number = options.dispatch.partition(":")
    check_one_of("dispatch", name, DISPATCH)
    way = DISPATCH[name]
    if colon and (way.number is None or not re.fullmatch(r"[0-9]{1,6}", number) or int(number) < way.least):
        expected = f"{name}" if way.number is None else f"{name}:N with a whole number N from {way.least} on"
        raise BadInput(f"`dispatch`: expected {expected}, found {options.dispatch!r}")
    if ranks == 1 and name == "aligned":
        raise BadInput("`dispatch`: expected two data-parallel ranks or more for aligned, whose prompts wait for each other's")
    if name == "cadence":
        return way.rank, Cadence(options.max_num_batched_tokens, step_s, options.ttft_s)
    if way.steps is None or way.number is None:
        return way.rank, EveryStep()
    return way.rank, way.steps(int(number) if colon else way.number)
