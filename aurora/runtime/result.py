"""Results of a run: the result of each rank, and the merged result of the run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aurora.io.journals import JournalledAnswers
from aurora.runtime.order_calibration import OrderCalibration
from aurora.runtime.order_choice import OrdersUsed
from aurora.runtime.phase_recorder import Routing
from aurora.types import Cluster, ControlReport, Profile, TokenRouting, Trace, TraceRecorder
from aurora.types.arrays import FloatArray
from aurora.types.trace import Row

MOST_EVENTS = 200_000  # that a rank keeps for the trace, the latest ones, so that its memory does not grow for ever
MOST_TIMES = 100_000  # between tokens of a model on a rank


@dataclass(frozen=True)
class Token:
    """One more token of the answer to a request.

    Args:
        request, token: number of the request, and id of the token.
        last: whether it completes the answer.
        logits: (1, vocabulary) logits from which it was chosen; None if they are not kept.
    """

    request: int
    token: int
    last: bool
    logits: FloatArray | None = None


@dataclass
class TokenTimes:
    """Times of one model's answers on one rank.

    Args:
        ttft_s: by number of the request, seconds from its arrival to its first token.
        tpot_s: seconds from one token of an answer to its next one, of all answers; at least the latest MOST_TIMES of them.
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


@dataclass
class Answers:
    """One model's answers.

    Args:
        tokens: the answer's token ids, by number of the request.
        logits: (tokens, vocabulary) logits from which the tokens were chosen, by number of the request; empty if they are not
            kept. Requests that an earlier run began have none.
        finished: numbers of the requests whose answers are complete.
        resumed: number of tokens that an earlier run produced.
        seconds: serving time.
        times_R: latencies of tokens, by the rank that produced them.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, FloatArray] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    resumed: int = 0
    seconds: float = 0.0
    times_R: dict[int, TokenTimes] = field(default_factory=dict)
    _last_s: dict[int, float] = field(default_factory=dict, init=False, repr=False)  # when unfinished answers' last tokens came

    def resume(self, request: int, tokens: Sequence[int], finished: bool) -> None:
        """Takes over the tokens that an earlier run produced of an answer; `finished`: they complete it."""
        self.tokens[request] = list(tokens)
        self.resumed += len(tokens)
        if finished:
            self.finished.add(request)

    def add(self, tokens: Sequence[Token], rank: int, at_s: float, arrived_s: Mapping[int, float]) -> None:
        """Appends new tokens, and their logits if kept, to the answers of their requests.

        Args:
            tokens: the tokens.
            rank: the rank that they came from.
            at_s: when they came.
            arrived_s: by number of the request, when it arrived, by the same clock.
        """
        times = self.times_R.setdefault(rank, TokenTimes())
        for token in tokens:
            answer = self.tokens.setdefault(token.request, [])
            if token.logits is not None and (kept := self.logits.get(token.request, token.logits[:0])).shape[0] == len(answer):
                self.logits[token.request] = np.concatenate([kept, token.logits])
            last_s = self._last_s.pop(token.request, None)
            if last_s is not None:
                times.add_between(at_s - last_s)
            elif not answer:  # else an earlier run began it
                times.ttft_s[token.request] = at_s - arrived_s[token.request]
            answer.append(token.token)
            if token.last:
                self.finished.add(token.request)
            else:
                self._last_s[token.request] = at_s

    @property
    def ttft_s(self) -> list[float]:
        """Seconds from the arrival of each request to its first token."""
        return [seconds for times in self.times_R.values() for seconds in times.ttft_s.values()]

    @property
    def tpot_s(self) -> list[float]:
        """Seconds from one token of an answer to its next one, over all answers and ranks; see `TokenTimes`."""
        return [seconds for times in self.times_R.values() for seconds in times.tpot_s]


def journalled_answers(journalled: JournalledAnswers, models: int) -> list[Answers]:
    """Returns the answers of a journal for each of `models` models, marked as produced by an earlier run."""
    answers_M = [Answers() for _ in range(models)]
    for (model, request), answer in journalled.items():
        answers_M[model].resume(request, answer.tokens, answer.finished)
    return answers_M


@dataclass
class MembershipChange:
    """A change of the members of a run. Times are seconds since the run began.

    Args:
        epoch: the first epoch of the new members.
        lost: reason for the loss, by lost rank.
        joined: ranks that joined.
        moved: number of experts whose weights came from other ranks.
        from_checkpoint: number of experts whose weights came from the model's files, because no rank had them.
        moved_bytes: bytes of the weights that came from other ranks.
        predicted_s: predicted seconds of the transfer between ranks, by the plan's cluster.
        stopped_s: when the last token of any request before the change arrived; None: there was none.
        took_s: measured seconds of the transfer between ranks, on the slowest rank.
        resumed_s: when the first token of any request after the change arrived; None: there was none.
    """

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

    def __str__(self) -> str:
        parts = [f"lost rank {rank} ({how})" for rank, how in sorted(self.lost.items())]
        parts += [f"rank {rank} joined" for rank in self.joined]
        weights = f"{self.moved} experts' weights from other ranks"
        if self.moved:
            weights += f" ({self.moved_bytes / 1e6:.2f} MB in {self.took_s:.3f} s, predicted {self.predicted_s:.3f} s)"
        weights += f", {self.from_checkpoint} from the model's files"
        pause = "nothing to resume"
        if self.stopped_s is None:
            pause = "before the first token"
        elif self.resumed_s is not None:
            pause = f"no token for {self.resumed_s - self.stopped_s:.3f} s"
        return f"epoch {self.epoch}: {', '.join(parts) or 'replicas restored'}; {weights}; {pause}"


@dataclass(frozen=True)
class RunConditions:
    """Measured conditions of a run, from which the simulator can predict it.

    Args:
        routing_M: for each model, or each micro-batch of one, the experts that every token chose; one window per step.
        cluster: the plan's cluster, with the network as measured before serving.
    """

    routing_M: tuple[TokenRouting, ...]
    cluster: Cluster

    def traffic(self, profiles: Sequence[Profile]) -> list[Profile]:
        """Returns profiles with the run's traffic in place of the recorded traffic, one window per step.

        Args:
            profiles: one per model. The result has one for each entry of `routing_M`, so one per micro-batch.
        """
        served = [*profiles] * (len(self.routing_M) // len(profiles))
        return [
            replace(
                profile,
                tokens_TLSE=routing.tokens_TLSE(int(routing.window_U.max()) + 1, len(self.cluster), profile.experts),
                routing=routing,
                stage_T=None,
                coactivation=None,
            )
            for profile, routing in zip(served, self.routing_M, strict=True)
        ]


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Args:
        answers_M: every request's answer, by model.
        seconds: serving time of the whole run, without `start_s`.
        trace: the measured trace.
        transport: name of the transport.
        calibration: measured times of orders before serving, by size; None unless they were measured.
        orders_M: orders that the exchanges of each model, or micro-batch, used; empty unless `calibration` was measured.
        conditions: measured conditions, for a prediction of the run; None unless `options.predictable`.
        changes: the changes of membership; empty unless `options.survive`.
        failure: reason why some requests are not answered; None: all are.
        start_s: seconds before serving: processes start, models are loaded, orders are measured.
        trace_from_s: the trace lacks events before this time, in seconds since the run began; None: it lacks none.
    """

    answers_M: tuple[Answers, ...]
    seconds: float
    trace: Trace
    transport: str
    calibration: OrderCalibration | None = None
    orders_M: tuple[OrdersUsed, ...] = ()
    conditions: RunConditions | None = None
    changes: tuple[MembershipChange, ...] = ()
    failure: str | None = None
    start_s: float = 0.0
    trace_from_s: float | None = None

    @property
    def control_M(self) -> tuple[ControlReport, ...]:
        """Report of the controller for each model whose experts followed the traffic; see `Trace`."""
        return self.trace.control_M

    def tokens_per_second(self, model: int, with_start: bool = False) -> float:
        """Returns the tokens per second of the model with index `model` while it served; 0 if it did not serve.

        Args:
            model: index of the model.
            with_start: count `start_s` too.
        """
        answers = self.answers_M[model]
        tokens = sum(map(len, answers.tokens.values())) - answers.resumed
        return tokens / (answers.seconds + with_start * self.start_s) if answers.seconds else 0.0


@dataclass(frozen=True)
class RankResult:
    """Result of one rank. Fields that are not listed are as in `RunResult`.

    Args:
        answers_M: by model, the answers to the requests that this rank served.
        rows: this rank's rows of the trace.
        routing_M: for each model, or each micro-batch of one, experts_ULK and the step of each token (U,), if
            `options.predictable`; else empty.
        network: the cluster with the network as measured, if `options.predictable`; else None.
        control_M: as in `Trace`, on rank 0; on other ranks empty.
        began_s: when serving began, by time.perf_counter.
    """

    answers_M: list[Answers]
    seconds: float
    rows: list[Row]
    transport: str
    calibration: OrderCalibration | None
    orders_M: list[OrdersUsed]
    routing_M: list[Routing]
    network: Cluster | None
    control_M: tuple[ControlReport, ...] = ()
    began_s: float = 0.0


def merge_results(results: Sequence[RankResult], names_M: tuple[str, ...]) -> RunResult:
    """Merges the results of all ranks, by rank, into the result of the run; `names_M` are the models' names in the trace."""
    answers_M = tuple(map(merge_answers, zip(*(result.answers_M for result in results), strict=True)))
    first, seconds = results[0], max(result.seconds for result in results)
    conditions = None
    if first.network is not None:
        routing_MR = zip(*(result.routing_M for result in results), strict=True)
        conditions = RunConditions(tuple(_merge_routing(routing_R) for routing_R in routing_MR), first.network)
    trace, from_s = measured_trace(results, names_M, len(results))
    orders_M = tuple(first.orders_M)
    return RunResult(answers_M, seconds, trace, first.transport, first.calibration, orders_M, conditions, trace_from_s=from_s)


def merge_answers(parts: Iterable[Answers]) -> Answers:
    """Merges the answers of several ranks, or micro-batches, that served one model side by side."""
    merged = Answers()
    for answers in parts:
        merged.tokens |= answers.tokens
        merged.logits |= answers.logits
        merged.finished |= answers.finished
        merged.seconds = max(merged.seconds, answers.seconds)
        for rank, times in answers.times_R.items():
            merged.times_R.setdefault(rank, TokenTimes()).merge(times)
    return merged


def measured_trace(results: Sequence[RankResult], names_M: tuple[str, ...], ranks: int) -> tuple[Trace, float | None]:
    """Merges the ranks' recorded events into the trace of the run.

    A rank keeps only its latest MOST_EVENTS events. If one has dropped events, the trace leaves out all steps that began on any
    rank before the rank's first kept event.

    Args:
        results: results of all ranks.
        names_M: names of the models.
        ranks: number of ranks.

    Returns:
        The trace, and the time in seconds before which it lacks events; None: it lacks none.
    """
    recorder = TraceRecorder("measured", names_M, ranks)
    rows = [row for result in results for row in result.rows]
    from_s = max((result.rows[0][0] for result in results if len(result.rows) == MOST_EVENTS), default=None)
    if from_s is not None:
        begun = {row[3:6] for row in rows if row[0] < from_s}  # epoch, model, step
        rows = [row for row in rows if row[3:6] not in begun]
    recorder.rows.extend(rows)
    control_M = tuple(report for result in results for report in result.control_M)
    return replace(recorder.trace(), control_M=control_M), from_s


def _merge_routing(routing_R: Sequence[Routing]) -> TokenRouting:
    source_U = np.repeat(np.arange(len(routing_R)), [len(step_U) for _, step_U in routing_R])
    experts_ULK, step_U = (np.concatenate(parts) for parts in zip(*routing_R, strict=True))
    return TokenRouting(experts_ULK, source_U, step_U)
