"""Requests served under a plan: continuous batching, whose steps are priced by the simulator."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from aurora.planner.layers_in_threads import Progress, untold
from aurora.simulator.interpreter import OrderBatch
from aurora.simulator.served_requests import ServedRequests, serve
from aurora.simulator.step_prices import StepPrices
from aurora.types import Plan, Profile, RequestOptions, Requests
from aurora.types.arrays import FloatArray, IntArray

CHECKED = 8  # steps of a run that are simulated beside their interpolated seconds
CHECKED_TRANSFERS = 1_000_000  # in these steps at most, but two steps at least


@dataclass(frozen=True, eq=False)
class RequestSimulation:
    """Requests served under a plan.

    Attributes:
        served: when each request was served.
        points: steps that were simulated, between which the others are interpolated.
        off_C: (C,) float64, interpolated over simulated seconds, minus one, of some steps of the run, which are drawn in
            proportion to their time; simulated with other draws of the traffic and all layers.
        assumptions: sentences on what the seconds leave out.
    """

    served: ServedRequests
    points: int
    off_C: FloatArray
    assumptions: tuple[str, ...]


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
    requests: Requests,
    options: RequestOptions = RequestOptions(),
    barriers: str = "gpu",
    ordered: OrderBatch | None = None,
    staged: bool = False,
    progress: Progress = untold,
    gathered: bool = False,
) -> RequestSimulation:
    """Simulates requests under a plan of one model; see `aurora.simulate_requests`."""
    prices = StepPrices(plan, profile, options.max_num_batched_tokens, barriers, ordered, staged, gathered, options.seed)
    most = min(CHECKED, max(2, CHECKED_TRANSFERS // prices.transfers))
    steps = _DrawnSteps(most, np.random.default_rng(options.seed))
    served = serve(requests, len(plan.cluster), prices, options, steps.add, progress)
    off = []
    for _, number, tokens_G, seconds in sorted(steps.drawn, key=lambda each: each[1]):
        off.append(seconds / prices.simulated(np.maximum(tokens_G, 1)[None], (number,)) - 1)
    return RequestSimulation(served, prices.points, np.array(off), _assumptions(plan, profile, steps.most_tokens))


def _assumptions(plan: Plan, profile: Profile, most_tokens: int) -> tuple[str, ...]:
    """What the seconds leave out, in sentences."""
    said = [
        "Attention is priced by the tokens of a step, as the profile's gate curve was measured, whatever a request's context.",
        "The KV cache holds all requests, and no prompts share a prefix.",
        "What the profile's compute curves leave out takes no time: the head, and of synthetic profiles dense layers.",
    ]
    curves = [profile.curves.get(gpu.kind, next(iter(profile.curves.values())))["gate"] for gpu in plan.cluster.gpus]
    measured = int(min(curve.tokens_X[-1] for curve in curves))
    if most_tokens > measured:
        said.append(
            f"A rank has up to {most_tokens} tokens in a step; gate curves end at {measured} and go on with their last slope."
        )
    return tuple(said)
