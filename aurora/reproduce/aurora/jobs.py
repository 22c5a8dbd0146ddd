"""What is put on a cluster, and what it takes: by the paper's formulas, by the causal one, or event by event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.planner.make_plan import make_plan
from aurora.planner.network.schedule_time import timed
from aurora.planner.placement.cost_model import GroupCosts, group_costs, group_tokens
from aurora.planner.placement.grouping import PLACE
from aurora.planner.placement.objective import PhaseTimes, causal, exclusive, paper
from aurora.reports.summary import summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Plan, PlanOptions, Profile, Schedule
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class LayerJob:
    """One layer of one model with as many experts as the cluster has GPUs, for ASSIGN and COLOCATE to place.

    Attributes:
        cluster: its GPUs.
        profile: of this layer.
        coupled: whether the shard that sits with an expert moves with it, row and column alike, as in the paper; else the
            requests' shards stay on their GPUs and only the column moves. Equal tokens a source are assumed where it does.
        costs: what placements are searched by.
    """

    cluster: Cluster
    profile: Profile
    coupled: bool
    costs: GroupCosts

    def placed(self, held_G: IntArray) -> Profile:
        """The profile with expert held_G[g], and its shard where coupled, renamed to g."""
        rows = held_G if self.coupled else np.arange(len(held_G))
        return replace(self.profile, tokens_TLSE=self.profile.tokens_TLSE[:, :, rows][:, :, :, held_G])


def job(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """The LayerJob of one layer, experts and shards numbered like the GPUs."""
    n = len(cluster)
    one = replace(profile, tokens_TLSE=profile.tokens_TLSE[:, [layer]])
    costs = group_costs(cluster, one, 0, np.arange(n))
    if coupled:
        tokens_SE = one.tokens_TLSE.sum(axis=(0, 1))
        own_J = np.diagonal(tokens_SE)
        send_GJ = np.tile(tokens_SE.sum(axis=1) - own_J, (n, 1))
        costs = replace(costs, send_GJ=send_GJ, recv_GJ=np.tile(tokens_SE.sum(axis=0) - own_J, (n, 1)))
    return LayerJob(cluster, one, coupled, costs)


@dataclass(frozen=True)
class LayerOutcome:
    """What a layer takes.

    Attributes:
        seconds: until it is through on all GPUs.
        utilisation: compute time over that, the mean over GPUs.
    """

    seconds: float
    utilisation: float


Price = Callable[
    [Sequence[LayerJob], Sequence[IntArray]], LayerOutcome
]  # one job or two that share all GPUs; the expert on each (G,)
OrderedPrice = Callable[[LayerJob, IntArray, str], LayerOutcome]  # one job, and an order by name in ORDER


def by_formula(colocated: Callable[[PhaseTimes, PhaseTimes], float]) -> Price:
    """Eq. 1 for one job, and `colocated` for two; every all-to-all takes its ports' time, which is the best order's."""

    def price(jobs: Sequence[LayerJob], held: Sequence[IntArray]) -> LayerOutcome:
        terms = [j.costs.phase_times(held_G) for j, held_G in zip(jobs, held, strict=True)]
        return _outcome(terms, exclusive(terms[0]) if len(terms) == 1 else colocated(terms[0], terms[1]))

    return price


def timed_order(one: LayerJob, held_G: IntArray, order: str) -> LayerOutcome:
    """Eq. 1, N and C of a GPU being when its own transfers end under `order` on the switch."""
    profile, network = one.placed(held_G), one.cluster.network
    model = _planned([one], [held_G], order).models[0]
    tokens_GG = profile.tokens_TLSE[0, 0] * (1 - np.eye(profile.experts, dtype=np.int64))
    there_G = _ends(timed(model.dispatch_L[0], tokens_GG * profile.dispatch_bytes, network), profile.experts)
    back_G = _ends(timed(model.combine_L[0], tokens_GG.T * profile.combine_bytes, network), profile.experts)
    terms = replace(one.costs.phase_times(held_G), send_G=there_G, recv_G=there_G, csend_G=back_G, crecv_G=back_G)
    return _outcome([terms], exclusive(terms))


def simulated(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str = "auto") -> LayerOutcome:
    """The event simulator, transfers by the planner's `order`."""
    plan = _planned(jobs, held, order)
    trace = simulate_plan(plan, [j.placed(held_G) for j, held_G in zip(jobs, held, strict=True)])
    summary = summarise(trace, plan.cluster)
    return LayerOutcome(summary.seconds, summary.utilisation)


def simulated_order(one: LayerJob, held_G: IntArray, order: str) -> LayerOutcome:
    return simulated([one], [held_G], order)


def _planned(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str) -> Plan:
    profiles = [j.placed(held_G) for j, held_G in zip(jobs, held, strict=True)]
    return make_plan(jobs[0].cluster, profiles, PlanOptions("contiguous", "contiguous", "contiguous", order))


def _ends(schedule: Schedule, gpus: int) -> FloatArray:
    end_G = np.zeros(gpus)
    np.maximum.at(end_G, schedule.src_X, schedule.end_s_X)
    np.maximum.at(end_G, schedule.dst_X, schedule.end_s_X)
    return end_G


def _outcome(terms: Sequence[PhaseTimes], seconds: float) -> LayerOutcome:
    busy = sum(float((t.gate_G + t.expert_G + t.aggregate_G).mean()) for t in terms)
    return LayerOutcome(seconds, busy / max(seconds, 1e-30))


@dataclass(frozen=True)
class Pricing:
    """How outcomes are found.

    Attributes:
        name: for tables.
        price: of one job, or of two that are colocated, given where their experts are.
        ordered: of one job under an order by name.
        objective: the name in OBJECTIVE by which searches go.
        coupled: as in LayerJob.
        draws: how many random placements a random baseline is the mean of.
    """

    name: str
    price: Price
    ordered: OrderedPrice
    objective: str = "causal"
    coupled: bool = True
    draws: int = 16


PRICINGS: dict[str, Pricing] = {
    "printed": Pricing("Eq. 1, Table 2 as printed", by_formula(paper), timed_order, "paper"),
    "causal": Pricing("Table 2, causal", by_formula(causal), timed_order),
    "simulated": Pricing("event simulator", simulated, simulated_order, draws=1),
    "experts-only": Pricing("Eq. 1, Table 2 causal, only experts move", by_formula(causal), timed_order, coupled=False),
}


def lina_half(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """Lina's packing on half of the GPUs, every second one and thus half of each kind: most popular expert with the least
    popular, the second with the second least, and so on; both shards of a pair sit with it."""
    half = replace(cluster, gpus=cluster.gpus[::2])
    tokens_SE = profile.tokens_TLSE[:, layer].sum(axis=0)
    pair_E = _lina_pairs(tokens_SE)
    tokens_JE = group_tokens(tokens_SE.T, pair_E, len(half)).T
    tokens_JJ = group_tokens(tokens_JE, pair_E, len(half))
    return job(half, replace(profile, tokens_TLSE=tokens_JJ[None, None]), 0, coupled)


def lina_all(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """Lina's packing on all GPUs, of which a model then has twice as many as it has pairs: every pair of experts is held by
    two GPUs, the tokens that each source sends it halved between them (the odd one to the first)."""
    tokens_SE = profile.tokens_TLSE[:, layer].sum(axis=0)
    pair_E = _lina_pairs(tokens_SE)
    shared_SE = np.empty_like(tokens_SE)
    for pair in range(len(cluster) // 2):
        first, second = np.flatnonzero(pair_E == pair)
        both_S = tokens_SE[:, first] + tokens_SE[:, second]
        shared_SE[:, first], shared_SE[:, second] = both_S - both_S // 2, both_S // 2
    return job(cluster, replace(profile, tokens_TLSE=shared_SE[None, None]), 0, coupled)


def _lina_pairs(tokens_SE: IntArray) -> IntArray:
    experts = tokens_SE.shape[1]
    return PLACE["lina"](tokens_SE.sum(axis=0), np.full(experts // 2, 2), np.random.default_rng(0))
