"""Lower bounds on an all-to-all over a fabric: by minimum cut, with the cut's name, and the fluid optimum as an LP."""

import numpy as np
from scipy import sparse
from scipy.optimize import LinearConstraint, milp

from aurora.planner.network.cuts import SLACK, CutResult, flow_network
from aurora.planner.network.routes import route
from aurora.types import Cut, Network
from aurora.types.arrays import IntArray


def cut_bound(bytes_GG: IntArray, network: Network) -> Cut:
    """The worst cut that was found: bytes that have no way but over some ports and links, over their summed rate.

    bytes_GG (G, G) int64 with a zero diagonal; network: one with a fabric. Every cut is a lower bound, however traffic is
    routed. The worst of all is NP-hard to find in general, and even that may lie below `fluid_optimum`; looked at are, in this
    order: each port; what hangs together behind one switch; the links into or out of a switch, and the busiest links, on
    shortest paths; on fabrics of up to MOST_BLOCKS switches (and GPUs with several) sets of those grown one by one, so pairs
    and arcs; and for each GPU the exact minimum cut of all that it sends, and of all that it receives (one commodity, Ford &
    Fulkerson 1956). The search ends as soon as traffic divided over shortest paths needs no longer than a cut, which proves
    both optimal: at once on trees and on leaf/spine whose uplinks are equal, where the bound is the fluid optimum.
    """
    assert network.fabric is not None
    graph, routes = flow_network(network), route(network)
    load_A = routes.load_R(bytes_GG)[: len(graph.Bps_A)]
    enough_s = routes.seconds(bytes_GG) * (1 - SLACK)
    best: CutResult = 0.0, 0, np.zeros(len(load_A), dtype=bool)
    for sets in (graph.ports(), graph.hanging(network.fabric)):
        best = graph.worse(best, graph.load(sets, bytes_GG), graph.leaving(sets))
    for arcs in graph.bundles(load_A):
        if load_A[arcs].sum() <= best[0] * graph.Bps_A[arcs].sum() * (1 + SLACK):
            break  # nor can those after it, which are less busy
        best = graph.worse(best, np.array([graph.cut_off(arcs, bytes_GG)]), arcs[None])
    growing = graph.grown(bytes_GG)
    while best[0] < enough_s and (grown := next(growing, None)) is not None:
        best = graph.worse(best, graph.load(grown, bytes_GG), graph.leaving(grown))
    for gpu in range(graph.gpus):
        for alone_GG in (_only(bytes_GG, (gpu, slice(None))), _only(bytes_GG, (slice(None), gpu))):
            while best[0] < min(enough_s, routes.seconds(alone_GG) * (1 - SLACK)):  # else this GPU alone fits in
                before_s, least = best[0], graph.minimum(alone_GG, best[0])[None]
                best = graph.worse(best, graph.load(least, bytes_GG), graph.leaving(least))
                if best[0] == before_s:
                    break
    return Cut(best[0], best[1], tuple(np.array(graph.names)[best[2]].tolist()))


def fluid_optimum(bytes_GG: IntArray, network: Network) -> float:
    """The shortest all-to-all when traffic may be routed and divided at will, in seconds: maximum concurrent flow.

    An LP over what each source sends through each port and link, G * (links + 2 G) variables, solved by HiGHS; exact to its
    tolerance. Source: Shahrokhi & Matula 1990, with the commodities of one source in one.
    """
    graph = flow_network(network)
    total = int(bytes_GG.sum())
    if total == 0:
        return 0.0
    n, arcs, fastest = graph.gpus, len(graph.Bps_A), float(graph.Bps_A.max())
    sources = np.flatnonzero(bytes_GG.sum(axis=1))
    ends = np.concatenate([graph.tail_A, graph.head_A])
    signs = np.repeat([1.0, -1.0], arcs)
    leaving_VA = sparse.coo_array((signs, (ends, np.tile(np.arange(arcs), 2))), shape=(graph.vertices, arcs))
    supply_SV = np.zeros((len(sources), graph.vertices))
    supply_SV[np.arange(len(sources)), sources] = bytes_GG[sources].sum(axis=1) / total
    supply_SV[:, n : 2 * n] -= bytes_GG[sources] / total
    supply = supply_SV.ravel()
    conserve = sparse.kron(sparse.eye_array(len(sources)), leaving_VA)
    within = sparse.kron(sparse.csr_array(np.ones((1, len(sources)))), sparse.eye_array(arcs))
    rates = sparse.csr_array(-graph.Bps_A[:, None] / fastest)
    found = milp(
        np.append(np.zeros(len(sources) * arcs), 1.0),
        constraints=[
            LinearConstraint(sparse.hstack([conserve, sparse.csr_array((len(supply), 1))]), supply, supply),
            LinearConstraint(sparse.hstack([within, rates]), -np.inf, 0.0),
        ],
    )
    assert found.status == 0, found.message
    return float(found.fun) * total / fastest


def _only(bytes_GG: IntArray, kept: tuple[int | slice, int | slice]) -> IntArray:
    alone_GG = np.zeros_like(bytes_GG)
    alone_GG[kept] = bytes_GG[kept]
    return alone_GG
