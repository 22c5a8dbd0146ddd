"""Seconds of a step under a plan, by the tokens that each rank has in it: simulated at some numbers, interpolated between."""

from collections.abc import Sequence

import numpy as np

from aurora.errors import BadInput, check_one_of
from aurora.planner.check.fit import check_traffic
from aurora.planner.check.plans import check_plan
from aurora.planner.compile import compile_plan
from aurora.planner.workload.step_traffic import cut_traffic, step_profile
from aurora.simulator.interpreter import OrderBatch, simulate
from aurora.types import BARRIERS, Plan, Profile
from aurora.types.arrays import FloatArray, IntArray

PER_OCTAVE = 2  # numbers of tokens that are simulated between one and its double
DRAWN_LAYERS = 16  # layers at least, over whose draws of traffic a simulated step is a mean
TRANSFERS = 30_000  # simulated at most for a step of the grid; with more, some layers stand for all


class StepPrices:
    """Seconds of a step of one model.

    A step is described by the tokens of its busiest rank and by the mean tokens of the others. Steps in which both are numbers
    of a grid, and all others have equally many, are simulated when they are first asked for; between them seconds are
    interpolated. On several kinds of GPUs that is done for the busiest rank of each kind, and the longest counts. If a step has
    more than TRANSFERS, some of its layers are simulated for the grid, evenly spaced.

    Args:
        plan: a plan of one model.
        profile: the traffic from which tokens' experts are drawn.
        most_tokens: of a rank in a step.
        barriers: as in `aurora.simulate`.
        ordered: as in `aurora.simulator.interpreter.simulate`.
        staged: as in `aurora.simulate`.
        gathered: whether an allgather and a reduce-scatter stand for all-to-alls.
        seed: for the draws. Plans with one seed see the same traffic, unless tokens are deduplicated under one alone.

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
        """Number of steps that were simulated for the grid."""
        return len(self._points)

    @property
    def transfers(self) -> int:
        """Largest number of transfers of a step."""
        gpus = len(self._cluster)
        return 2 * self._profile.layers * max(1, gpus * (gpus - 1)) * max(1, self._plan.options.micro_batches)

    def simulated(self, tokens_XG: IntArray, seed: Sequence[int], layers: int | None = None) -> float:
        """Returns the simulated seconds of a step, the mean over as many draws as make DRAWN_LAYERS layers.

        Args:
            tokens_XG: (X, G) int64, tokens of each rank; of several rows the draws take one after the other.
            seed: further numbers for the draws.
            layers: how many layers are simulated, evenly spaced, and stand for all; None: all.
        """
        rng, all_layers = np.random.default_rng([self._seed, *seed]), self._profile.layers
        some = np.unique(np.linspace(0, all_layers - 1, min(layers or all_layers, all_layers)).astype(np.int64))
        profile = self._profile if len(some) == all_layers else self._profile.at_layers(some)
        draws = -(-DRAWN_LAYERS // all_layers)
        total_s = 0.0
        for draw in range(draws):
            drawn = step_profile(profile, tokens_XG[draw % len(tokens_XG)], rng, self._token_level)
            plan, cut = cut_traffic(self._plan, [drawn])
            program = compile_plan(plan, self._gathered)
            program = program if len(some) == all_layers else program.at_layers([some] * len(cut))
            total_s += simulate(program, self._cluster, cut, *self._simulated).seconds
        return total_s / draws * all_layers / len(some)

    def __call__(self, tokens_G: IntArray) -> float:
        """Returns the interpolated seconds of a step with `tokens_G` (G,) int64 tokens on each rank."""
        total, longest_s = int(tokens_G.sum()), 0.0
        for kind in range(self._kinds):
            own = int(tokens_G[self._kind_G == kind].max())
            if own * len(tokens_G) < total:
                continue  # a rank with less than the mean is not the busiest
            if (kind, own, total) not in self._known:
                others = (total - own) / max(1, len(tokens_G) - 1)
                self._known[kind, own, total] = self._interpolated(kind, own, others or own)
            longest_s = max(longest_s, self._known[kind, own, total])
        return longest_s

    def _interpolated(self, kind: int, own: float, others: float) -> float:
        """Seconds between the grid's points, linear in the triangle or rectangle around; `others` are at most `own`."""
        (at_own, u), (at_others, v) = self._between(own), self._between(others)
        weights = {(0, 0): (1 - u) * (1 - v), (0, 1): (1 - u) * v, (1, 0): u * (1 - v), (1, 1): u * v}
        if at_own == at_others:  # at the diagonal, where all ranks have equally many, seconds have a kink
            weights = {(0, 0): 1 - u, (1, 0): u - v, (1, 1): v}
        return sum(
            part * self._point(kind, int(self._levels[at_own + i]), int(self._levels[at_others + j]))
            for (i, j), part in weights.items()
            if part
        )

    def _between(self, tokens: float) -> tuple[int, float]:
        """The grid's number at or below, by its index, and which part of the way to the next one `tokens` is."""
        at = int(np.searchsorted(self._levels, tokens, side="right")) - 1
        if self._levels[at] == tokens:
            return at, 0.0
        return at, float((tokens - self._levels[at]) / (self._levels[at + 1] - self._levels[at]))

    def _point(self, kind: int, own: int, others: int) -> float:
        """Simulated seconds where a rank of a kind, each in turn, has `own` tokens and every other rank `others`."""
        key = kind, own, others
        if key not in self._points:
            ranks_X = np.flatnonzero(self._kind_G == kind)
            tokens_XG = np.full((len(ranks_X), len(self._cluster)), others)
            tokens_XG[np.arange(len(ranks_X)), ranks_X] = own
            self._points[key] = self.simulated(tokens_XG, key, self._layers)
        return self._points[key]


def grid(most_tokens: int) -> FloatArray:
    """Returns numbers of tokens from one to `most_tokens`, PER_OCTAVE of them between one and its double."""
    found, step = [1], 1
    while found[-1] < most_tokens:
        if found[-1] >= 2 * step * PER_OCTAVE:
            step *= 2
        found.append(min(found[-1] + step, most_tokens))
    return np.array(found, dtype=np.float64)


def _kinds(plan: Plan) -> IntArray:
    """(G,) the number of each GPU's kind, which is that of all GPUs with its speed and ports."""
    keys = [(gpu.kind, gpu.speed, gpu.out_Bps, gpu.in_Bps, gpu.startup_s) for gpu in plan.cluster.gpus]
    return np.array([list(dict.fromkeys(keys)).index(key) for key in keys])
