"""Simulates data-parallel ranks that serve requests in lockstep: continuous batching, chunked prefill, prefix caching."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.requests.dispatch import DISPATCH, dispatch_of
from aurora.algorithms.requests.ranks import RankLoads, RankRule, by_requests
from aurora.algorithms.requests.steps import EveryStep, RanksAtStep
from aurora.errors import BadInput
from aurora.types import RequestOptions, Requests
from aurora.types.arrays import IntArray
from aurora.types.requests import ServedRequests

MOST_STEPS = 2_000_000  # in which something begins or ends
StepSeconds = Callable[[IntArray, IntArray], float]  # of a step, by the prompt tokens and the generating requests of each rank
Watch = Callable[[IntArray, int, float], None]  # told of each rank's tokens, for how many steps, and the seconds of one


@dataclass
class RankScheduler:
    """The scheduler of one data-parallel rank, with vLLM's rules.

    In a step, every generating request first gets one token. Prompts fill the rest of the step's tokens, first come first
    served. A prompt that does not fit is cut, and goes on in a later step before any other prompt begins.

    Args:
        max_num_batched_tokens: maximum tokens of a step.
        max_num_seqs: maximum requests that generate or whose prompt has begun.

    Attributes:
        generating: number of requests that generate.
        prompts: (request, tokens left to compute) for each request whose prompt is not yet computed, in sequence.
        begun: whether part of the first of these prompts is computed.

    Source:
        vLLM, `v1/core/sched/scheduler.py`.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    generating: int = 0
    prompts: deque[tuple[int, int]] = field(default_factory=deque)
    begun: bool = False

    @property
    def slots(self) -> int:
        """Number of prompts that may be computed now, including one that is begun."""
        return max(int(self.begun), self.max_num_seqs - self.generating)

    def prefill(self, begin: Callable[[int, int], int] = lambda _request, tokens: tokens) -> tuple[int, list[int]]:
        """Schedules the prompts of the next step; requests whose prompt ends in it count as generating from then on.

        Args:
            begin: called with (request, tokens) of each prompt that begins; returns the tokens to compute.

        Returns:
            (tokens, ended): number of prompt tokens in the step, and the requests whose prompt ends in it.
        """
        ended: list[int] = []
        rest = budget = self.max_num_batched_tokens - self.generating
        while self.prompts and rest and (self.begun or self.generating + len(ended) < self.max_num_seqs):
            request, tokens = self.prompts.popleft()
            tokens = tokens if self.begun else begin(request, tokens)
            computed = min(tokens, rest)
            rest -= computed
            self.begun = computed < tokens
            if self.begun:
                self.prompts.appendleft((request, tokens - computed))
            else:
                ended.append(request)
        self.generating += len(ended)
        return budget - rest, ended


class _Ranks:
    """Data-parallel ranks in lockstep: their schedulers, loads and prefix caches."""

    def __init__(self, requests: Requests, ranks: int, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.schedulers = [RankScheduler(max_num_batched_tokens, max_num_seqs) for _ in range(ranks)]
        self.loads = RankLoads.idle(ranks)
        self.rank_Q = np.zeros(len(requests), dtype=np.int64)
        self.cached_tokens = 0
        self._requests, self._cache_R = requests, [set[int]() for _ in range(ranks)]
        self._inputs, self._outputs = requests.input_tokens_Q.tolist(), requests.output_tokens_Q.tolist()

    @property
    def waiting(self) -> bool:
        """True if a prompt is not computed."""
        return any(scheduler.prompts for scheduler in self.schedulers)

    def at(self, step: int, now_s: float) -> RanksAtStep:
        """Returns the state that rules of steps see."""
        waiting_R = [len(scheduler.prompts) - scheduler.begun for scheduler in self.schedulers]
        generating_R = [scheduler.generating for scheduler in self.schedulers]
        prompt_tokens_R = [
            tokens
            if scheduler.slots >= len(scheduler.prompts)
            else sum(left for _, left in islice(scheduler.prompts, scheduler.slots))
            for scheduler, tokens in zip(self.schedulers, self.loads.prompt_tokens_R, strict=True)
        ]
        return RanksAtStep(step, now_s, prompt_tokens_R, waiting_R, generating_R)

    def send(self, request: int, rule: RankRule) -> int:
        """Sends a request to the rank that the rule chooses; returns its prompt tokens to compute."""
        cached_R = [self._cached(rank, request) for rank in range(len(self.schedulers))]
        rank = rule(self.loads, cached_R)
        tokens = self._inputs[request] - cached_R[rank]
        self.schedulers[rank].prompts.append((request, tokens))
        self.rank_Q[request] = rank
        self.loads.requests_R[rank] += 1
        self.loads.prompt_tokens_R[rank] += tokens
        self.loads.sent += 1
        return int(tokens)

    def _begin(self, request: int, tokens: int) -> int:
        """Begins a prompt: looks its prefix up once more, as others have been computed since it came, and keeps its blocks."""
        rank = int(self.rank_Q[request])
        cached = self._cached(rank, request)
        left = self._inputs[request] - cached
        self.cached_tokens += cached
        self.loads.prompt_tokens_R[rank] += left - tokens
        self.loads.kv_tokens_R[rank] += cached
        if self._requests.blocks_Q:
            self._cache_R[rank].update(self._requests.blocks_Q[request])
        return int(left)

    def _cached(self, rank: int, request: int) -> int:
        """Prompt tokens of a request in a rank's prefix cache: whole blocks, never the last token, which gives the answer."""
        if not self._requests.blocks_Q:
            return 0
        known, blocks = self._cache_R[rank], self._requests.blocks_Q[request]
        shared = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
        size = self._requests.block_tokens
        return int(min(shared * size, (self._inputs[request] - 1) // size * size))

    def compute(self, open_R: Sequence[bool]) -> tuple[IntArray, list[int]]:
        """Schedules prompts of the ranks that are open; returns (G,) tokens of each, and the requests whose prompt ends."""
        prompt_G, ended = np.zeros(len(open_R), dtype=np.int64), []
        for rank, (scheduler, opened) in enumerate(zip(self.schedulers, open_R, strict=True)):
            if opened and scheduler.prompts:
                prompt_G[rank], last = scheduler.prefill(self._begin)
                self.loads.prompt_tokens_R[rank] -= int(prompt_G[rank])
                self.loads.kv_tokens_R[rank] += int(prompt_G[rank])
                ended += last
        return prompt_G, ended

    def generated(self, generating_G: IntArray, steps: int) -> None:
        """Counts one token of every generating request for each of `steps` steps."""
        for rank, generating in enumerate(generating_G.tolist()):
            self.loads.kv_tokens_R[rank] += steps * generating

    def end(self, request: int) -> None:
        """Ends a request that has all its tokens."""
        rank = int(self.rank_Q[request])
        self.schedulers[rank].generating -= 1
        self.loads.requests_R[rank] -= 1
        self.loads.kv_tokens_R[rank] -= self._inputs[request] + self._outputs[request] - 1


def serve(
    requests: Requests,
    ranks: int,
    step_s: StepSeconds,
    options: RequestOptions = RequestOptions(),
    watch: Watch = lambda _tokens_G, _steps, _seconds: None,
    progress: Progress = no_progress,
    rank: str = "",
) -> ServedRequests:
    """Simulates an engine whose data-parallel ranks step in lockstep, each with its own scheduler; returns the served requests.

    A request goes to the rank that `options.dispatch` chooses when it arrives, is scheduled from the next step on, and stays
    there. A rank without requests takes part in every step, because all ranks take part in the all-to-alls.

    Args:
        requests: the requests.
        ranks: data-parallel ranks.
        step_s: a function that returns the seconds of a step from two arrays, (G,) int64: prompt tokens of each rank, and its
            requests that generate.
        options: `dispatch`, `ttft_s`, `max_num_batched_tokens` and `max_num_seqs` are used.
        watch: called with (tokens of each rank, number of steps, seconds of one step) for each run of steps with the same
            tokens.
        progress: called with (name of the work, requests served, requests in all) for each hundredth of the requests.
        rank: the way in DISPATCH whose rule chooses the rank; empty: that of `options.dispatch`.

    Raises:
        BadInput: if `options.dispatch` is unknown, or there are more than MOST_STEPS steps in which a request begins or ends.
    """

    def even_s(prompt_tokens: int, generating: int) -> float:
        return step_s(np.full(ranks, prompt_tokens), np.full(ranks, generating))

    rank_rule, steps_rule = dispatch_of(options, ranks, even_s)
    rank_rule = DISPATCH[rank].rank if rank else rank_rule
    state = _Ranks(requests, ranks, options.max_num_batched_tokens, options.max_num_seqs)
    return _served(requests, state, rank_rule, steps_rule, step_s, watch, progress)


def serve_evenly(
    requests: Requests,
    ranks: int,
    step_s: StepSeconds,
    options: RequestOptions = RequestOptions(),
    progress: Progress = no_progress,
) -> ServedRequests:
    """Returns the requests as ranks would serve them that share every step's tokens evenly: a ceiling for all ways of dispatch.

    The ranks are one scheduler with the limits of all, and each computes its part of every step.

    Args:
        requests, ranks, step_s, options, progress: as in `serve`.
    """

    def shared_s(prompt_G: IntArray, generating_G: IntArray) -> float:
        tokens, generating = (-(-int(counts_G.sum()) // ranks) for counts_G in (prompt_G + generating_G, generating_G))
        return step_s(np.full(ranks, tokens - generating), np.full(ranks, generating))

    state = _Ranks(requests, 1, ranks * options.max_num_batched_tokens, ranks * options.max_num_seqs)
    return _served(requests, state, by_requests, EveryStep(), shared_s, lambda _tokens_G, _steps, _seconds: None, progress)


def _served(
    requests: Requests, state: _Ranks, rank_rule: RankRule, steps_rule: EveryStep, step_s: StepSeconds, watch: Watch,
    progress: Progress,
) -> ServedRequests:  # fmt: skip
    """The loop over steps; runs of steps that are alike are counted at once."""
    arrival_s_Q, first_s_Q, last_s_Q = (np.zeros(len(requests)) for _ in range(3))
    turns = _Turns(requests)
    ends: list[tuple[int, int]] = []  # of requests that generate: the step of the last token, and the request
    outputs = requests.output_tokens_Q.tolist()
    busiest: list[float] = []
    seconds_of: list[float] = []
    served, step, woken, now_s = 0, 0, 0, 0.0  # `woken`: the step at which the ranks were last idle
    for _ in range(MOST_STEPS):
        if not ends and not state.waiting:
            if served == len(requests):
                runs = np.array(busiest), np.array(seconds_of)
                return ServedRequests(
                    requests, arrival_s_Q, first_s_Q, last_s_Q, state.rank_Q, step, *runs, state.cached_tokens
                )
            now_s, woken = max(now_s, turns.next_s), step
        while turns.next_s <= now_s:
            at_s, request = turns.pop()
            arrival_s_Q[request] = at_s
            steps_rule.arrived(at_s, state.send(request, rank_rule))
        generating_G = np.array([scheduler.generating for scheduler in state.schedulers])
        waiting, prompt_G, begin = state.waiting, np.zeros_like(generating_G), list[int]()
        if waiting:
            open_R = steps_rule.open_R(state.at(step - woken, now_s))
            prompt_G, begin = state.compute(open_R)
            steps_rule.scheduled(state.at(step - woken, now_s), open_R)
        seconds, steps = step_s(prompt_G, generating_G), 1
        if not waiting:  # all steps are alike until a request ends or one arrives
            steps = ends[0][0] - step + 1
            if seconds > 0 and np.isfinite(turns.next_s):
                steps = min(steps, max(1, int(np.ceil((turns.next_s - now_s) / seconds))))
        now_s, step = now_s + steps * seconds, step + steps
        tokens_G = prompt_G + generating_G
        watch(tokens_G, steps, seconds)
        if tokens_G.any():
            busiest.append(float(tokens_G.max() / tokens_G.mean()))
            seconds_of.append(steps * seconds)
        state.generated(generating_G, steps)
        for request in begin:
            first_s_Q[request] = now_s
            heapq.heappush(ends, (step - 1 + outputs[request] - 1, request))
        while ends and ends[0][0] < step:
            _, request = heapq.heappop(ends)
            last_s_Q[request], served = now_s, served + 1
            state.end(request)
            turns.answered(request, now_s)
            if served * 100 // len(requests) > (served - 1) * 100 // len(requests):
                progress("requests", served, len(requests))
    raise BadInput(f"`requests`: expected at most {MOST_STEPS} steps in which something begins or ends, found more")


class _Turns:
    """The requests that are still to be sent, by time; a later turn of a session once the turn before is answered."""

    def __init__(self, requests: Requests) -> None:
        sessions = range(len(requests)) if requests.session_Q is None else requests.session_Q.tolist()
        self._delay_s = [0.0] * len(requests) if requests.delay_s_Q is None else requests.delay_s_Q.tolist()
        self._next: dict[int, int] = {}
        last: dict[int, int] = {}
        first: list[tuple[float, int]] = []
        for request, (session, at_s) in enumerate(zip(sessions, requests.arrival_s_Q.tolist(), strict=True)):
            if session in last:
                self._next[last[session]] = request
            else:
                first.append((at_s, request))
            last[session] = request
        self._heap = first  # in the sequence of arrivals, which a heap may have

    @property
    def next_s(self) -> float:
        """Seconds at which the next request is sent; infinite if none is known."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, int]:
        """Returns the time of the next request, and the request."""
        return heapq.heappop(self._heap)

    def answered(self, request: int, now_s: float) -> None:
        """Makes the next turn of an answered request's session known."""
        if (turn := self._next.get(request)) is not None:
            heapq.heappush(self._heap, (now_s + self._delay_s[turn], turn))
