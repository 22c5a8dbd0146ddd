"""Lower bounds on the seconds of a layer over all placements: of one model, of colocated models, and with servers.

The share of an expert's tokens that a GPU takes is a number from 0 to 1, so a linear program covers all placements with
replicas and every split of tokens over them. Its dual solution is evaluated apart from the solver: rounding in the solver makes
a bound lower, never false. Counting adds two facts that the linear program does not cover: an expert whose tokens keep a GPU
too long needs a second slot, and slots are few; deduplicated tokens cross once for each GPU, or server, that needs them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aurora.algorithms.network.port_bounds import Nics, spread
from aurora.algorithms.placement.coactivation import coactivation_counts, distinct_tokens
from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.linear_program import SMALL, blocks, phase_program, shares_program
from aurora.algorithms.placement.objective import Formula, Part, formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s
from aurora.algorithms.replicas.load_bounds import least_largest
from aurora.algorithms.search.slot_state import PhaseSums
from aurora.algorithms.workload.traffic import CountedTokens
from aurora.types.arrays import FloatArray, IntArray

MOST = 4 * SMALL  # the same for all programs of a layer together, above which GPUs of a kind count as one


def layer_bound_s(costs: LayerCosts, slots_G: IntArray) -> float:
    """Returns a lower bound in seconds on `costs.value_s` that holds for all placements within the slots.

    Traffic between servers is bounded in the same way as traffic between GPUs, with each server taken as one GPU.

    Args:
        costs: one layer in W traffic cases.
        slots_G: (G,) int64, how many experts each GPU can hold; more than experts are there for replicas.
    """
    bound_s = _ports_s(costs, slots_G)
    if costs.nics is None or costs.of_servers is None:
        return bound_s
    slots_N = (costs.nics.members_NG @ slots_G).astype(np.int64)
    return max(bound_s, _ports_s(costs.of_servers, slots_N))


def _ports_s(costs: LayerCosts, slots_G: IntArray) -> float:
    """The bound on ports, and on what counting tells of each GPU's NIC.

    Small layers are one linear program for all traffic cases together. In larger ones each case has a program of its own; in
    still larger ones GPUs of a kind count as one GPU with their mean time, which is no more than the slowest one's.
    """
    layer = costs.phase_sums(slots_G)
    gpus, experts, _, cases = layer.part_s_GEXW.shape
    spare = max(0, int(layer.slots_G.sum()) - experts)
    least_YW = _least_phases(layer, spare)
    if costs.nics is not None:
        least_YW = np.maximum(least_YW, _least_phases(_by_nics(costs, costs.nics, layer), spare))
    if gpus * experts * cases <= SMALL:
        return phase_program(layer, least_YW, np.arange(gpus)).relaxed_s()
    large = gpus * experts > SMALL or gpus * experts * cases > MOST
    block_G = blocks(costs, max(1, SMALL // experts)) if large else np.arange(gpus)
    programs = (phase_program(_case(layer, w), least_YW[:, w : w + 1], block_G) for w in range(cases))
    return float(np.sort([program.relaxed_s() for program in programs])[-layer.worst :].mean())


def _by_nics(costs: LayerCosts, nics: Nics, layer: PhaseSums) -> PhaseSums:
    """The layer as its GPUs' NICs see it, which carry the tokens of other servers alone."""
    near_WGE = nics.members_NG.T @ (nics.members_NG @ costs.own_WGE)
    far_GEW, expert_GEW = (np.moveaxis(part_WGE, 0, 2) for part_WGE in (costs.load_WE[:, None] - near_WGE, costs.expert_s_WGE))
    there_GEW, back_GEW = (far_GEW * (size / nics.Bps_G)[:, None, None] for size in (costs.dispatch_bytes, costs.combine_bytes))
    back_GEW += expert_GEW
    return layer._replace(part_s_GEXW=np.stack([there_GEW, there_GEW, back_GEW, back_GEW], axis=2))


def _least_phases(layer: PhaseSums, spare: int) -> FloatArray:
    """(2, W) seconds that each phase takes at least, by counting: `spare` more replicas than one of each expert."""
    _, received_GEW, expert_GEW, _ = np.moveaxis(layer.part_s_GEXW, 2, 0)
    gate_GW = layer.base_s_GXW[:, 1]
    replicated_YWER = [
        [_replicated_ER(part_GE, layer.slots_G) for part_GE in np.moveaxis(part_GEW, 2, 0)]
        for part_GEW in (received_GEW, expert_GEW)
    ]
    first_W, second_W = ([least_largest(value_ER, spare) for value_ER in value_WER] for value_WER in replicated_YWER)
    return np.stack([np.maximum(gate_GW.max(axis=0), gate_GW.min(axis=0) + first_W), second_W])


def _replicated_ER(part_GE: FloatArray, slots_G: IntArray) -> FloatArray:
    """(E, R) seconds that a GPU with each expert takes at least, if 1 to R GPUs hold it.

    Replicas on the R best GPUs all take equally long. A GPU with an expert that no other holds has further such experts if all
    other GPUs' slots are too few for the rest.
    """
    with np.errstate(divide="ignore", over="ignore"):
        divided_ER = 1 / np.cumsum(1 / np.sort(part_GE.T, axis=1), axis=1)
    alone_G = np.maximum(1, part_GE.shape[1] - (slots_G.sum() - slots_G))[:, None]  # experts on this GPU alone
    ranked_GE = np.sort(part_GE, axis=1)
    last_G1 = np.take_along_axis(ranked_GE, alone_G - 1, axis=1)
    others_G1 = np.take_along_axis(ranked_GE.cumsum(axis=1), alone_G - 1, axis=1) - last_G1
    divided_ER[:, 0] = (others_G1 + np.maximum(last_G1, part_GE)).min(axis=0)
    return divided_ER


def _case(layer: PhaseSums, w: int) -> PhaseSums:
    """The layer in its traffic case w alone."""
    return layer._replace(
        part_s_GEXW=layer.part_s_GEXW[..., w : w + 1],
        base_s_GXW=layer.base_s_GXW[..., w : w + 1],
        aggregate_s_W=layer.aggregate_s_W[w : w + 1],
        worst=1,
    )


def colocated_bound_s(formula: Formula, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """Returns a lower bound in seconds on a layer of colocated models, over all placements of all models' experts.

    Traffic between servers is bounded in the same way as traffic between GPUs, with each server taken as one GPU.

    Args:
        formula: the objective's formula without NICs, which could only add time.
        costs_M: the layer of each model, in a single traffic case.
        replicas: whether the bound covers placements with replicas.
    """
    of_servers_M = [servers for costs in costs_M if (servers := costs.of_servers) is not None]
    return max(_colocated_ports_s(formula, layer_M, replicas) for layer_M in (costs_M, of_servers_M) if layer_M)


def least_compute_s(parts: Sequence[Part], costs_M: Sequence[LayerCosts], replicas: bool) -> float | None:
    """Returns a lower bound on the seconds of a term (see `Formula`) of compute phases; None if it has another phase.

    Args:
        parts: the parts of the term, each a sum of phases.
        costs_M: the layer of each model, in a single traffic case.
        replicas: whether the bound covers placements with replicas.
    """
    if any(phase not in ("gate", "expert", "aggregate") for part in parts for _, phase in part):
        return None
    return max(_least_s(part, costs_M, replicas) for part in parts)


def _colocated_ports_s(formula: Formula, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """The bound on ports alone.

    The program chooses the share of each expert's tokens that each GPU takes. Each part on each GPU is at most its term, and
    each path is at most the result. As in `layer_bound_s`, the bound is the dual solution's, and in large layers GPUs of a kind
    count as one.
    """
    numbers = {term: number for number, term in enumerate(formula.parts)}
    parts = [(numbers[term], part) for term in formula.moved for part in formula.parts[term]]
    summed = [_summed(part, costs_M) for _, part in parts]
    least_X = np.array([max(_least_s(part, costs_M, replicas) for part in term_parts) for term_parts in formula.parts.values()])
    term_K, fixed_KG = np.array([number for number, _ in parts]), np.stack([fixed_G for fixed_G, _ in summed])
    cost_KGE = np.stack([cost_GE for _, cost_GE in summed])
    _, gpus, experts = cost_KGE.shape
    block_G = blocks(costs_M[0], max(1, SMALL // experts)) if gpus * experts > SMALL else np.arange(gpus)
    program = shares_program(cost_KGE, fixed_KG, term_K, formula.count_ZX, np.zeros(len(formula.paths)), least_X, block_G)
    return max(formula.longest(least_X), program.relaxed_s())


def _summed(part: Part, costs_M: Sequence[LayerCosts]) -> tuple[FloatArray, FloatArray]:
    """(G,) what a part takes without experts, and (G, E) what each expert of any model adds, model by model."""
    fixed_G, cost_M = np.zeros(len(costs_M[0].out_Bps)), [np.zeros(costs.own_WGE.shape[1:]) for costs in costs_M]
    for model, phase in part:
        (fixed_1G,), (cost_GE,) = costs_M[model].phase_s(phase)
        fixed_G += fixed_1G
        cost_M[model] += cost_GE
    return fixed_G, np.concatenate(cost_M, axis=1)


def _least_s(part: Part, costs_M: Sequence[LayerCosts], replicas: bool) -> float:
    """A lower bound on the seconds of a part on the GPU where it takes longest."""
    fixed_G, cost_GE = _summed(part, costs_M)
    return spread(cost_GE, replicas, fixed_G)


def _shared_GE(counts_SEE: IntArray, top_k: int, slots_G: IntArray) -> FloatArray:
    """(G, E): a lower bound on expert e's part of the tokens that GPU g receives, each divided evenly over its experts there.

    The experts there that tokens of e choose too are at most the slots_G[g] - 1 that they choose most often.
    """
    elsewhere_GEE = counts_SEE.sum(axis=0) - counts_SEE
    common_GE = np.stack(
        [_busiest(_others(count_EE), slots - 1) for count_EE, slots in zip(elsewhere_GEE, slots_G.tolist(), strict=True)]
    )
    return _divided(np.diagonal(elsewhere_GEE, axis1=1, axis2=2), common_GE, top_k)


def _divided(tokens_XE: IntArray, common_XE: IntArray, top_k: int) -> FloatArray:
    """A lower bound on sum 1 / c_u over tokens, where the numbers c_u, from 1 to top_k, sum to tokens_XE + common_XE at most.

    1 / c is convex, so that the sum is least where all c_u are one of the two whole numbers next to their mean.
    """
    mean_XE = 1 + common_XE / np.maximum(tokens_XE, 1)
    numbers = np.arange(1, top_k + 1)
    return np.asarray(tokens_XE * np.interp(mean_XE, numbers, 1 / numbers))


def least_arriving(counts_SEE: IntArray, top_k: int, slots_G: IntArray, holders: int) -> FloatArray:
    """Returns (R, E) float64: a lower bound on the tokens that GPUs receive for expert e, if 1 to R GPUs hold it.

    A token that starts on none of these GPUs is sent to one of them, and counts in equal parts for its experts there, as in
    `_shared_GE`. The bound holds for any R GPUs: it assumes that as many of e's tokens start there as on any R GPUs, and as few
    of the tokens that e has in common with another expert.

    Args:
        counts_SEE: (S, E, E) int64, as `coactivation_counts` returns them.
        top_k: experts per token.
        slots_G: (G,) int64, how many experts each GPU can hold.
        holders: the largest R.
    """
    own_GE = np.diagonal(counts_SEE, axis1=1, axis2=2)
    total_E, total_EE = own_GE.sum(axis=0), _others(counts_SEE.sum(axis=0))
    parts = [_shared_GE(counts_SEE, top_k, slots_G).min(axis=0)]
    if holders > 1:
        own_GE, fewest_GEE = -np.sort(-own_GE, axis=0).cumsum(axis=0), np.sort(counts_SEE, axis=0).cumsum(axis=0)
        others_G = np.sort(slots_G - 1)[::-1].cumsum()
    for holder in range(1, holders):
        far_E = total_E - own_GE[holder]
        common_E = _busiest(_others(total_EE - fewest_GEE[holder]), int(others_G[holder]))
        parts.append(_divided(far_E, common_E, top_k))
    return np.stack(parts)


def least_sent(counts_SEE: IntArray, top_k: int, slots_G: IntArray) -> IntArray:
    """Returns (G,) int64: a lower bound on the tokens that each source rank sends to other GPUs.

    A token is not sent only if all its top_k experts are on its own GPU. There it accounts for top_k of the experts' counts,
    and for top_k * (top_k - 1) of the ordered pairs' counts, which limits the number of such tokens.

    Args:
        counts_SEE: (S, E, E) int64, as `coactivation_counts` returns them.
        top_k: experts per token.
        slots_G: (G,) int64, how many experts each GPU can hold.
    """
    sent, own_GE = [], np.diagonal(counts_SEE, axis1=1, axis2=2)
    for own_E, own_EE, slots in zip(own_GE, counts_SEE, slots_G.tolist(), strict=True):
        stay = int(_busiest(own_E, slots)) // top_k
        if top_k > 1:
            pairs_E = _busiest(_others(own_EE), slots - 1)
            stay = min(stay, int(_busiest(pairs_E, slots)) // (top_k * (top_k - 1)))
        sent.append(int(own_E.sum()) // top_k - (stay if slots >= top_k else 0))
    return np.array(sent, dtype=np.int64)


def _others(counts_EE: IntArray) -> IntArray:
    """The counts with a diagonal of zeros."""
    return counts_EE - np.diag(np.diag(counts_EE))


def _busiest(value_XE: IntArray, many: int) -> IntArray:
    """The sum of the `many` largest along the last axis."""
    return np.asarray(np.sort(value_XE, axis=-1)[..., ::-1][..., : max(0, many)].sum(axis=-1))


FEW = 8  # servers that hold an expert, up to which its rows are bounded; one that more of them hold is taken to need none
PRICES = 64  # of a replica that the bound tries


class LeastRows(NamedTuple):
    """Lower bounds on the rows that cross between servers in the dispatch of one layer.

    Attributes:
        sent_N: (N,) int64, rows that each server sends.
        all_rows: rows of all servers together.
        alone_NE: (N, E) int64, rows that server n receives for expert e if no other server holds e; zeros if several may.
    """

    sent_N: IntArray
    all_rows: float
    alone_NE: IntArray


def server_counts(costs: LayerCosts) -> IntArray:
    """Returns (N, E, E) int64: tokens that start on each server and choose both experts, as `coactivation_counts`.

    If only counts of tokens are known, a pair's number is the count of its rarer expert, the most possible; larger numbers make
    the bounds lower, never false.

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
    """Returns a lower bound in seconds on a layer with hierarchical all-to-alls, over all placements of all models' experts.

    Rows, one for each token and each GPU or server that it is sent to, cross NICs between servers. A server sends at least the
    tokens that cannot find all of their experts within its slots. All servers together receive at least the rows that
    `least_rows` counts. The rows of several models are added.

    Args:
        objective: the objective of several models; not used for one model, whose objective is Eq. 1 of Aurora.
        costs_M: the layer of each model, with deduplicated tokens, on servers with NICs.
        counts_M: the `server_counts` of each model.
        top_k_M: experts per token of each model.
        slots_MG: for each model (G,) int64, how many experts each GPU can hold.
        replicas: whether the bound covers placements with replicas, where slots are left for any.
    """
    least_M = [least_times(*model, replicas) for model in zip(costs_M, counts_M, top_k_M, slots_MG, strict=True)]
    if len(least_M) == 1:
        return exclusive_s(least_M[0])
    of = formula(objective, len(least_M), nics=True)
    term_X = of.term_XG(least_M).max(axis=1)
    for number, parts in enumerate(of.parts.values()):
        if (computed_s := least_compute_s(parts, costs_M, replicas)) is not None:
            term_X[number] = computed_s
    return of.longest(term_X)


def least_times(costs: LayerCosts, counts_NEE: IntArray, top_k: int, slots_G: IntArray, replicas: bool) -> PhaseTimes:
    """Returns lower bounds on the phases of one model. In place of GPUs there are the servers, and then the mean server.

    No phase is longer in the mean server, or in the server itself, than on the GPU where it is longest. Steps, gates and
    experts are those of the GPU where they are longest.

    Args: as in `hierarchical_bound_s`, for one model.
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

    there_2X, back_2X = np.stack([sending(out_Bps_N), receiving(in_Bps_N)]), np.stack([receiving(out_Bps_N), sending(in_Bps_N)])
    several = replicas and np.minimum(slots_G, experts).sum() > experts
    computed_s = spread(costs.expert_s_WGE[0], replicas=several)
    return PhaseTimes(
        every_X * costs.gate_s_WG.max(),
        np.zeros((4, 1)),
        every_X * computed_s,
        every_X * costs.aggregate_s_WG.max(),
        np.concatenate([there_2X * costs.dispatch_bytes, back_2X * costs.combine_bytes]),
        np.stack([steps(in_Bps_N, there_2X) * costs.dispatch_bytes, steps(out_Bps_N, back_2X) * costs.combine_bytes]),
    )


def least_rows(counts_NEE: IntArray, top_k: int, slots_N: IntArray, replicas: bool) -> LeastRows:
    """Returns lower bounds on the rows that cross between servers, over all placements within the slots.

    Tokens that start on a server without the expert go to a server that holds it. A row is divided evenly over the token's
    experts on the server; `least_arriving` bounds each expert's part from below. The relaxation may give the replicas that fit
    into the slots to any experts (Lagrangian).

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
