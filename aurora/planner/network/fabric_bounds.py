"""Lower bounds on an all-to-all over a fabric: the worst cut, by name, and the fluid optimum as a linear program."""

import numpy as np
from scipy import sparse
from scipy.optimize import LinearConstraint, milp

from aurora.planner.network.cuts import SLACK, CutResult, flow_network
from aurora.planner.network.routes import route
from aurora.types import Cut, Network
from aurora.types.arrays import IntArray


def cut_bound(bytes_GG: IntArray, network: Network) -> Cut:
    """Finds the cut that limits an all-to-all most: bytes that must use some ports and links, divided by their summed rate.

    Every cut is a lower bound, however traffic is routed. To find the worst of all cuts is NP-hard in general, and even the
    worst may lie below `fluid_optimum`. The search looks at, in this order:

    1. each port;
    2. the parts into which removing one switch splits the fabric;
    3. the links into or out of a switch, and the busiest links on shortest paths;
    4. on fabrics of up to MOST_BLOCKS switches (and GPUs with several neighbours), sets of these grown one by one, so that
       pairs of switches and arcs of a ring are found;
    5. for each GPU, the exact minimum cut of all that it sends, and of all that it receives (one commodity).

    The search ends as soon as traffic divided over shortest paths needs no longer than a cut, which proves both optimal. This
    happens at once on trees and on leaf/spine fabrics with equal uplinks, where the bound is the fluid optimum.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other.
        network: a network with a fabric.

    Returns:
        The worst cut that was found.

    Source (minimum cut): Ford & Fulkerson 1956.
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
            break  # the sets after this one are less busy, so none of them is a worse cut either
        best = graph.worse(best, np.array([graph.cut_off(arcs, bytes_GG)]), arcs[None])
    growing = graph.grown(bytes_GG)
    while best[0] < enough_s and (grown := next(growing, None)) is not None:
        best = graph.worse(best, graph.load(grown, bytes_GG), graph.leaving(grown))
    for gpu in range(graph.gpus):
        for own_GG in (_only(bytes_GG, (gpu, slice(None))), _only(bytes_GG, (slice(None), gpu))):
            while best[0] < min(enough_s, routes.seconds(own_GG) * (1 - SLACK)):  # else this GPU's traffic cannot be worse
                before_s, least = best[0], graph.minimum(own_GG, best[0])[None]
                best = graph.worse(best, graph.load(least, bytes_GG), graph.leaving(least))
                if best[0] == before_s:
                    break
    return Cut(best[0], best[1], tuple(np.array(graph.names)[best[2]].tolist()))


def fluid_optimum(bytes_GG: IntArray, network: Network) -> float:
    """Computes the shortest time of an all-to-all when traffic may be routed and divided at will (maximum concurrent flow).

    A linear program over what each source sends through each port and link: G * (links + 2 G) variables, solved by HiGHS, exact
    to its tolerance.

    Args:
        bytes_GG: (G, G) int64, as in `cut_bound`.
        network: a network with a fabric.

    Returns:
        Seconds.

    Source: Shahrokhi & Matula 1990, with the commodities of one source in one.
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
    """(G, G) the traffic at `kept`, zero elsewhere."""
    own_GG = np.zeros_like(bytes_GG)
    own_GG[kept] = bytes_GG[kept]
    return own_GG
