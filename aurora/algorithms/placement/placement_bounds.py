"""Lower bounds on the seconds of a layer over all placements: of one model, of colocated models, and with servers.

The share of an expert's tokens that a GPU takes is a number from 0 to 1, so a linear program covers all placements with
replicas and every split of tokens over them. Its dual solution is evaluated apart from the solver: rounding in the solver makes
a bound lower, never false. Counting adds two facts that the linear program does not cover: an expert whose tokens keep a GPU
too long needs a second slot, and slots are few; a token crosses to other servers unless its own holds all of its experts.
"""

from collections.abc import Sequence

import numpy as np

from aurora.algorithms.network.port_bounds import Nics, spread
from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.linear_program import SMALL, blocks, phase_program, shares_program
from aurora.algorithms.placement.objective import Formula, Part, formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s
from aurora.algorithms.replicas.load_bounds import least_largest
from aurora.algorithms.search.phase_sums import PhaseSums
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
        fixed_s_Z=layer.fixed_s_Z[w : w + 1],
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


def hierarchical_bound_s(
    costs_M: Sequence[LayerCosts],
    top_k_M: Sequence[int],
    slots_MG: Sequence[IntArray],
    replicas: bool,
) -> float:
    """Returns a lower bound in seconds on a layer with hierarchical all-to-alls, over all placements of all models' experts.

    Rows, one for each token and each GPU or server that it is sent to, cross NICs between servers. A server sends at least the
    tokens that cannot find all of their experts within its slots. Without replicas, the server of an expert receives a row for
    each of the expert's tokens of other servers. The rows of several models are added.

    Args:
        costs_M: the layer of each model, with deduplicated tokens, on servers with NICs.
        top_k_M: experts per token of each model.
        slots_MG: for each model (G,) int64, how many experts each GPU can hold.
        replicas: whether the bound covers placements with replicas, where slots are left for any.
    """
    least_M = [least_times(*model, replicas) for model in zip(costs_M, top_k_M, slots_MG, strict=True)]
    if len(least_M) == 1:
        return exclusive_s(least_M[0])
    of = formula(len(least_M), nics=True)
    term_X = of.term_XG(least_M).max(axis=1)
    for number, parts in enumerate(of.parts.values()):
        if (computed_s := least_compute_s(parts, costs_M, replicas)) is not None:
            term_X[number] = computed_s
    return of.longest(term_X)


def least_times(costs: LayerCosts, top_k: int, slots_G: IntArray, replicas: bool) -> PhaseTimes:
    """Returns lower bounds on the phases of one model. In place of GPUs there are the servers, and then the mean server.

    No phase is longer in the mean server, or in the server itself, than on the GPU where it is longest. Steps, gates and
    experts are those of the GPU where they are longest.

    Args: as in `hierarchical_bound_s`, for one model.
    """
    assert costs.nics is not None, "hierarchical all-to-alls go between servers"
    nics, experts = costs.nics, costs.own_WGE.shape[2]
    slots_N = np.minimum(nics.members_NG @ slots_G, experts).astype(np.int64)
    tokens_NE = nics.members_NG @ costs.own_WGE[0]
    sent_N = _least_sent(tokens_NE, top_k, slots_N)
    spare = replicas and slots_N.sum() > experts
    alone_NE = np.zeros_like(tokens_NE) if spare else tokens_NE.sum(axis=0) - tokens_NE
    out_Bps_N, in_Bps_N = (np.minimum(nics.server_Bps_N, nics.members_NG @ Bps_G) for Bps_G in (costs.out_Bps, costs.in_Bps))
    none_X, every_X = np.zeros(len(slots_N) + 1), np.ones(len(slots_N) + 1)

    def sending(Bps_N: FloatArray) -> FloatArray:
        return np.append(sent_N / Bps_N, sent_N.sum() / Bps_N.sum())

    def receiving(Bps_N: FloatArray) -> FloatArray:
        return np.append(none_X[1:], sent_N.sum() / Bps_N.sum())

    def steps(to_Bps_N: FloatArray, sides_X: FloatArray) -> FloatArray:
        alone_s_NE = alone_NE / to_Bps_N[:, None]
        return every_X * max(float(sides_X.max()), float(alone_s_NE.min(axis=0).max()))

    there_2X, back_2X = np.stack([sending(out_Bps_N), receiving(in_Bps_N)]), np.stack([receiving(out_Bps_N), sending(in_Bps_N)])
    further = max(0, int(np.minimum(slots_G, experts).sum()) - experts) if replicas else 0  # replicas beyond one of each expert
    counted_s = least_largest(_replicated_ER(costs.expert_s_WGE[0], slots_G), further)
    computed_s = max(counted_s, spread(costs.expert_s_WGE[0], replicas=further > 0))
    return PhaseTimes(
        every_X * costs.gate_s_WG.max(),
        np.zeros((4, 1)),
        every_X * computed_s,
        every_X * costs.aggregate_s_WG.max(),
        np.concatenate([there_2X * costs.dispatch_bytes, back_2X * costs.combine_bytes]),
        np.stack([steps(in_Bps_N, there_2X) * costs.dispatch_bytes, steps(out_Bps_N, back_2X) * costs.combine_bytes]),
    )


def _least_sent(tokens_NE: FloatArray, top_k: int, slots_N: IntArray) -> FloatArray:
    """(N,) a lower bound on the tokens that each server sends to others.

    A token stays only if all its top_k experts are on its server, where it accounts for top_k of the experts' counts.

    tokens_NE is (N, E), how many tokens of each server choose each expert; slots_N (N,), how many experts a server can hold.
    """
    busiest_NE = -np.sort(-tokens_NE, axis=1)
    held_NE = np.arange(tokens_NE.shape[1]) < np.where(slots_N < top_k, 0, slots_N)[:, None]
    return np.asarray(tokens_NE.sum(axis=1) // top_k - (busiest_NE * held_NE).sum(axis=1) // top_k)
