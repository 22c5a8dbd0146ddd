"""What a run brings home: each rank's share, and the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from aurora.execute.calibrate import Choice
from aurora.types import Recorder, Trace
from aurora.types.arrays import FloatArray
from aurora.types.trace import Row


@dataclass
class Answers:
    """One model's answers on one rank: tokens and, if kept, logits (tokens, vocabulary) by request index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, FloatArray] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """A finished run. answers_M: every request's answer by model; seconds: the whole run's serving time; trace: measured;
    choice: which orders were used at which size, where that was measured."""

    answers_M: tuple[Answers, ...]
    seconds: float
    trace: Trace
    transport: str
    choice: Choice | None = None

    def tokens_per_second(self, model: int) -> float:
        answers = self.answers_M[model]
        return sum(map(len, answers.tokens.values())) / answers.seconds if answers.seconds else 0.0


@dataclass(frozen=True)
class Share:
    """What one rank brings home. rows: of the trace."""

    answers_M: list[Answers]
    rows: list[Row]
    transport: str
    choice: Choice | None


def merge(shares: Sequence[Share], names_M: tuple[str, ...]) -> RunResult:
    """The whole run from what all ranks brought home."""
    merged = [Answers() for _ in names_M]
    recorder = Recorder("measured", names_M, len(shares))
    for share in shares:
        recorder.rows += share.rows
        for whole, part in zip(merged, share.answers_M, strict=True):
            whole.tokens |= part.tokens
            whole.logits |= part.logits
            whole.seconds = max(whole.seconds, part.seconds)
    first = shares[0]
    return RunResult(tuple(merged), max(a.seconds for a in merged), recorder.trace(), first.transport, first.choice)
