"""What a run brings home: each rank's share, and the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aurora.runtime.order_calibration import OrderCalibration
from aurora.types import Cluster, Plan, Profile, TokenRouting, Trace, TraceRecorder
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.trace import Row

Routing = tuple[NDArray[Any], IntArray]  # experts_ULK of a rank's U tokens, and in which step each was routed


@dataclass(frozen=True)
class Token:
    """One more token of the answer to a request. logits (1, vocabulary): if kept. last: the answer is complete."""

    request: int
    token: int
    last: bool
    logits: FloatArray | None = None


@dataclass
class Answers:
    """One model's answers: tokens and, if kept, logits (tokens, vocabulary) by request index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, FloatArray] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, fresh: Sequence[Token]) -> None:
        for one in fresh:
            self.tokens.setdefault(one.request, []).append(one.token)
            if one.logits is not None:
                kept = self.logits.get(one.request, one.logits[:0])
                self.logits[one.request] = np.concatenate([kept, one.logits])


@dataclass
class MembershipChange:
    """Who was there from `epoch` on. lost: how each seat was lost; joined: seats; moved, from_checkpoint: experts whose weights
    came from other ranks and, because none of them had them, from the model's files. moved_bytes, predicted_s, took_s: of those
    from other ranks, by the plan's cluster and as measured, the slowest rank's. stopped_s, resumed_s: when the last token
    before and the first after came, of any request, since the run began; None: none came."""

    epoch: int
    lost: dict[int, str]
    joined: tuple[int, ...]
    moved: int
    from_checkpoint: int
    moved_bytes: int
    predicted_s: float
    stopped_s: float | None
    took_s: float = 0.0
    resumed_s: float | None = None


@dataclass(frozen=True)
class RunConditions:
    """choices_M: the experts that every token of each model chose, a window a step; cluster: with the network as measured."""

    routing_M: tuple[TokenRouting, ...]
    cluster: Cluster

    def traffic(self, profiles: Sequence[Profile]) -> list[Profile]:
        """The models' profiles with the run's own traffic in place of theirs, a window a step."""
        return [
            replace(
                profile,
                tokens_TLSE=routing.tokens_TLSE(int(routing.window_U.max()) + 1, len(self.cluster), profile.experts),
                routing=routing,
                stage_T=None,
                coactivation=None,
            )
            for profile, routing in zip(profiles, self.routing_M, strict=True)
        ]


@dataclass(frozen=True)
class RunResult:
    """A finished run. answers_M: every request's answer by model; seconds: the whole run's serving time; trace: measured;
    choice: which orders were used at which size, where that was measured; conditions: what a prediction of the run wants, if
    options.predictable; changes: of membership, if options.survive; failure: why not all requests are answered."""

    answers_M: tuple[Answers, ...]
    seconds: float
    trace: Trace
    transport: str
    choice: OrderCalibration | None = None
    conditions: RunConditions | None = None
    changes: tuple[MembershipChange, ...] = ()
    failure: str | None = None

    def tokens_per_second(self, model: int) -> float:
        answers = self.answers_M[model]
        return sum(map(len, answers.tokens.values())) / answers.seconds if answers.seconds else 0.0


@dataclass(frozen=True)
class RankResult:
    """What one rank brings home. rows: of the trace. routing_M: each model's experts_ULK and steps (U,), and network: both if
    options.predictable."""

    answers_M: list[Answers]
    seconds: float
    rows: list[Row]
    transport: str
    choice: OrderCalibration | None
    routing_M: list[Routing]
    network: Cluster | None


def merge(shares: Sequence[RankResult], names_M: tuple[str, ...]) -> RunResult:
    """The whole run from what all ranks brought home."""
    merged = [Answers() for _ in names_M]
    recorder = TraceRecorder("measured", names_M, len(shares))
    for share in shares:
        recorder.rows += share.rows
        for whole, part in zip(merged, share.answers_M, strict=True):
            whole.tokens |= part.tokens
            whole.logits |= part.logits
            whole.seconds = max(whole.seconds, part.seconds)
    first = shares[0]
    conditions = None
    if first.network is not None:
        routing_MR = zip(*(share.routing_M for share in shares), strict=True)
        conditions = RunConditions(tuple(_routing(routing_R) for routing_R in routing_MR), first.network)
    return RunResult(
        tuple(merged), max(share.seconds for share in shares), recorder.trace(), first.transport, first.choice, conditions
    )


def survived(
    answers_M: Sequence[Answers],
    changes: Sequence[MembershipChange],
    shares: Sequence[RankResult],
    plan: Plan,
    failure: str | None,
) -> RunResult:
    """The whole run from its journal; the trace is of the ranks that are left."""
    recorder = TraceRecorder("measured", tuple(model.model for model in plan.models), len(plan.cluster))
    for share in shares:
        recorder.rows += share.rows
    seconds = max(answers.seconds for answers in answers_M)
    transport = shares[0].transport if shares else "none"
    return RunResult(tuple(answers_M), seconds, recorder.trace(), transport, changes=tuple(changes), failure=failure)


def _routing(routing_R: Sequence[Routing]) -> TokenRouting:
    source_U = np.repeat(np.arange(len(routing_R)), [len(step_U) for _, step_U in routing_R])
    experts_ULK, step_U = (np.concatenate(parts) for parts in zip(*routing_R, strict=True))
    return TokenRouting(experts_ULK, source_U, step_U)
