"""Layer jobs and their prices: by the paper's formulas, by the causal reading of them, or by the event simulator."""

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
        cluster: of G GPUs.
        profile: of this layer.
        coupled: True: the shard of tokens that sits with an expert moves with it, row and column alike, as in the paper; equal
            tokens per source are assumed. False: the requests' shards stay on their GPUs and only the column moves.
        costs: by which placements are searched.
    """

    cluster: Cluster
    profile: Profile
    coupled: bool
    costs: GroupCosts

    def placed(self, held_G: IntArray) -> Profile:
        """Returns the profile with expert held_G[g], and its shard where coupled, renamed to g.

        Args:
            held_G: (G,) int64, the expert on each GPU.
        """
        rows = held_G if self.coupled else np.arange(len(held_G))
        return replace(self.profile, tokens_TLSE=self.profile.tokens_TLSE[:, :, rows][:, :, :, held_G])


def job(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """Makes the LayerJob of one layer, with experts and shards numbered like the GPUs.

    Args:
        cluster: of as many GPUs as the profile has experts.
        profile: the traffic.
        layer: index of the MoE layer.
        coupled: as in `LayerJob`.
    """
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
    """Time of a layer.

    Attributes:
        seconds: until it has ended on all GPUs.
        utilisation: compute time over that, the mean over GPUs.
    """

    seconds: float
    utilisation: float


Price = Callable[
    [Sequence[LayerJob], Sequence[IntArray]], LayerOutcome
]  # one job or two that share all GPUs; the expert on each (G,)
OrderedPrice = Callable[[LayerJob, IntArray, str], LayerOutcome]  # one job, and an order by name in ORDER


def by_formula(colocated: Callable[[PhaseTimes, PhaseTimes], float]) -> Price:
    """Returns a price by formulas; every all-to-all takes its ports' time, which is the best order's.

    Args:
        colocated: seconds of two models by their phase times; one job is priced by Eq. 1.
    """

    def price(jobs: Sequence[LayerJob], held: Sequence[IntArray]) -> LayerOutcome:
        terms = [j.costs.phase_times(held_G) for j, held_G in zip(jobs, held, strict=True)]
        return _outcome(terms, exclusive(terms[0]) if len(terms) == 1 else colocated(terms[0], terms[1]))

    return price


def timed_order(one: LayerJob, held_G: IntArray, order: str) -> LayerOutcome:
    """Prices a job by Eq. 1; on each GPU N and C are when its own transfers end under the order on the switch.

    Args:
        one: the job.
        held_G: (G,) int64, the expert on each GPU.
        order: a name in ORDER.
    """
    profile, network = one.placed(held_G), one.cluster.network
    model = _planned([one], [held_G], order).models[0]
    tokens_GG = profile.tokens_TLSE[0, 0] * (1 - np.eye(profile.experts, dtype=np.int64))
    there_G = _ends(timed(model.dispatch_L[0], tokens_GG * profile.dispatch_bytes, network), profile.experts)
    back_G = _ends(timed(model.combine_L[0], tokens_GG.T * profile.combine_bytes, network), profile.experts)
    terms = replace(one.costs.phase_times(held_G), send_G=there_G, recv_G=there_G, csend_G=back_G, crecv_G=back_G)
    return _outcome([terms], exclusive(terms))


def simulated(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str = "auto") -> LayerOutcome:
    """Prices jobs by the event simulator.

    Args:
        jobs: one, or two that share all GPUs.
        held: for each, (G,) int64, the expert on each GPU.
        order: a name in ORDER, or "auto" for the planner's choice.
    """
    plan = _planned(jobs, held, order)
    trace = simulate_plan(plan, [j.placed(held_G) for j, held_G in zip(jobs, held, strict=True)])
    summary = summarise(trace, plan.cluster)
    return LayerOutcome(summary.seconds, summary.utilisation)


def simulated_order(one: LayerJob, held_G: IntArray, order: str) -> LayerOutcome:
    """Prices one job under an order by the event simulator.

    Args:
        one, held_G, order: as in `timed_order`.
    """
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
    """A way to find outcomes.

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
    """Makes the job of Lina's packing on half of the GPUs: every second one, and thus half of each kind.

    The most popular expert is paired with the least popular, the second with the second least, and so on; both shards of a pair
    sit with it.

    Args:
        cluster, profile, layer, coupled: as in `job`.
    """
    half = replace(cluster, gpus=cluster.gpus[::2])
    tokens_SE = profile.tokens_TLSE[:, layer].sum(axis=0)
    pair_E = _lina_pairs(tokens_SE)
    tokens_JE = group_tokens(tokens_SE.T, pair_E, len(half)).T
    tokens_JJ = group_tokens(tokens_JE, pair_E, len(half))
    return job(half, replace(profile, tokens_TLSE=tokens_JJ[None, None]), 0, coupled)


def lina_all(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """Makes the job of Lina's packing on all GPUs, of which a model then has twice as many as it has pairs.

    Every pair of experts is held by two GPUs, the tokens that each source sends it halved between them (the odd one to the
    first).

    Args:
        cluster, profile, layer, coupled: as in `job`.
    """
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
