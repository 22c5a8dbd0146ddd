"""Results of a run: the result of each rank, and the merged result of the run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aurora.runtime.order_calibration import OrderCalibration
from aurora.runtime.order_choice import OrdersUsed
from aurora.runtime.phase_recorder import Routing
from aurora.types import Cluster, Profile, TokenRouting, Trace, TraceRecorder
from aurora.types.arrays import FloatArray
from aurora.types.trace import Row

MOST_EVENTS = 200_000  # that a rank keeps for the trace, the latest ones, so that its memory does not grow for ever
MOST_TIMES = 100_000  # between tokens of a model on a rank


@dataclass(frozen=True)
class Token:
    """Generated token of one request.

    Args:
        request, token: number of the request, and id of the token.
        last: True if it is the last token of the answer.
        logits: (1, vocabulary) logits from which it was chosen; None if logits are not kept.
    """

    request: int
    token: int
    last: bool
    logits: FloatArray | None = None


@dataclass
class TokenTimes:
    """Token latencies of one model on one rank.

    Args:
        ttft_s: seconds from the arrival of a request to its first token, by request number.
        tpot_s: seconds from each token of an answer to the next, over all answers; at least the latest MOST_TIMES are kept.
    """

    ttft_s: dict[int, float] = field(default_factory=dict)
    tpot_s: list[float] = field(default_factory=list)

    def add_between(self, seconds: float) -> None:
        """Adds the seconds between two tokens of an answer, in bounded memory."""
        self.tpot_s.append(seconds)
        if len(self.tpot_s) == 2 * MOST_TIMES:
            del self.tpot_s[:MOST_TIMES]

    def merge(self, other: "TokenTimes") -> None:
        """Adds the latencies in `other`, such as those of another micro-batch on the same rank."""
        self.ttft_s |= other.ttft_s
        self.tpot_s += other.tpot_s


@dataclass
class Answers:
    """Answers of one model to its requests.

    Args:
        tokens: token ids of each answer, by request number.
        logits: (tokens, vocabulary) logits from which the tokens were chosen, by request number; empty if logits are not kept.
        seconds: serving time.
        times_R: token latencies, by the rank that produced the tokens.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, FloatArray] = field(default_factory=dict)
    seconds: float = 0.0
    times_R: dict[int, TokenTimes] = field(default_factory=dict)
    _last_s: dict[int, float] = field(default_factory=dict, init=False, repr=False)  # when unfinished answers' last tokens came

    def add(self, tokens: Sequence[Token], rank: int, at_s: float, arrived_s: Mapping[int, float]) -> None:
        """Appends new tokens, and their logits if kept, to the answers of their requests.

        Args:
            tokens: the tokens.
            rank: the rank that produced them.
            at_s: time at which they were produced.
            arrived_s: arrival time of each request, by request number and by the same clock.
        """
        times = self.times_R.setdefault(rank, TokenTimes())
        for token in tokens:
            answer = self.tokens.setdefault(token.request, [])
            if token.logits is not None and (rows := self.logits.get(token.request, token.logits[:0])).shape[0] == len(answer):
                self.logits[token.request] = np.concatenate([rows, token.logits])
            last_s = self._last_s.pop(token.request, None)
            if last_s is not None:
                times.add_between(at_s - last_s)
            else:
                times.ttft_s[token.request] = at_s - arrived_s[token.request]
            answer.append(token.token)
            if not token.last:
                self._last_s[token.request] = at_s

    @property
    def ttft_s(self) -> list[float]:
        """Seconds from the arrival of each request to its first token."""
        return [seconds for times in self.times_R.values() for seconds in times.ttft_s.values()]

    @property
    def tpot_s(self) -> list[float]:
        """Seconds from each token of an answer to the next, over all answers and ranks; see `TokenTimes`."""
        return [seconds for times in self.times_R.values() for seconds in times.tpot_s]


@dataclass(frozen=True)
class RunConditions:
    """Measured inputs of a run (routing and network) for the simulator's prediction of that run.

    Args:
        routing_M: the experts that every token chose, one entry per model and micro-batch; one window per step.
        cluster: the plan's cluster, with the network as measured before serving.
    """

    routing_M: tuple[TokenRouting, ...]
    cluster: Cluster

    def traffic(self, profiles: Sequence[Profile]) -> list[Profile]:
        """Returns copies of `profiles` that hold the traffic of this run instead of their own, one window per step.

        Args:
            profiles: one per model. The result has one profile per entry of `routing_M`, so one per micro-batch.
        """
        served = [*profiles] * (len(self.routing_M) // len(profiles))
        return [
            replace(
                profile,
                tokens_TLSE=routing.tokens_TLSE(int(routing.window_U.max()) + 1, len(self.cluster), profile.experts),
                routing=routing,
                stage_T=None,
            )
            for profile, routing in zip(served, self.routing_M, strict=True)
        ]


@dataclass(frozen=True)
class RunResult:
    """Answers and measurements of a whole run (all ranks).

    Args:
        answers_M: the answers of each model.
        seconds: serving time of the whole run, without `start_s`.
        trace: the measured trace.
        transport: name of the transport.
        calibration: times of the orders, measured before serving; None if not measured.
        orders_M: counts of the methods that the exchanges of each model or micro-batch used; empty without `calibration`.
        conditions: measured inputs for a prediction of the run; None unless `options.predictable`.
        start_s: seconds before serving: process start, model loading, calibration.
        trace_from_s: the trace has no events before this time, in seconds since the run began; None: it is complete.
    """

    answers_M: tuple[Answers, ...]
    seconds: float
    trace: Trace
    transport: str
    calibration: OrderCalibration | None = None
    orders_M: tuple[OrdersUsed, ...] = ()
    conditions: RunConditions | None = None
    start_s: float = 0.0
    trace_from_s: float | None = None

    def tokens_per_second(self, model: int, with_start: bool = False) -> float:
        """Returns a model's generated tokens per second of its serving time; 0 if it did not serve.

        Args:
            model: index of the model.
            with_start: True: add `start_s` to the serving time.
        """
        answers = self.answers_M[model]
        tokens = sum(map(len, answers.tokens.values()))
        return tokens / (answers.seconds + with_start * self.start_s) if answers.seconds else 0.0


@dataclass(frozen=True)
class RankResult:
    """Answers and measurements of one rank. Fields that are not listed are as in `RunResult`.

    Args:
        answers_M: this rank's answers, by model.
        rows: this rank's rows of the trace.
        routing_M: for each model and micro-batch, the experts of every token, (U, L, K), and the step of every token, (U,);
            empty unless `options.predictable`.
        network: the cluster with measured network rates; None unless `options.predictable`.
        began_s: start of serving, by time.perf_counter.
    """

    answers_M: list[Answers]
    seconds: float
    rows: list[Row]
    transport: str
    calibration: OrderCalibration | None
    orders_M: list[OrdersUsed]
    routing_M: list[Routing]
    network: Cluster | None
    began_s: float = 0.0


def merge_results(results: Sequence[RankResult], names_M: tuple[str, ...]) -> RunResult:
    """Merges the ranks' results, given by rank, into the result of the run; `names_M`: the models' names in the trace."""
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
    """Merges the answers of one model from several ranks or micro-batches that served it in parallel."""
    merged = Answers()
    for answers in parts:
        merged.tokens |= answers.tokens
        merged.logits |= answers.logits
        merged.seconds = max(merged.seconds, answers.seconds)
        for rank, times in answers.times_R.items():
            merged.times_R.setdefault(rank, TokenTimes()).merge(times)
    return merged


def measured_trace(results: Sequence[RankResult], names_M: tuple[str, ...], ranks: int) -> tuple[Trace, float | None]:
    """Merges the ranks' recorded events into the trace of the run.

    A rank keeps only its latest MOST_EVENTS events. If a rank has dropped events, the trace omits all steps that began, on any
    rank, before the first event that this rank kept.

    Args:
        results: results of all ranks.
        names_M: names of the models.
        ranks: number of ranks.

    Returns:
        The trace, and the time in seconds before which it has no events; None: it is complete.
    """
    recorder = TraceRecorder("measured", names_M, ranks)
    rows = [row for result in results for row in result.rows]
    from_s = max((result.rows[0][0] for result in results if len(result.rows) == MOST_EVENTS), default=None)
    if from_s is not None:
        begun = {row[3:5] for row in rows if row[0] < from_s}  # model, step
        rows = [row for row in rows if row[3:5] not in begun]
    recorder.rows.extend(rows)
    return recorder.trace(), from_s


def _merge_routing(routing_R: Sequence[Routing]) -> TokenRouting:
    source_U = np.repeat(np.arange(len(routing_R)), [len(step_U) for _, step_U in routing_R])
    experts_ULK, step_U = (np.concatenate(parts) for parts in zip(*routing_R, strict=True))
    return TokenRouting(experts_ULK, source_U, step_U)
