"""Ways to use GPUs for one model, or for several: their names, what each brings, and which of them wins."""

from collections.abc import Mapping
from dataclasses import dataclass

IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES = "one after the other", "time-sliced", "micro-batches"
BY_EXCHANGE, BY_LAYER, THREE_MODELS = "by exchange", "by layer", "three models"
WAYS = (IN_SEQUENCE, TIME_SLICED, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS)  # the simplest first
SIMULATED_STEPS = 4  # of each model, if nothing else is said
TIE = 1.02  # ways that are slower than the fastest by at most this are as fast


@dataclass(frozen=True)
class WayOutcome:
    """What a way brings.

    Attributes:
        way: one of WAYS.
        seconds: until all requests are served.
        gain: the seconds that the same requests take one after the other, over `seconds`.
        tokens_per_s: tokens of all its models' steps in a second.
        tpot_s_M: by model (p50, p99): seconds between the ends of two steps that one request is in.
        utilisation: part of the GPUs' time in which they compute.
        how: what was chosen within the way; empty if nothing.
    """

    way: str
    seconds: float
    gain: float
    tokens_per_s: float
    tpot_s_M: tuple[tuple[float, float], ...]
    utilisation: float
    how: str = ""


@dataclass(frozen=True)
class WaysCompared:
    """Ways of using the same GPUs beside each other.

    Attributes:
        batch: tokens of each rank in a step of each model.
        outcomes: of each way that can be had, in the sequence of WAYS.
        left_out: why other ways cannot be had, by their names.
    """

    batch: int
    outcomes: tuple[WayOutcome, ...]
    left_out: Mapping[str, str]

    @property
    def gains(self) -> dict[str, float]:
        """The gain of each way, by its name."""
        return {outcome.way: outcome.gain for outcome in self.outcomes}

    @property
    def winner(self) -> WayOutcome:
        """The simplest of the ways that are as fast as the fastest."""
        first = winners(self.gains)[0]
        return next(outcome for outcome in self.outcomes if outcome.way == first)


def winners(gains: Mapping[str, float]) -> list[str]:
    """Returns the ways that are as fast as the fastest, within TIE, in the sequence of WAYS: the simplest first.

    Args:
        gains: by way, at least one.

    Example:
        >>> winners({"one after the other": 1.0, "by exchange": 1.4, "by layer": 1.42})
        ['by exchange', 'by layer']
    """
    least = max(gains.values()) / TIE
    return [way for way in WAYS if gains.get(way, 0.0) >= least]
