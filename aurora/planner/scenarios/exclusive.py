"""One model that has the GPUs to itself, layer by layer.

Recorded counts are a sample: the best placement for them is not the best for future traffic. So placements are made for a
forecast of a layer's traffic (`algorithms/workload/forecast`) and compared on windows drawn from it. The search ends when these
show no gain. The aim "own" takes the counts as exact instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.placement.assignment import ASSIGN, best_exclusive_s
from aurora.algorithms.placement.bounds import layer_bound_s
from aurora.algorithms.placement.cost_model import (
    OWN,
    SUMMED,
    LayerCosts,
    aimed_costs,
    expected_costs,
    layer_costs,
)
from aurora.algorithms.placement.gpu_slots import even_slots, failure_domains, memory_slots_G, slots_G
from aurora.algorithms.placement.grouping import PLACE, grouped
from aurora.algorithms.placement.linear_program import blocks, lp_rounding
from aurora.algorithms.placement.slot_search import WORTH, fill, search_in_rounds, slot_search
from aurora.algorithms.placement.slot_state import PhaseSums
from aurora.algorithms.replicas.failure_resilient import SURVIVE, aim_of, allocate, capped
from aurora.algorithms.replicas.registry import REPLICAS, place_unbounded
from aurora.algorithms.workload.forecast import Forecast, layer_forecast
from aurora.algorithms.workload.serving_gpus import is_unreplicated
from aurora.errors import InfeasiblePlan
from aurora.planner.scenarios.scenario import PlacedModels, Scenario, sum_if_all
from aurora.types import Cluster, GpuSlots, Placement, PlanOptions
from aurora.types.arrays import MOST_COUNT, FloatArray, IntArray, evenly_spaced

SWAP_SEARCH = "swap-search"  # not in PLACE, as it places experts one by one
DRAWS = 48  # unseen cases that placements of a layer are compared on
OFFERED_LAYERS = 8  # layers at most from which the gain of one more slot on each GPU is estimated


@dataclass(frozen=True)
class ExclusiveProblem:
    """One layer of a model that has the GPUs to itself, as placement strategies see it.

    Attributes:
        recorded: costs in the recorded traffic cases (windows or traffic domains).
        whole: costs of the sum of all windows, without the profiles of further domains.
        expected: costs in the forecast of each case; placements are made for these.
        ports: `expected` with port rates lowered to the NICs', for searches, which model ports but no NICs.
        judge: costs in cases drawn from the forecast; candidate placements are compared on these, with NICs.
        unseen: costs in other draws; they give the expected seconds of the placement that was chosen.
        load_E: (E,) int64 tokens of each expert in all traffic cases, as recorded.
        slots_G: (G,) int64, how many experts each GPU can hold.
        exact: whether the recorded counts are taken as exact.
    """

    recorded: LayerCosts
    whole: LayerCosts
    expected: LayerCosts
    ports: LayerCosts
    judge: LayerCosts
    unseen: LayerCosts
    load_E: IntArray
    slots_G: IntArray
    exact: bool

    @cached_property
    def sums(self) -> PhaseSums:
        """The layer as the slot search sees it."""
        return self.ports.phase_sums(self.slots_G)

    @property
    def any_group_fits(self) -> bool:
        """True if every GPU has slots for its share of the experts, divided equally and rounded up."""
        return bool((self.slots_G >= -(-len(self.load_E) // len(self.slots_G))).all())

    def judged_s(self, placement: Placement) -> float:
        """Returns the predicted seconds of a placement of this layer in the traffic cases of `judge`."""
        return self.judge.value_s(placement.split_EG(0))


@dataclass(frozen=True)
class PlacedLayer:
    """One layer's placement, its seconds on recorded and on unseen (drawn) traffic, and lower bounds on recorded traffic.

    `larger_s` is the seconds on unseen traffic with one more slot on each GPU; None if that was not tried.
    """

    placement: Placement
    objective_s: float
    bound_s: float
    assignment_bound_s: float | None
    unseen_s: float
    larger_s: float | None


class Exclusive(Scenario):
    """Places one model that has the GPUs to itself. Layers are placed in parallel, each with its own random generator."""

    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns [LayerCosts] of a layer, in one traffic case per window or domain; `options.aim` says which cases count."""
        return [aimed_costs(self.cluster, self.profiles[0], self.domains, layer, self.options.aim)]

    def place(self, rng: np.random.Generator, progress: Progress = no_progress) -> PlacedModels:
        """Places all experts by `options.place`, by their loads as recorded or forecast. See `Scenario.place`."""
        profile, options = self.profiles[0], self.options
        memory_G, capacity_G = self._memory_G, slots_G(self.cluster, profile, options)
        offered = set(evenly_spaced(profile.layers, OFFERED_LAYERS).tolist())

        def placed(layer: int) -> PlacedLayer:
            rng = np.random.default_rng((options.seed, layer))
            problem = self._problem(layer, capacity_G, rng)
            if options.place in PLACE and not problem.any_group_fits:
                raise InfeasiblePlan(
                    f"`place` {options.place}: an equal share of {profile.model!r}'s experts does not fit on every GPU; "
                    f"`place` {SWAP_SEARCH} gives the larger GPUs more"
                )
            placement = _place_layer(self.cluster, problem, options, rng)
            larger = _with_one_more_slot(problem, placement, memory_G) if layer in offered else None
            split_EG, recorded, unseen = placement.split_EG(0), problem.recorded, problem.unseen
            value_s, (bound_s, own_s) = recorded.value_s(split_EG), self.bounds([recorded], [split_EG])
            return PlacedLayer(
                placement,
                value_s,
                min(bound_s, value_s),
                None if own_s is None else min(own_s, value_s),
                unseen.value_s(split_EG),
                None if larger is None else unseen.evenly_s(larger),
            )

        layers = map_layers(placed, profile.layers, "placing experts", progress)
        tried = [(layer.unseen_s, layer.larger_s) for layer in layers if layer.larger_s is not None]
        now_s, then_s = (sum(column) for column in zip(*tried, strict=True)) if tried else (0.0, 0.0)
        return PlacedModels(
            (Placement.stack([layer.placement for layer in layers]),),
            sum(layer.objective_s for layer in layers),
            sum(layer.bound_s for layer in layers),
            sum_if_all([layer.assignment_bound_s for layer in layers]),
            unseen_s=None if self.domains else sum(layer.unseen_s for layer in layers),
            slot_gain=1 - then_s / now_s if now_s else None,
        )

    def bounds(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, float | None]:
        """Returns lower bounds on a layer's seconds, the second for a single traffic case; see `Scenario.bounds`."""
        (costs,), (split_EG,), own_s = costs_M, split_MEG, None
        most_G = np.maximum(np.minimum(self._memory_G, self.options.slots_per_gpu or MOST_COUNT), slots_G)
        if len(costs.own_WGE) == 1 and not self.domains and is_unreplicated(split_EG):
            own_s = best_exclusive_s(costs.grouped(split_EG.argmax(axis=1)))
        return layer_bound_s(costs, most_G), own_s

    def price(self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray]) -> float:
        """Returns the seconds of a layer by Aurora's Eq. 1, averaged over the cases that count; see `Scenario.price`."""
        return costs_M[0].value_s(split_MEG[0])

    def unseen_s(self, placements_M: Sequence[Placement]) -> float | None:
        """Returns the expected seconds of all layers on draws of the forecast; None with domains."""
        if self.domains:  # domains may have compute times of their own, draws have the profile's
            return None
        layers = range(self.layers)
        return sum(self._unseen(self._forecast(l), l).value_s(placements_M[0].split_EG(l)) for l in layers)

    @cached_property
    def _memory_G(self) -> IntArray:
        """(G,) int64 slots that memory allows."""
        return memory_slots_G(self.cluster, self.profiles)

    def _problem(self, layer: int, capacity_G: IntArray, rng: np.random.Generator) -> ExclusiveProblem:
        """One layer with its recorded and its forecast traffic."""
        cluster, profile, aim = self.cluster, self.profiles[0], self.options.aim
        forecast = self._forecast(layer)
        expected_WSE, drawn = forecast.expected_WSE, None if aim == OWN else forecast.draws(DRAWS, rng)
        (recorded,) = self.costs(layer)
        expected = judge = recorded
        if drawn is not None:
            if np.ptp(forecast.share_WE, axis=0).max() == 0:  # cases differ in size alone
                expected_WSE = expected_WSE.mean(axis=0, keepdims=True)
            windows_W = forecast.windows_W[: len(expected_WSE)]
            expected = expected_costs(cluster, profile, expected_WSE, windows_W, aim, len(expected_WSE))
            judge = expected_costs(cluster, profile, *drawn, aim, len(forecast.share_WE))
        return ExclusiveProblem(
            recorded,
            layer_costs(cluster, profile, layer) if self.domains else recorded.summed,
            expected,
            expected.nics_as_ports,
            judge,
            self._unseen(forecast, layer),
            np.asarray(recorded.load_WE.sum(axis=0), dtype=np.int64),
            capacity_G,
            aim == OWN,
        )

    def _unseen(self, forecast: Forecast, layer: int) -> LayerCosts:
        """The costs of a layer in draws of its traffic that no placement was made for; see `Forecast.draws`."""
        draws, cases = forecast.draws(DRAWS, np.random.default_rng((layer, 1, 1, 1))), len(forecast.share_WE)
        return expected_costs(self.cluster, self.profiles[0], *draws, self.options.aim, cases)

    def _forecast(self, layer: int) -> Forecast:
        """The forecast of a layer's traffic."""
        return layer_forecast([*self.profiles, *self.domains], layer, self.options.aim in SUMMED)


def _place_layer(cluster: Cluster, problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """One layer placed by the strategy `options.place`."""
    if options.place in SURVIVE:
        return _failure_resilient(cluster, problem, options, rng)
    if options.place in REPLICAS:
        return _replicated(problem, options, rng)
    return _unreplicated(problem, options.place, options.assign, rng)


def _unreplicated(problem: ExclusiveProblem, place: str, assign: str, rng: np.random.Generator) -> Placement:
    """Each expert on one GPU: groups of equal size assigned to GPUs; then the local search if `place` is SWAP_SEARCH."""
    any_fits, own_G = problem.any_group_fits, even_slots(len(problem.load_E), problem.slots_G)
    gpu_E = grouped("balanced" if place == SWAP_SEARCH else place, problem.load_E, own_G, rng)
    if any_fits:
        held_G = ASSIGN[assign](problem.whole.nics_as_ports.grouped(gpu_E), rng)
        gpu_E = np.argsort(held_G)[gpu_E]
    start = Placement.unreplicated(gpu_E, len(problem.slots_G))
    if place != SWAP_SEARCH:
        return start
    placements = [_searched(problem, [begun], rng, replicas=False) for begun in (start, *_relaxed(problem))]
    return min(placements, key=problem.judged_s) if len(placements) > 1 else placements[0]


def _relaxed(problem: ExclusiveProblem) -> list[Placement]:
    """LP rounding where GPUs differ: how many experts each should hold is hard to reach by swaps. None where they are alike."""
    gpus = len(problem.slots_G)
    alike = blocks(problem.expected, gpus).max() == 0
    return [] if alike else [Placement.unreplicated(lp_rounding(problem.ports, problem.slots_G), gpus)]


def _replicated(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """Replicas in all slots: EPLB's as they are; otherwise the best of several packings and what the search makes of them."""
    cost_G = problem.ports.token_s_G
    slots = GpuSlots(problem.slots_G, np.ones(len(cost_G)) if options.place == "eplb" else cost_G)  # EPLB sees equal GPUs
    load_1E = problem.expected.load_WE.mean(axis=0)[None]
    packed = place_unbounded(load_1E, slots, options.place, options.seed)
    if options.place == "eplb":
        return packed
    starts = [packed]
    if slots.alike:
        starts.append(place_unbounded(load_1E, slots, "eplb"))
    else:
        starts.append(_unreplicated(problem, "balanced", options.assign, rng))
    placements = [_searched(problem, begun, rng, replicas=True) for begun in (starts, _relaxed(problem)) if begun]
    best = min(placements, key=problem.judged_s)
    if problem.exact:  # replicas that cost time are no insurance
        alone = _unreplicated(problem, SWAP_SEARCH, options.assign, rng)
        if problem.judged_s(alone) < problem.judged_s(best) * (1 - WORTH):
            return alone
    return best


def _searched(problem: ExclusiveProblem, starts: Sequence[Placement], rng: np.random.Generator, replicas: bool) -> Placement:
    """The best of several starts and of what the local search makes of them, on the traffic cases that compare placements."""
    layer, width = problem.sums, int(problem.slots_G.max())
    begun = [start.held_LGP(width)[0] for start in starts]
    return Placement.of_slots(search_in_rounds(layer, begun, problem.judge.evenly_s, rng, replicas, problem.exact)[None])


def _with_one_more_slot(problem: ExclusiveProblem, placement: Placement, memory_G: IntArray) -> IntArray | None:
    """(G, P) the experts in slots with a further replica on each GPU whose memory holds it; None if none's does.

    memory_G is (G,) int64, the slots that each GPU's memory holds.
    """
    held_G = np.array([len(experts) for experts in placement.slots_LG[0]])
    more_G = np.maximum(held_G, np.minimum(held_G + 1, np.minimum(memory_G, len(problem.load_E))))
    if (more_G == held_G).all() or (np.ptp(held_G) == 0 and (more_G == held_G).any()):
        return None
    layer = problem.sums._replace(slots_G=more_G)
    return slot_search(layer, fill(layer, placement.held_LGP()[0])[0], np.random.default_rng(0), 0)[0]


def _failure_resilient(
    cluster: Cluster, problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator
) -> Placement:
    """Replicas that survive failures of nodes, no two of an expert on one GPU."""
    assert options.min_replicas is not None, "resolving the options sees to it"
    domains, load_E = failure_domains(cluster, problem.slots_G), problem.load_E
    count_E = capped(allocate(load_E, domains, options.min_replicas), load_E, len(problem.slots_G))
    held_EG = SURVIVE[options.place](count_E, domains, aim_of(options.min_replicas, domains), rng)
    return Placement.held(held_EG)
