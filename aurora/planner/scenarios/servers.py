"""Models on servers, for hierarchical all-to-alls: a token crosses once to each server that it needs.

Placements start from those that balance load alone (`Exclusive`, `Colocated`). A search then puts experts that the same tokens
choose on one server, as long as no GPU takes more than GPU_LOAD times the seconds of the most loaded GPU at the start, and no
server more than SERVER_LOAD times the mean. A layer keeps its first placement unless the search finds a faster one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Self

import numpy as np

from aurora.algorithms.alltoall.hierarchical import level_from
from aurora.algorithms.alltoall.schedule import hierarchical_order_s
from aurora.algorithms.gpu_slots import even_slots, shared_slots_MG, slots_G
from aurora.algorithms.layers_in_threads import Progress, map_layers, no_progress
from aurora.algorithms.network.port_bounds import spread
from aurora.algorithms.network.switch import steps_seconds
from aurora.algorithms.placement.cost_model import OWN, LayerCosts, expected_costs, layer_costs
from aurora.algorithms.placement.objective import seconds
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.algorithms.placement.placement_bounds import hierarchical_bound_s
from aurora.algorithms.placement.server_replicas import Homes, levelled, server_replicas
from aurora.algorithms.placement.server_search import NONE, ServerLimits, gpu_seconds, server_search, some_tokens
from aurora.algorithms.replicas.failure_resilient import DEFAULT
from aurora.algorithms.replicas.registry import REPLICAS, ReplicaStrategy
from aurora.algorithms.workload.forecast import Forecast, layer_forecast
from aurora.algorithms.workload.serving_gpus import from_servers, is_unreplicated, served_split
from aurora.algorithms.workload.traffic import CountedTokens, exchange_bytes, known_or_counted, steps_by_chunks
from aurora.planner.scenarios.colocated import Colocated
from aurora.planner.scenarios.exclusive import SWAP_SEARCH, Exclusive
from aurora.planner.scenarios.scenario import PlacedModels, Scenario
from aurora.types import Cluster, Hierarchy, Placement, Profile
from aurora.types.arrays import BoolArray, FloatArray, IntArray, evenly_spaced

CHUNKS = (1, 2, 4, 8)  # of a hierarchical all-to-all, of which the fastest is taken
LEVEL_GAIN = 0.02  # what levelling must save of the predicted seconds, as it also costs steps and memory
MOST_COUNTS = 1 << 18  # numbers that ranks tell each other before a dispatch, at most, where NICs are levelled
MOST_PRICED = 1 << 23  # choices of tokens that exchanges of single experts are priced by, in a layer: half a second
LEAST_CHOSEN = 100  # choices of the mean expert, below which exchanges would follow chance
KICKS = 8  # descents of exchanges, each but the first after two exchanges at random
PRICED = 8192  # pairs of ranks of all exchanges that each number of chunks is priced by
GPU_LOAD = 1.02  # of the fullest GPU where placement looks at load alone
SERVER_LOAD = 1.05  # of the mean server
LEVEL = 0.995  # of the fullest GPU's limit that a server takes with replicas, so that its GPUs can be levelled below it
Tokens = tuple[IntArray, IntArray]  # the experts (U, K) of each, and the server (U,) that it starts on, or NONE
SPARE = (1.0, 0.5, 0.0)  # parts of a server's spare slots that are tried for replicas of experts from other servers


class OverServers(Scenario):
    """Places one or several models with hierarchical all-to-alls, by `server_search`: few tokens cross between servers."""

    def costs(self, layer: int) -> list[LayerCosts]:
        """Returns the LayerCosts of a layer with deduplicated tokens, one per model."""
        return [layer_costs(self.cluster, profile, layer % profile.layers, deduplicated=True) for profile in self.profiles]

    def place(self, rng: np.random.Generator, progress: Progress = no_progress) -> PlacedModels:
        """Places all models over servers; the result has each model's Hierarchy. See `Scenario.place`.

        Experts are placed by load alone if `options.place` names a strategy that knows no servers, or `min_replicas` is given
        and nodes (which fail as a whole) are not the same GPUs as servers. Without token-level routing, too, but then replicas
        are levelled inside servers.
        """
        by_load = (Colocated if self._colocated else Exclusive)(
            replace(self.cluster, servers=None), self.profiles, self.options
        )
        placements_M = by_load.placements(rng, progress)
        if self._searches_servers:
            placements_M = tuple(self.improve_on_servers(placements_M, self.hierarchies(placements_M, rng), progress))
        return self.for_placements(placements_M, rng).priced(placements_M, progress)

    def for_placements(self, placements_M: Sequence[Placement], rng: np.random.Generator) -> Self:
        """Returns this scenario with each model's fastest Hierarchy under given placements; see `Scenario.for_placements`."""
        return replace(self, hierarchy_M=self.hierarchies(placements_M, rng))

    def hierarchies(self, placements_M: Sequence[Placement], rng: np.random.Generator) -> tuple[Hierarchy, ...]:
        """Returns each model's fastest Hierarchy (servers, and number of chunks); see `fastest_hierarchy`."""
        pairs, order = zip(self.profiles, placements_M, strict=True), self.options.order
        return tuple(fastest_hierarchy(self.cluster, *pair, order, rng) for pair in pairs)

    def bounds(
        self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray], slots_G: IntArray | int = 0
    ) -> tuple[float, float | None]:
        """Returns lower bounds on a layer's seconds over placements within memory's slots; see `Scenario.bounds`."""
        problem = costs_M, [profile.top_k for profile in self.profiles], self._slots_MG
        once = all(map(is_unreplicated, split_MEG))
        return hierarchical_bound_s(*problem, self.replicas_fit), hierarchical_bound_s(*problem, False) if once else None

    def price(self, costs_M: Sequence[LayerCosts], split_MEG: Sequence[FloatArray]) -> float:
        """Returns the seconds of a layer with all steps of its all-to-alls; see `Scenario.price`."""
        times_M = [
            costs.phase_times(split_EG, hierarchy)
            for costs, split_EG, hierarchy in zip(costs_M, split_MEG, self.hierarchy_M, strict=True)
        ]
        return seconds(times_M, nics=True)

    def improve_on_servers(
        self, start_M: Sequence[Placement], hierarchy_M: Sequence[Hierarchy], progress: Progress = no_progress
    ) -> list[Placement]:
        """Places models one after the other by server search, on the loads of the forecast, or as recorded if the aim is "own".

        If `options.place` puts replicas into spare slots, some replicate experts of other servers that a server's own tokens
        choose (`server_replicas`), and the rest balance its GPUs; several ratios are tried. With `options.min_replicas` the
        replicas of an expert come to different servers first. If models share every GPU, a GPU holds as many experts of each
        as in start_M, and the load limits (see this module) are on the sum of all models. Without token-level routing servers
        keep their experts, and the GPUs of each are levelled.

        Args:
            start_M: a placement of each model; unreplicated unless `options` ask for replicas.
            hierarchy_M: the Hierarchy of each model's all-to-alls.
            progress: called with (what is being done, layers done, layers in all).

        Raises:
            InfeasiblePlan: if the experts do not fit.
        """
        cluster, options, placements = self.cluster, self.options, list(start_M)
        costs_ML = [[layer_costs(cluster, p, layer, deduplicated=True) for layer in range(p.layers)] for p in self.profiles]
        replicated = "equal-split" if options.min_replicas is not None else options.place
        make = REPLICAS.get(replicated)

        def placed(model: int, layer: int) -> Placement:
            profile, hierarchy, costs = self.profiles[model], hierarchy_M[model], costs_ML[model][layer]
            forecast = layer_forecast([profile], layer, summed=True)
            expected = costs
            if options.aim != OWN:
                expected = expected_costs(cluster, profile, forecast.expected_WSE, forecast.windows_W, OWN, 1)
            begun, seed = start_M[model].layer(layer), (model, layer) if self._colocated else (layer,)
            start_E, rng = begun.split_EG(0).argmax(axis=1), np.random.default_rng((options.seed, *seed))
            beside_s_G = np.zeros(len(cluster))
            for other, costs_L in enumerate(costs_ML):
                if other != model:
                    at = layer % len(costs_L)
                    beside_s_G += gpu_seconds(costs_L[at].expert_s_WGE.sum(axis=0), placements[other].gpu_E(at))
            held_G = np.bincount(start_E, minlength=len(cluster))
            capacity_G = held_G if self._colocated else slots_G(cluster, profile, options)
            limits = _limits(expected, start_E, capacity_G, hierarchy, beside_s_G)
            if profile.routing is None:
                return _levelled_inside(costs, expected, limits, begun, hierarchy, make, rng) if make else begun
            tokens = _tokens(costs, forecast, hierarchy)
            if make is None:
                return Placement.unreplicated(_searched(costs, tokens, limits, start_E, hierarchy, rng), len(cluster))
            candidates = _replicated(expected, tokens, limits, begun, hierarchy, options.min_replicas or 1, make, rng)
            best = min(candidates, key=lambda candidate: exclusive_s(costs.phase_times(candidate.split_EG(0), hierarchy)))
            enough = options.aim == OWN or tokens[0].size >= LEAST_CHOSEN * profile.experts
            if not enough or options.min_replicas is not None:
                return best
            return _exchanged(costs, hierarchy, capacity_G, best, rng)

        for model, profile in enumerate(self.profiles):
            layers = map_layers(partial(placed, model), profile.layers, "placing experts over servers", progress)
            placements[model] = Placement.stack(layers)
        return placements

    @property
    def _colocated(self) -> bool:
        """True if several models share the GPUs."""
        return len(self.profiles) > 1

    @property
    def _searches_servers(self) -> bool:
        """True if experts are placed over servers."""
        options = self.options
        if options.min_replicas is None:
            return options.place in (("balanced",) if self._colocated else (SWAP_SEARCH, "equal-split"))
        assert self.cluster.servers is not None, "planner/options refuses others"
        node_G, server_G = np.array([gpu.node for gpu in self.cluster.gpus]), np.array(self.cluster.servers.server_G)
        return options.place == DEFAULT and np.array_equal(node_G[:, None] == node_G, server_G[:, None] == server_G)

    @cached_property
    def _slots_MG(self) -> list[IntArray]:
        """Of each model, (G,) int64 slots of other placements."""
        if self._colocated:
            return shared_slots_MG(self.cluster, self.profiles)
        return [slots_G(self.cluster, self.profiles[0], self.options)]


def fastest_hierarchy(
    cluster: Cluster, profile: Profile, placement: Placement, order: str, rng: np.random.Generator
) -> Hierarchy:
    """Returns the Hierarchy over the cluster's servers with the number of chunks that is predicted to be fastest.

    It is levelled if that shortens exchanges by more than LEVEL_GAIN. The prediction prices the dispatches and combines of
    some windows and layers, evenly spaced, in the order `order`.

    Args:
        cluster: a cluster with servers.
        profile: the model's traffic.
        placement: the GPUs of the model's experts.
        order: "auto" or a name of ORDER.
        rng: for orders that draw.
    """
    assert cluster.servers is not None, "planner/options refuses others"
    cases = profile.windows * profile.layers
    some = evenly_spaced(cases, max(1, PRICED // len(cluster) ** 2)).tolist()

    def steps_of(case: int) -> Callable[[Hierarchy], IntArray]:
        window, layer = divmod(case, profile.layers)
        return steps_by_chunks(known_or_counted(profile, layer, window), placement.split_EG(layer), plain[0].server_G)

    plain = [Hierarchy(np.array(cluster.servers.server_G), chunks) for chunks in CHUNKS]
    steps_C = [steps_of(case) for case in some]

    def seconds(hierarchy: Hierarchy) -> float:
        total_s = 0.0
        for steps in steps_C:
            steps_SGG = steps(hierarchy)
            there_SGG, back_SGG = (exchange_bytes(steps_SGG, profile, phase, True) for phase in ("dispatch", "combine"))
            dispatch, there_s = hierarchical_order_s(there_SGG, hierarchy, cluster.network, order, rng=rng)
            total_s += there_s + steps_seconds(dispatch.reversed, back_SGG, cluster.network)
        return total_s

    seconds_of = {hierarchy: seconds(hierarchy) for hierarchy in plain}
    best = min(plain, key=seconds_of.__getitem__)
    if _most_levelled([steps(plain[0]) for steps in steps_C], cluster) <= LEVEL_GAIN:
        return best
    row_bytes = profile.row_bytes(deduplicated=True)
    levelled = [replace(hierarchy, level_from=level_from(hierarchy.chunks, row_bytes, cluster.network)) for hierarchy in plain]
    small = [hierarchy for hierarchy in levelled if hierarchy.parts > 1 and hierarchy.pieces * len(cluster) ** 2 <= MOST_COUNTS]
    seconds_of.update((hierarchy, seconds(hierarchy) / (1 - LEVEL_GAIN)) for hierarchy in small)
    return min(seconds_of, key=seconds_of.__getitem__)


def _most_levelled(rows_CSGG: Sequence[IntArray], cluster: Cluster) -> float:
    """Returns the part of the busiest NICs' rows that levelling can save at most, of some all-to-alls."""
    assert cluster.servers is not None
    if cluster.servers.shared:
        return 0.0
    server_G, busiest, even = np.array(cluster.servers.server_G), 0.0, 0.0
    for rows_SGG in rows_CSGG:
        between_GG = np.where(server_G[:, None] == server_G, 0, rows_SGG.sum(axis=0))
        nics_2G = np.stack([between_GG.sum(axis=1), between_GG.sum(axis=0)])
        busiest += float(nics_2G.max())
        even += max(float((np.bincount(server_G, nic_G) / np.bincount(server_G)).max()) for nic_G in nics_2G)
    return 1 - even / busiest if busiest else 0.0


def _searched(
    costs: LayerCosts, tokens: Tokens, limits: ServerLimits, start_E: IntArray, hierarchy: Hierarchy, rng: np.random.Generator
) -> IntArray:
    """(E,) the GPU of each expert after a server search; the start where that is as fast."""
    found_E = server_search(*tokens, limits, start_E, rng)
    each_GG = np.eye(len(limits.slots_G))
    start_s, found_s = (exclusive_s(costs.phase_times(each_GG[gpu_E], hierarchy)) for gpu_E in (start_E, found_E))
    return found_E if found_s < start_s else start_E


def _replicated(
    expected: LayerCosts,
    tokens: Tokens,
    limits: ServerLimits,
    begun: Placement,
    hierarchy: Hierarchy,
    least: int,
    make: ReplicaStrategy,
    rng: np.random.Generator,
) -> list[Placement]:
    """Placements of a layer with replicas: the start, and those within its limits that spend slots on rows or on load.

    The server search leaves equally many slots on every GPU. Replicas are chosen after it, so only servers limit it, not GPUs
    with an expert of much load.
    """
    full_s = GPU_LOAD * float(np.einsum("wge,eg->g", expected.expert_s_WGE, begun.split_EG(0)).max())
    servers_only = limits._replace(most_gpu_s=np.inf, most_server_s=min(limits.most_server_s, LEVEL * full_s))
    even_G = even_slots(begun.experts, limits.slots_G)
    start_E = np.repeat(np.arange(hierarchy.ranks), even_G)
    gpu_E = server_search(*tokens, servers_only._replace(slots_G=even_G), start_E, rng)
    from_NE = from_servers(expected.own_WGE.sum(axis=0), hierarchy.server_G)
    layer, placements = Homes(*some_tokens(*tokens, rng), servers_only, hierarchy.server_G[gpu_E], from_NE), [begun]
    for part in SPARE:
        share_NE = server_replicas(layer, (part * layer.spare_N).astype(np.int64), least)
        if share_NE is not None:
            placement = levelled(layer, share_NE, make, rng)
            served_EG = served_split(expected.own_WGE.sum(axis=0), placement.split_EG(0), hierarchy.server_G)
            if np.einsum("wge,eg->g", expected.expert_s_WGE, served_EG).max() <= full_s:
                placements.append(placement)
    return placements


def _levelled_inside(
    costs: LayerCosts,
    expected: LayerCosts,
    limits: ServerLimits,
    begun: Placement,
    hierarchy: Hierarchy,
    make: ReplicaStrategy,
    rng: np.random.Generator,
) -> Placement:
    """The start, or its servers' replicas levelled over their GPUs if that is faster: a server serves its own tokens first."""
    share_NE = from_servers(begun.split_EG(0).T, hierarchy.server_G)
    from_NE, no_tokens = from_servers(expected.own_WGE.sum(axis=0), hierarchy.server_G), np.zeros((0, 1), dtype=np.int64)
    homes = Homes(no_tokens, no_tokens[:, 0], limits, share_NE.argmax(axis=0), from_NE)
    placements = begun, levelled(homes, share_NE, make, rng)
    return min(placements, key=lambda placement: exclusive_s(costs.phase_times(placement.split_EG(0), hierarchy)))


def _exchanges(holds_EG: BoolArray, slots_G: IntArray) -> Iterator[BoolArray]:
    """Yields what GPUs hold (E, G) after each exchange of a replica for another, or of two experts that have one each."""
    for expert, gpu in np.argwhere(~holds_EG).tolist():
        full = holds_EG[:, gpu].sum() >= slots_G[gpu]
        for evicted in np.flatnonzero(holds_EG[:, gpu]).tolist() if full else [expert]:
            alone = full and holds_EG[evicted].sum() == 1
            for other in np.flatnonzero(holds_EG[expert]).tolist() if alone else [gpu]:
                then_EG = holds_EG.copy()
                then_EG[[evicted, expert], gpu] = False, True
                if alone:
                    then_EG[[expert, evicted], other] = False, True
                yield then_EG


def _exchanged(
    costs: LayerCosts, hierarchy: Hierarchy, slots_G: IntArray, begun: Placement, rng: np.random.Generator
) -> Placement:
    """Exchanges single experts as long as the layer takes less, KICKS times again after two at random; large layers stay.

    The replicas of an expert take equal parts then. Each exchange is priced by all tokens.
    """
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    assert not isinstance(costs.routing, CountedTokens), "servers are searched for known tokens alone"
    begun_EG, budget = begun.split_EG(0), MOST_PRICED // costs.routing[0].size
    if begun_EG.size * int(slots_G.max()) > budget:
        return begun

    def priced(holds_EG: BoolArray) -> tuple[float, FloatArray]:
        split_EG = holds_EG / holds_EG.sum(axis=1, keepdims=True)
        return exclusive_s(costs.phase_times(split_EG, hierarchy)), split_EG

    best_s, best_EG = exclusive_s(costs.phase_times(begun_EG, hierarchy)), begun_EG
    for kick in range(KICKS):
        found_s, found_EG = best_s, best_EG
        if kick:
            holds_EG = best_EG > 0
            for _ in range(2):
                some = list(_exchanges(holds_EG, slots_G))
                holds_EG = some[rng.integers(len(some))] if some else holds_EG
            found_s, found_EG = priced(holds_EG)
        again = True
        while again:
            again = False
            for then_EG in _exchanges(found_EG > 0, slots_G):
                then_s, split_EG = priced(then_EG)
                budget -= 1
                if again := then_s < found_s * (1 - 1e-9):
                    found_s, found_EG = then_s, split_EG
                if again or budget <= 0:
                    break
        if found_s < best_s:
            best_s, best_EG = found_s, found_EG
        if budget <= 0:
            break
    return Placement.divided(tuple(tuple(np.flatnonzero(split_E).tolist()) for split_E in best_EG.T), best_EG)


def _limits(
    costs: LayerCosts, start_E: IntArray, slots_G: IntArray, hierarchy: Hierarchy, beside_s_G: FloatArray
) -> ServerLimits:
    """Returns the limits of the search, by the seconds of the start and of an even division over servers."""
    gpu_s_GE = np.ascontiguousarray(costs.expert_s_WGE.sum(axis=0))
    with np.errstate(divide="ignore", over="ignore"):  # an expert is divided over a server's GPUs so that all take equally long
        speed_GE = 1 / gpu_s_GE
        server_s_NE = np.stack([1 / speed_GE[hierarchy.server_G == server].sum(axis=0) for server in range(hierarchy.servers)])
    beside_s_N = np.bincount(hierarchy.server_G, weights=beside_s_G) / np.bincount(hierarchy.server_G)
    return ServerLimits(
        hierarchy.server_G,
        slots_G.copy(),
        gpu_s_GE,
        server_s_NE,
        GPU_LOAD * float((beside_s_G + gpu_seconds(gpu_s_GE, start_E)).max()),
        SERVER_LOAD * (spread(server_s_NE, replicas=True) + float(beside_s_G.mean())),
        beside_s_G,
        beside_s_N,
    )


def _tokens(costs: LayerCosts, forecast: Forecast, hierarchy: Hierarchy) -> Tokens:
    """(U, K) the experts of tokens and (U,) the server that each starts on, which counts if sources' preferences come again."""
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    assert not isinstance(costs.routing, CountedTokens), "counts alone do not tell which experts tokens chose together"
    experts_UK, source_U = costs.routing
    lasting = bool((forecast.affinity_SE != 1).any())
    return experts_UK, hierarchy.server_G[source_U] if lasting else np.full(len(source_U), NONE)
