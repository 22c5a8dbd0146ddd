"""Layer jobs and their prices: by the paper's formulas, by the causal reading of them, or by the event simulator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from aurora.algorithms.network.switch import timed
from aurora.algorithms.placement.cost_model import OWN, GroupCosts, exclusive_s, layer_costs
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.placement.objective import formula
from aurora.algorithms.workload.traffic import group_tokens
from aurora.planner.plan import make_plan
from aurora.reports.trace_times import summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Order, Plan, PlanOptions, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class LayerJob:
    """One layer of one model with as many experts as the cluster has GPUs, for ASSIGN and COLOCATE to place.

    If `coupled`, as in the paper, the source shard with an expert's number moves with it (row and column of the traffic);
    all sources must have equally many tokens. Otherwise source shards stay on their GPUs and only experts (columns) move.
    """

    name: str  # of model, data set and layer
    cluster: Cluster  # of G GPUs
    profile: Profile  # of this layer
    coupled: bool
    costs: GroupCosts  # by which placements are searched

    def placed(self, held_G: IntArray) -> Profile:
        """Returns the profile with expert held_G[g] in place of expert g; held_G is (G,) int64, the expert on each GPU.

        If `coupled`, source shard held_G[g] also takes the place of source g.
        """
        rows = held_G if self.coupled else np.arange(len(held_G))
        return replace(self.profile, tokens_TLSE=self.profile.tokens_TLSE[:, :, rows][:, :, :, held_G])


def job(cluster: Cluster, profile: Profile, layer: int, coupled: bool) -> LayerJob:
    """Returns the LayerJob of one layer of a profile; expert g and source shard g belong to GPU g at first."""
    n = len(cluster)
    one = replace(profile, tokens_TLSE=profile.tokens_TLSE[:, [layer]])
    costs = layer_costs(cluster, one, 0).grouped(np.arange(n))
    if coupled:
        tokens_SE = one.tokens_TLSE.sum(axis=(0, 1))
        own_J = np.diagonal(tokens_SE)
        send_GJ = np.tile(tokens_SE.sum(axis=1) - own_J, (n, 1))
        costs = replace(costs, send_GJ=send_GJ, recv_GJ=np.tile(tokens_SE.sum(axis=0) - own_J, (n, 1)))
    return LayerJob(f"{profile.model} {layer + 1}", cluster, one, coupled, costs)


@dataclass(frozen=True)
class LayerOutcome:
    """Seconds and GPU utilisation of a layer."""

    seconds: float  # until the layer has ended on all GPUs
    utilisation: float  # compute time divided by `seconds`, the mean over GPUs


class Price(Protocol):
    """Function that returns the outcome of one job, or of two that share all GPUs; held[j][g] is job j's expert on GPU g.

    `order`, a name of ORDER, may be given for a single job; with None every all-to-all has its best order.
    """

    def __call__(self, jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str | None = None) -> LayerOutcome: ...


def _by_formula(objective: str) -> Price:
    """A price by Eq. 1, and by the formula of `objective` for two jobs; the best all-to-all takes as long as its ports."""

    def price(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str | None = None) -> LayerOutcome:
        terms = [one.costs.phase_times(held_G) for one, held_G in zip(jobs, held, strict=True)]
        if order is not None:
            there_G, back_G = _order_ends(jobs[0], held[0], order)
            terms = [replace(terms[0], port_4G=np.array([there_G, there_G, back_G, back_G]))]
        seconds = exclusive_s(terms[0]) if len(terms) == 1 else formula(objective, 2).seconds(terms)
        busy = sum(float((t.gate_G + t.expert_G + t.aggregate_G).mean()) for t in terms)
        return LayerOutcome(seconds, busy / max(seconds, 1e-30))

    return price


def _order_ends(one: LayerJob, held_G: IntArray, order: str) -> tuple[FloatArray, FloatArray]:
    """When each GPU's own transfers of dispatch and combine end under an order on the switch."""
    profile, model = one.placed(held_G), _planned([one], [held_G], order).models[0]
    tokens_GG = profile.tokens_TLSE[0, 0] * (1 - np.eye(profile.experts, dtype=np.int64))

    def ends(planned: Order, bytes_GG: IntArray) -> FloatArray:
        schedule, end_G = timed(planned, bytes_GG, one.cluster.network), np.zeros(profile.experts)
        np.maximum.at(end_G, schedule.src_X, schedule.end_s_X)
        np.maximum.at(end_G, schedule.dst_X, schedule.end_s_X)
        return end_G

    dispatch_G = ends(model.dispatch_L[0], tokens_GG * profile.dispatch_bytes)
    return dispatch_G, ends(model.combine_L[0], tokens_GG.T * profile.combine_bytes)


def _simulated(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str | None = None) -> LayerOutcome:
    """The price by the event simulator."""
    plan = _planned(jobs, held, order or "auto")
    trace = simulate_plan(plan, [one.placed(held_G) for one, held_G in zip(jobs, held, strict=True)])
    summary = summarise(trace, plan.cluster)
    return LayerOutcome(summary.seconds, summary.utilisation)


def _planned(jobs: Sequence[LayerJob], held: Sequence[IntArray], order: str) -> Plan:
    """The plan that keeps experts where they are held; a paper's tables take counts as exact."""
    profiles = [one.placed(held_G) for one, held_G in zip(jobs, held, strict=True)]
    return make_plan(jobs[0].cluster, profiles, PlanOptions("contiguous", "contiguous", "contiguous", order, aim=OWN))


@dataclass(frozen=True)
class Pricing:
    """A way to price layer jobs, and how random baselines are drawn."""

    name: str  # for tables
    price: Price
    objective: str = "causal"  # the name in OBJECTIVE by which searches go
    coupled: bool = True  # as in LayerJob
    draws: int = 16  # how many random placements a random baseline is the mean of


PRICINGS: dict[str, Pricing] = {
    "printed": Pricing("Eq. 1, Table 2 as printed", _by_formula("paper"), "paper"),
    "causal": Pricing("Table 2, causal", _by_formula("causal")),
    "simulated": Pricing("event simulator", _simulated, draws=1),
    "experts-only": Pricing("Eq. 1, Table 2 causal, only experts move", _by_formula("causal"), coupled=False),
}


def lina_half(one: LayerJob) -> LayerJob:
    """Returns the job in Lina's packing on every second GPU, which is half of each kind of GPU.

    The most popular expert is paired with the least popular, the second with the second least, and so on. A pair is on one GPU,
    with both source shards.
    """
    half = replace(one.cluster, gpus=one.cluster.gpus[::2])
    tokens_SE, pair_E = _lina_pairs(one)
    tokens_JE = group_tokens(tokens_SE.T, pair_E, len(half)).T
    tokens_JJ = group_tokens(tokens_JE, pair_E, len(half))
    return job(half, replace(one.profile, tokens_TLSE=tokens_JJ[None, None]), 0, one.coupled)


def lina_all(one: LayerJob) -> LayerJob:
    """Returns the job in Lina's packing on all GPUs: every pair of experts (see `lina_half`) is held by two GPUs.

    The tokens that a source sends to a pair are halved between the two GPUs; an odd token goes to the first.
    """
    tokens_SE, pair_E = _lina_pairs(one)
    shared_SE = np.empty_like(tokens_SE)
    for pair in range(len(one.cluster) // 2):
        first, second = np.flatnonzero(pair_E == pair)
        both_S = tokens_SE[:, first] + tokens_SE[:, second]
        shared_SE[:, first], shared_SE[:, second] = both_S - both_S // 2, both_S // 2
    return job(one.cluster, replace(one.profile, tokens_TLSE=shared_SE[None, None]), 0, one.coupled)


def _lina_pairs(one: LayerJob) -> tuple[IntArray, IntArray]:
    """The job's tokens by source and expert, and the pair of each expert."""
    tokens_SE = one.profile.tokens_TLSE[:, 0].sum(axis=0)
    experts = tokens_SE.shape[1]
    return tokens_SE, PLACE["lina"](tokens_SE.sum(axis=0), np.full(experts // 2, 2), np.random.default_rng(0))
