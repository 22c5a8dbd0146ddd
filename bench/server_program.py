"""Exact seconds of small layers over servers, by an integer program with a variable for every token.

Linear relaxations are far below what placements reach there: a token crosses once to each server that it needs, so a server
that holds a fraction of every expert would seem to save most rows.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.phase_times import PhaseTimes
from aurora.algorithms.placement.placement_bounds import least_times
from aurora.algorithms.workload.traffic import CountedTokens
from aurora.types.arrays import FloatArray, IntArray

MOST_PAIRS, MOST_KINDS = 32, 256  # GPUs times experts, and kinds of tokens, of a program at most
MOST_NODES = 2000  # that the solver looks at, in some seconds; a program that takes more is given up
TOLERANCE = 2e-3  # relative: how far the solver's bound may be below the optimum
ROUNDED = 1e-6  # relative: what the solver's own tolerances may add to its bound


class _RowsAtLeast:
    """Rows of a program, each at least its limit."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []

    def at_least(self, limit: float, *terms: tuple[int, float]) -> None:
        """Adds the row of a sum of variables times numbers."""
        self.entries += [(len(self.limits), int(variable), float(factor)) for variable, factor in terms]
        self.limits.append(limit)


class TokenKinds(NamedTuple):
    """Kinds of a layer's tokens: tokens that start on the same server and choose the same experts are of one kind.

    Attributes:
        server_V: (V,) int64, the server on which the tokens of each kind start.
        experts_VK: (V, K) int64, the experts that they choose.
        count_V: (V,) int64, the number of tokens.
    """

    server_V: IntArray
    experts_VK: IntArray
    count_V: IntArray

    @classmethod
    def of(cls, costs: LayerCosts) -> "TokenKinds | None":
        """Returns the kinds of a layer's tokens; None if only counts are known."""
        if costs.routing is None or costs.nics is None or isinstance(costs.routing, CountedTokens):
            return None
        experts_UK, source_U = costs.routing
        rows_UX = np.column_stack([costs.nics.server_G[source_U], np.sort(experts_UK, axis=1)])
        kind_VX, count_V = np.unique(rows_UX, axis=0, return_counts=True)
        return cls(kind_VX[:, 0], kind_VX[:, 1:], count_V)


def exact_server_s(costs: LayerCosts, slots_G: IntArray, replicas: bool, least: PhaseTimes) -> float | None:
    """Returns the least seconds of a layer with hierarchical all-to-alls, over all placements, by an integer program.

    The program counts gates, the NICs of servers, experts and aggregations. It leaves out what can only add to that: ports
    inside servers, chunks, and uneven loads of a server's NICs. If a server does not hold an expert, all of its tokens for that
    expert go to one server that does. The GPUs of a server may share an expert's tokens there in any parts.

    Args:
        costs: one layer with deduplicated tokens, in a single traffic case, on servers with NICs.
        slots_G: (G,) int64, how many experts each GPU can hold.
        replicas: whether an expert may be on several GPUs.
        least: lower bounds on the seconds of phases, such as a relaxation's, with which the solver begins.

    Returns:
        Seconds, at most TOLERANCE below the optimum; None if only counts of tokens are known, or the program is large.
    """
    kinds, experts = TokenKinds.of(costs), costs.own_WGE.shape[2]
    if kinds is None or len(slots_G) * experts > MOST_PAIRS or len(kinds.count_V) > MOST_KINDS:
        return None
    least_s_3 = np.array([phase_s_G.max() for phase_s_G in (least.dispatch_G, least.expert_G, least.combine_G)])
    solved_s = _solved_s(costs, kinds, np.minimum(slots_G, experts), replicas, least_s_3)
    return None if solved_s is None else float(least.gate_G.max() + solved_s + least.aggregate_G.max())


def _solved_s(costs: LayerCosts, kinds: TokenKinds, slots_G: IntArray, replicas: bool, least_s_3: FloatArray) -> float | None:
    """The optimum of dispatch, experts and combine, which take least_s_3 (3,) at least; None if the solver gives up."""
    assert costs.nics is not None
    server_G, members_NG = costs.nics.server_G, costs.nics.members_NG
    crossing_s = (costs.dispatch_bytes + costs.combine_bytes) * costs.own_WGE[0].sum() / costs.nics.server_Bps_N.min()
    unit_s = max(float(least_s_3.sum()), 1e-3 * float(crossing_s + costs.expert_s_WGE[0].max(axis=0).sum())) or 1.0
    (_, gpus, experts), servers, kinds_V = costs.own_WGE.shape, len(members_NG), len(kinds.count_V)
    sizes = (gpus * experts, gpus * experts, servers * experts * servers, kinds_V * servers, 3)
    held, part, serves, crosses, phases = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    held_GE, part_GE = held.reshape(gpus, experts), part.reshape(gpus, experts)
    serves_NEN, crosses_VN = serves.reshape(servers, experts, servers), crosses.reshape(kinds_V, servers)
    own_NE = members_NG @ costs.own_WGE[0]
    rows, least_V, most_V = _RowsAtLeast(), np.zeros(sum(sizes)), np.ones(sum(sizes))
    least_V[phases], most_V[phases] = least_s_3 / unit_s, np.inf
    for gpu, held_E in enumerate(held_GE):
        rows.at_least(-float(slots_G[gpu]), *((each, -1.0) for each in held_E))
        rows.at_least(0.0, (phases[1], 1.0), *zip(part_GE[gpu], -costs.expert_s_WGE[0, gpu] / unit_s, strict=True))
    for expert in range(experts):
        holders = held_GE[:, expert]
        if not replicas:
            rows.at_least(-1.0, *((each, -1.0) for each in holders))
        for each, share in zip(holders, part_GE[:, expert], strict=True):
            rows.at_least(0.0, (each, 1.0), (share, -1.0))
        for at in range(servers):
            inside = np.flatnonzero(server_G == at)
            rows.at_least(1.0, *((serves_NEN[at, expert, other], 1.0) for other in range(servers)))
            for holder in holders[inside]:  # a server that holds an expert serves its own tokens
                rows.at_least(0.0, (serves_NEN[at, expert, at], 1.0), (holder, -1.0))
            for other in range(servers):
                rows.at_least(0.0, *((holder, 1.0) for holder in holders[inside]), (serves_NEN[other, expert, at], -1.0))
            share_N = own_NE[:, expert] / max(1.0, float(own_NE[:, expert].sum()))
            taken = ((serves_NEN[other, expert, at], -share_N[other]) for other in range(servers))
            rows.at_least(0.0, *((each, 1.0) for each in part_GE[inside, expert]), *taken)
    for kind, (server, chosen) in enumerate(zip(kinds.server_V, kinds.experts_VK, strict=True)):
        for other in np.flatnonzero(np.arange(servers) != server).tolist():
            for expert in chosen:
                rows.at_least(0.0, (crosses_VN[kind, other], 1.0), (serves_NEN[server, expert, other], -1.0))
    out_Bps_N, in_Bps_N = (np.minimum(costs.nics.server_Bps_N, members_NG @ Bps_G) for Bps_G in (costs.out_Bps, costs.in_Bps))
    for server in range(servers):
        own_V = kinds.server_V == server
        sent = [(each, n) for n, row in zip(kinds.count_V[own_V], crosses_VN[own_V], strict=True) for each in row]
        received = list(zip(crosses_VN[~own_V, server], kinds.count_V[~own_V], strict=True))
        for phase, size, out, into in ((0, costs.dispatch_bytes, sent, received), (2, costs.combine_bytes, received, sent)):
            for carried, Bps_N in ((out, out_Bps_N), (into, in_Bps_N)):
                row_units = size / Bps_N[server] / unit_s
                rows.at_least(0.0, (phases[phase], 1.0), *((each, -n * row_units) for each, n in carried))
    row_X, variable_X, factor_X = zip(*rows.entries, strict=True)
    matrix = coo_array((factor_X, (row_X, variable_X)), shape=(len(rows.limits), sum(sizes))).tocsr()
    whole_V = np.isin(np.arange(sum(sizes)), np.concatenate([held, serves])).astype(int)
    found = milp(
        np.isin(np.arange(sum(sizes)), phases).astype(float),
        integrality=whole_V,
        bounds=Bounds(least_V, most_V),
        constraints=LinearConstraint(matrix, rows.limits),
        options={"node_limit": MOST_NODES, "mip_rel_gap": TOLERANCE},
    )
    return float(found.mip_dual_bound) * (1 - ROUNDED) * unit_s if found.status == 0 else None


def exact_hierarchical_s(costs: LayerCosts, top_k: int, slots_G: IntArray, replicas: bool) -> float | None:
    """Returns the least seconds of one model's layer with hierarchical all-to-alls; None if it is large (`exact_server_s`).

    Args: as in `hierarchical_bound_s`, for one model.
    """
    return exact_server_s(costs, slots_G, replicas, least_times(costs, top_k, slots_G, replicas))
