"""Simulation of requests under continuous batching: when each gets its first token and its last."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aurora.errors import BadInput
from aurora.planner.layers_in_threads import Progress, untold
from aurora.simulator.request_scheduler import RankScheduler
from aurora.types import RequestOptions, Requests
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.requests import MOST_REQUESTS

MOST_STEPS = 2_000_000  # in which something begins or ends
DURATION_S = 60.0  # in which requests arrive, if nothing else is said
GROWTH = 1.5  # of the queue from the second to the last quarter of the arrivals, above which it is said to grow
StepSeconds = Callable[[IntArray], float]  # of a step, by the tokens of each rank
Watch = Callable[[IntArray, int, float], None]  # told of each rank's tokens, for how many steps, and the seconds of one


@dataclass(frozen=True, eq=False)
class ServedRequests:
    """When requests were served.

    Attributes:
        requests: the requests.
        first_s_Q: (Q,) float64, when the first token of each was there.
        last_s_Q: (Q,) float64, when the last one was.
        rank_Q: (Q,) int64, the rank that served it.
        steps: how many steps that took.
    """

    requests: Requests
    first_s_Q: FloatArray
    last_s_Q: FloatArray
    rank_Q: IntArray
    steps: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return float(self.last_s_Q.max() - self.requests.arrival_s_Q[0])

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, of all ranks."""
        return float(self.requests.output_tokens_Q.sum() / self.seconds)

    @property
    def ttft_s_Q(self) -> FloatArray:
        """(Q,) time to first token: from a request's arrival to its first token."""
        return self.first_s_Q - self.requests.arrival_s_Q

    @property
    def tpot_s_X(self) -> FloatArray:
        """(X,) time per output token of each request with two or more: from its first to its last, over those after it."""
        after_Q = self.requests.output_tokens_Q - 1
        some = after_Q > 0
        return np.asarray((self.last_s_Q - self.first_s_Q)[some] / after_Q[some])

    def waiting(self, begin: float, end: float) -> float:
        """Returns how many requests are without a first token, the mean over a part of the time in which requests arrive.

        Args:
            begin, end: from 0, the first arrival, to 1, the last one.
        """
        arrival_s_Q = self.requests.arrival_s_Q
        span_s = float(arrival_s_Q[-1] - arrival_s_Q[0])
        if not span_s:
            return 0.0
        from_s, to_s = (float(arrival_s_Q[0]) + part * span_s for part in (begin, end))
        inside_s_Q = np.minimum(self.first_s_Q, to_s) - np.maximum(arrival_s_Q, from_s)
        return float(np.maximum(inside_s_Q, 0.0).sum() / (to_s - from_s))

    @property
    def queue_grows(self) -> bool:
        """Whether more requests arrive than are served: the queue is longer at the end by GROWTH and a request per rank."""
        ranks = int(self.rank_Q.max()) + 1
        return self.waiting(0.75, 1.0) > GROWTH * self.waiting(0.25, 0.5) + ranks


def drawn_requests(options: RequestOptions) -> Requests:
    """Draws requests of one size that arrive at random (Poisson).

    Args:
        options: with `rate`, `isl` and `osl`.

    Raises:
        BadInput: if one of these is missing, or there are none or too many requests.
    """
    if options.rate is None or options.isl is None or options.osl is None:
        missing = next(name for name in ("rate", "isl", "osl") if getattr(options, name) is None)
        raise BadInput(f"`{missing}`: expected a number, or a trace of `requests`, found neither")
    duration_s = options.duration_s or DURATION_S
    if options.rate * duration_s > MOST_REQUESTS:
        raise BadInput(f"`rate`: expected at most {MOST_REQUESTS} requests, found {options.rate:g}/s for {duration_s:g} s")
    rng = np.random.default_rng(options.seed)
    arrivals = int(rng.poisson(options.rate * duration_s))
    if not arrivals:
        raise BadInput(
            f"`rate`: expected requests, found none at {options.rate:g}/s in {duration_s:g} s; give a longer `duration_s`"
        )
    arrival_s_Q = np.sort(rng.uniform(0, duration_s, arrivals))
    return Requests(arrival_s_Q, np.full(arrivals, options.isl), np.full(arrivals, options.osl))


def serve(
    requests: Requests,
    ranks: int,
    step_s: StepSeconds,
    options: RequestOptions = RequestOptions(),
    watch: Watch = lambda _tokens_G, _steps, _seconds: None,
    progress: Progress = untold,
) -> ServedRequests:
    """Simulates an engine whose data-parallel ranks step together, each with a scheduler of its own.

    A request goes to the least loaded rank when it arrives, is scheduled from the next step on, and stays there. A rank without
    requests computes one token in a step, as all ranks take part in its all-to-alls.

    Args:
        requests: the requests.
        ranks: data-parallel ranks.
        step_s: seconds of a step.
        options: `max_num_batched_tokens` and `max_num_seqs`.
        watch: called after each step, or several in which every rank has as many tokens.
        progress: called with (what is being done, requests served, requests in all), at each hundredth of them.

    Raises:
        BadInput: if it takes more than MOST_STEPS steps in which something begins or ends.
    """
    limits = options.max_num_batched_tokens, options.max_num_seqs
    schedulers = [RankScheduler(*limits) for _ in range(ranks)]
    first_s_Q, last_s_Q = np.zeros(len(requests)), np.zeros(len(requests))
    rank_Q = np.zeros(len(requests), dtype=np.int64)
    ends: list[tuple[int, int]] = []  # of requests that generate: the step of the last token, and the request
    arrived, served, step, now_s = 0, 0, 0, 0.0
    arrival_s, outputs, inputs = (
        each.tolist() for each in (requests.arrival_s_Q, requests.output_tokens_Q, requests.input_tokens_Q)
    )
    waiting: set[int] = set()  # ranks with prompts
    generating_G = np.zeros(ranks, dtype=np.int64)
    for _ in range(MOST_STEPS):
        if not ends and not waiting:
            if arrived == len(requests):
                return ServedRequests(requests, first_s_Q, last_s_Q, rank_Q, step)
            now_s = max(now_s, arrival_s[arrived])
        while arrived < len(requests) and arrival_s[arrived] <= now_s:
            rank = min(range(ranks), key=lambda each: schedulers[each].score)
            schedulers[rank].prompts.append((arrived, inputs[arrived]))
            waiting.add(rank)
            rank_Q[arrived], arrived = rank, arrived + 1
        tokens_G, begin = generating_G.copy(), []
        for rank in sorted(waiting):
            tokens, ended = schedulers[rank].prefill()
            tokens_G[rank] += tokens
            begin += [(rank, request) for request in ended]
        seconds = step_s(np.maximum(tokens_G, 1))
        steps = 1
        if not waiting:  # all steps are alike until a request ends or one arrives
            steps = ends[0][0] - step + 1
            if arrived < len(requests) and seconds > 0:
                steps = min(steps, max(1, int(np.ceil((arrival_s[arrived] - now_s) / seconds))))
        now_s, step = now_s + steps * seconds, step + steps
        watch(tokens_G, steps, seconds)
        for rank, request in begin:
            first_s_Q[request] = now_s
            generating_G[rank] += 1
            heapq.heappush(ends, (step - 1 + outputs[request] - 1, request))
        waiting = {rank for rank in waiting if schedulers[rank].prompts}
        while ends and ends[0][0] < step:
            _, request = heapq.heappop(ends)
            last_s_Q[request], served = now_s, served + 1
            if served * 100 // len(requests) > (served - 1) * 100 // len(requests):
                progress("requests", served, len(requests))
            schedulers[rank_Q[request]].generating -= 1
            generating_G[rank_Q[request]] -= 1
    raise BadInput(f"`requests`: expected at most {MOST_STEPS} steps in which something begins or ends, found more")
