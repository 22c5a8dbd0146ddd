"""Predicts what balance of requests over data-parallel ranks brings, beside balance of experts, and both together.

All ranks step together. A part of a step takes as long as on the rank with most tokens (attention, dense layers, the host) or
works on the tokens of all ranks together (experts, which are elsewhere): so a step's seconds come from `step_seconds` at the
busiest rank's tokens and at the mean. Requests are simulated under the engine's way of spreading them and under others.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import DispatchFlag, ServingWay
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.advisor.serving_case import BATCHED_TOKENS, PERFECT, ServingCase
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.simulator.serving import serve, serve_evenly
from aurora.types import RequestLoad, RequestOptions, Requests
from aurora.types.arrays import IntArray
from aurora.types.requests import ServedRequests

MOST_SIMULATED = 6000  # requests of a trace, the first ones
BELOW, ABOVE = 0.8, 1.2  # arrivals over what even ranks take: for latencies, and for the most tokens per second
ALIKE = 1.01  # tokens per second within which settings are alike, and latencies count
WORTH, LATENCY = 1.02, 1.25  # times the tokens per second, or less TTFT x TPOT, from which a setting is advised
DRAWN_REQUESTS, DRAWN_SIGMA = 1000, 1.0  # number and spread (standard deviation of the logarithm) of drawn lengths


@dataclass(frozen=True)
class RequestService:
    """Requests as served under one way of spreading them.

    Attributes:
        tokens_per_s: generated tokens per second where more requests arrive than even ranks can take (ABOVE).
        ttft_p95_s, tpot_p50_s: of the requests, where BELOW of what even ranks take arrives.
        busiest: tokens of the busiest rank in a step over the mean of the ranks, mean over the time, then.
    """

    tokens_per_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    busiest: float

    @property
    def latency(self) -> float:
        """TTFT x TPOT, by which settings with as many tokens per second are compared."""
        return self.ttft_p95_s * self.tpot_p50_s

    @classmethod
    def of(cls, above: ServedRequests, below: ServedRequests) -> "RequestService":
        """Returns the figures of requests that were served above and below what even ranks take."""
        ttft_s = float(np.percentile(below.ttft_s_Q, 95))
        tpot_s = float(np.percentile(below.tpot_s_X, 50)) if len(below.tpot_s_X) else 0.0
        return cls(above.tokens_per_s, ttft_s, tpot_s, below.busiest)


@dataclass(frozen=True)
class BalanceOfRequests:
    """Result of `balance_of_requests`.

    Attributes:
        requests: number of simulated requests.
        drawn: whether their lengths were drawn; then they advise nothing.
        ranks: data-parallel ranks.
        load: arrivals over what even ranks can take, as the requests were recorded.
        default: the engine's way of spreading requests.
        flags: {what to set: the requests so}, for the engine's own settings and a planned cadence.
        experts: the default, with the experts of `expert_way`.
        both: the best of `flags`, with these experts.
        even: even ranks and these experts: a ceiling.
        expert_way: name of the way of placing experts.
    """

    requests: int
    drawn: bool
    ranks: int
    load: float
    default: RequestService
    flags: dict[str, RequestService]
    experts: RequestService
    both: RequestService
    even: RequestService
    expert_way: str

    @property
    def worth(self) -> bool:
        """True if the best setting brings more tokens per second than WORTH, or shortens latencies by LATENCY with as many."""
        best, default = self.flags[self.best], self.default
        faster = best.tokens_per_s / default.tokens_per_s
        return faster > WORTH or (faster * ALIKE >= 1 and best.latency * LATENCY < default.latency)

    @cached_property
    def best(self) -> str:
        """The setting to advise: of those with the most tokens per second (within ALIKE), that of the least TTFT x TPOT."""
        most = max(service.tokens_per_s for service in self.flags.values())
        return min(
            (name for name, service in self.flags.items() if service.tokens_per_s * ALIKE >= most),
            key=lambda name: self.flags[name].latency,
        )


class UnevenSteps:
    """Seconds of a step of ranks with unequal tokens, interpolated on a grid of prompt tokens and generating requests.

    Args:
        case: the model and its GPUs.
        way: the way of serving.
        ratios: seconds of the slowest GPU's experts / seconds with perfect balance, in steps with prompts and without.
        context: tokens of a request's context, in the mean.
        isl: tokens of a prompt, in the mean.
    """

    def __init__(self, case: ServingCase, way: ServingWay, ratios: tuple[float, float], context: int, isl: int) -> None:
        self._prompts = [0, 1, *(1 << power for power in range(4, BATCHED_TOKENS.bit_length()))]
        self._generating = [0, 1, *(1 << power for power in range(2, 11))]
        busiest_is_sent = EXCHANGES[way.exchange].sends == "route"
        steps = [
            [
                step_seconds(
                    case.config, case.kind, way.layout,
                    SchedulerStep(prompts, generating or int(not prompts), generating * context, 0, -(-prompts // isl) or 1),
                    nic_Bps=case.nic_Bps, per_server=case.domain_gpus or case.per_server,
                    ratio=ratios[0 if prompts else 1],
                    **way.exchanging,
                )
                for generating in self._generating
            ]
            for prompts in self._prompts
        ]  # fmt: skip
        self._host_s = min(step.host_s for row in steps for step in row)  # of a step whose launches are hidden
        self._shared = [[step.experts_s + (0.0 if busiest_is_sent else step.collectives_s) for step in row] for row in steps]
        busy = [[step.total - step.host_s for step in row] for row in steps]
        self._own = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(busy, self._shared, strict=True)]
        self._launched = [
            [
                gpu_s + step.host_s - self._host_s if step.host_s > self._host_s else 0.0
                for gpu_s, step in zip(*rows, strict=True)
            ]
            for rows in zip(busy, steps, strict=True)
        ]

    def __call__(self, prompt_G: IntArray, generating_G: IntArray) -> float:
        """Returns the seconds of a step from (G,) prompt tokens and generating requests of each rank."""
        least = min(1, int(prompt_G.max()))  # all ranks leave their CUDA graphs where one has prompts
        ranks = set(zip(np.maximum(prompt_G, least).tolist(), generating_G.tolist(), strict=True))
        shared_s = self._at(self._shared, float(prompt_G.mean()), float(generating_G.mean()))
        own_s, launched_s = (max(self._at(grid, *rank) for rank in ranks) for grid in (self._own, self._launched))
        return self._host_s + max(own_s + shared_s, launched_s)

    def _at(self, grid: list[list[float]], prompts: float, generating: float) -> float:
        """A value of a grid, linear between its points; beyond the last one it goes on as before it."""
        (row, u), (column, v) = _between(self._prompts, prompts), _between(self._generating, generating)
        low, high = (grid[at][column] * (1 - v) + grid[at][column + 1] * v for at in (row, row + 1))
        return low * (1 - u) + high * u


def _between(points: list[int], value: float) -> tuple[int, float]:
    """The index of the point at or below a value, and which part of the way to the next one it is."""
    at = min(bisect_right(points, value), len(points) - 1) - 1
    return at, (value - points[at]) / (points[at + 1] - points[at])


def heavy_tailed(load: RequestLoad) -> Requests:
    """Draws requests whose lengths are log-normal about those of `load`, arriving at random (Poisson), one a second."""
    rng = np.random.default_rng(0)
    spread = np.exp(rng.normal(-(DRAWN_SIGMA**2) / 2, DRAWN_SIGMA, (2, DRAWN_REQUESTS)))
    tokens = (np.maximum(1, np.rint(mean * of)).astype(np.int64) for mean, of in zip((load.isl, load.osl), spread, strict=True))
    return Requests(np.cumsum(rng.exponential(1.0, DRAWN_REQUESTS)), *tokens)


def balance_of_requests(
    case: ServingCase,
    served: WaysOfServing,
    best: ComparedWay | None,
    requests: Requests | None = None,
    progress: Progress = no_progress,
) -> BalanceOfRequests | None:
    """Simulates requests under an engine's ways of spreading them over ranks, with its experts as they are and balanced.

    Args:
        case: the model, its GPUs and its requests in flight.
        served: ways of serving the same model, compared on its traffic.
        best: the way whose placement of experts is taken; None: perfect balance, which bounds what experts bring.
        requests: recorded requests; None: lengths are drawn, with a heavy tail.
        progress: called with (name of the work, amount done, amount in all).

    Returns:
        The BalanceOfRequests; None if the default has a single data-parallel rank.
    """
    way = served.default.way
    assert way is not None
    ranks = way.layout.data
    if ranks == 1:
        return None
    drawn = requests is None
    requests = heavy_tailed(case.load) if requests is None else requests.first(MOST_SIMULATED)
    isl, osl = (max(1, round(float(tokens_Q.mean()))) for tokens_Q in (requests.input_tokens_Q, requests.output_tokens_Q))
    prompts, answers = (1 + max(0.0, split.whole.value) for split in served.splits)
    now = prompts, answers
    expert_way, then = "perfect balance of experts", PERFECT
    if best is not None and best.way is not None and best.way.layout == way.layout and best.share is not None:
        left = 1 - best.share
        expert_way, then = best.name, (1 + (prompts - 1) * left, 1 + (answers - 1) * left)
    steps, balanced = (UnevenSteps(case, way, ratios, isl + osl // 2, isl) for ratios in (now, then))
    at_once = replace(requests, arrival_s_Q=np.zeros(len(requests)), session_Q=None, delay_s_Q=None)
    load = serve_evenly(at_once, ranks, steps).seconds / max(float(np.ptp(requests.arrival_s_Q)), 1e-9)

    def simulated(flag: DispatchFlag, step_s: UnevenSteps, even: bool = False) -> RequestService:
        def at(part: float) -> ServedRequests:
            rated = requests.at_rate(part / load)
            if even:
                return serve_evenly(rated, ranks, step_s)
            return serve(rated, ranks, step_s, RequestOptions(dispatch=flag.dispatch), rank=flag.rank)

        return RequestService.of(at(ABOVE), at(BELOW))

    use = SERVING_ENGINES[way.engine]
    default = DispatchFlag("", use.dispatch)
    flags: dict[str, RequestService] = {}
    for number, flag in enumerate(use.dispatch_flags):
        progress("spreading requests", number, len(use.dispatch_flags))
        flags[flag.words] = simulated(flag, steps)
    by_default, ceiling = simulated(default, steps), simulated(default, balanced, even=True)
    experts = simulated(default, balanced)
    flags = flags or {"": by_default}
    result = BalanceOfRequests(len(requests), drawn, ranks, load, by_default, flags, experts, experts, ceiling, expert_way)
    chosen = next((flag for flag in use.dispatch_flags if flag.words == result.best), default)
    return replace(result, both=simulated(chosen, balanced))
