"""Simulates requests that are served under a plan: prices the steps of data-parallel ranks, and lets them serve.

A step's seconds depend on the number of tokens on each rank. They are simulated for a grid of numbers, and interpolated.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aurora.algorithms.check.fit import check_traffic
from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.layers_in_threads import Progress, no_progress
from aurora.algorithms.workload.step_traffic import cut_traffic, drawn_windows
from aurora.errors import BadInput, check_one_of
from aurora.simulator.interpreter import OrderBatch, batch_orders, simulate
from aurora.simulator.serving import serve, serve_evenly
from aurora.types import BARRIERS, Plan, Profile, RequestOptions, Requests
from aurora.types.arrays import FloatArray, IntArray, evenly_spaced
from aurora.types.options import GATHERED
from aurora.types.requests import MOST_REQUESTS, RequestSimulation

DURATION_S = 60.0  # in which requests arrive, if nothing else is said
CHECKED = 8  # steps of a run that are simulated beside their interpolated seconds
CHECKED_TRANSFERS = 1_000_000  # in these steps at most, but two steps at least


def drawn_requests(options: RequestOptions) -> Requests:
    """Draws arrival times (Poisson) of requests of equal size, and returns the Requests.

    Args:
        options: `rate`, `isl` and `osl` must be given.

    Raises:
        BadInput: if one of the three is None, or the draw has no or too many requests.
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


PER_OCTAVE = 2  # numbers of tokens that are simulated between one and its double
DRAWN_LAYERS = 16  # layers at least, over whose draws of traffic a simulated step is a mean
TRANSFERS = 30_000  # simulated at most for a step of the grid; with more, some layers stand for all


class StepPrices:
    """Predicts the seconds of a step of one model from the tokens on each rank, by simulation and interpolation.

    A step is described by two numbers: the tokens of its busiest rank, and the mean tokens of the other ranks. Steps with both
    numbers on a grid are simulated when first needed, with equal tokens on the other ranks; seconds between are interpolated.
    With several kinds of GPUs, the busiest rank of each kind gives a prediction, and the longest counts. If a step has more
    than TRANSFERS transfers, only some of its layers are simulated for the grid, evenly spaced.

    Args:
        plan: a plan of one model.
        profile: the traffic from which tokens' experts are drawn.
        most_tokens: maximum tokens of a rank in a step.
        barriers: as in `aurora.simulate`.
        ordered: as in `aurora.simulator.interpreter.simulate`.
        staged: as in `aurora.simulate`.
        gathered: whether an allgather and a reduce-scatter replace all-to-alls.
        seed: random seed of the draws. Plans with the same seed get the same traffic, unless only one of them is deduplicated.

    Raises:
        BadInput: if the plan is of several models, or the profile does not fit it.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        most_tokens: int,
        barriers: str = "gpu",
        ordered: OrderBatch | None = None,
        staged: bool = False,
        gathered: bool = False,
        seed: int = 0,
    ) -> None:
        if len(plan.models) != 1:
            raise BadInput(f"plan: expected one model, whose requests are simulated, found {len(plan.models)}")
        check_one_of("barriers", barriers, BARRIERS)
        check_plan(plan)
        check_traffic(plan, [profile])
        self._plan, self._cluster, self._profile, self._seed = plan, plan.cluster, profile, seed
        self._layers = max(1, TRANSFERS // max(1, self.transfers // profile.layers))
        self._simulated, self._gathered = (barriers, ordered, True, staged), gathered
        self._token_level = plan.models[0].deduplicated and profile.routing is not None
        self._levels = grid(most_tokens)
        self._kind_G = _kinds(plan)
        self._kinds = int(self._kind_G.max()) + 1
        self._points: dict[tuple[int, int, int], float] = {}
        self._known: dict[tuple[int, int, int], float] = {}

    @property
    def points(self) -> int:
        """Number of grid points simulated so far."""
        return len(self._points)

    @property
    def transfers(self) -> int:
        """Upper limit of the transfers in a step: two exchanges per layer and micro-batch, each with one per pair of GPUs."""
        gpus = len(self._cluster)
        return 2 * self._profile.layers * max(1, gpus * (gpus - 1)) * self._plan.options.micro_batches

    def simulated(self, tokens_XG: IntArray, seed: Sequence[int], layers: int | None = None) -> float:
        """Returns the simulated seconds of a step, averaged over draws of its traffic.

        The number of draws is DRAWN_LAYERS / number of the model's layers, rounded up.

        Args:
            tokens_XG: (X, G) int64, tokens of each rank; draw i uses row i modulo X.
            seed: numbers that, with the seed of the constructor, determine the draws.
            layers: number of layers to simulate, evenly spaced; their seconds are scaled up to all layers. None: all.
        """
        rng, all_layers = np.random.default_rng([self._seed, *seed]), self._profile.layers
        some = evenly_spaced(all_layers, layers or all_layers)
        profile = self._profile if len(some) == all_layers else self._profile.at_layers(some)
        draws = -(-DRAWN_LAYERS // all_layers)
        total_s = 0.0
        for draw in range(draws):
            drawn = drawn_windows(profile, tokens_XG[draw % len(tokens_XG)][None], rng, self._token_level)
            plan, cut = cut_traffic(self._plan, [drawn])
            program = compile_plan(plan, self._gathered)
            program = program if len(some) == all_layers else program.at_layers([some] * len(cut))
            total_s += simulate(program, self._cluster, cut, *self._simulated).seconds
        return total_s / draws * all_layers / len(some)

    def __call__(self, tokens_G: IntArray) -> float:
        """Returns the interpolated seconds of a step with `tokens_G` (G,) int64 tokens on each rank."""
        total, longest_s = int(tokens_G.sum()), 0.0
        for kind in range(self._kinds):
            busiest = int(tokens_G[self._kind_G == kind].max())
            if busiest * len(tokens_G) < total:
                continue  # a rank with less than the mean is not the busiest
            if (kind, busiest, total) not in self._known:
                others = (total - busiest) / max(1, len(tokens_G) - 1)
                self._known[kind, busiest, total] = self._interpolated(kind, busiest, others or busiest)
            longest_s = max(longest_s, self._known[kind, busiest, total])
        return longest_s

    def _interpolated(self, kind: int, busiest: float, others: float) -> float:
        """Seconds between the grid's points, linear in the triangle or rectangle around; `others` are at most `busiest`."""
        (at_busiest, u), (at_others, v) = self._between(busiest), self._between(others)
        weights = {(0, 0): (1 - u) * (1 - v), (0, 1): (1 - u) * v, (1, 0): u * (1 - v), (1, 1): u * v}
        if at_busiest == at_others:  # at the diagonal, where all ranks have equally many, seconds have a kink
            weights = {(0, 0): 1 - u, (1, 0): u - v, (1, 1): v}
        return sum(
            part * self._point(kind, int(self._levels[at_busiest + i]), int(self._levels[at_others + j]))
            for (i, j), part in weights.items()
            if part
        )

    def _between(self, tokens: float) -> tuple[int, float]:
        """The grid's number at or below, by its index, and which part of the way to the next one `tokens` is."""
        at = int(np.searchsorted(self._levels, tokens, side="right")) - 1
        if self._levels[at] == tokens:
            return at, 0.0
        return at, float((tokens - self._levels[at]) / (self._levels[at + 1] - self._levels[at]))

    def _point(self, kind: int, busiest: int, others: int) -> float:
        """Simulated seconds where a rank of a kind, each in turn, has `busiest` tokens and every other rank `others`."""
        key = kind, busiest, others
        if key not in self._points:
            ranks_X = np.flatnonzero(self._kind_G == kind)
            tokens_XG = np.full((len(ranks_X), len(self._cluster)), others)
            tokens_XG[np.arange(len(ranks_X)), ranks_X] = busiest
            self._points[key] = self.simulated(tokens_XG, key, self._layers)
        return self._points[key]


def grid(most_tokens: int) -> FloatArray:
    """Returns the grid: numbers of tokens from one to `most_tokens`, PER_OCTAVE of them per factor of two."""
    levels, step = [1], 1
    while levels[-1] < most_tokens:
        if levels[-1] >= 2 * step * PER_OCTAVE:
            step *= 2
        levels.append(min(levels[-1] + step, most_tokens))
    return np.array(levels, dtype=np.float64)


def _kinds(plan: Plan) -> IntArray:
    """(G,) the number of each GPU's kind, which is that of all GPUs with its speed and ports."""
    keys = [(gpu.kind, gpu.speed, gpu.out_Bps, gpu.in_Bps, gpu.startup_s) for gpu in plan.cluster.gpus]
    return np.array([list(dict.fromkeys(keys)).index(key) for key in keys])


@dataclass
class _DrawnSteps:
    """Draws steps in proportion to their time while they go by, and keeps the largest number of tokens on a rank."""

    most: int
    rng: np.random.Generator
    drawn: list[tuple[float, int, IntArray, float]] = field(default_factory=list)  # key, sequence, tokens, seconds
    seen: int = 0
    most_tokens: int = 0

    def add(self, tokens_G: IntArray, steps: int, seconds: float) -> None:
        """Sees steps with equal tokens on each rank, of `seconds` each."""
        self.seen += 1
        self.most_tokens = max(self.most_tokens, int(tokens_G.max()))
        if not seconds:
            return
        key = float(np.log(self.rng.random())) / (steps * seconds)
        if len(self.drawn) < self.most:
            heapq.heappush(self.drawn, (key, self.seen, tokens_G, seconds))
        elif key > self.drawn[0][0]:
            heapq.heapreplace(self.drawn, (key, self.seen, tokens_G, seconds))


def simulate_requests(
    plan: Plan,
    profile: Profile,
    requests: Requests | None = None,
    options: RequestOptions = RequestOptions(),
    *,
    barriers: str = "gpu",
    orders: str = "plan",
    staged: bool = False,
    progress: Progress = no_progress,
) -> RequestSimulation:
    """Predicts tokens per second, time to first token and time per output token of requests that are served under a plan.

    Every GPU is a data-parallel rank with vLLM's scheduling: continuous batching, chunked prefill. All ranks step in lockstep.
    A step's seconds depend on the tokens on each rank (`StepPrices`): they are simulated for a grid of token numbers, with
    experts drawn from the profile, and interpolated.

    Args:
        plan: the plan of one model.
        profile: the traffic that tokens' experts are drawn from.
        requests: arrival times and tokens of the requests; None: they are drawn as `options` say.
        options: the requests to draw, and the engine's limits; given `requests` are cut off after `duration_s`.
        barriers, orders, staged: as in `aurora.simulate`.
        progress: called with (name of the work, requests served, requests in all).

    Returns:
        The RequestSimulation: times of each request's first and last token, the error of interpolated steps against
        simulated ones, and a list of effects that the prediction leaves out.

    Raises:
        BadInput: if the plan is of several models, the profile does not fit it, or there are no requests.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> options = aurora.RequestOptions(rate=2, isl=64, osl=4, duration_s=10, max_num_batched_tokens=256)
        >>> found = aurora.simulate_requests(plan, traffic, options=options)
        >>> bool((found.served.ttft_s_Q > 0).all()), found.served.queue_grows
        (True, False)
    """
    if requests is None:
        requests = drawn_requests(options)
    elif options.duration_s is not None:
        requests = requests.until(options.duration_s)
    ordered, gathered = batch_orders(plan, orders), orders == GATHERED
    prices = StepPrices(plan, profile, options.max_num_batched_tokens, barriers, ordered, staged, gathered, options.seed)
    most = min(CHECKED, max(2, CHECKED_TRANSFERS // prices.transfers))
    steps = _DrawnSteps(most, np.random.default_rng(options.seed))
    ranks = len(plan.cluster)

    def step_s(prompt_G: IntArray, generating_G: IntArray) -> float:
        return prices(np.maximum(prompt_G + generating_G, 1))

    served = serve(requests, ranks, step_s, options, steps.add, progress)
    even = serve_evenly(requests, ranks, step_s, options, progress)
    off = []
    for _, number, tokens_G, seconds in sorted(steps.drawn, key=lambda draw: draw[1]):
        off.append(seconds / prices.simulated(np.maximum(tokens_G, 1)[None], (number,)) - 1)
    return RequestSimulation(
        served, even, prices.points, np.array(off), _assumptions(plan, profile, requests, steps.most_tokens)
    )


def _assumptions(plan: Plan, profile: Profile, requests: Requests, most_tokens: int) -> tuple[str, ...]:
    """Returns sentences on costs that the seconds leave out."""
    said = [
        "Attention is priced by the tokens of a step, as the profile's gate curve was measured, whatever a request's context.",
        "The KV cache holds all requests, and "
        + ("keeps every prefix that it has computed." if requests.blocks_Q else "no prompts share a prefix."),
        "What the profile's compute curves leave out takes no time: the head, and of synthetic profiles dense layers.",
    ]
    curves = [profile.curves.get(gpu.kind, next(iter(profile.curves.values())))["gate"] for gpu in plan.cluster.gpus]
    measured = int(min(curve.tokens_X[-1] for curve in curves))
    if most_tokens > measured:
        said.append(
            f"A rank has up to {most_tokens} tokens in a step; gate curves end at {measured} and go on with their last slope."
        )
    return tuple(said)
