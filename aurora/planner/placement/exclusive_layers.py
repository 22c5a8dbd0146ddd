"""Placement of one model that has the GPUs to itself, layer by layer.

Recorded counts are a sample, so that the placement that is best on them is not the best on what comes. Placements are made for
the forecast of a layer's traffic (`planner/workload/forecast`) and compared on draws of unseen windows. The search ends where
it gains nothing there. The aim "own" takes the counts as exact instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.errors import InfeasiblePlan
from aurora.planner.layers_in_threads import Progress, of_layers, untold
from aurora.planner.placement.assignment import ASSIGN, best_exclusive_s
from aurora.planner.placement.bounds import layer_bound_s
from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.grouping import PLACE, grouped
from aurora.planner.placement.phase_sums import PhaseSums, blocks, lp_rounding
from aurora.planner.placement.placed_models import PlacedModels, unreplicated
from aurora.planner.placement.profile_costs import AIMS, OWN, SUMMED, aimed_costs, expected_costs, layer_costs
from aurora.planner.placement.slot_counts import even_slots, failure_domains, memory_slots_G, slots_G
from aurora.planner.placement.slot_search import fill, slot_search
from aurora.planner.replication.failure_resilient import SURVIVE, aim_of, allocate, capped
from aurora.planner.replication.registry import REPLICAS, best_divided, place_unbounded
from aurora.planner.workload.forecast import Forecast, layer_forecast
from aurora.types import Cluster, FailureDomains, GpuSlots, Placement, PlanOptions, Profile
from aurora.types.arrays import IntArray

SWAP_SEARCH = "swap-search"  # not in PLACE, as it places experts one by one
DRAWS = 48  # unseen scenarios that placements of a layer are compared on
ROUNDS = 4  # of a search at most
KICKS = 16  # restarts of the search in a round
WORTH = 0.01  # share of a layer's time that replicas in spare slots may cost at most, where counts are exact
OFFERED_LAYERS = 8  # layers at most from which the gain of one more slot on each GPU is estimated


@dataclass(frozen=True)
class ExclusiveProblem:
    """One layer of a model that has the GPUs to itself, as placement strategies see it.

    Attributes:
        recorded: the layer in every scenario that the placement must serve, as recorded.
        own_costs: the layer over the whole profile, without the profiles of further domains.
        expected: the layer in every scenario, as placements are made for.
        judge: the layer in scenarios by which placements are compared.
        unseen: the layer in further scenarios, by which the placement that was chosen is judged.
        slots_G: (G,) int64, how many experts each GPU can hold.
        domains: which GPUs fail together.

    Searches know ports alone, so that they see `searched`; what they find is compared with NICs and all.
    """

    recorded: LayerCosts
    own_costs: LayerCosts
    expected: LayerCosts
    judge: LayerCosts
    unseen: LayerCosts
    slots_G: IntArray
    domains: FailureDomains

    @property
    def load_E(self) -> IntArray:
        """(E,) int64 tokens of each expert in all scenarios, as recorded."""
        return np.asarray(self.recorded.load_WE.sum(axis=0), dtype=np.int64)

    @property
    def exact(self) -> bool:
        """Whether the recorded counts are taken as exact."""
        return self.judge is self.expected

    @property
    def searched(self) -> LayerCosts:
        """`expected` with ports as slow as NICs make them."""
        return self.expected.nics_as_ports

    @property
    def any_group_fits(self) -> bool:
        """Whether every GPU has slots for any group if experts are divided into one group per GPU, as equally as possible."""
        return bool((self.slots_G >= -(-len(self.load_E) // len(self.slots_G))).all())

    def judged_s(self, placement: Placement) -> float:
        """The seconds of a placement of this layer in the scenarios by which placements are compared."""
        return self.judge.value_s(placement.split_EG(0))


@dataclass(frozen=True)
class PlacedLayer:
    """One layer's placement and its seconds: as recorded, expected on unseen traffic, and their lower bounds.

    `slot_s` is what the placement takes on average in unseen scenarios, and what it would take with one more slot on each GPU;
    None if that was not tried.
    """

    placement: Placement
    objective_s: float
    unseen_s: float
    bound_s: float
    assignment_bound_s: float | None
    slot_s: tuple[float, float] | None


def place_exclusive(
    cluster: Cluster,
    profile: Profile,
    domains: Sequence[Profile],
    options: PlanOptions,
    progress: Progress = untold,
) -> PlacedModels:
    """Places one model that has the GPUs to itself. Layers are placed in parallel, each with random numbers of its own.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model that the placement must serve; `options.aim` says how they count.
        options: resolved, so `options.place` names a strategy.
        progress: told of every layer that is placed.

    Raises:
        InfeasiblePlan: if the experts do not fit.
    """
    capacity_G = slots_G(cluster, profile, options)
    nodes = failure_domains(cluster, capacity_G)
    more_G = memory_slots_G(cluster, [profile])
    offered = set(np.linspace(0, profile.layers - 1, OFFERED_LAYERS, dtype=np.int64).tolist())

    def placed(layer: int) -> PlacedLayer:
        rng = np.random.default_rng((options.seed, layer))
        problem = _problem(cluster, profile, domains, layer, options.aim, capacity_G, nodes, rng)
        if options.place in PLACE and not problem.any_group_fits:
            raise InfeasiblePlan(
                f"`place` {options.place}: an equal share of {profile.model!r}'s experts does not fit on every GPU; "
                f"`place` {SWAP_SEARCH} gives the larger GPUs more"
            )
        placement = _place_layer(problem, options, rng)
        slot_s = _with_one_more_slot(problem, placement, more_G) if layer in offered else None
        return _priced(problem, placement, bool(domains), slot_s)

    layers = of_layers(placed, profile.layers, "placing experts", progress)
    bounds = [layer.assignment_bound_s for layer in layers]
    tried = [layer.slot_s for layer in layers if layer.slot_s is not None]
    now_s, then_s = (sum(column) for column in zip(*tried, strict=True)) if tried else (0.0, 0.0)
    return PlacedModels(
        (Placement.stack([layer.placement for layer in layers]),),
        sum(layer.objective_s for layer in layers),
        sum(layer.bound_s for layer in layers),
        None if None in bounds else sum(bound_s for bound_s in bounds if bound_s is not None),
        unseen_s=sum(layer.unseen_s for layer in layers),
        slot_gain=1 - then_s / now_s if now_s else None,
    )


def _problem(
    cluster: Cluster,
    profile: Profile,
    domains: Sequence[Profile],
    layer: int,
    aim: str,
    capacity_G: IntArray,
    nodes: FailureDomains,
    rng: np.random.Generator,
) -> ExclusiveProblem:
    """One layer with its recorded and its forecast traffic."""
    recorded = aimed_costs(cluster, profile, domains, layer, aim)
    forecast = layer_forecast([profile, *domains], layer, aim in SUMMED)
    expected = recorded
    if aim != OWN:
        expected_WSE = forecast.expected_WSE
        if np.ptp(forecast.share_WE, axis=0).max() == 0:  # scenarios differ in size alone
            expected_WSE = expected_WSE.mean(axis=0, keepdims=True)
        windows_W = forecast.windows_W[: len(expected_WSE)]
        expected = expected_costs(cluster, profile, expected_WSE, windows_W, AIMS[aim](len(expected_WSE)))
    judge = expected if aim == OWN else _drawn_costs(cluster, profile, forecast, aim, rng)
    unseen = _drawn_costs(cluster, profile, forecast, aim, np.random.default_rng((layer, 1, 1, 1)))
    return ExclusiveProblem(recorded, layer_costs(cluster, profile, layer), expected, judge, unseen, capacity_G, nodes)


def _drawn_costs(cluster: Cluster, profile: Profile, forecast: Forecast, aim: str, rng: np.random.Generator) -> LayerCosts:
    """The costs of a layer in DRAWS unseen scenarios, or a few more, so that each of the forecast's is drawn equally often."""
    tokens_XSE, windows_X = forecast.draws(DRAWS, rng)
    scenarios = len(forecast.share_WE)
    worst = AIMS[aim](scenarios) * len(windows_X) // scenarios
    return expected_costs(cluster, profile, tokens_XSE, windows_X, worst)


def unseen_seconds(cluster: Cluster, profile: Profile, domains: Sequence[Profile], placement: Placement, aim: str) -> float:
    """Returns the seconds of all layers that are to be expected on traffic that the profiles hold no record of.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model.
        placement: of the model's experts.
        aim: how windows or domains count, a name of AIMS.
    """
    total_s = 0.0
    for layer in range(profile.layers):
        forecast = layer_forecast([profile, *domains], layer, aim in SUMMED)
        unseen = _drawn_costs(cluster, profile, forecast, aim, np.random.default_rng((layer, 1, 1, 1)))
        total_s += unseen.value_s(placement.split_EG(layer))
    return total_s


def _priced(problem: ExclusiveProblem, placement: Placement, further: bool, slot_s: tuple[float, float] | None) -> PlacedLayer:
    """A layer's placement with its seconds and bounds; `further`: whether there are further domains."""
    split_EG = placement.split_EG(0)
    value_s = problem.recorded.value_s(split_EG)
    assignment_bound_s = None
    if placement.split_LG is None and len(problem.recorded.own_WGE) == 1 and not further:
        assignment_bound_s = min(best_exclusive_s(problem.own_costs.grouped(placement.gpu_E(0))), value_s)
    bound_s = min(layer_bound_s(problem.recorded, problem.slots_G), value_s)
    return PlacedLayer(placement, value_s, problem.unseen.value_s(split_EG), bound_s, assignment_bound_s, slot_s)


def _place_layer(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """One layer placed by the strategy `options.place`."""
    if options.place in SURVIVE:
        return _failure_resilient(problem, options, rng)
    if options.place in REPLICAS:
        return _replicated(problem, options, rng)
    return _unreplicated(problem, options.place, options.assign, rng)


def _unreplicated(problem: ExclusiveProblem, place: str, assign: str, rng: np.random.Generator) -> Placement:
    """Each expert on one GPU: groups of equal size assigned to GPUs; then the local search if `place` is SWAP_SEARCH."""
    own_G = even_slots(len(problem.load_E), problem.slots_G)
    gpu_E = grouped("balanced" if place == SWAP_SEARCH else place, problem.load_E, own_G, rng)
    if problem.any_group_fits:
        held_G = ASSIGN[assign](problem.own_costs.nics_as_ports.grouped(gpu_E), rng)
        gpu_E = np.argsort(held_G)[gpu_E]
    start = unreplicated(gpu_E, len(problem.slots_G))
    if place != SWAP_SEARCH:
        return start
    starts = [start, *_relaxed(problem)]
    return min((_searched(problem, [each], rng, replicas=False) for each in starts), key=problem.judged_s)


def _relaxed(problem: ExclusiveProblem) -> list[Placement]:
    """LP rounding where GPUs differ: how many experts each should hold is hard to reach by swaps. None where they are alike."""
    gpus = len(problem.slots_G)
    alike = blocks(problem.expected, gpus).max() == 0
    return [] if alike else [unreplicated(lp_rounding(problem.searched, problem.slots_G), gpus)]


def _replicated(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """Replicas in all slots: EPLB's as they are; otherwise the best of several packings and what the search makes of them."""
    cost_G = problem.searched.token_s_G
    slots = GpuSlots(problem.slots_G, np.ones(len(cost_G)) if options.place == "eplb" else cost_G)  # EPLB sees equal GPUs
    load_1E = problem.expected.load_WE.mean(axis=0)[None]
    packed = place_unbounded(load_1E, slots, options.place, options.seed)
    if options.place == "eplb":
        return packed
    starts = [packed if REPLICAS[options.place].divided_evenly else place_unbounded(load_1E, slots, seed=options.seed)]
    if slots.alike:
        starts.append(place_unbounded(load_1E, slots, "eplb"))
    else:
        starts.append(_unreplicated(problem, "balanced", options.assign, rng))
    found = [_searched(problem, each, rng, replicas=True) for each in (starts, _relaxed(problem)) if each]
    if not REPLICAS[options.place].divided_evenly:
        found += [packed, _swapped(problem, packed, rng)]
    best = min(found, key=problem.judged_s)
    if problem.exact:  # replicas that cost time are no insurance
        alone = _unreplicated(problem, SWAP_SEARCH, options.assign, rng)
        if problem.judged_s(alone) < problem.judged_s(best) * (1 - WORTH):
            return alone
    return best


def _searched(problem: ExclusiveProblem, starts: Sequence[Placement], rng: np.random.Generator, replicas: bool) -> Placement:
    """The best of several starts and of what the local search makes of them, on the scenarios that compare placements.

    The search goes on in rounds from the best of its results, and ends after a round that gains nothing there.

    Args:
        problem: the layer.
        starts: placements, which are filled with replicas if these are allowed.
        rng: for the search.
        replicas: whether experts may have several, which then share their tokens evenly and fill all slots, unless that costs
            more than WORTH: a hot expert that has a GPU to itself may have no neighbour that it can bear.
    """
    layer = PhaseSums.of(problem.searched, problem.slots_G)

    def full(held_GP: IntArray) -> IntArray:
        if not replicas:
            return held_GP
        filled_GP = fill(layer, held_GP)[0]
        kept_s, filled_s = (problem.judged_s(Placement.of_slots(each[None])) for each in (held_GP, filled_GP))
        return held_GP if kept_s < filled_s * (1 - WORTH) else filled_GP

    def searched(held_GP: IntArray, kicks: int) -> IntArray:
        return full(slot_search(layer, held_GP, rng, kicks, replicas)[0])

    begun = [full(start.held_LGP(int(problem.slots_G.max()))[0]) for start in starts]
    found = [searched(held_GP, 0) for held_GP in begun]
    candidates = [Placement.of_slots(held_GP[None]) for held_GP in (*found, *begun)]
    judged_s = [problem.judged_s(candidate) for candidate in candidates]
    best, best_s = candidates[int(np.argmin(judged_s))], min(judged_s)
    held_GP = found[int(np.argmin(judged_s[: len(found)]))]
    for _ in range(ROUNDS):
        held_GP = searched(held_GP, KICKS)
        placement = Placement.of_slots(held_GP[None])
        if (judged := problem.judged_s(placement)) < best_s * (1 - 1e-12):
            best, best_s = placement, judged
        elif not problem.exact:
            break
    return best


def _swapped(problem: ExclusiveProblem, placement: Placement, rng: np.random.Generator) -> Placement:
    """One layer's replicas after a search that moves each replica with the share of its expert's tokens that it has."""
    held_GP = placement.held_LGP(int(problem.slots_G.max()))[0]
    share_GP = np.where(held_GP >= 0, np.take_along_axis(placement.split_EG(0).T, np.maximum(held_GP, 0), axis=1), 0.0)
    found_GP, _ = slot_search(PhaseSums.of(problem.searched, problem.slots_G), held_GP, rng, KICKS, share_GP=share_GP)
    return Placement.of_slots(found_GP[None], share_GP[None])


def _with_one_more_slot(problem: ExclusiveProblem, placement: Placement, memory_G: IntArray) -> tuple[float, float] | None:
    """The seconds of a placement and of one with a further replica on each GPU whose memory holds it; None if none's does.

    memory_G is (G,) int64, the slots that each GPU's memory holds.
    """
    held_G = np.array([len(held) for held in placement.slots_LG[0]])
    more_G = np.minimum(held_G + 1, np.minimum(memory_G, len(problem.load_E)))
    if (more_G <= held_G).all() or (len(set(held_G.tolist())) == 1 and (more_G <= held_G).any()):
        return None
    larger = GpuSlots(np.maximum(more_G, held_G), problem.searched.token_s_G)
    load_1E = problem.expected.load_WE.mean(axis=0)[None]
    start = place_unbounded(load_1E, larger) if larger.alike else placement
    layer = PhaseSums.of(problem.searched, larger.slots_G)
    held_GP, _ = fill(layer, start.held_LGP()[0])
    held_GP, _ = slot_search(layer, held_GP, np.random.default_rng(0), 0)
    return problem.unseen.value_s(placement.split_EG(0)), problem.unseen.value_s(Placement.of_slots(held_GP[None]).split_EG(0))


def _failure_resilient(problem: ExclusiveProblem, options: PlanOptions, rng: np.random.Generator) -> Placement:
    """Replicas that survive failures of nodes, no two of an expert on one GPU, with the best token split."""
    assert options.min_replicas is not None, "resolving the options sees to it"
    domains, load_E = problem.domains, problem.load_E
    count_E = capped(allocate(load_E, domains, options.min_replicas), load_E, len(problem.slots_G))
    held_EG = SURVIVE[options.place](count_E, domains, aim_of(options.min_replicas, domains), rng)
    return best_divided(held_EG.T, load_E.astype(np.float64), problem.searched.token_s_G)
