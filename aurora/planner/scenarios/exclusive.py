"""One model that has the GPUs to itself, layer by layer.

Recorded counts are a sample: the best placement for them is not the best for future traffic. So placements are made for a
forecast of a layer's traffic (`algorithms/workload/forecast`) and compared on windows drawn from it. The search ends when these
show no gain. The aim "own" takes the counts as exact instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aurora.algorithms.gpu_slots import even_slots, failure_domains, memory_slots_G, slots_G
from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.placement.assignment import ASSIGN, best_exclusive_s
from aurora.algorithms.placement.cost_model import OWN, SUMMED, LayerCosts, aimed_costs, expected_costs
from aurora.algorithms.placement.grouping import PLACE, grouped
from aurora.algorithms.placement.linear_program import blocks
from aurora.algorithms.placement.placement_bounds import layer_bound_s
from aurora.algorithms.replicas.failure_resilient import SURVIVE, aim_of, allocate, capped
from aurora.algorithms.replicas.registry import REPLICAS, place_unbounded
from aurora.algorithms.search.phase_sums import PhaseSums
from aurora.algorithms.search.slot_search import WORTH, fill, search_in_rounds, slot_search
from aurora.algorithms.workload.forecast import Forecast, layer_forecast
from aurora.algorithms.workload.serving_gpus import is_unreplicated
from aurora.errors import InfeasiblePlan
from aurora.planner.scenarios.scenario import PlacedModels, Scenario
from aurora.types import Cluster, GpuSlots, Placement, PlanOptions
from aurora.types.arrays import MOST_COUNT, FloatArray, IntArray, evenly_spaced

SWAP_SEARCH = "swap-search"  # not in PLACE, as it places experts one by one
DRAWS = 48  # unseen cases that placements of a layer are compared on
OFFERED_LAYERS = 8  # layers at most from which the gain of one more slot on each GPU is estimated


@dataclass(frozen=True)
class ExclusiveProblem:
    """One layer of a model that has the GPUs to itself, as placement strategies see it.

    Attributes:
        reported: costs in the recorded traffic cases (windows or traffic domains), which the plan's objective is of.
        searched: costs in the forecast of each case, with port rates lowered to the NICs': searches model ports but no NICs.
        deciding: costs in cases drawn from the forecast, with NICs; of several placements the shortest by these is taken.
        slots_G: (G,) int64, how many experts each GPU can hold.
        exact: whether the recorded counts are taken as exact; all costs are then of the recorded traffic.
    """

    reported: LayerCosts
    searched: LayerCosts
    deciding: LayerCosts
    slots_G: IntArray
    exact: bool

    @cached_property
    def sums(self) -> PhaseSums:
        """The layer as the slot search sees it."""
        return self.searched.phase_sums(self.slots_G)

    @cached_property
    def load_E(self) -> IntArray:
        """(E,) int64 tokens of each expert in all traffic cases, as recorded."""
        return np.asarray(self.reported.load_WE.sum(axis=0), dtype=np.int64)

    @property
    def any_group_fits(self) -> bool:
        """True if every GPU has slots for its share of the experts, divided equally and rounded up."""
        return bool((self.slots_G >= -(-len(self.load_E) // len(self.slots_G))).all())

    def deciding_s(self, placement: Placement) -> float:
        """Returns the seconds of a placement of this layer that decide between placements."""
        return self.deciding.value_s(placement.split_EG(0))


class Exclusive(Scenario):
    """Places one model that has the GPUs to itself. Layers are placed in parallel, each with its own random generator."""

    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns [LayerCosts] of a layer, in one traffic case per window or domain; `options.aim` says which cases count."""
        return [aimed_costs(self.cluster, self.profiles[0], self.domains, layer, self.options.aim)]

    def place(self, rng: np.random.Generator, progress: Progress = no_progress) -> PlacedModels:
        """Places all experts by `options.place`, by their loads as recorded or forecast. See `Scenario.place`."""
        profile = self.profiles[0]
        offered = set(evenly_spaced(profile.layers, OFFERED_LAYERS).tolist())

        def placed(layer: int) -> tuple[Placement, float, float | None]:
            """One layer's placement; the promised seconds; and those with one more slot on each GPU, None if not tried."""
            (placement, problem, forecast), larger = self._placed(layer), None
            promised = self._promised(layer, forecast)
            if layer in offered:
                larger = _with_one_more_slot(problem, placement, self._memory_G)
            return placement, promised.value_s(placement.split_EG(0)), None if larger is None else promised.evenly_s(larger)

        placement_L, now_s_L, larger_s_L = zip(*map_layers(placed, profile.layers, "placing experts", progress), strict=True)
        tried = [(now_s, larger_s) for now_s, larger_s in zip(now_s_L, larger_s_L, strict=True) if larger_s is not None]
        now_s, larger_s = (sum(column) for column in zip(*tried, strict=True)) if tried else (0.0, 0.0)
        found = self.priced([Placement.stack(placement_L)], progress, None if self.domains else sum(now_s_L))
        return replace(found, slot_gain=1 - larger_s / now_s if now_s else None)

    def placements(self, rng: np.random.Generator, progress: Progress = no_progress) -> tuple[Placement, ...]:
        """Returns the placements of `place`, without their prices."""
        layers = map_layers(lambda layer: self._placed(layer)[0], self.profiles[0].layers, "placing experts", progress)
        return (Placement.stack(layers),)

    def _placed(self, layer: int) -> tuple[Placement, ExclusiveProblem, Forecast]:
        """One layer's placement, and what it was made for."""
        options, rng, forecast = self.options, np.random.default_rng((self.options.seed, layer)), self._forecast(layer)
        problem = self._problem(layer, forecast, slots_G(self.cluster, self.profiles[0], options), rng)
        if options.place in PLACE and not problem.any_group_fits:
            raise InfeasiblePlan(
                f"`place` {options.place}: an equal share of {self.profiles[0].model!r}'s experts does not fit on every GPU; "
                f"`place` {SWAP_SEARCH} gives the larger GPUs more"
            )
        return _place_layer(self.cluster, problem, options, rng), problem, forecast

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
        return sum(self._promised(l, self._forecast(l)).value_s(placements_M[0].split_EG(l)) for l in layers)

    @cached_property
    def _memory_G(self) -> IntArray:
        """(G,) int64 slots that memory allows."""
        return memory_slots_G(self.cluster, self.profiles)

    def _problem(self, layer: int, forecast: Forecast, capacity_G: IntArray, rng: np.random.Generator) -> ExclusiveProblem:
        """One layer with its recorded and its forecast traffic."""
        cluster, profile, aim = self.cluster, self.profiles[0], self.options.aim
        (reported,) = self.costs(layer)
        searched = deciding = reported
        if aim != OWN:
            expected_WSE, drawn = forecast.expected_WSE, forecast.draws(DRAWS, rng)
            if np.ptp(forecast.share_WE, axis=0).max() == 0:  # cases differ in size alone
                expected_WSE = expected_WSE.mean(axis=0, keepdims=True)
            windows_W = forecast.windows_W[: len(expected_WSE)]
            searched = expected_costs(cluster, profile, expected_WSE, windows_W, aim, len(expected_WSE))
            deciding = expected_costs(cluster, profile, *drawn, aim, len(forecast.share_WE))
        return ExclusiveProblem(reported, searched.nics_as_ports, deciding, capacity_G, aim == OWN)

    def _promised(self, layer: int, forecast: Forecast) -> LayerCosts:
        """The costs of a layer that the plan's `unseen_s` is of: in draws that no placement was made for or chosen by."""
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
        held_G = ASSIGN[assign](problem.reported.summed.nics_as_ports.grouped(gpu_E), rng)
        gpu_E = np.argsort(held_G)[gpu_E]
    start = Placement.unreplicated(gpu_E, len(problem.slots_G))
    if place != SWAP_SEARCH:
        return start
    placements = [_searched(problem, [begun], rng, replicas=False) for begun in (start, *_by_speed(problem))]
    return min(placements, key=problem.deciding_s) if len(placements) > 1 else placements[0]


def _by_speed(problem: ExclusiveProblem) -> list[Placement]:
    """Experts packed by what a token costs each GPU, where GPUs differ: how many each should hold is hard to reach by swaps."""
    if blocks(problem.searched, len(problem.slots_G)).max() == 0:
        return []
    slots, load_E = GpuSlots(problem.slots_G, problem.searched.token_s_G), problem.searched.load_WE.mean(axis=0)
    held_GP, _ = REPLICAS["equal-split"](load_E, slots, np.ones(len(load_E), dtype=np.int64), np.random.default_rng(0))
    return [Placement.of_slots(held_GP[None])]


def _replicated(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """Replicas in all slots: EPLB's as they are; otherwise the best of several packings and what the search makes of them."""
    cost_G = problem.searched.token_s_G
    slots = GpuSlots(problem.slots_G, np.ones(len(cost_G)) if options.place == "eplb" else cost_G)  # EPLB sees equal GPUs
    load_1E = problem.searched.load_WE.mean(axis=0)[None]
    packed = place_unbounded(load_1E, slots, options.place, options.seed)
    if options.place == "eplb":
        return packed
    starts = [packed]
    if slots.alike:
        starts.append(place_unbounded(load_1E, slots, "eplb"))
    else:
        starts.append(_unreplicated(problem, "balanced", options.assign, rng))
    placements = [_searched(problem, begun, rng, replicas=True) for begun in (starts, _by_speed(problem)) if begun]
    best = min(placements, key=problem.deciding_s)
    if problem.exact:  # replicas that cost time are no insurance
        alone = _unreplicated(problem, SWAP_SEARCH, options.assign, rng)
        if problem.deciding_s(alone) < problem.deciding_s(best) * (1 - WORTH):
            return alone
    return best


def _searched(problem: ExclusiveProblem, starts: Sequence[Placement], rng: np.random.Generator, replicas: bool) -> Placement:
    """The best of several starts and of what the local search makes of them, on the traffic cases that compare placements."""
    layer, width = problem.sums, int(problem.slots_G.max())
    begun = [start.held_LGP(width)[0] for start in starts]
    return Placement.of_slots(search_in_rounds(layer, begun, problem.deciding.evenly_s, rng, replicas, problem.exact)[None])


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
