"""Lower bound on a layer whose all-to-alls are hierarchical, by the rows that cross between servers in any placement."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aurora.planner.network.lower_bounds import spread, spread_split
from aurora.planner.placement.coactivation import coactivation_counts, distinct_tokens, least_arriving, least_sent
from aurora.planner.placement.colocated_bound import least_compute_s
from aurora.planner.placement.cost_model import LayerCosts
from aurora.planner.placement.objective import PhaseTimes, exclusive, formula
from aurora.planner.workload.estimated_rows import CountedTokens
from aurora.types.arrays import FloatArray, IntArray

FEW = 8  # servers that hold an expert, up to which its rows are bounded; one that more of them hold is taken to need none
PRICES = 64  # of a replica that the bound tries


class LeastRows(NamedTuple):
    """Rows that cross between servers at least, in the dispatch of one layer.

    Attributes:
        sent_N: (N,) int64, from each server.
        all_rows: between all servers.
        alone_NE: (N, E) int64, to each server for one of its experts, if no other server holds it; zeros if another may.
    """

    sent_N: IntArray
    all_rows: float
    alone_NE: IntArray


def server_counts(costs: LayerCosts) -> IntArray:
    """Returns (N, E, E) int64: tokens that start on each server and choose both experts, as `coactivation_counts`.

    Of counted tokens as many may choose both as choose the rarer one; more pairs make the bounds lower.

    Args:
        costs: one layer with deduplicated tokens, on servers with NICs.
    """
    assert costs.routing is not None, "layer_costs counts deduplicated tokens"
    assert costs.nics is not None, "hierarchical all-to-alls go between servers"
    if isinstance(costs.routing, CountedTokens):
        counts_NE = (costs.nics.members_NG @ costs.own_WGE[0]).astype(np.int64)
        return np.asarray(np.minimum(counts_NE[:, :, None], counts_NE[:, None, :]))
    (experts_UK, source_U), server_G = costs.routing, costs.nics.server_G
    tokens = distinct_tokens(experts_UK, server_G[source_U])
    return coactivation_counts(*tokens, costs.own_WGE.shape[2], len(costs.nics.size_N))


def hierarchical_bound_s(
    objective: str,
    costs_M: Sequence[LayerCosts],
    counts_M: Sequence[IntArray],
    top_k_M: Sequence[int],
    slots_MG: Sequence[IntArray],
    replicas: bool,
) -> float:
    """Returns seconds of a layer that no placement of all models' experts beats, if all-to-alls are hierarchical.

    What servers send and receive crosses their NICs. A server sends at least the tokens that cannot find all of their experts
    within its slots. All servers together receive at least what `least_rows` counts. Several models add up.

    Args:
        objective: the objective of several models; for one it is Eq. 1.
        costs_M: the layer of each model, with deduplicated tokens, on servers with NICs.
        counts_M: of each model `server_counts`.
        top_k_M: experts per token of each model.
        slots_MG: for each model (G,) int64, how many experts each GPU can hold.
        replicas: whether the bound covers placements with replicas, where slots are left for any.
    """
    least_M = [_least_times(*each, replicas) for each in zip(costs_M, counts_M, top_k_M, slots_MG, strict=True)]
    if len(least_M) == 1:
        return exclusive(least_M[0])
    of = formula(objective, len(least_M), nics=True)
    term_X = of.term_XG(least_M).max(axis=1)
    for number, parts in enumerate(of.parts.values()):
        if (computed_s := least_compute_s(parts, costs_M, replicas)) is not None:
            term_X[number] = computed_s
    return of.longest(term_X)


def _least_times(costs: LayerCosts, counts_NEE: IntArray, top_k: int, slots_G: IntArray, replicas: bool) -> PhaseTimes:
    """The phases of one model at least. In place of GPUs there are the servers, and then the mean server.

    No phase is longer in the mean server, or in the server itself, than on the GPU where it is longest. Steps, gates and
    experts are those of the GPU where they are longest.
    """
    assert costs.nics is not None, "hierarchical all-to-alls go between servers"
    nics, experts = costs.nics, len(counts_NEE[0])
    slots_N = np.minimum(nics.members_NG @ slots_G, experts).astype(np.int64)
    rows = least_rows(counts_NEE, top_k, slots_N, replicas)
    out_Bps_N, in_Bps_N = (np.minimum(nics.server_Bps_N, nics.members_NG @ Bps_G) for Bps_G in (costs.out_Bps, costs.in_Bps))
    none_X, every_X = np.zeros(len(slots_N) + 1), np.ones(len(slots_N) + 1)

    def sending(Bps_N: FloatArray) -> FloatArray:
        return np.append(rows.sent_N / Bps_N, rows.all_rows / Bps_N.sum())

    def receiving(Bps_N: FloatArray) -> FloatArray:
        return np.append(none_X[1:], rows.all_rows / Bps_N.sum())

    def steps(to_Bps_N: FloatArray, sides_X: FloatArray) -> FloatArray:
        alone_s_NE = rows.alone_NE / to_Bps_N[:, None]
        return every_X * max(float(sides_X.max()), float(alone_s_NE.min(axis=0).max()))

    there, back = costs.dispatch_bytes, costs.combine_bytes
    there_2X, back_2X = np.stack([sending(out_Bps_N), receiving(in_Bps_N)]), np.stack([receiving(out_Bps_N), sending(in_Bps_N)])
    several = replicas and np.minimum(slots_G, experts).sum() > experts
    computed_s = (spread_split if several else spread)(costs.expert_s_WGE[0])
    return PhaseTimes.of(
        every_X * costs.gate_s_WG.max(),
        np.zeros((4, 1)),
        every_X * computed_s,
        every_X * costs.aggregate_s_WG.max(),
        np.concatenate([there_2X * there, back_2X * back]),
        np.stack([steps(in_Bps_N, there_2X) * there, steps(out_Bps_N, back_2X) * back]),
    )


def least_rows(counts_NEE: IntArray, top_k: int, slots_N: IntArray, replicas: bool) -> LeastRows:
    """Returns the rows that cross between servers at least, in any placement within the slots.

    If some servers hold an expert, its tokens that start elsewhere go to one of them. Every visit of a token to a server is
    divided evenly over the token's experts there; `least_arriving` bounds each expert's part from below. Which experts have the
    replicas that there are slots for is chosen freely, by a Lagrangian relaxation.

    Args:
        counts_NEE: (N, E, E) int64, as `server_counts` returns them.
        top_k: experts per token.
        slots_N: (N,) int64, how many distinct experts each server can hold.
        replicas: whether several servers may hold an expert.
    """
    experts = counts_NEE.shape[1]
    spare = int(slots_N.sum()) - experts if replicas else 0
    sent_N = least_sent(counts_NEE, top_k, slots_N)
    part_RE = least_arriving(counts_NEE, top_k, slots_N, min(FEW, len(slots_N)) if spare else 1)
    own_NE = np.diagonal(counts_NEE, axis1=1, axis2=2)
    alone_NE = np.zeros_like(own_NE) if spare else own_NE.sum(axis=0) - own_NE
    return LeastRows(sent_N, max(float(sent_N.sum()), _cheapest(part_RE, spare)), alone_NE)


def _cheapest(part_RE: FloatArray, spare: int) -> float:
    """A lower bound on the sum of part_RE, one entry for each expert, if R - 1 of them are `spare` at most."""
    if not spare:
        return float(part_RE[0].sum())
    part_RE = np.concatenate([part_RE, np.zeros((1, part_RE.shape[1]))])
    more_R1 = np.arange(len(part_RE))[:, None]
    gains = (part_RE[:1] - part_RE)[1:] / more_R1[1:]
    prices = np.unique(np.quantile(gains, np.linspace(0, 1, PRICES)))
    return max(float((part_RE + price * more_R1).min(axis=0).sum() - price * spare) for price in prices.tolist())
