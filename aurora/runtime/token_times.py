"""When the tokens of one model's answers came, as one rank gave them: time to first token, and time between tokens."""

from dataclasses import dataclass, field

MOST_TIMES = 100_000  # between tokens of a model on a rank


@dataclass
class TokenTimes:
    """Times of one model's answers on one rank.

    Args:
        ttft_s: by number of the request, seconds from its arrival to its first token.
        tpot_s: seconds between two tokens of an answer, of each answer and token, at least the latest MOST_TIMES.
    """

    ttft_s: dict[int, float] = field(default_factory=dict)
    tpot_s: list[float] = field(default_factory=list)

    def add_between(self, seconds: float) -> None:
        """Adds the seconds between two tokens of an answer, in bounded memory."""
        self.tpot_s.append(seconds)
        if len(self.tpot_s) == 2 * MOST_TIMES:
            del self.tpot_s[:MOST_TIMES]

    def merge(self, other: "TokenTimes") -> None:
        """Adds the times of another part of the rank's answers."""
        self.ttft_s |= other.ttft_s
        self.tpot_s += other.tpot_s
